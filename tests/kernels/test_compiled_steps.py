"""What lays out, accepts and moves compiles for the GPUs we name, and move reads every row before it writes any."""

from __future__ import annotations

import pytest

from tests.kernels.compiling import CAPABILITIES, compile_kernel
from verifier.ops.kernels import accept, lay_out, move, recent

pytestmark = pytest.mark.parametrize("capability", CAPABILITIES)


def test_accept(capability, tmp_path) -> None:
    types = {name: "*i64" for name in accept.walk_trees.arg_names if name != "WORD"} | {"width": "i32"}
    made = compile_kernel(accept.walk_trees, types, {"WORD": 64}, tmp_path, capability, warps=2)
    assert made.stack == 0 and made.registers <= 64


def test_lay_out_and_recent(capability, tmp_path) -> None:
    words, longs = ("tables", "lengths", "depths", "live"), ("nodes", "positions", "slots")
    types = dict.fromkeys(words, "*i32") | dict.fromkeys(longs, "*i64")
    types |= dict.fromkeys(("rows", "pages", "width", "depth_stride"), "i32")
    sizes = {"PAGE_SIZE": 48, "ROWS": 128}
    made = compile_kernel(lay_out.lay_out_rows, types, sizes, tmp_path, capability)
    assert made.stack == 0 and made.registers <= 64
    types = dict.fromkeys(("recent", "emitted", "lengths", "out"), "*i64")
    sizes = {"BLOCK": 128}
    made = compile_kernel(recent.gather_rows, types | {"width": "i32", "nodes": "i32"}, sizes, tmp_path, capability)
    assert made.stack == 0 and made.registers <= 64


@pytest.mark.parametrize("rows", [8, 64])
def test_move(rows, capability, tmp_path) -> None:
    types = dict.fromkeys(("sources", "destinations", "lengths"), "*i64") | {"keys": "*i32", "values": "*i32"}
    sizes = {"KEY_WIDTH": 512, "VALUE_WIDTH": 512, "ROWS": rows, "COLUMNS": 64}
    made = compile_kernel(move.move_columns, types | {"slots": "i32", "path_width": "i32"}, sizes, tmp_path, capability)
    assert made.stack == 0 and made.registers <= 128
    last_read, first_write = made.ptx.rindex("ld.global"), made.ptx.index("st.global")
    assert "bar.sync" in made.ptx[last_read:first_write], "every thread has read before any writes"
