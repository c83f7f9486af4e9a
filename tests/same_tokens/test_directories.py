"""The same tokens from engines built as the server builds them, from directories and flags."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from foresay.server.engine.build import build_engine
from foresay.server.engine.drafters.models import DraftModel
from foresay.server.engine.drafters.registry import find
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import choose_draft
from foresay.spec.engine import EngineCore
from foresay.spec.errors import ConfigurationError
from foresay.verifier.model.errors import NoSuchModel
from tests.heads.assistants import CLUSTERED, make_assistant
from tests.heads.mtp import Mtp
from tests.heads.published import make_eagle, make_medusa
from tests.same_tokens.models import Pair
from tests.same_tokens.runs import assert_same, jobs_of, plain
from tests.same_tokens.witness import Text, Witness, run

LENGTHS = (9, 70, 33, 1, 20, 40)


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A byte-level BPE of this size."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    text = ["the quick brown fox jumps over the lazy dog, says the other fox"] * 3
    backend.train_from_iterator(text, trainer)
    assert backend.get_vocab_size() == vocab_size
    backend.save(str(directory / "tokenizer.json"))


def config(target: Path, draft: str, **changes) -> EngineConfig:
    """A small engine in one thread."""
    base = {"dtype": "float32", "kv_tokens": 640, "max_model_len": 256, "threads": 1}
    return EngineConfig(target=str(target), draft=draft, **{**base, **changes})


def witnessed(engine: EngineCore) -> EngineCore:
    engine.runner = Witness(engine.runner.verifier, engine.drafter)
    return engine


@pytest.fixture(scope="module")
def directories(pair) -> Callable[[str], Path]:
    """By family: a target and a draft model, each with a tokenizer, and heads for it beside them."""

    @cache
    def made(family: str) -> Path:
        models: Pair = pair(family, layers=4 if family == "gemma4" else 3)
        root = models.directory.parent
        for checkpoint in (models.directory, models.draft_directory):
            write_tokenizer(checkpoint, 290)
        if family == "smollm":
            make_medusa(root / "medusa", models.target, "authors")
            make_eagle(root / "eagle3", models.target, "specforge", [0, 1, 3])
            make_eagle(root / "speculators", models.target, "speculators", [0, 1, 3])
            make_eagle(root / "eagle1", models.target, "eagle1")
        elif family == "gemma4":
            make_assistant(root / "target-assistant", models.target.config, **CLUSTERED)
        else:
            Mtp().put_beside(models.directory)
        return root

    return made


@pytest.fixture(scope="module")
def directory(directories) -> Path:
    """A target and a draft model, both with a tokenizer."""
    found: Path = directories("smollm")
    return found


@pytest.fixture(scope="module")
def expected(pair, directory) -> dict[str, Text]:
    return plain(pair("smollm").target, jobs_of(300, LENGTHS, 20))


#: The family, what ``--draft`` says, how the engine calls who drafts ("": it does not matter), and other settings.
WAYS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("smollm", "none", "", {}),
    ("smollm", "ngram", "combined", {}),
    ("smollm", "auto", "combined", {}),
    ("smollm", "{}/draft,suffix,ngram", "combined", {}),
    ("smollm", "ngram,{}/draft", "combined", {"draft_tree": "3,2,1"}),
    ("smollm", "suffix", "suffix", {"draft_tokens": 8}),
    ("smollm", "suffix", "suffix", {"draft_tree": "3,2,1"}),
    ("smollm", "{}/draft", "draft_model", {"draft_tokens": 1}),
    ("smollm", "{}/draft", "draft_model", {"draft_tokens": 6}),
    ("smollm", "{}/draft", "draft_model", {"draft_tree": "4,4,2,2,1"}),
    ("smollm", "{}/draft", "draft_model", {"draft_tree": "3,2,1", "max_seqs": 1}),
    ("smollm", "{}/draft", "draft_model", {"draft_tree": "3,2,1", "prefix_cache": False}),
    ("smollm", "medusa:{}/medusa", "medusa", {"draft_tree": "4,4,2"}),
    ("smollm", "{}/medusa", "medusa", {"draft_tokens": 7}),
    ("smollm", "eagle3:{}/eagle3", "eagle3", {"draft_tree": "4,4,2,2,1"}),
    ("smollm", "{}/speculators", "eagle3", {"draft_tokens": 3, "max_seqs": 1}),
    ("smollm", "eagle:{}/eagle1", "eagle", {"draft_tree": "3,2,1", "prefix_cache": False}),
    ("smollm", "{}/eagle1", "eagle", {"draft_tokens": 4}),
    ("smollm", "{}/eagle1,ngram", "combined", {}),
    ("gemma4", "{}/target-assistant", "mtp", {"draft_tokens": 4}),
    ("gemma4", "mtp:{}/target-assistant", "mtp", {"draft_tree": "4,4,2,2,1"}),
    ("gemma4", "{}/target-assistant", "mtp", {"draft_tree": "3,2,1", "kv_dtype": "int8"}),
    ("gemma4", "{}/target-assistant,ngram", "combined", {"max_seqs": 1}),
    ("gemma4", "auto", "combined", {}),  # the one whose directory is called after the target's
    ("gemma4", "{}/target-assistant > self:int8", "self", {"draft_tokens": 6}),
    ("qwen3_5", "auto", "combined", {}),
    ("qwen3_5", "mtp", "mtp", {"draft_tokens": 3}),
    ("qwen3_5", "{}/draft,mtp,suffix,ngram", "combined", {}),
    ("qwen3_5", "tests.same_tokens.customs:Meddling,mtp", "combined", {}),
]


@pytest.mark.parametrize(("family", "draft", "name", "changes"), WAYS, ids=str)
def test_every_way_to_draft(pair, directories, family, draft, name, changes) -> None:
    root, jobs = directories(family), jobs_of(300, LENGTHS, 20)
    engine = witnessed(build_engine(config(root / "target", draft.format(root), **changes)))
    assert engine.info.exact, engine.info.exact_reason
    assert not name or (engine.drafter is not None and engine.drafter.name == name)
    kv = torch.int8 if "kv_dtype" in changes else None
    wanted = plain(pair(family, layers=4 if family == "gemma4" else 3).target, jobs, kv=kv)
    for turn in ("", "-again"):
        arriving = [replace(job, id=f"{job.id}{turn}", arrives=2 * index) for index, job in enumerate(jobs)]
        texts = run(engine, arriving)
        assert_same({f"{id}{turn}": text for id, text in wanted.items()}, texts)
        if name not in ("", "combined", "ngram", "suffix"):  # a budget soon finds that a random one is not worth it
            assert sum(text.statistics.drafted for text in texts.values() if text.statistics) > 40
    engine.check()
    assert "prefix_cache" in changes or (engine.prefix is not None and engine.prefix.hits)


def test_what_is_no_head_is_refused(directory) -> None:
    with pytest.raises(ConfigurationError, match=r"--draft medusa:.*target holds no head"):
        find(f"medusa:{directory}/target")
    with pytest.raises(ConfigurationError, match=r"--draft medusa:.*eagle3 holds eagle heads"):
        find(f"medusa:{directory}/eagle3")
    with pytest.raises(NoSuchModel, match="no such file or directory"):
        find("eagle3:/nowhere/at/all")
    assert isinstance(find(str(directory / "target")), DraftModel)


def test_auto_leaves_out_an_assistant_that_was_made_for_another_target(directories, tmp_path) -> None:
    shutil.copytree(directories("gemma4"), tmp_path / "both")
    file = tmp_path / "both" / "target-assistant" / "config.json"
    found = config(tmp_path / "both" / "target", "auto")
    assert choose_draft(found).value.startswith("mtp:")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"backbone_hidden_size": 1024}))
    assert not choose_draft(found).value.startswith("mtp")
