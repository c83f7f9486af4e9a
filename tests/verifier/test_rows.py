"""Numbers of rows: how products are made of those that agree, and that no model is called exact whose rows differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.same_tokens import mutations
from tests.verifier.families import make
from tests.verifier.libraries import BORDERS, differing, simulate
from tests.verifier.reading import Reader, load_decoder
from verifier.model import linear as linear_module
from verifier.model.linear import Linear
from verifier.model.rows import RowCounts, agreeing, random_rows
from verifier.ops import spans
from verifier.probe import Exactness, probe

#: Shapes as of published models, their layers cut down: hidden, inner, layers, heads.
SHAPES = [(64, 160, 3, 4), (288, 768, 6, 6), (320, 1280, 3, 5), (576, 1536, 1, 9)]
#: Whole models as wide as large ones, of one layer; and single matrices, inner and outer width.
WIDE = [("qwen3", (2048, 4096, 1, 16)), ("llama2", (4096, 2048, 1, 32))]
LARGE = [(2048, 3072), (4096, 1024), (14336, 256)]
NAMES = ["llama2", "mistral", "qwen2", "qwen3"]
#: What is judged: every number of a small step, then some, to a pass over four trees and a chunk of a prompt.
JUDGED = [*range(1, 42), *range(63, 67), *range(160, 206, 5), 255, 256, 257, 400, 513]
JUDGED_WIDE = [1, 2, 7, 9, 17, 33, 37, 66, 130, 200]


@pytest.mark.parametrize("agreed", [[8], [3, 4, 16], [2, 3, 5, 64], range(2, 257), [256]], ids=str)
def test_every_number_is_made_of_those_that_agree(agreed) -> None:
    counts, x, multiplied = RowCounts(agreed), torch.arange(700.0)[:, None], []

    def product(part: Tensor) -> Tensor:
        multiplied.append(len(part))
        return part * 2

    for rows in range(1, 700):
        multiplied.clear()
        assert torch.equal(counts.multiply(product, x[:rows]), x[:rows] * 2)
        assert set(multiplied) <= set(agreed)
        assert sum(multiplied) == counts.fitting(rows) == counts.fitting(counts.fitting(rows)) >= rows


def test_passes_of_any_size_are_divided() -> None:
    """256 sequences with a tree of 64 nodes each, and none at all."""
    counts = RowCounts([8])
    assert counts.fitting(20_001) == 20_008
    assert counts.multiply(lambda x: x * 2, torch.zeros(0, 3)).shape == (0, 3)


def test_few_rows_are_padded_and_many_split() -> None:
    counts = RowCounts([2, 4, 8, 16, 32, 64, 128, 256])
    expected = {1: (2,), 3: (4,), 9: (16,), 20: (16, 4), 60: (64,), 65: (64, 2), 250: (256,), 300: (256, 32, 16)}
    assert {rows: counts._divided(rows) for rows in expected} == expected


def model_of(family: str, shape: tuple[int, int, int, int], directory, dtype: torch.dtype) -> Reader:
    hidden, inner, layers, heads = shape
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    make(family, directory, num_attention_heads=heads, num_key_value_heads=heads, head_dim=hidden // heads, **sizes)
    return Reader(load_decoder(directory, dtype, probed=False))


def judged(reader: Reader, numbers: Sequence[int] = JUDGED) -> tuple[Exactness, list[int]]:
    """What the probe says, and the numbers of rows at which rows differ all the same."""
    found = probe(reader.model, reader.pool)
    kinds = {linear.kind: linear for linear in reader.model.decoder.linears}
    return found, sorted({rows for linear in kinds.values() for rows in differing(linear, numbers)})


ALL = [*zip(NAMES, SHAPES, strict=True)]
SIMULATED = [*((*ALL[0], name) for name in BORDERS), *((*model, "amx") for model in ALL[1:])]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "shape", "library"), SIMULATED, ids=str)
def test_a_model_is_exact_with_a_library_that_changes_its_sums(family, shape, library, tmp_path, monkeypatch) -> None:
    simulate(monkeypatch, BORDERS[library])
    found, wrong = judged(model_of(family, shape, tmp_path, torch.bfloat16))
    assert found.exact, found.reason
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "shape"), ALL, ids=str)
def test_no_model_is_called_exact_whose_rows_differ_here(family, shape, dtype, tmp_path) -> None:
    found, wrong = judged(model_of(family, shape, tmp_path, dtype))
    assert not found.exact or wrong == []


@pytest.mark.slow
@pytest.mark.parametrize(("family", "shape"), WIDE, ids=str)
def test_no_wide_model_is_called_exact_whose_rows_differ(family, shape, tmp_path) -> None:
    found, wrong = judged(model_of(family, shape, tmp_path, torch.bfloat16), JUDGED_WIDE)
    assert not found.exact or wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_no_number_agrees_that_does_not_here(shape) -> None:
    dtype = torch.bfloat16 if linear_module.packable(torch.bfloat16) else torch.float32
    linear = Linear(random_rows(shape[1], shape[0]).to(dtype))
    linear.counts = linear.agreeing(256)
    assert differing(linear, [1, 2, 7, 9, 17, 33, 37, 66, 130, 200, 257]) == []


def test_what_is_tried_of_a_wide_matrix_in_part_is_tried_of_all_of_it(monkeypatch) -> None:
    """A library that goes by the number of columns, too."""
    real = Linear._product

    def product(self: Linear, x: Tensor) -> Tensor:
        return real(self, x) * (1 + 2**-20 * (self.out_features > 100 and len(x) > 32))

    monkeypatch.setattr(Linear, "_product", product)
    monkeypatch.setattr(linear_module, "_TRIED", 64 * 100)
    linear = Linear(random_rows(200, 64))
    linear.counts = linear.agreeing(256)
    assert linear.counts is not None
    assert linear.counts.largest == 32
    assert differing(linear, [2, 9, 33, 200]) == []


def test_heads_whose_products_need_more_rows_get_them(monkeypatch) -> None:
    """A library that multiplies fewer than 12 stacked rows otherwise, as one does for heads of 192 and more."""
    real = torch.bmm

    def bmm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        product = real(a, b) if a.shape[1] >= 12 else real(a, b) * (1 + 2**-20)
        return product if out is None else out.copy_(product)

    monkeypatch.setattr(torch, "bmm", bmm)
    spans.least_rows.cache_clear()
    spans.adds_in_order.cache_clear()
    try:
        assert spans.least_rows(192) == 12
    finally:
        spans.least_rows.cache_clear()
        spans.adds_in_order.cache_clear()


def small_numbers_alone(product, x: Tensor, group: int, counts) -> list[int]:
    """A trial that takes large numbers for granted."""
    known = [*counts]
    return [*agreeing(product, x, group, [c for c in known if c <= 64]), *(c for c in known if c > 64)]


@pytest.mark.parametrize("narrowed", ["other numbers run", "large numbers are not tried"])
def test_a_narrower_trial_would_say_so_falsely(narrowed, tmp_path, monkeypatch) -> None:
    """The judge is able to see it, and a probe of one text alone is not enough."""
    simulate(monkeypatch, BORDERS["late"])
    if narrowed == "other numbers run":
        mutations.untried_rows(monkeypatch)
    else:
        monkeypatch.setattr(linear_module, "agreeing", small_numbers_alone)
    found, wrong = judged(model_of("llama2", SHAPES[0], tmp_path, torch.bfloat16))
    assert found.exact
    assert wrong
