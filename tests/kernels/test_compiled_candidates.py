"""The kernels of samples and children compile for the GPUs we name, for any vocabulary, and no register spills."""

from __future__ import annotations

import re
from typing import Any

import pytest

from foresay.verifier.ops.kernels import candidates
from tests.combinations import pairwise
from tests.kernels.compiling import CAPABILITIES, compile_kernel

FLOATS = ("logits", "temperature", "top_ps", "min_ps", "floats", "chances")
LONGS = ("seeds", "positions", "token_ids", "noisy_lists", "lists", "tokens")
TYPES = dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(LONGS, "*i64") | {"top_ks": "*i32"}
SIZES = {"size": "i32", "width": "i32", "blocks": "i32", "count": "i32"}
KERNELS: list[tuple[Any, tuple[int, int], dict[str, int], int]] = [
    (candidates.scan, candidates.SCAN_WARPS, {"BLOCK": 1024}, 64),
    (candidates.decide, candidates.DECIDE_WARPS, {"MERGE": candidates.MERGE, "TILE": candidates.TILE}, 128),
]


@pytest.mark.parametrize(
    ("number", "exact", "own_ids", "capability"), pairwise([0, 1], [False, True], [False, True], CAPABILITIES), ids=str
)
def test_draw(number, exact, own_ids, capability, tmp_path) -> None:
    kernel, warps, constants, registers = KERNELS[number]
    arguments = {name: kind for name, kind in (TYPES | SIZES).items() if name in kernel.arg_names}
    constants = constants | {"EXACT": exact, "MOST": candidates.MOST, "USE_GDC": capability >= 90}
    if not own_ids:
        del arguments["token_ids"]
        constants = constants | {"token_ids": None}
    made = compile_kernel(kernel, arguments, constants, tmp_path, capability, warps[exact])
    assert made.stack == 0 and made.registers <= registers
    assert not re.search(r"\b(atom|red)\.", made.ptx), "no sum depends on who comes first"
    if kernel is candidates.scan or exact:
        assert "div.rn.f32" in made.ptx, "logits are divided by the temperature as torch divides them"
    assert "lg2.approx" not in made.ptx, "near 1 the approximate logarithm has no correct digit"
