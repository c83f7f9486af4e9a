"""How many threads run kernels while something else wants the cores too."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from foresay.verifier.ops.kernels.cpu.threads import ThreadTuner, read_schedstat


class Machine:
    """Threads that run all the time, and wait for cores as long as ``hogs`` others want some of ``cores`` too."""

    def __init__(self, cores: int, most: int) -> None:
        self.cores, self.hogs = cores, 0
        self.now = self.ran = self.waited = 0.0
        self.crowding = ThreadTuner(most, lambda _: (self.ran, self.waited), lambda: self.now)

    def walk(self, seconds: float) -> set[int]:
        """So long a list after the other; how many threads walked them."""
        counts, end = set(), self.now + seconds
        while self.now < end:
            count = self.crowding.update(list)
            counts.add(count)
            share = min(1.0, self.cores / (count + self.hogs))
            self.now += 0.005
            self.ran, self.waited = self.ran + count * 0.005 * share, self.waited + count * 0.005 * (1 - share)
        return counts


def test_a_quiet_machine_gives_all_threads_to_the_kernels() -> None:
    machine = Machine(4, 4)
    assert machine.walk(60) == {4}
    assert machine.crowding.share == 0


@pytest.mark.parametrize(("cores", "hogs", "count"), [(2, 1, 1), (2, 6, 1), (4, 1, 3), (16, 1, 15), (16, 16, 8)])
def test_as_many_fewer_as_cores_are_missing(cores: int, hogs: int, count: int) -> None:
    machine = Machine(cores, cores)
    machine.walk(1)
    machine.hogs = hogs
    machine.walk(0.5)
    assert machine.crowding.count == count
    assert machine.crowding.share > 0
    assert machine.walk(0.5) == {count}


def test_all_are_tried_now_and_then_less_often_each_time_and_stay_once_there_is_room() -> None:
    machine = Machine(2, 2)
    machine.hogs = 2
    machine.walk(100)
    tried = sum(2 in machine.walk(0.005) for _ in range(8000))  # 40 seconds
    assert 10 <= tried <= 40, "some 50 ms every 16 s"
    machine.hogs = 0
    machine.walk(17)
    assert machine.walk(20) == {2}
    assert machine.crowding.share == 0


def test_one_thread_stays_one_and_knows_that_it_waits() -> None:
    machine = Machine(1, 1)
    machine.hogs = 1
    assert machine.walk(2) == {1}
    assert machine.crowding.share == pytest.approx(0.5, abs=0.01)


def test_what_hardly_ran_shows_nothing() -> None:
    ran = [0.0]
    now = [0.0]

    def read(_: Iterable[int]) -> tuple[float, float]:
        return ran[0], 3 * ran[0]

    crowding = ThreadTuner(2, read, lambda: now[0])
    for _ in range(100):
        now[0] += 1.0
        ran[0] += 0.0005
        assert crowding.update(list) == 2


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="a kernel that does not count run delay")
def test_linux_counts_it() -> None:
    me = threading.get_native_id()
    before, end = read_schedstat([me]), time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    after = read_schedstat([me])
    assert after[0] - before[0] == pytest.approx(0.05, abs=0.02)
    assert after[1] >= before[1]
    assert read_schedstat([0]) == (0, 0), "a thread that is not there"
