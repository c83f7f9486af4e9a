"""The kernels of the sample compile for the GPUs we name, for any vocabulary, and no register spills."""

from __future__ import annotations

import re
from typing import Any

import pytest

from foresay.verifier.ops.kernels import planes, sample, settle
from tests.kernels.compiling import CAPABILITIES, compile_kernel

FLOATS = ("logits", "temperature", "top_ps", "min_ps", "floats")
WORDS = ("words", "top_ks")
LONGS = ("seeds", "positions", "token_ids", "sampled")
TYPES = dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(WORDS, "*i32") | dict.fromkeys(LONGS, "*i64")
SIZES = {"size": "i32", "vocab_size": "i32", "blocks": "i32"}
KERNELS: list[tuple[Any, int, dict[str, int], int]] = [
    (sample.scan, 4, {"BLOCK": 1024}, 64),
    (sample.weigh, sample.WEIGH_WARPS, {"BLOCK": 1024, "MERGE": planes.MERGE, "CAP": planes.CAP}, 64),
    (settle.settle, sample.SETTLE_WARPS, {"MERGE": planes.MERGE, "TILE": sample.TILE, "CAP": planes.CAP}, 128),
]


@pytest.mark.parametrize("own_ids", [False, True], ids=("", "own ids"))
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("kernel", "warps", "constants", "registers"), KERNELS, ids=("scan", "weigh", "settle"))
def test_draw(kernel, warps, constants, registers, capability, own_ids, tmp_path) -> None:
    arguments = {name: kind for name, kind in (TYPES | SIZES).items() if name in kernel.arg_names}
    if not own_ids and "token_ids" in arguments:
        del arguments["token_ids"]
        constants = constants | {"token_ids": None}
    constants = constants | {"CHAINED": capability >= 90}
    made = compile_kernel(kernel, arguments, constants, tmp_path, capability, warps)
    assert made.stack == 0 and made.registers <= registers
    assert not re.search(r"\b(atom|red)\.", made.ptx), "no sum depends on who comes first"
    assert "div.rn.f32" in made.ptx, "logits are divided by the temperature as torch divides them"
    assert "lg2.approx" not in made.ptx, "near 1 the approximate logarithm has no correct digit"
