"""Inflated heads on an inflated target draft what the small ones draft on the small one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bench import drive
from bench.drive import Options
from bench.inflate import CannotInflate, inflate
from bench.inflate_heads import inflate_head
from tests.bench import head_files
from tests.bench.test_inflate import LARGE, VOCAB, write_source

MODES = {"medusa": "medusa:3,4,3", "eagle3": "eagle3:3,4,3", "dflash": "dflash:3,4,3"}


def write_head(kind: str, path: Path, target: Path, token_ids: torch.Tensor | None = None) -> Path:
    """A random head, published as a trained one is."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    matrix, ids = model.get_input_embeddings().weight.detach(), torch.arange(VOCAB) if token_ids is None else token_ids
    with torch.enable_grad():
        head_files.write(path, head_files.random_head(kind, (matrix, matrix), ids, (1,)), torch.bfloat16)
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    write_source(path, tied=True)
    return path


def drafted(kind: str, target: Path, head: Path, temperature: float, monkeypatch: pytest.MonkeyPatch):
    """What an engine drafts at each step, as (tokens, parents), and what it writes."""
    options = Options(str(target), None, "float32", kv_tokens=64, medusa=str(head), eagle3=str(head), dflash=str(head))
    engine, trees = drive.build(MODES[kind], options), []
    assert engine.drafter is not None
    propose = engine.drafter.propose

    def recording(sequences, shapes):
        found = propose(sequences, shapes)
        trees.extend((tree.tokens, tree.parents) for tree in found)
        return found

    monkeypatch.setattr(engine.drafter, "propose", recording)
    return trees, drive.run(engine, drive.request([5, 6, 7, 8], 24, temperature, seed=1)).tokens


@pytest.mark.parametrize(
    ("kind", "temperature", "vocab"), [("medusa", 0.0, 400), ("eagle3", 1.0, None), ("dflash", 0.0, 400)]
)
def test_same_drafts(
    kind: str, temperature: float, vocab: int | None, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the target grew by tokens too or not."""
    small = write_head(kind, tmp_path / "head", source)
    inflate(source, tmp_path / "big", LARGE, vocab=vocab)
    inflate_head(small, tmp_path / "big_head", tmp_path / "big")
    want = drafted(kind, source, small, temperature, monkeypatch)
    got = drafted(kind, tmp_path / "big", tmp_path / "big_head", temperature, monkeypatch)
    assert got == want
    assert max(len(tokens) for tokens, _ in want[0]) == 11
    assert len({token for tokens, _ in want[0] for token in tokens}) > 10  # drafts are not all the same
    weights = next((tmp_path / "big_head").glob("*.safetensors"))
    assert vocab or all((each != 0).all() for each in load_file(weights).values() if each.is_floating_point())


def test_draft_vocabulary_is_kept(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = write_head("eagle3", tmp_path / "head", source, torch.arange(1, VOCAB, 3))
    inflate(source, tmp_path / "big", LARGE, vocab=400)
    inflate_head(small, tmp_path / "big_head", tmp_path / "big")
    assert load_file(tmp_path / "big_head" / "model.safetensors")["lm_head.weight"].shape == (32, 72)
    got = drafted("eagle3", tmp_path / "big", tmp_path / "big_head", 0.0, monkeypatch)
    assert got == drafted("eagle3", source, small, 0.0, monkeypatch)


def test_refusals(source: Path, tmp_path: Path) -> None:
    eagle = write_head("eagle3", tmp_path / "eagle", source)
    with pytest.raises(CannotInflate, match="was not made by"):
        inflate_head(eagle, tmp_path / "out", source)
    inflate(source, tmp_path / "big", LARGE)
    with pytest.raises(CannotInflate, match="only EAGLE-3 heads"):
        inflate_head(source, tmp_path / "out", tmp_path / "big")
    config = json.loads((eagle / "config.json").read_text())
    (eagle / "config.json").write_text(json.dumps(config | {"hidden_size": 48}))
    with pytest.raises(CannotInflate, match="48 wide"):
        inflate_head(eagle, tmp_path / "out", tmp_path / "big")
    del config["eagle_config"]
    (eagle / "config.json").write_text(json.dumps(config))
    with pytest.raises(CannotInflate, match="names no"):
        inflate_head(eagle, tmp_path / "out", tmp_path / "big")
    assert not (tmp_path / "out").exists()
