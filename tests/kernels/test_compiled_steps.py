"""What lays out, accepts and moves compiles for the GPUs we name, and move reads every row before it writes any."""

from __future__ import annotations

import pytest

from tests.kernels.compiling import CAPABILITIES, compile_kernel
from verifier.ops.kernels import accept, lay_out, move, recent

pytestmark = pytest.mark.parametrize("capability", CAPABILITIES)


def test_accept(capability, tmp_path) -> None:
    types = {name: "*i64" for name in accept.walk_trees.arg_names if name not in ("WIDTH", "WORD")}
    made = compile_kernel(accept.walk_trees, types, {"WIDTH": 60, "WORD": 64}, tmp_path, capability, warps=2)
    assert made.stack == 0 and made.registers <= 64


def test_lay_out_and_recent(capability, tmp_path) -> None:
    words, longs = ("tables", "lengths", "depths", "live"), ("nodes", "positions", "slots")
    types = dict.fromkeys(words, "*i32") | dict.fromkeys(longs, "*i64") | {"rows": "i32"}
    sizes = {"PAGES": 100, "PAGE_SIZE": 48, "WIDTH": 6, "DEPTHS": 0, "ROWS": 128}
    made = compile_kernel(lay_out.lay_out_rows, types, sizes, tmp_path, capability)
    assert made.stack == 0 and made.registers <= 64
    types = dict.fromkeys(("recent", "emitted", "lengths", "out"), "*i64")
    sizes = {"WIDTH": 100, "EMITTED": 6, "BLOCK": 128}
    made = compile_kernel(recent.gather_rows, types, sizes, tmp_path, capability)
    assert made.stack == 0 and made.registers <= 64


@pytest.mark.parametrize("rows", [8, 64])
def test_move(rows, capability, tmp_path) -> None:
    types = dict.fromkeys(("sources", "destinations", "lengths"), "*i64") | {"keys": "*i32", "values": "*i32"}
    sizes = {"KEY_WIDTH": 512, "VALUE_WIDTH": 512, "WIDTH": rows, "ROWS": rows, "COLUMNS": 64}
    made = compile_kernel(move.move_columns, types | {"slots": "i32"}, sizes, tmp_path, capability)
    assert made.stack == 0 and made.registers <= 128
    last_read, first_write = made.ptx.rindex("ld.global"), made.ptx.index("st.global")
    assert "bar.sync" in made.ptx[last_read:first_write], "every thread has read before any writes"
