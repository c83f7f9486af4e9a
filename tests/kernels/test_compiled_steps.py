"""What lays out, accepts and moves compiles for the GPUs we name, and move reads every row before it writes any."""

from __future__ import annotations

import pytest
import torch

from foresay.verifier.ops.kernels import trees
from foresay.verifier.ops.trees import accept_paths, advance, lay_out, report, rows_of_paths, text_ends
from tests.kernels.compiling import CAPABILITIES, compile_kernel, compile_launches

pytestmark = pytest.mark.parametrize("capability", CAPABILITIES)


def of(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_accept(capability, tmp_path) -> None:
    def call() -> None:
        each, live = of(2, 60), of(2, dtype=torch.int32)
        found = accept_paths.launch(each, each, each, each, of(2), each, live)
        report.launch(found, each, each, of(2), each, of(2, 241), -2)

    made = compile_launches(call, tmp_path, capability)
    assert set(made) == {"walk_trees", "report_rows"}
    assert all(each.stack == 0 and each.registers <= 64 for each in made.values())


def test_lay_out_and_recent(capability, tmp_path) -> None:
    def call() -> None:
        lengths, live, tables = (of(*shape, dtype=torch.int32) for shape in ((2,), (2,), (2, 64)))
        lay_out.launch(tables, 48, lengths, of(2, 60, dtype=torch.int32), of(2, 60), live)
        advance.launch(of(2, 100), lengths, of(2, 1), of(2, 6), of(2))
        text_ends.launch(of(2, 100), lengths, 6, 1)
        rows_of_paths.launch(of(2, 60), of(2, 60), lengths, 5)

    made = compile_launches(call, tmp_path, capability)
    assert set(made) == {"lay_out_rows", "advance_rows", "end_rows", "path_rows"}
    assert all(each.stack == 0 and each.registers <= 64 for each in made.values())
    ptx = made["advance_rows"].ptx
    assert "bar.sync" in ptx[ptx.rindex("ld.global") : ptx.index("st.global")], "all is read before any is written"


@pytest.mark.parametrize("rows", [8, 64])
def test_move(rows, capability, tmp_path) -> None:
    types = dict.fromkeys(("sources", "destinations", "lengths"), "*i64") | {"keys": "*i32", "values": "*i32"}
    sizes = {"KEY_WIDTH": 512, "VALUE_WIDTH": 512, "ROWS": rows, "COLUMNS": 64, "CHAINED": capability >= 90}
    made = compile_kernel(
        trees.move_columns, types | {"slots": "i32", "path_width": "i32"}, sizes, tmp_path, capability
    )
    assert made.stack == 0 and made.registers <= 128
    last_read, first_write = made.ptx.rindex("ld.global"), made.ptx.index("st.global")
    assert "bar.sync" in made.ptx[last_read:first_write], "every thread has read before any writes"
