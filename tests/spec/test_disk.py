"""Texts are the same with KV on disk and without, whatever becomes of the files, and no tenant finds another's."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from safetensors import safe_open

from foresay.kvpaging import DiskPages, file_cache, prefix
from foresay.kvpaging.threads import BackgroundThreads
from foresay.spec.budget import CostModel
from foresay.spec.sampling import SamplingParams
from foresay.spec.scheduler import Scheduler
from foresay.spec.tree import TreeShape
from tests.spec.harness import Harness
from tests.spec.tables import Guesser, Plain, TableModel, plain

TENANTS = ("", "one", "another")
#: Computing takes longer than reading does, so that all is read that is there.
DEAR = CostModel([1, 1000], [100.0, 100_000.0])
_ids = count()


def harness(model: TableModel, folder: Path, key: str, most: int = 1 << 20, pages: int = 60) -> Harness:
    """An engine that has just started."""
    made = Harness(model, Guesser(model, 0.8), (2, 1), pages=pages, cost=DEAR, max_chunk=24)
    assert made.prefix is not None
    made.prefix.disk = DiskPages(folder, {key: [made.verifier.store]}, made.pool, most)
    return made


def idle(made: Harness, pages: int = 1 << 20) -> None:
    """Time in which nobody asks, for so many pages."""
    assert made.prefix is not None and made.prefix.disk is not None
    while pages and made.engine.keep_one():
        pages -= made.prefix.disk.can_write(60)


def at_rest(made: Harness) -> None:
    """Until both of its threads have done all that they were given."""
    assert made.prefix is not None and made.prefix.disk is not None
    both = threading.Barrier(2)
    for one in [made.prefix.disk._threads.submit(both.wait, 180) for _ in range(both.parties)]:
        one.result()


class Life:
    """Two servers on one folder, one model or the other in each, and what happens to them. Whatever a row says is
    checked by :class:`~tests.spec.tables.TableVerifier`."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng, self.folder = random.Random(seed), folder
        self.models = {"a": TableModel(seed), "b": TableModel(seed + 1)}
        self.texts: dict[tuple[str, str], list[list[int]]] = defaultdict(list)
        self.prompts = [self.rng.choices(range(1, 9), k=50)]
        self.servers = [self.server("a"), self.server("a")]
        self.read = self.damaged = 0

    def server(self, key: str) -> tuple[str, Harness]:
        most, pages = self.rng.choice([4096 * 100, 1 << 21]), self.rng.choice([40, 90])
        return key, harness(self.models[key], self.folder, key, most, pages)

    def go_on(self) -> None:
        slot = self.rng.randrange(2)
        key, made = self.servers[slot]
        self.ask(key, made)
        idle(made, self.rng.choice([0, 9, 1 << 20, 1 << 20]))
        if self.rng.random() < 0.3:
            self.damage()
        if self.rng.random() < 0.6:
            self.replace(slot)

    def ask(self, key: str, made: Harness) -> None:
        """Some requests at once, most of which go on with an earlier text."""
        wanted: dict[str, Plain] = {}
        known: dict[str, int] = {}
        for _ in range(self.rng.randint(1, 3)):
            base = self.rng.choice(self.prompts)[: self.rng.randint(30, 80)]
            prompt = base + self.rng.choices(range(1, 9), k=self.rng.randint(1, 12))
            warm, most = self.rng.choice([0.0, 1.0]), self.rng.randint(1, 12)
            sampling = SamplingParams(seed=next(_ids), temperature=warm, max_tokens=most)
            id, salt = f"{next(_ids)}", self.rng.choice(TENANTS)
            made.add(id, prompt, sampling, salt)
            wanted[id] = plain(self.models[key], prompt, sampling)
            self.texts[key, salt].append(prompt + wanted[id].tokens)
            known[id] = max(map(partial(in_common, prompt), self.texts[key, salt][:-1]), default=0)
            self.prompts = [*self.prompts[-8:], prompt + wanted[id].tokens]
        if self.rng.random() < 0.1:
            made.step()
            made.engine.cancel(gone := self.rng.choice(list(wanted)))
            del wanted[gone]
        answers = made.run()
        assert {id: answers[id].plain for id in wanted} == wanted
        assert all(answers[id].last.cached_tokens <= known[id] for id in wanted), "another tenant's, or model's"
        for trace in made.traces:
            self.read += trace.disk.get("read", 0)
            self.damaged += trace.disk.get("damaged", 0)
        made.traces.clear()

    def replace(self, slot: int) -> None:
        """It is killed, or swapped for the other model; the next one knows nothing but what is on disk."""
        self.servers[slot] = self.server(self.rng.choice("aab"))

    def damage(self) -> None:
        for _, made in self.servers:
            at_rest(made)  # what is still read for a request that was cancelled may be removed
        files = [path for path in self.folder.glob("*/*") if path.is_file() and not path.is_symlink()]
        held = [path.read_bytes() for path in files]
        for path in self.rng.sample(files, min(len(files), 5)):
            data = bytearray(path.read_bytes() or b"?")
            match self.rng.randrange(7):
                case 0:
                    data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
                case 1:
                    del data[self.rng.randrange(len(data)) :]
                case 2:
                    data += b"\0"
                case 3:
                    data[:] = self.rng.choice(held)  # another text's, tenant's or model's
                case 4:
                    data[:] = self.rng.randbytes(self.rng.randrange(200))
                case 5:  # one that was killed while it wrote
                    path = path.rename(f"{path}.1")
                case 6:
                    path.unlink()
                    path.symlink_to(self.rng.choice(files))
                    continue
            path.write_bytes(data)


