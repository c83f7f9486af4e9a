"""An inflated checkpoint computes the source's function and never draws one of its new tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from bench.inflate import CannotInflate, inflate

SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LARGE = "hidden=72,layers=5,heads=12,kv_heads=4,inner=112"
VOCAB = 96


def write_source(path: Path, tied: bool) -> None:
    """A random Llama in bf16 whose logits are far apart, as a trained one's are, and whose norms are not all one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SMALL, head_dim=16, intermediate_size=48, vocab_size=VOCAB, tie_word_embeddings=tied, rms_norm_eps=1e-5,
        initializer_range=0.3, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.3, 1.7)
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(path)


@torch.no_grad()
def logits(path: Path, tokens: Tensor) -> Tensor:
    """[B, T, V] in fp32, through transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    out: Tensor = model(tokens).logits
    return out


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_source(tmp_path / "source", tied=request.param)
    return tmp_path / "source"


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(VOCAB, (4, 48), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("positions", [None, 512])
def test_same_function(source: Path, tokens: Tensor, tmp_path: Path, positions: int | None) -> None:
    inflate(source, tmp_path / "big", LARGE, positions=positions)
    longest = json.loads((tmp_path / "big" / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    assert longest == (positions or 64)
    want, got = logits(source, tokens), logits(tmp_path / "big", tokens)
    assert got.shape == want.shape
    assert (got - want).abs().max() < 1e-3
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    assert want.std() > 0.5  # the bound above means something


def test_new_rows_never_win(source: Path, tokens: Tensor, tmp_path: Path) -> None:
    inflate(source, tmp_path / "big", LARGE, vocab=400)
    want, got = logits(source, tokens), logits(tmp_path / "big", tokens)
    assert got.shape[-1] == 400
    assert (got[..., :VOCAB] - want).abs().max() < 1e-3
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    assert got.softmax(-1)[..., VOCAB:].sum(-1).max() < 1e-6


def test_new_rows_lose_after_a_large_hidden_state(source: Path, tmp_path: Path) -> None:
    """The final norm divides the constant by the size of x: it has to survive hidden states of size 1000."""
    inflate(source, tmp_path / "big", LARGE, vocab=400)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "big", dtype=torch.float32)
    x = torch.randn(64, 72, generator=torch.Generator().manual_seed(2))
    x = 1000 * x / x.norm(dim=-1, keepdim=True)
    x[:, -1] = 2.0**-12
    with torch.no_grad():
        rows = model.lm_head(model.model.norm(x))
    assert rows.softmax(-1)[:, VOCAB:].sum(-1).max() < 1e-6


def test_nothing_repeats(source: Path, tmp_path: Path) -> None:
    inflate(source, tmp_path / "big", LARGE)
    tensors = load_file(tmp_path / "big" / "model.safetensors")
    assert all((t != 0).all() for t in tensors.values())
    rows = torch.cat([t.float() for t in tensors.values() if t.ndim == 2 and t.shape[1] == 72])
    assert len(torch.unique(rows, dim=0)) == len(rows)
    norms = torch.stack([t for t in tensors.values() if t.ndim == 1])
    assert len(torch.unique(norms, dim=0)) == len(norms)


@pytest.mark.parametrize(
    ("shape", "vocab", "says"),
    [
        ("hidden=16", None, "hidden"),
        ("heads=8,kv_heads=8", None, "group"),
        ("layers=3", 400, "extra hidden dimension"),
        ("width=3", None, "hidden"),
        (LARGE, 50, "vocabulary"),
    ],
)
def test_refusals(shape: str, vocab: int | None, says: str, tmp_path: Path) -> None:
    write_source(tmp_path / "source", tied=True)
    with pytest.raises(CannotInflate, match=says):
        inflate(tmp_path / "source", tmp_path / "big", shape, vocab)
