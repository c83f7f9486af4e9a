"""The same tokens from engines built as the server builds them, from directories and flags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from foresay.server.engine.build import build_engine
from foresay.server.settings.config import EngineConfig
from foresay.spec.engine import EngineCore
from tests.same_tokens.models import Pair
from tests.same_tokens.runs import assert_same, jobs_of, plain
from tests.same_tokens.witness import Text, Witness, run


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
def directory(pair) -> Path:
    """A target and a draft model, both with a tokenizer."""
    checkpoints: Pair = pair("smollm")
    for checkpoint in (checkpoints.directory, checkpoints.draft_directory):
        write_tokenizer(checkpoint, 290)
    return checkpoints.directory.parent


@pytest.fixture(scope="module")
def expected(pair, directory) -> dict[str, Text]:
    return plain(pair("smollm").target, jobs_of(300, (9, 70, 33, 1, 20, 40), 20))


@pytest.mark.parametrize(
    ("draft", "changes"),
    [
        ("none", {}),
        ("ngram", {}),
        ("auto", {}),
        ("draft,suffix,ngram", {}),
        ("ngram,draft", {"draft_tree": "3,2,1"}),
        ("suffix", {"draft_tokens": 8}),
        ("suffix", {"draft_tree": "3,2,1"}),
        ("draft", {"draft_tokens": 1}),
        ("draft", {"draft_tokens": 6}),
        ("draft", {"draft_tree": "4,4,2,2,1"}),
        ("draft", {"draft_tree": "3,2,1", "max_seqs": 1}),
        ("draft", {"draft_tree": "3,2,1", "prefix_cache": False}),
    ],
)
def test_every_way_to_draft(directory, monkeypatch, expected, draft, changes) -> None:
    monkeypatch.chdir(directory)
    where = ",".join(str(directory / "draft") if part == "draft" else part for part in draft.split(","))
    engine = witnessed(build_engine(config(directory / "target", where, **changes)))
    assert engine.info.exact, engine.info.exact_reason
    jobs = [replace(job, arrives=2 * index) for index, job in enumerate(jobs_of(300, (9, 70, 33, 1, 20, 40), 20))]
    assert_same(expected, run(engine, jobs))
    again = [replace(job, id=f"{job.id}-again") for job in jobs]
    assert_same({job.id: expected[job.id.removesuffix("-again")] for job in again}, run(engine, again))
