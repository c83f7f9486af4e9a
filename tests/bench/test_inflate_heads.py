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
from foresay.drafters.heads.dflash_model import DFlashModel, DFlashShape
from foresay.drafters.heads.eagle_model import EagleModel, EagleShape
from foresay.drafters.heads.medusa_model import MedusaModel
from foresay.spec.sampling import SamplingParams
from tests.bench import head_files
from tests.bench.test_inflate import LARGE, VOCAB, write_source

MODES = {"medusa": "medusa:3,4,3", "eagle3": "eagle3:3,4,3", "dflash": "dflash:3,4,3"}
Head = MedusaModel | EagleModel | DFlashModel


def head(kind: str, target: Path, token_ids: torch.Tensor) -> Head:
    """A random one."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    matrix = model.get_input_embeddings().weight.detach()
    made: Head
    layer: Any = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        "max_position_embeddings": 64,
    }  # fmt: skip
    if kind == "medusa":
        made = MedusaModel(matrix, 3)
    elif kind == "eagle3":
        shape = EagleShape(**layer, draft_vocab_size=len(token_ids), layers=(0, 1, 2))
        made = EagleModel(shape, matrix, token_ids, matrix, passes=3)
    else:
        own = {"draft_vocab_size": VOCAB, "num_hidden_layers": 2, "target_layers": 2}
        block = DFlashShape(**layer, **own, layers=(1,), block_size=4, mask_token_id=7)
        made = DFlashModel(block, matrix, torch.arange(VOCAB), matrix)
    for parameter in filter(lambda each: each.requires_grad, made.parameters()):
        low, high = (0.3, 1.7) if parameter.ndim == 1 else (-0.3, 0.3)
        torch.nn.init.uniform_(parameter, low, high)
    return made


def write_head(kind: str, path: Path, target: Path, token_ids: torch.Tensor | None = None) -> Path:
    """A random head, published as a trained one is."""
    torch.manual_seed(7)
    with torch.enable_grad():
        made = head(kind, target, torch.arange(VOCAB) if token_ids is None else token_ids)
    head_files.write(path, made, torch.bfloat16)
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
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=24, ignore_eos=True)
    return trees, drive.run(engine, drive.request([5, 6, 7, 8], params)).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", sorted(MODES))
def test_same_drafts(
    kind: str, temperature: float, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = write_head(kind, tmp_path / "head", source)
    inflate(source, tmp_path / "big", LARGE)
    inflate_head(small, tmp_path / "big_head", tmp_path / "big")
    want = drafted(kind, source, small, temperature, monkeypatch)
    got = drafted(kind, tmp_path / "big", tmp_path / "big_head", temperature, monkeypatch)
    assert got == want
    assert max(len(tokens) for tokens, _ in want[0]) == 11
    assert len({token for tokens, _ in want[0] for token in tokens}) > 10  # drafts are not all the same


@pytest.mark.parametrize("kind", sorted(MODES))
def test_same_drafts_with_a_larger_vocabulary(
    kind: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = write_head(kind, tmp_path / "head", source)
    inflate(source, tmp_path / "big", LARGE, vocab=400)
    inflate_head(small, tmp_path / "big_head", tmp_path / "big")
    got = drafted(kind, tmp_path / "big", tmp_path / "big_head", 0.0, monkeypatch)
    assert got == drafted(kind, source, small, 0.0, monkeypatch)


def test_draft_vocabulary_is_kept(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = write_head("eagle3", tmp_path / "head", source, torch.arange(1, VOCAB, 3))
    inflate(source, tmp_path / "big", LARGE, vocab=400)
    inflate_head(small, tmp_path / "big_head", tmp_path / "big")
    assert load_file(tmp_path / "big_head" / "model.safetensors")["lm_head.weight"].shape == (32, 72)
    got = drafted("eagle3", tmp_path / "big", tmp_path / "big_head", 0.0, monkeypatch)
    assert got == drafted("eagle3", source, small, 0.0, monkeypatch)


def test_every_matrix_grows(source: Path, tmp_path: Path) -> None:
    inflate(source, tmp_path / "big", LARGE)
    inflate_head(write_head("eagle3", tmp_path / "eagle", source), tmp_path / "big_eagle", tmp_path / "big")
    eagle = load_file(tmp_path / "big_eagle" / "model.safetensors")
    assert eagle["fc.weight"].shape == (72, 3 * 72)
    assert eagle["midlayer.self_attn.q_proj.weight"].shape == (12 * 16, 2 * 72)
    assert eagle["midlayer.self_attn.o_proj.weight"].shape == (72, 12 * 16)
    assert eagle["midlayer.mlp.down_proj.weight"].shape == (72, 112)
    inflate_head(write_head("medusa", tmp_path / "medusa", source), tmp_path / "big_medusa", tmp_path / "big")
    medusa = load_file(tmp_path / "big_medusa" / "medusa_lm_head.safetensors")
    assert medusa["0.0.linear.weight"].shape == (72, 72)
    assert medusa["2.1.weight"].shape == (VOCAB, 72)
    inflate_head(write_head("dflash", tmp_path / "dflash", source), tmp_path / "big_dflash", tmp_path / "big")
    dflash = load_file(tmp_path / "big_dflash" / "model.safetensors")
    assert dflash["fc.weight"].shape == (72, 72)
    assert dflash["layers.1.self_attn.k_proj.weight"].shape == (4 * 16, 72)
    for tensor in (*eagle.values(), *medusa.values(), *dflash.values()):
        assert (tensor != 0).all()


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
