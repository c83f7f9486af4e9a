"""Mixtures of experts: who is chosen, and that a row has the bits of its own experts, alone and in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foresay.verifier.model.linear import Linear, Matrix
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.experts import mixed, places_of, route, sort_rows
from foresay.verifier.ops.quantized import QuantizedMatrix
from foresay.verifier.ops.records import Routing
from tests.combinations import alternating
from tests.verifier.quantized_weights import E2M1, KINDS, STEPPED, matrix_of
from tests.verifier.reading import threads

ROUTINGS = {
    "softmax": Routing(24, 5, norm_topk=False),
    "normalised": Routing(40, 8, scale=2.5),
    "one": Routing(8, 1),
    "all": Routing(8, 8),
    "sigmoid": Routing(24, 4, sigmoid=True, norm_topk=False),
    "groups": Routing(24, 5, sigmoid=True, groups=(4, 2), scale=1.8),
    "softmax in groups": Routing(24, 5, groups=(6, 3)),
}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("how", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("coarse", [False, True], ids=["", "with ties"])
def test_the_kernel_chooses_as_the_contract_says(how, coarse) -> None:
    """Ties go to the lowest number; what is behind the experts' logits is not looked at."""
    logits, correction = noise(50, how.experts + 1) * 2, noise(how.experts, seed=1) if how.sigmoid else None
    if coarse:
        logits, correction = logits.round(), None if correction is None else correction.round()
        logits[7], logits[8] = 0.0, -0.0
    chosen, weights = route(logits, how, correction)
    with references():
        wanted, their = route(logits, how, correction)
    assert torch.equal(chosen, wanted)
    torch.testing.assert_close(weights, their, rtol=1e-5, atol=1e-7)
    factors = 1 + 0.3 * noise(how.experts, seed=2)
    same, own = route(logits, how, correction, factors=factors)
    assert torch.equal(same, chosen) and torch.equal(own, weights * factors[chosen.long()])
    with references():
        _, their = route(logits, how, correction, factors=factors)
    torch.testing.assert_close(own, their, rtol=1e-5, atol=1e-7)
    for rows in (slice(3, 4), slice(20, 40)):
        alone = route(logits[rows].clone(), how, correction)
        assert torch.equal(alone[0], chosen[rows])
        assert torch.equal(alone[1], weights[rows])


def test_rows_that_are_no_numbers_have_experts_all_the_same() -> None:
    how, logits = ROUTINGS["groups"], noise(3, 24)
    logits[0], logits[1, 5:] = torch.nan, torch.inf
    chosen, _ = route(logits, how, torch.zeros(24))
    assert all(each[0] >= 0 and each[-1] < 24 and len(set(each)) == 5 for each in chosen.tolist())


#: Experts, outputs of each that fill no block, inputs: several groups of every quantised kind.
EXPERTS, OUTER, INNER = 8, 40, 512
FORMS = ["bf16", "fp16", "fp32", *KINDS, *STEPPED, *E2M1]


def weight_of(form: str, turns: int) -> Matrix:
    floats = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if form in floats:
        plain: Tensor = noise(turns * EXPERTS * OUTER, INNER, seed=2) / INNER**0.5
        return plain.to(floats[form])
    found: Matrix = matrix_of((INNER, turns * EXPERTS * OUTER), form)
    return found


def of_expert(weight: Matrix, turns: int, expert: int) -> Matrix:
    parts = weight.split_with_sizes([OUTER] * (turns * EXPERTS))
    own = [parts[turn * EXPERTS + expert] for turn in range(turns)]
    if isinstance(own[0], QuantizedMatrix):
        return QuantizedMatrix.stacked(own)  # type: ignore[arg-type]
    return torch.cat(own)  # type: ignore[arg-type]


def chosen_of(rows: int, kind: str) -> Tensor:
    """int32[R, 2]: all rows on the same experts, each on others, or at random."""
    first = {"all on one": torch.zeros(rows), "apart": torch.arange(rows) * 2 % EXPERTS}
    found = first.get(kind, torch.randint(EXPERTS - 1, (rows,), generator=torch.Generator().manual_seed(rows)))
    return torch.stack((found, found + 1), dim=1).int()


