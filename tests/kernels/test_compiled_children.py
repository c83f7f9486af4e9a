"""The kernels that find children compile for the GPUs we name, and no register spills."""

from __future__ import annotations

import re

import pytest

from foresay.verifier.ops.kernels import children, planes
from foresay.verifier.ops.records import MOST_CHILDREN
from tests.kernels.compiling import CAPABILITIES, compile_kernel

FLOATS = ("logits", "temperature", "top_ps", "min_ps", "floats", "chances")
LONGS = ("token_ids", "seeds", "positions", "noisy_lists", "lists", "tokens")
TYPES = dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(LONGS, "*i64") | {"top_ks": "*i32"}
SIZES = {"size": "i32", "width": "i32", "blocks": "i32", "count": "i32"}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("own_ids", [False, True], ids=("same ids", "own ids"))
def test_children(own_ids, capability, tmp_path) -> None:
    for kernel, warps, constants in (
        (children.rank, children.RANK_WARPS, {"MOST": MOST_CHILDREN, "BLOCK": 1024}),
        (children.merge, children.MERGE_WARPS, {"MOST": MOST_CHILDREN, "MERGE": planes.MERGE}),
    ):
        types = {name: kind for name, kind in (TYPES | SIZES).items() if name in kernel.arg_names}
        none = {} if own_ids else {"token_ids": None}
        types = {name: kind for name, kind in types.items() if name not in none}
        made = compile_kernel(
            kernel, types, constants | none | {"CHAINED": capability >= 90}, tmp_path, capability, warps
        )
        assert made.stack == 0 and made.registers <= 128
        assert not re.search(r"\b(atom|red)\.", made.ptx), "no sum depends on who comes first"
        assert "lg2.approx" not in made.ptx, "near 1 the approximate logarithm has no correct digit"
