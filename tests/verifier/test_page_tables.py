"""Page tables of captured steps: what lies after a text's pages is the padding page, whatever text was there before."""

from __future__ import annotations

import torch

from foresay.kvpaging import WindowPages
from foresay.verifier.graphs.staging import PageTables, Staged


def test_nothing_is_left_of_a_longer_text() -> None:
    """Nor of window pages; a text may have more pages than there is room for."""
    windows = WindowPages(20, 4, 20, page_size=2)
    windows.page_map[:] = range(20)
    each = ((1, 6), torch.int32)
    staged = Staged(torch.device("cpu"), {"tables": each, "window_tables": each})
    tables = PageTables(staged, windows)
    for pages, length, own in (
        ([1, 2, 3, 4, 5], 0, [1, 2, 3, 4, 5, 0]),
        ([7, 8], 0, [7, 8, 0, 0, 0, 0]),
        ([7, 8, 9], 5, [7, 8, 9, 0, 0, 0]),
        (list(range(1, 10)), 17, [7, 8, 9, 0, 0, 0]),
        ([], 0, [0] * 6),
    ):
        tables.write(0, pages, length)
        known = (pages + [0] * 6)[:6]
        assert staged.arrays["tables"].tolist() == [known]
        assert staged.arrays["window_tables"].tolist() == [own]
