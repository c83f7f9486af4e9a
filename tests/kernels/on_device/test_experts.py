"""Mixtures of experts: the kernels against the reference, and a row's bits in any company and alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foresay.verifier.model.expert_offload import page_locked
from foresay.verifier.ops import experts as op
from foresay.verifier.ops import records
from foresay.verifier.ops.eager import references
from foresay.verifier.ops.kernels import blocked, experts, linear
from foresay.verifier.ops.kernels.blocked import BlockedWeight
from foresay.verifier.ops.records import Routing, gate_parts
from tests.combinations import alternating
from tests.kernels.on_device.conftest import DTYPES, INTERPRETED
from tests.verifier.test_experts import EXPERTS, INNER, OUTER, ROUTINGS, chosen_of, noise, of_expert, weight_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:(All-NaN|.* encountered in):RuntimeWarning")]
#: One of each way through a product.
FORMS = ["floats", "int8", "int4 zeros", "q4_k", "mxfp4"]


@pytest.fixture(autouse=True)
def _by_torch() -> Iterator[None]:
    """Whatever is computed on a CPU."""
    with references():
        yield


@pytest.mark.parametrize("how", ROUTINGS.values(), ids=ROUTINGS)
def test_experts_are_chosen_as_the_contract_says(how, device) -> None:
    """Ties go to the lowest number, rows that are no numbers have experts all the same, and padding has none."""
    logits, correction = noise(50, how.experts + 1) * 2, noise(how.experts, seed=1) if how.sigmoid else None
    logits[:20] = logits[:20].round()
    logits[7], logits[8], slots = 0.0, -0.0, torch.arange(50) % 10
    wanted, their = op.route(logits, how, correction, None, slots)
    on_device = [None if one is None else one.to(device) for one in (correction, None, slots)]
    chosen, weights = op.route.launch(logits.to(device), how, *on_device)
    assert torch.equal(chosen.cpu(), wanted)
    torch.testing.assert_close(weights.cpu(), their, rtol=1e-5, atol=1e-7)
    factors = 1 + 0.3 * noise(how.experts, seed=2)
    same, own = op.route.launch(logits.to(device), how, on_device[0], None, on_device[2], factors.to(device))
    real = slots.to(device) != 0
    assert torch.equal(same, chosen) and torch.equal(own[real], (weights * factors.to(device)[chosen.long()])[real])
    alone = op.route.launch(logits[23:24].to(device), how, on_device[0])
    assert torch.equal(alone[0], chosen[23:24]) and torch.equal(alone[1], weights[23:24])
    broken = torch.full_like(logits, torch.nan).to(device)
    assert all(len({*each} & {*range(how.experts)}) == how.top_k for each in op.route.launch(broken, how)[0].tolist())


@pytest.mark.parametrize(("rows", "kind"), [(1, ""), (5, "apart"), (70, ""), (700, "all on one")])
def test_rows_are_sorted_by_expert(rows, kind, device) -> None:
    chosen, how, x = chosen_of(rows, kind), Routing(EXPERTS, 2), noise(rows, 8)
    chosen[rows // 3 :: 5] = -1
    _, wanted = op.sort_rows(x, chosen, how)
    same, found = experts.sort_rows(x.to(device), chosen.to(device), how)
    assert wanted.expert_ids is not None and wanted.sorted_ids is not None and found.sorted_ids is not None
    owned = wanted.expert_ids >= 0
    assert torch.equal(found.sorted_ids.cpu()[owned], wanted.sorted_ids[owned]) and len(same) == rows
    for name in ("positions", "spans", "expert_ids"):
        assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), name


@pytest.mark.parametrize(
    ("form", "gated", "dtype", "least"),
    [
        ("floats", "silu", DTYPES[0], 128),
        ("floats", "relu2", DTYPES[1], 128),
        ("int8", "clamped", DTYPES[1], 512),
        ("int4 zeros", "relu2", DTYPES[1], 128),
        ("q4_k", "", DTYPES[0], 512),
        ("mxfp4", "silu", DTYPES[0], 128),
    ],
    ids=str,
)
def test_a_pair_has_the_bits_of_a_linear_of_its_expert_alone(form, gated, dtype, least, device, monkeypatch) -> None:
    """Through tiles of 16, 32 and 64 rows, read by pairs and by rows that share them, in one segment and several.

    least: the inner positions of a segment."""
    monkeypatch.setattr(blocked, "_LEAST", least)
    monkeypatch.setattr(blocked, "_PROGRAMS", 4)
    turns, how = gate_parts(gated), Routing(EXPERTS, 2)
    weight, bias = weight_of("fp32" if form == "floats" else form, turns), noise(turns * EXPERTS * OUTER, seed=3)
    weight = weight.to(dtype) if isinstance(weight, Tensor) else weight
    mixture = BlockedWeight.pack(weight.to(device), bias.to(device), gated, EXPERTS)
    x, alone = noise(20, INNER, seed=4).to(device, dtype), []
    for number in range(EXPERTS):
        own = torch.cat(bias.view(turns, EXPERTS, OUTER)[:, number].unbind()).to(device)
        one = BlockedWeight.pack(of_expert(weight, turns, number).to(device), own, gated)
        alone.append(linear.whole(x, one, dtype))
    for rows, kind, height in ((1, "", 16), (20, "all on one", 16), (6, "", 32), (6, "apart", 64)):
        monkeypatch.setattr(records, "tile_rows", lambda *_, height=height: height)
        chosen = chosen_of(rows, kind)
        shared, where = experts.sort_rows(x[:rows].clone(), chosen.to(device), how)
        made = experts.expert_linear(shared, mixture, dtype, where)
        wanted = torch.stack([alone[one][row] for row, each in enumerate(chosen.tolist()) for one in each])
        assert torch.equal(made, wanted)
    assert torch.equal(experts.expert_linear(shared.repeat_interleave(2, 0), mixture, dtype, where), wanted)


@pytest.mark.parametrize("form", FORMS[-1:] if INTERPRETED else FORMS)  # an interpreter has no other memory
def test_experts_in_host_memory_have_the_same_bits(form, device) -> None:
    """Triton 3.7.1's launcher takes whatever address the driver maps into the device's memory, which it does for
    page-locked tensors (backends/nvidia/driver.c, extractPointer: cuPointerGetAttribute)."""
    dtype = DTYPES[1]
    weight = weight_of("fp32" if form == "floats" else form, 2)
    weight = weight.to(dtype) if isinstance(weight, Tensor) else weight
    near = BlockedWeight.pack(weight.to(device), None, "silu", EXPERTS)
    data = {name: getattr(near, name) for name in ("values", "scales", "offsets", "steps")}
    host = {name: one.cpu() for name, one in data.items() if one is not None}
    if not INTERPRETED:
        host = {name: page_locked(one.nbytes).view(one.dtype).view(one.shape).copy_(one) for name, one in host.items()}
    far = replace(near, **host)
    assert not far.values.is_cuda
    x = noise(6, INNER, seed=4).to(device, dtype)
    shared, where = experts.sort_rows(x, chosen_of(6, "").to(device), Routing(EXPERTS, 2))
    found, wanted = (experts.expert_linear(shared, one, dtype, where) for one in (far, near))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("dtype", "gated"), alternating(DTYPES, [False, True]), ids=str)
def test_what_experts_made_is_added_up_in_their_order(dtype, gated, device) -> None:
    """Nothing is read for a row that is padding."""
    parts, weights, shared, gate = noise(65, 300), noise(16, 4, seed=1), noise(16, 300, seed=2), noise(16, 9, seed=3)
    places, parts[0] = torch.randperm(64, generator=torch.Generator().manual_seed(5)).view(16, 4).int(), torch.nan
    places[3], weights[3] = -1, 0.0
    for more in ((), (shared, gate) if gated else (shared,)):
        given, eps = [one.to(device) for one in (parts, weights, places)], torch.finfo(dtype).eps
        found = op.mixed.launch(given[0][1:], given[1], given[2], dtype, *(one.to(device) for one in more))
        wanted = op.mixed(parts[1:], weights, places, dtype, *more)
        torch.testing.assert_close(found.cpu(), wanted, rtol=2 * eps, atol=2e-6)