def in_common(one: list[int], other: list[int]) -> int:
    return next(
        (position for position, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def live(seeds: range, folder: Path) -> None:
    read = damaged = 0
    for seed in seeds:
        life = Life(seed, folder / str(seed))
        for _ in range(12):
            life.go_on()
        read, damaged = read + life.read, damaged + life.damaged
    assert read > 150 * len(seeds)
    assert damaged > 2 * len(seeds)


def test_random_lives(tmp_path: Path) -> None:
    live(range(8), tmp_path)


@pytest.mark.soak
def test_many_random_lives(tmp_path: Path) -> None:
    live(range(1000, 1060), tmp_path)


PROMPT = [position % 7 + 1 for position in range(60)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture
def model() -> TableModel:
    return TableModel(3)


def written(model: TableModel, folder: Path, **settings: Any) -> Harness:
    """An engine that had one request, and had time."""
    made = harness(model, folder, "a", **settings)
    made.answer(PROMPT, GREEDY)
    idle(made)
    return made


def found(model: TableModel, folder: Path, prompt: list[int] = PROMPT, salt: str = "", key: str = "a") -> int:
    """Tokens that an engine started now need not compute."""
    return harness(model, folder, key).answer(prompt, GREEDY, salt).last.cached_tokens


def test_what_was_written_before_an_engine_died_is_found(model: TableModel, tmp_path: Path) -> None:
    made = harness(model, tmp_path, "a")
    made.answer(PROMPT, GREEDY)
    idle(made, 5)
    assert found(model, tmp_path) == 5 * made.pool.page_size
    idle(made)
    assert found(model, tmp_path) == 56
    assert found(model, tmp_path, [*PROMPT[:30], 8, 8, 8]) == 28
    assert found(model, tmp_path, salt="another") == found(model, tmp_path, key="b") == 0


def test_private_texts_are_written_nowhere(model: TableModel, tmp_path: Path) -> None:
    """They are found in memory; a page that another text has too is written for that one."""
    made, size = harness(model, tmp_path, "a"), 4
    texts = [[*PROMPT[:20], *range(1, 9), *range(1, 9)], [*PROMPT[:40], 8, 8, 8, 8, 8], [9, *PROMPT]]
    made.answer(PROMPT[:24], GREEDY)  # public, before a private one begins so
    for text in texts:
        made.add(f"{next(_ids)}", text, GREEDY, private=True)
    made.run()
    made.answer([*texts[1][:30], 7, 7, 7], GREEDY)  # public, after a private one began so
    made.add("again", texts[2], GREEDY, private=True)
    assert made.run()["again"].last.cached_tokens == 60
    made.answer(texts[2][:18], GREEDY)  # public, all of whose pages a private one left
    idle(made)
    assert [found(model, tmp_path, text) for text in (*texts, PROMPT)] == [20, 28, 16, 28]
    assert made.answer(texts[2], GREEDY).last.cached_tokens == 60
    idle(made)
    assert found(model, tmp_path, texts[2]) == 60, "a public request has the same text now"
    assert size == made.pool.page_size


def test_files_are_for_their_owner_and_for_tools(
    model: TableModel, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(partial(os.umask, os.umask(0o002)))
    written(model, folder := tmp_path / "kv")
    files = list(folder.glob("*/*"))
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (folder, files[0].parent)} == {0o700}
    with safe_open(files[0], "pt") as file:
        assert file.get_tensor("0").shape == (1, 4, 1, 1)


def test_a_full_disk_is_tried_again_more_and_more_rarely(
    model: TableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, now = harness(model, tmp_path, "a"), [1000.0]
    assert made.prefix is not None and made.prefix.disk is not None
    made.prefix.disk._clock = lambda: now[0]
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patched:
        patched.setattr(os, "replace", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        for passed in (0.0, 59.0, 1.0, 119.0, 1.0):
            now[0] += passed
            made.answer(PROMPT, GREEDY)
            idle(made)
    assert [record.getMessage() for record in caplog.records] == [
        f"KV is not kept on disk for {seconds} s: [Errno 28] No space left on device" for seconds in (60, 120, 240)
    ]
    assert not list(tmp_path.glob("*/*"))
    now[0] += 240.0
    made.answer(PROMPT, GREEDY)
    idle(made)
    assert found(model, tmp_path) == 56
    assert made.prefix.disk._pause == 60.0


def test_what_is_in_the_pool_takes_no_other_page(model: TableModel, tmp_path: Path) -> None:
    """Of a text whose first page is missing, one page is read, and no other is evicted."""
    made = written(model, tmp_path)
    assert made.prefix is not None and made.prefix.disk is not None
    (first, *pages), before = made.prefix.match(PROMPT), len(made.prefix)
    for page in (*reversed(pages), first):
        made.pool.release(page)
    made.pool.replace(first, first)
    taken = made.pool.allocate(made.pool.available - made.pool.idle - 1)
    for _ in (reading := made.prefix.fetch(made.prefix.disk, PROMPT)):
        at_rest(made)
    reading.close()
    assert len(made.prefix) == before and made.prefix.match(PROMPT)[1:] == pages
    assert made.pool.references(taken[0]) == 1


def test_two_may_write_the_same_page_at_once(
    model: TableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where both have the same process id, as in containers that share a folder."""
    first, second, replace = harness(model, tmp_path, "a"), harness(model, tmp_path, "a"), os.replace
    for made in (first, second):
        made.answer(PROMPT, GREEDY)

    def meanwhile(*paths: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        idle(second, 1)
        replace(*paths)

    monkeypatch.setattr(os, "replace", meanwhile)
    idle(first)
    assert found(model, tmp_path) == 56


@pytest.mark.parametrize(("clock_was_wrong", "most", "blocks"), [(False, 24, 1000), (True, 24, 1000), (False, 48, 48)])
def test_the_ends_of_what_was_not_used_for_longest_go_first(
    model: TableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock_was_wrong: bool, most: int, blocks: int
) -> None:
    monkeypatch.setattr(file_cache, "free_bytes", lambda folder: 4096 * (blocks - len(list(folder.glob("*/*")))))
    for number in range(2):
        monkeypatch.setattr(time, "time_ns", lambda number=number: 10**18 + number * 10**12)
        made = harness(model, tmp_path, "a", 4096 * most)
        made.answer([8 - number, *PROMPT], GREEDY)
        idle(made)
        for path in tmp_path.glob("*/*") if clock_was_wrong and not number else ():
            os.utime(path, (4e9, path.stat().st_mtime - 1e9 + 4e9))
    assert len(list(tmp_path.glob("*/*"))) <= 24 and found(model, tmp_path, [7, *PROMPT]) == 60
    assert 0 < found(model, tmp_path, [8, *PROMPT]) < 60


def test_those_who_decode_wait_for_no_file(model: TableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(model, tmp_path)
    made, goes_on = harness(model, tmp_path, "a"), threading.Event()
    load = DiskPages._load
    monkeypatch.setattr(DiskPages, "_load", lambda *given: goes_on.wait(600) and load(*given))
    made.add("running", [1], SamplingParams(temperature=0.0, max_tokens=110))
    made.step()
    made.add("read", PROMPT, GREEDY)
    for _ in range(20):
        made.step()
    assert not made.answers["read"].deltas
    goes_on.set()
    made.run()
    assert made.answers["read"].last.cached_tokens == 56


def test_nobody_waits_for_a_disk_that_hangs(model: TableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = written(model, tmp_path)
    before.answer(PROMPT, GREEDY, "b")
    idle(before)
    made, goes_on = harness(model, tmp_path, "a"), threading.Event()
    monkeypatch.setattr(prefix, "_PATIENCE", 0.05)
    monkeypatch.setattr(DiskPages, "_load", lambda *given: goes_on.wait(600))
    assert [made.answer(PROMPT, GREEDY, salt).last.cached_tokens for salt in ("", "b")] == [0, 0]
    goes_on.set()
    assert [trace.disk for trace in made.traces if trace.disk] == [{"slow": 4}]  # only the first has waited


def test_files_that_never_arrive_hold_up_nothing_else(
    model: TableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is read at once hangs; other texts are written and found by the next engine."""
    written(model, tmp_path)
    made, arrived = harness(model, tmp_path, "a"), threading.Event()
    monkeypatch.setattr(prefix, "_PATIENCE", 0.05)
    monkeypatch.setattr(DiskPages, "_load", lambda *given: arrived.wait(60))
    made.answer(PROMPT, GREEDY)
    assert made.prefix is not None and made.prefix.disk is not None
    made.answer(PROMPT[::-1], GREEDY)
    idle(made)
    assert list(made.prefix.disk.prefault())
    monkeypatch.undo()
    assert found(model, tmp_path, PROMPT[::-1]) > 0
    arrived.set()


def test_what_is_no_file_is_removed_and_not_waited_for(model: TableModel, tmp_path: Path) -> None:
    written(model, tmp_path)
    first = min((tmp_path / "a").iterdir(), key=lambda path: -path.stat().st_mtime_ns)
    first.unlink()
    os.mkfifo(first)
    assert found(model, tmp_path, PROMPT) == 0
    assert not first.exists()


def test_a_directory_instead_of_a_file_leaves_nothing_open(model: TableModel, tmp_path: Path) -> None:
    written(model, tmp_path)
    for path in (tmp_path / "a").iterdir():
        path.unlink()
        path.mkdir()
    made = harness(model, tmp_path, "a")
    assert made.answer(PROMPT, GREEDY).last.cached_tokens == 0
    at_rest(made)
    assert [place for place in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if str(tmp_path) in place] == []


def test_python_ends_while_a_thread_waits_for_ever() -> None:
    program = "from foresay.kvpaging.threads import *; BackgroundThreads(2, '', list).submit(SimpleQueue().get)"
    subprocess.run([sys.executable, "-c", program], timeout=300, check=True)


def test_threads_that_were_replaced_end_with_the_others() -> None:
    made = BackgroundThreads(2, "replaced", list)
    made.replace()
    ran = [thread for thread in threading.enumerate() if thread.name == "replaced"]
    del made
    for thread in ran:
        thread.join(60)
    assert len(ran) == 4 and not any(thread.is_alive() for thread in ran)


def test_what_takes_longer_to_read_is_computed(model: TableModel, tmp_path: Path) -> None:
    written(model, tmp_path)
    made = harness(model, tmp_path, "a")
    made.scheduler = made.engine.scheduler = Scheduler(made.pool, made.prefix, TreeShape(()), CostModel([1], [1e-9]), 4)
    made.answer(PROMPT, GREEDY)
    assert made.traces[0].disk == {"read": 32, "slow": 32}


def test_memory_is_touched_for_what_is_on_disk_unless_somebody_removed_it(model: TableModel, tmp_path: Path) -> None:
    made = harness(model, tmp_path, "a")
    assert made.prefix is not None and (disk := made.prefix.disk) is not None
    assert list(disk.prefault()) == []
    made.answer(PROMPT, GREEDY)
    idle(made)
    assert list(disk.prefault()) == [None]
    shutil.rmtree(tmp_path / "a")
    assert list(disk.prefault()) == []
    assert made.answer(PROMPT, GREEDY) is not None
