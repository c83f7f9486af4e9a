"""The bundled heads: the same tokens as without them, and guesses good enough to be worth having."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from foresay.server.engine.build import build_engine
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import BUNDLED, BUNDLED_HEADS, choose_draft
from foresay.spec.errors import ConfigurationError
from foresay.spec.names import DSPARK, EAGLE, PEAGLE
from tests.same_tokens.runs import assert_same, sampled
from tests.same_tokens.test_bundled import PROMPTS
from tests.same_tokens.witness import Job, Text, Witness, run

#: Tokens per step that each must reach on these few texts; docs/choosing-a-drafter.md has the measured figures.
LEAST = {"eagle3": 1.9, "medusa": 1.5, "dflash": 1.5}


def jobs() -> list[Job]:
    tokenizer = Tokenizer.from_file(str(BUNDLED / "target" / "tokenizer.json"))
    return [
        Job(str(index), tokenizer.encode(text).ids, sampled(name, index, 40), arrives=3 * index)
        for index, (text, name) in enumerate(PROMPTS)
    ]


def texts_with(draft: str, tree: str | None) -> dict[str, Text]:
    tokens = 4 if tree is None else None
    engine = build_engine(
        EngineConfig(draft=draft, draft_tokens=tokens, draft_tree=tree, kv_tokens=640, max_model_len=160, threads=1)
    )
    if draft != "none":
        assert engine.drafter is not None
        assert engine.drafter.name == draft
        assert engine.info.drafter_reason == "comes with the bundled target", "nothing speaks against it"
        assert engine.info.drafter == draft
    engine.runner = Witness(engine.runner.verifier, engine.drafter)
    return run(engine, jobs())


@pytest.fixture(scope="module")
def plain() -> dict[str, Text]:
    return texts_with("none", None)


@pytest.mark.parametrize("draft", BUNDLED_HEADS)
@pytest.mark.parametrize("tree", [None, "6,8,7,6"])
def test_bundled_heads_write_the_same_sooner(plain, draft, tree) -> None:
    texts = texts_with(draft, tree)
    assert_same(plain, texts)
    counts = [text.statistics for text in texts.values() if text.statistics is not None]
    assert len(counts) == len(PROMPTS)
    per_step = sum(count.completion_tokens for count in counts) / sum(count.steps for count in counts)
    assert per_step > (LEAST[draft] if tree else 1.3)


def test_they_take_little_room() -> None:
    sizes = [file.stat().st_size for head in BUNDLED_HEADS for file in (BUNDLED / head).iterdir()]
    assert sum(sizes) <= 18e6


@pytest.mark.parametrize("draft", [*BUNDLED_HEADS, EAGLE, PEAGLE, DSPARK])
def test_a_head_named_without_its_folder_is_none_of_another_target(draft) -> None:
    with pytest.raises(ConfigurationError, match=rf"--draft {draft}: no such head comes with somewhere/else"):
        choose_draft(EngineConfig(target="somewhere/else", draft=draft))
