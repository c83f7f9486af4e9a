"""Medusa heads from every published layout compute what the plain implementation does."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from foresay.verifier.heads.layouts import kind_of
from foresay.verifier.heads.medusa import MedusaHeads
from foresay.verifier.model.errors import ModelError
from tests.heads.plain import medusa_logits
from tests.heads.published import BLOCKS, MEDUSA, make_medusa
from tests.heads.writing import change_config


@pytest.mark.parametrize("layout", MEDUSA)
def test_every_layout_gives_the_same_logits(target, tmp_path, layout) -> None:
    plain, token_map = make_medusa(tmp_path, target("llama2"), layout)
    heads = MedusaHeads.load(tmp_path, target("llama2"))
    assert len(heads) == 3
    assert kind_of(tmp_path) == "medusa"
    assert (heads.token_map is None) == (token_map is None)
    if heads.token_map is not None and token_map is not None:
        assert torch.equal(heads.token_map, token_map)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    for depth in range(3):
        expected = medusa_logits(plain, depth, BLOCKS, hidden)
        assert torch.allclose(heads(hidden, depth), expected, rtol=0, atol=1e-4)


def test_logits_are_scaled_by_the_configuration(target, tmp_path) -> None:
    plain, _ = make_medusa(tmp_path, target("llama2"), "vllm")
    change_config(tmp_path, logit_scale=0.5)
    hidden = torch.randn(2, 64)
    heads = MedusaHeads.load(tmp_path, target("llama2"))
    assert torch.allclose(heads(hidden, 1), 0.5 * medusa_logits(plain, 1, BLOCKS, hidden), atol=1e-4)


def rewrite(directory, change, file: str = "medusa_lm_head.safetensors") -> None:
    stored = load_file(directory / file)
    change(stored)
    save_file(stored, directory / file)


def drop_a_head(stored) -> None:
    for name in [name for name in stored if name.startswith("1.")]:
        del stored[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_a_head, r"medusa_lm_head.safetensors: the heads are numbered \[0, 2\], one is missing"),
        (lambda stored: stored.clear(), r"holds no Medusa head"),
        (lambda stored: stored.update(extra=torch.zeros(1)), r"extra: not known in this layout"),
    ],
)
def test_what_does_not_fit_is_named(target, tmp_path, change, message) -> None:
    make_medusa(tmp_path, target("llama2"), "authors")
    rewrite(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        MedusaHeads.load(tmp_path, target("llama2"))


@pytest.mark.parametrize("count", [1, 3])
def test_blocks_are_counted_in_the_file(target, tmp_path, count) -> None:
    """The configuration claims 7; the file of three has tied blocks, as the authors' own list of them was built."""
    make_medusa(tmp_path, target("llama2"), "authors", heads=1)
    change_config(tmp_path, medusa_num_layers=7)
    block = {
        kind: torch.randn(64, 64)[:, : 64 if kind == "weight" else 1].squeeze(-1) / 8 for kind in ("weight", "bias")
    }
    plain = {f"0.{number}.linear.{kind}": block[kind].clone() for number in range(count) for kind in block}
    plain[f"0.{count}.weight"] = torch.randn(300, 64)
    save_file(plain, tmp_path / "medusa_lm_head.safetensors")
    hidden = torch.randn(3, 64)
    found = MedusaHeads.load(tmp_path, target("llama2"))(hidden, 0)
    assert torch.allclose(found, medusa_logits(plain, 0, count, hidden), rtol=0, atol=1e-4)
