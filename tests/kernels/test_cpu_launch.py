"""Kernels of a CPU: the threads that walk them, what a recording owns, and that a kernel is what its text says."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from foresay.verifier.ops.kernels.cpu import launch
from foresay.verifier.ops.kernels.cpu.asm import Kernel
from foresay.verifier.ops.kernels.cpu.launch import Compiled, alias, arena, recording
from foresay.verifier.ops.kernels.cpu.threads import ThreadPool, Threads, num_threads, set_num_threads, set_yielding
from foresay.verifier.ops.kernels.cpu.torch_ops import ReadsNumbers
from foresay.verifier.ops.kernels.cpu.values import I64
from foresay.verifier.ops.kernels.cpu.walk import PLACES, walker
from foresay.verifier.ops.records import Norm
from foresay.verifier.ops.rows import add_norm


@pytest.fixture(autouse=True, params=[1, 2, 4])
def as_many(request) -> Iterator[None]:
    """So many threads, however busy the machine is."""
    before = num_threads()
    set_yielding(False)
    set_num_threads(request.param)
    yield
    set_num_threads(before)
    set_yielding(True)


@Compiled
def _marking() -> Kernel:
    """Each thread adds one to its own of some int64: (numbers)."""
    k = Kernel("mark")
    numbers = k.pointer(0)
    k.store(k.load(numbers, I64, k.thread) + 1, numbers, k.thread)
    return k


@Compiled
def _doubling() -> Kernel:
    """(numbers, count): each is twice what it was."""
    k = Kernel("double")
    numbers = k.pointer(0)
    with k.share(k.counted(1)) as index:
        k.store(k.load(numbers, I64, index) * 2, numbers, index)
    return k


def test_every_thread_runs_every_entry_once() -> None:
    numbers = torch.zeros(8, dtype=torch.int64)
    for _ in range(500):
        _marking()(numbers)
    assert numbers.tolist() == [500] * num_threads() + [0] * (8 - num_threads())


def test_entries_wait_for_each_other_and_threads_that_slept_come_back() -> None:
    numbers, count = torch.ones(1000, dtype=torch.int64), torch.tensor([1000])
    with recording() as made:
        for _ in range(40):
            _doubling()(numbers, count)
    assert numbers.sum() == 1000, "recorded, not run"
    for _ in range(3):
        numbers.fill_(1)
        time.sleep(0.05)  # all others sleep by then
        made()
        assert (numbers == 2**40).all()


def test_a_recording_reads_how_many_when_it_runs() -> None:
    numbers, count = torch.ones(10, dtype=torch.int64), torch.tensor([0])
    with recording() as made:
        _doubling()(numbers, count)
    for many in (0, 3, 10):
        count[0] = many
        made()
    assert numbers.tolist() == [4] * 3 + [2] * 7


def test_a_recording_owns_what_its_kernels_touch() -> None:
    """And uses memory again that nothing names any more, as views do."""
    x, weight = torch.randn(6, 32), torch.ones(32)
    with recording() as made:
        kept = add_norm(x, torch.randn(6, 32), Norm(weight, 1e-5))
        first = arena((6, 32), torch.float32)
        address, view = first.data_ptr(), first.view(3, 64)
        del first
        assert arena((6, 32), torch.float32).data_ptr() != address
        del view
        assert arena((6, 32), torch.float32).data_ptr() == address != kept.data_ptr()
    begun = x.clone()
    junk = [torch.full((6, 32), 7.0) for _ in range(50)]  # would lie where something was freed
    made()
    made()
    assert len(junk) == 50
    added = (x - begun) / 2
    expected = torch.nn.functional.rms_norm(begun + 2 * added, (32,), weight, 1e-5)
    torch.testing.assert_close(kept, expected, atol=1e-4, rtol=1e-4)


def doubled_in_several_threads(before: Callable[[], None] = lambda: None) -> None:
    texts = [torch.ones(300, dtype=torch.int64) for _ in range(4)]

    def work(numbers: torch.Tensor) -> None:
        for _ in range(30):
            before()
            _doubling()(numbers, torch.tensor([300]))

    users = [threading.Thread(target=work, args=(numbers,), daemon=True) for numbers in texts]
    for user in users:
        user.start()
    for user in users:
        user.join(120)  # a busy machine takes its time
    assert not any(user.is_alive() for user in users), "hangs"
    assert all((numbers == 2**30).all() for numbers in texts)


def test_callers_in_several_threads_wait_for_each_other() -> None:
    doubled_in_several_threads()


def test_the_number_of_threads_may_change_while_others_call() -> None:
    numbers = itertools.cycle([1, 3, 2])
    for _ in range(4):
        doubled_in_several_threads(lambda: set_num_threads(next(numbers)))


def test_a_list_without_entries_wakes_nobody() -> None:
    """There would be no barrier behind which the next list may be named: who comes late would walk that one twice."""
    team = Threads(3)
    before = team._state.copy()
    team.run(0, 0)
    assert (team._state == before).all()
    team.stop()


def test_threads_that_are_dropped_keep_what_they_wait_at() -> None:
    """Else others would get that memory, and wake them to walk what is no list."""
    dropped = weakref.ref(Threads(3)._state)
    gc.collect()
    state = dropped()
    assert state is not None
    state[PLACES["stop"] // 8] = 1
    walker().run(state.ctypes.data, 0, 0)


def test_threads_end_and_others_come() -> None:
    for _ in range(5):
        team = Threads(3)
        numbers = torch.zeros(4, dtype=torch.int64)
        launcher = _marking()
        with recording() as made:
            launcher(numbers)
        team.run(made._table.ctypes.data, 1)
        team.stop()
        assert numbers.tolist() == [1, 1, 1, 0]
        assert not any(thread.is_alive() for thread in team._others)


def test_a_child_has_threads_of_its_own() -> None:
    """Whatever another thread ran when it was made."""
    numbers, ends = torch.zeros(8, dtype=torch.int64), threading.Event()
    _marking()(numbers)

    def run_on() -> None:
        while not ends.is_set():
            _doubling()(torch.ones(300, dtype=torch.int64), torch.tensor([300]))

    other = threading.Thread(target=run_on)
    other.start()
    for _ in range(7):
        child = os.fork()
        if not child:
            signal.alarm(20)
            numbers.zero_()
            _marking()(numbers)
            os._exit(int(numbers.sum()) != num_threads())
        assert os.waitpid(child, 0)[1] == 0
    ends.set()
    other.join()


def test_denormals_are_numbers_in_every_thread() -> None:
    """Whatever the caller set for its own: a row must not depend on the thread that it is given to."""
    x, tiny, one = torch.full((8, 32), 1e-40), torch.full((8, 32), 1e-40), torch.ones(32)
    assert torch.set_flush_denormal(True)
    try:
        add_norm(x, tiny, Norm(one, 1e-5))
        added = tiny + tiny
    finally:
        torch.set_flush_denormal(False)
    assert not added.any(), "and the caller's are as it set them"
    assert (x == 2 * tiny).all()


def test_the_first_of_what_is_equal_is_compiled_once() -> None:
    assert _doubling() is _doubling()
    assert isinstance(_doubling(), launch.Launcher)


def test_ops_of_torch_are_entries_too() -> None:
    """Between kernels, in order, into the same memory; what changes is the content of their inputs."""
    numbers, count, state = torch.tensor([1, 2, 3, 4]), torch.tensor([4]), torch.zeros(2, dtype=torch.int64)
    with recording() as made:
        _doubling()(numbers, count)
        view = numbers.view(2, 2)[:, 1]
        best = (view + 1).sort(descending=True)
        state.add_(best.values)
        _doubling()(state, torch.tensor([2]))
    assert numbers.tolist() == [1, 2, 3, 4] and state.tolist() == [0, 0], "nothing was run"
    made()
    assert (numbers.tolist(), state.tolist()) == ([2, 4, 6, 8], [18, 10])
    assert best.indices.tolist() == [1, 0]
    numbers[:] = torch.tensor([0, 20, 0, 1])
    made()
    assert (numbers.tolist(), state.tolist()) == ([0, 40, 0, 2], [2 * (18 + 41), 2 * (10 + 3)])
    assert best.indices.tolist() == [0, 1]


def test_a_recording_is_cut_where_the_host_looks() -> None:
    numbers, count = torch.tensor([1, 2]), torch.tensor([2])
    with recording() as made:
        _doubling()(numbers, count)
        made.cut()
        _doubling()(numbers, count)
        numbers.add_(1)
        made.cut()
        _doubling()(numbers, count)
    made.run(0)
    assert numbers.tolist() == [2, 4]
    numbers[0] = 5
    made.run(1)
    assert numbers.tolist() == [11, 9]
    made.run(2)
    assert numbers.tolist() == [22, 18]
    numbers[:] = 1
    made()
    assert numbers.tolist() == [10, 10]
    numbers[:] = 1
    made.run(0, 2)
    assert numbers.tolist() == [5, 5]
    made.run(2, 3)
    assert numbers.tolist() == [10, 10]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.item(),
        lambda x: int(x[0]),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.repeat_interleave(x),
    ],
)
def test_a_step_that_reads_a_number_is_not_recorded(read: Callable[[torch.Tensor], object]) -> None:
    """It would have that of the recording for ever."""
    numbers = torch.tensor([3])
    with pytest.raises(ReadsNumbers), recording():
        read(numbers)


def test_what_is_borrowed_does_not_keep_memory() -> None:
    """A later entry uses it again; until then the host may write there."""
    numbers, count = torch.tensor([1, 2]), torch.tensor([2])
    with recording() as made:
        first = arena((2,), torch.int64)
        seen = alias(first)
        address = first.data_ptr()
        made.cut()
        _doubling()(first, count)
        numbers.copy_(first)
        del first
        gc.collect()
        second = arena((2,), torch.int64)
    made.run(0)
    seen[:] = torch.tensor([4, 7])
    made.run(1)
    assert numbers.tolist() == [8, 14]
    assert seen.data_ptr() == address
    assert second.data_ptr() != address, "an op of torch reads it still"


def test_threads_with_a_core_each_stay_on_it_until_they_stop() -> None:
    cores = sorted(os.sched_getaffinity(0))
    made = Threads(len(cores), cores=cores)
    try:
        assert [os.sched_getaffinity(id) for id in made.ids()] == [{core} for core in cores]
    finally:
        made.stop()
    assert os.sched_getaffinity(0) == set(cores)


def test_threads_have_a_core_each_where_they_are_as_many() -> None:
    team, cores = ThreadPool(), os.sched_getaffinity(0)
    team.pin()
    for count in (len(cores), 1 + len(cores)):
        team.set_num_threads(count)
        team.run(0, 0)
        assert team._threads is not None
        try:
            alone = [len(os.sched_getaffinity(id)) == 1 for id in team._threads.ids()]
        finally:
            team._threads.stop()
        assert all(alone) if count == len(cores) else os.sched_getaffinity(0) == cores
        team.forget()
