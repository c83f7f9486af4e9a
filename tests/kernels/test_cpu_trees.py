"""Ops on trees by the kernels of a CPU, at once and recorded (the cases: tests/kernels/tree_cases.py)."""

from __future__ import annotations

import pytest
import torch

from foresay.verifier.ops.kernels.cpu.launch import recording
from foresay.verifier.ops.trees import accept_paths
from tests.kernels.tree_cases import At, TreeCases, assert_same, some_trees


@pytest.mark.usefixtures("any_processor")
class TestOnCpu(TreeCases):
    @pytest.fixture
    def at(self) -> At:
        return lambda op: op

    @pytest.fixture
    def device(self) -> torch.device:
        return torch.device("cpu")

    def test_a_recording_reads_other_trees_each_time(self) -> None:
        inputs = {name: column.clone() for name, column in some_trees(0, 12)[1].items()}
        with recording() as replay:
            found = accept_paths(**inputs)
        for seed in range(1, 5):
            for name, column in some_trees(seed, 12)[1].items():
                inputs[name].copy_(column)
            replay()
            assert_same(found, inputs)
