"""The likeliest children of many rows by compiled kernels of a CPU, whatever threads and rows there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from foresay.verifier.ops.kernels.cpu import candidates
from foresay.verifier.ops.kernels.cpu.jit import Processor
from foresay.verifier.ops.kernels.cpu.launch import Launcher, recording
from foresay.verifier.ops.kernels.cpu.threads import num_threads, set_num_threads, set_yielding
from foresay.verifier.ops.records import MOST_CHILDREN, RowSampling
from foresay.verifier.ops.sample import best_children
from tests.kernels.children_cases import KINDS, ChildrenCases, Find, part_of, rows_of, sampling_of


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "PIECE", 64)


@pytest.fixture
def any_threads() -> Iterator[None]:
    """As many as are set, however busy the machine is."""
    before = num_threads()
    set_yielding(False)
    yield
    set_num_threads(before)
    set_yielding(True)


class TestOnCpu(ChildrenCases):
    @pytest.fixture
    def find(self, any_processor: Processor) -> Find:
        return best_children


def siblings(kinds: list[dict[str, Any]]) -> RowSampling:
    """Rows at one position next to each other, then others of another seed, then at another position."""
    sampling, third = sampling_of(kinds), len(kinds) // 3
    sampling.seeds[:third], sampling.seeds[third:] = sampling.seeds[0].clone(), sampling.seeds[-1].clone()
    sampling.positions[: 2 * third], sampling.positions[2 * third :] = 70, 71
    return sampling


def equal(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


@pytest.mark.parametrize(
    ("kinds", "make"), [(KINDS, sampling_of), (KINDS[:3] * 4, siblings)], ids=["others", "siblings"]
)
@pytest.mark.usefixtures("small_pieces", "any_threads")
def test_neither_rows_nor_threads_change_a_bit(any_processor, kinds, make) -> None:
    """Noise that is used again is the same, and so is what several threads list."""
    logits, sampling = rows_of([1.0, 4.0] * (len(kinds) // 2), 1000), make(kinds)
    set_num_threads(1)
    rows = [slice(row, row + 1) for row in range(len(kinds))]
    alone = [best_children(logits[row].clone(), part_of(sampling, row), 9) for row in rows]
    together = torch.cat([tokens for tokens, _ in alone]), torch.cat([chances for _, chances in alone])
    for threads in (1, 2, 4):
        set_num_threads(threads)
        assert equal(best_children(logits, sampling, 9), together)
        few = slice(3, 8)
        part = best_children(logits[few].clone(), part_of(sampling, few), 9)
        assert equal(part, (together[0][few], together[1][few]))


@pytest.mark.usefixtures("small_pieces", "any_threads")
def test_fewer_threads_may_merge_than_list(monkeypatch) -> None:
    """As when a core is taken between two entries."""
    logits, sampling = rows_of([2.0] * len(KINDS), 1000), sampling_of(KINDS)
    expected, merging = best_children(logits, sampling, MOST_CHILDREN), candidates._deciding
    set_num_threads(4)

    def by_one(*shape: object) -> Launcher:
        set_num_threads(1)
        return merging(*shape)

    monkeypatch.setattr(candidates, "_deciding", by_one)
    assert equal(best_children(logits, sampling, MOST_CHILDREN), expected)


@pytest.mark.usefixtures("small_pieces")
def test_a_recording_reads_rows_when_it_runs() -> None:
    kinds, width, token_ids = KINDS[:6], 300, torch.randperm(5000)[:300]
    logits, sampling = torch.zeros(len(kinds), width), sampling_of([{}] * len(kinds))
    with recording() as made:
        found = best_children(logits, sampling, 5, token_ids)
    for number in (3, 6, 1):
        now = sampling_of([*kinds[number:], *kinds[:number]])
        logits[:] = rows_of([float(number)] * len(kinds), width)
        for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "positions"):
            getattr(sampling, name)[:] = getattr(now, name)
        made()
        assert equal(found, best_children(logits.clone(), now, 5, token_ids))


def test_no_rows() -> None:
    assert [part.shape for part in best_children(torch.zeros(0, 30), sampling_of([]), 4)] == [(0, 4), (0, 4)]