@pytest.mark.parametrize(("form", "gated"), alternating(FORMS, ["", "silu", "clamped"]))
def test_a_row_has_the_bits_of_a_linear_of_its_expert_alone(form, gated) -> None:
    """Of 1 to 64 rows, wherever they go, with one thread and several."""
    turns, dtype = 2 if gated else 1, torch.bfloat16 if form == "bf16" else torch.float32
    weight, bias = weight_of(form, turns), noise(turns * EXPERTS * OUTER, seed=3)
    offsets = [torch.cat(bias.view(turns, EXPERTS, OUTER)[:, expert].unbind()) for expert in range(EXPERTS)]
    how, x = Routing(EXPERTS, 2), noise(64, INNER, seed=4).to(dtype)
    for rounds in {False, isinstance(weight, QuantizedMatrix) and not weight.floats}:
        mixture = Linear(weight, bias, dtype, gated, rounds, EXPERTS)
        alone = [Linear(of_expert(weight, turns, n), offsets[n], dtype, gated, rounds)(x) for n in range(EXPERTS)]
        for rows, kind in ((1, ""), (3, "apart"), (5, ""), (16, "all on one"), (64, "all on one"), (64, "")):
            chosen = chosen_of(rows, kind)
            with threads(1 + rows % 3):
                copies, where = sort_rows(x[:rows].clone(), chosen, how)
                made = mixture.per_expert(copies, where)
            places = where.positions.tolist()
            assert sorted({place for each in places for place in each}) and len(made) == places_of(rows, how)
            for row, (experts, own) in enumerate(zip(chosen.tolist(), places, strict=True)):
                for expert, place in zip(experts, own, strict=True):
                    assert torch.equal(made[place], alone[expert][row]), (rounds, rows, kind, row)
        with references():
            same, there = sort_rows(x, chosen, how)
            their = mixture.per_expert(same, there)
            torch.testing.assert_close(
                their[there.positions.long()], made[where.positions.long()], rtol=0.03, atol=0.03
            )


@pytest.mark.parametrize("form", FORMS)
def test_a_head_has_the_bits_of_a_linear_of_its_own_part(form) -> None:
    """Whose inputs and outputs of a row lie next to those of other heads."""
    weight, dtype = weight_of(form, 1), torch.bfloat16 if form == "bf16" else torch.float32
    heads, x = Linear(weight, None, dtype, experts=EXPERTS), noise(64, EXPERTS * INNER, seed=4).to(dtype)
    own = enumerate(x.split(INNER, dim=1))
    wanted = torch.cat([Linear(of_expert(weight, 1, n), None, dtype)(part.contiguous()) for n, part in own], dim=1)
    for rows in (1, 3, 16, 64):
        with threads(1 + rows % 3):
            assert torch.equal(heads.per_head(x[:rows].clone()), wanted[:rows])
    with references():
        torch.testing.assert_close(heads.per_head(x), wanted, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_experts_made_is_added_up_in_their_order(dtype) -> None:
    parts, weights, shared, gate = noise(64, 300), noise(16, 4, seed=1), noise(16, 300, seed=2), noise(16, 9, seed=3)
    places = torch.randperm(64, generator=torch.Generator().manual_seed(5)).view(16, 4).int()
    for more in ((), (shared,), (shared, gate)):
        found = mixed(parts, weights, places, dtype, *more)
        with references():
            torch.testing.assert_close(mixed(parts, weights, places, dtype, *more), found, rtol=1e-2, atol=1e-2)
        part = (one[3:4].clone() for one in more)
        assert torch.equal(mixed(parts, weights[3:4].clone(), places[3:4].clone(), dtype, *part), found[3:4])
    exact = (weights.unsqueeze(2).double() * parts[places.long()].double()).sum(1)
    torch.testing.assert_close(mixed(parts, weights, places, torch.float32).double(), exact, rtol=1e-5, atol=1e-5)
