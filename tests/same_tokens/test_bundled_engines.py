"""The same tokens from engines of the bundled target as a server builds them, on real text, with whoever ships with it:
in floats and in few bits, as GGUF files too, over pages of before; and heads are good enough to be worth having."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foresay.server.engine.build import build_engine
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import BUNDLED, BUNDLED_HEADS, choose_draft
from foresay.spec.errors import ConfigurationError
from foresay.spec.names import DSPARK, EAGLE, PEAGLE
from tests.same_tokens.bundled import jobs, texts_of
from tests.same_tokens.heads import head_drafter
from tests.same_tokens.runs import assert_same
from tests.verifier.reading import load_decoder

DRAFT, BLOCKS = str(BUNDLED / "draft"), ("dflash", "dspark", "peagle")
EVERYBODY = ["ngram", "suffix", f"draft_model:{DRAFT}", *BUNDLED_HEADS, "auto"]
#: Random ones, which are hardly ever right.
RANDOM = [f"{kind}:{{}}/{kind}" for kind in BLOCKS]
OWN = ["self:int4", "draft_model > self:int4", "eagle3,eagle3 > self:int4,suffix"]
#: What engines are like, what their info says of that, and who drafts in them.
ENGINES: list[tuple[dict[str, Any], dict[str, str], list[str]]] = [
    ({}, {}, EVERYBODY),
    ({"draft_tree": "4,4,2,2,1", "dtype": "bfloat16"}, {"dtype": "bfloat16"}, [f"draft_model:{DRAFT}", "eagle3"]),
    ({"draft_tree": "3,2,1", "dtype": "float32"}, {"dtype": "float32"}, [f"draft_model:{DRAFT}", "ngram"]),
    *(({"quantize": how, "draft_quantize": "int8"}, {"quantization": how}, drafts) for how, drafts in (
        ("int8", ["auto", "eagle3", *OWN]), ("int4", ["auto", "medusa"]), ("fp8", ["eagle3", OWN[0]]))),
    *(({"kv_dtype": kv, "draft_kv_dtype": kv}, {"kv_dtype": kv}, drafts)
      for kv, drafts in (("int8", ["auto", "medusa", *RANDOM]), ("fp8", ["auto", "eagle3", "dflash"]))),
]  # fmt: skip


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Random heads of blocks for the bundled target."""
    root, target = tmp_path_factory.mktemp("blocks"), load_decoder(BUNDLED / "target", torch.bfloat16)
    for kind in BLOCKS:
        head_drafter(kind, root / kind, target, "tree")
    return root


@pytest.mark.parametrize(("how", "said", "drafts"), ENGINES, ids=str)
def test_the_same_tokens(heads, how, said, drafts) -> None:
    plain = texts_of("none", said, **{name: value for name, value in how.items() if name != "draft_tree"})
    for draft in drafts:
        assert_same(plain, texts_of(draft.format(heads), said, **how))


#: Tokens per step that each must reach on these few texts; docs/choosing-a-drafter.md has the measured figures.
LEAST = {"eagle3": 1.9, "medusa": 1.5, "dflash": 1.5}


@pytest.mark.parametrize("draft", BUNDLED_HEADS)
@pytest.mark.parametrize("how", [{"draft_tokens": 4}, {"draft_tree": "6,8,7,6"}], ids=str)
def test_bundled_heads_write_the_same_sooner(draft, how) -> None:
    """Twice, the second time over the pages of the first."""
    engine = build_engine(EngineConfig(draft=draft, kv_tokens=640, max_model_len=160, threads=1, **how))
    assert engine.info.drafter_reason == "comes with the bundled target", "nothing speaks against it"
    assert engine.info.drafter == draft
    for again in (False, True):
        texts = texts_of(draft, {}, engine)
        counts = [text.statistics for text in texts.values() if text.statistics is not None]
        assert len(counts) == len(jobs())
        per_step = sum(count.completion_tokens for count in counts) / sum(count.steps for count in counts)
        assert per_step > (LEAST[draft] if "draft_tree" in how else 1.3)
        assert any(text.cached_tokens for text in texts.values()) == again
    assert_same(texts_of("none", {}), texts)


def test_they_take_little_room() -> None:
    sizes = [file.stat().st_size for head in BUNDLED_HEADS for file in (BUNDLED / head).iterdir()]
    assert sum(sizes) <= 18e6


@pytest.mark.parametrize("draft", [*BUNDLED_HEADS, EAGLE, PEAGLE, DSPARK])
def test_a_head_named_without_its_folder_is_none_of_another_target(draft) -> None:
    with pytest.raises(ConfigurationError, match=rf"--draft {draft}: no such head comes with somewhere/else"):
        choose_draft(EngineConfig(target="somewhere/else", draft=draft))
