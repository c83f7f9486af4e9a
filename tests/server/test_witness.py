"""The probe's finding is taken over from an earlier start of the same, and tried again while nobody asks anything."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import cast

import pytest

from foresay.kvpaging import PagePool
from foresay.server.engine.build import build_engine
from foresay.server.engine.handover import NotExact, Witness
from foresay.server.engine_process import frames
from foresay.server.engine_process.frames import Link
from foresay.server.engine_process.loop import Loop
from foresay.server.settings.config import EngineConfig
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.ops.kernels.cpu import kept
from tests.same_tokens import mutations
from tests.spec.harness import Harness
from tests.spec.tables import TableModel
from tests.verifier.families import make
from tests.verifier.gguf_files import cache_of_its_own
from tests.verifier.reading import Reader, load_decoder

DAY = 86400.0


class Clock:
    def __init__(self) -> None:
        self.now = 1.8e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_of_its_own(tmp_path / "cache", monkeypatch)
    (tmp_path / "cache/foresay/kernels").unlink()


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = tmp_path_factory.mktemp("llama2")
    make("llama2", directory)
    return load_decoder(directory, probed=False)


@pytest.fixture
def reader(decoder: Decoder) -> Reader:
    return Reader(decoder)


def start(reader: Reader, clock: Clock, of: str = "these") -> tuple[Witness, str, list[str]]:
    """A start: what is found, and what was done for it."""
    output: list[str] = []
    witness = Witness(clock)
    found = witness.exactness(of, reader.model, reader.pool, output.append)
    assert found.exact
    return witness, found.reason, output


def whole(pool: PagePool) -> bool:
    pool.check([], at_rest=True)
    return pool.available == pool.num_pages - 1


def going(witness: Witness) -> bool:
    """Asked anew each time."""
    return witness.going


def to_its_end(witness: Witness) -> None:
    witness.go_on()
    while going(witness):
        witness.go_on()


def test_a_second_start_of_the_same_within_a_day_does_not_probe(reader) -> None:
    clock = Clock()
    _, reason, output = start(reader, clock)
    assert output == ["probing exactness"] and reason == "rows are bit-equal in any batch (probed)"
    clock.now += DAY - 1
    _, reason, output = start(reader, clock)
    assert output == [] and reason.endswith("(probed at an earlier start, 2027-01-15 08:00 UTC)")
    assert start(reader, clock, "others")[2] == ["probing exactness"]
    clock.now += 2
    assert start(reader, clock)[2] == ["probing exactness"]


def test_an_engine_says_what_its_witness_knows() -> None:
    output: list[str] = []
    config = EngineConfig(draft="none", max_model_len=64, kv_tokens=512, threads=1)
    for _ in range(2):
        info = build_engine(config, lambda phase, share=None: output.append(phase), witness=Witness()).info
    assert output.count("probing exactness") == 1 and "at an earlier start" in info.exact_reason and info.exact


def test_it_is_tried_again_once_there_are_no_requests(reader) -> None:
    clock = Clock()
    start(reader, clock)
    clock.now += DAY - 100
    witness, *_ = start(reader, clock)
    witness.go_on()
    assert not going(witness), "somebody may still come"
    clock.now += 10
    for _ in range(3):
        witness.go_on()
    assert going(witness) and reader.pool.available < reader.pool.num_pages - 1
    witness.rest(requested=False)
    assert not going(witness) and whole(reader.pool)
    clock.now += 19
    witness.go_on()
    assert not going(witness), "given up once, it waits twice as long"
    witness.rest(requested=False)
    clock.now += 1
    witness.go_on()
    assert going(witness), "a look at the engine is no request"
    witness.rest(requested=True)
    clock.now += 39
    witness.rest(requested=True)
    clock.now += 39
    witness.go_on()
    assert not going(witness), "somebody may come again"
    clock.now += 1
    to_its_end(witness)
    clock.now += 1000
    witness.go_on()
    assert not going(witness) and whole(reader.pool)
    assert start(reader, clock)[2] == [], "a day from then"


def test_what_does_not_hold_any_more_ends_the_engine_and_is_forgotten(reader, monkeypatch) -> None:
    clock = Clock()
    start(reader, clock)
    witness, *_ = start(reader, clock)
    clock.now += 10
    with monkeypatch.context() as patch:
        mutations.values_by_slot(patch)
        with pytest.raises(NotExact, match=r"inside a tree.*although they did not at an earlier start"):
            to_its_end(witness)
    assert not going(witness) and whole(reader.pool)
    assert start(reader, clock)[2] == ["probing exactness"]


def test_what_is_not_exact_is_never_kept(reader, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        mutations.values_by_slot(patch)
        assert not Witness(Clock()).exactness("these", reader.model, reader.pool, lambda phase: None).exact
    assert start(reader, Clock())[2] == ["probing exactness"]


@pytest.mark.parametrize("content", [b"", b"never", b"nan", b"1e99"])
def test_a_finding_that_cannot_be_read_is_none(reader, content, monkeypatch) -> None:
    start(reader, Clock())
    monkeypatch.setattr(kept, "find", lambda key: content)
    assert start(reader, Clock())[2] == ["probing exactness"]


def test_the_loop_tries_when_it_is_idle_and_rests_for_all_but_a_ping() -> None:
    done: list[str] = []

    class Noted:
        """A witness that has three passes to run, at the end of which somebody comes."""

        @property
        def going(self) -> bool:
            return done[-1:] == ["pass"] and done[-3:] != ["pass"] * 3

        def go_on(self) -> None:
            done.append("pass")
            if done[-3:] == ["pass"] * 3:
                ours.sendall(frames.pack(frames.Stop() if "request" in done else add))

        def rest(self, asked: bool) -> None:
            done.append("request" if asked else "other")

    add = frames.Add(Request(id="one", prompt=[5, 6], params=SamplingParams(max_tokens=3, seed=1)))
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.closing(Link(theirs)) as link:
        ours.sendall(frames.pack(frames.Ping()))
        Loop(Harness(TableModel(0)).engine, link, witness=cast(Witness, Noted())).run()
    assert done[:4] == [*["pass"] * 3, "other"] and done[-4:] == [*["pass"] * 3, "other"], "it adds, and it stops"
    assert set(done[4:-4]) == {"request"}, "steps"
