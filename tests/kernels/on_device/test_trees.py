"""Ops on trees by the kernels of a GPU (the cases: tests/kernels/tree_cases.py)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.tree_cases import At, TreeCases


@pytest.mark.gpu
class TestOnDevice(TreeCases):
    @pytest.fixture
    def at(self) -> At:
        def launched(op: Any) -> Any:
            return op.launch

        return launched
