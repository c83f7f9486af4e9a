"""Draft models with a part of the vocabulary: what is left of it, and a whole run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench import vocabularies
from foresay.server.settings.resolved import BUNDLED

DRAFT = BUNDLED / "draft"


def tokens(directory: Path) -> dict[str, int]:
    return Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab()


def test_the_first_tokens_are_those_of_the_smallest_ids(tmp_path) -> None:
    known = tokens(DRAFT)
    first = tokens(vocabularies.part(DRAFT, tmp_path / "first", "first", 0.5))
    assert {known[token] for token in first} == set(range(2048))
    assert {token: known[token] for token in first} != first, "they have new ids"
    some = tokens(vocabularies.part(DRAFT, tmp_path / "any", "any", 0.5))
    assert len(some) == 2048
    assert set(range(261)) < {known[token] for token in some} != set(range(2048)), "special tokens and bytes stay"


def test_a_whole_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    other = vocabularies.renumbered(DRAFT, tmp_path / "other", range(4095, -1, -1))
    flags = "--limit 1 --max-tokens 24 --shares 0.5 --threads 1 --no-save --temperatures 1 --mode draft_model:3 --other"
    monkeypatch.setattr(sys, "argv", ["bench.vocabularies", *flags.split(), str(other)])
    vocabularies.main()
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = record["temperature"]["1"]
    assert [(name, of["known"]) for name, of in found.items()] == [
        ("none", 4096), ("draft", 4096), ("first 50%", 2048), ("any 50%", 2048), ("other", 4096)
    ]  # fmt: skip
    assert found["none"]["tokens_per_step"]["ratio"] == 1.0
    assert found["draft"]["tokens_per_step"] == found["other"]["tokens_per_step"]
    assert found["draft"]["tokens_per_step"]["ratio"] > 1.0
    assert found["any 50%"]["spoken"] < found["draft"]["spoken"] == 1.0
    assert record["others"] == ["other"]
