"""The soak in short: one wave with a freeze and a kill, and that it finds what is wrong."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.drive import Options
from bench.soak import report, storm
from bench.soak.answers import Reply, difference
from bench.soak.requests import SHARES, Json, RequestSource
from bench.soak.run import flags
from bench.soak.served import Served, started
from bench.soak.storm import Fault, Harm, Judge, Plain, Round, Tally

ARGS = Namespace(dtype="auto", threads=1, max_seqs=4, max_model_len=256)
OPTIONS = Options("bundled", threads=1)
#: An engine that keeps a page of its first request, and now and then says the next token of the vocabulary instead.
FAULTY = """
import sys

if "foresay.server.engine_process.process" in sys.orig_argv:
    from foresay.kvpaging.pool import PagePool
    from foresay.spec.engine import EngineCore

    release, step, kept, steps = PagePool.release, EngineCore.step, [], []

    def keep_one(pool, page):
        kept.append(page) if not kept else release(pool, page)

    def say_another(engine):
        deltas = step(engine)
        steps.extend(delta for delta in deltas if delta.tokens)
        if deltas and deltas[0].tokens and len(steps) % 5 == 0:
            deltas[0].tokens[0] = (deltas[0].tokens[0] + 1) % engine.info.vocab_size
        return deltas

    PagePool.release, EngineCore.step = keep_one, say_another
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server without drafts."""
    with started(flags("none", OPTIONS, ARGS), tmp_path_factory.mktemp("plain") / "log") as (_, port):
        yield port


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storm, "CLIENTS", 4)
    monkeypatch.setattr(storm, "VISITS", 4)


async def wave(plain: int, process: int, port: int, log: Path, harms: list[Harm]) -> tuple[Tally, Round]:
    """One wave against a server, all of it compared."""
    tally, right = Tally(), Plain(plain)
    judge = Judge(right, tally)
    working = asyncio.create_task(judge.work())
    async with Served(process, port, log) as served:
        one = Round("ngram:4", served, judge, tally, seed=3)
        await one.run(0.0, iter(harms))
    await judge.settled()
    working.cancel()
    await right.close()
    return tally, one


@contextmanager
def drafting(log: Path) -> Iterator[tuple[int, int]]:
    with started([*flags("ngram:4", OPTIONS, ARGS), "--kv-tokens", "320"], log) as server:
        yield server


@pytest.mark.soak
def test_a_wave_with_a_freeze_and_a_kill(plain: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storm, "VISITS", 12)  # so that the wave outlasts both
    log = tmp_path / "log"
    with drafting(log) as (process, port):
        harms = [Harm(0.1, hold=0.5), Harm(0.1, hold=None)]
        tally, one = asyncio.run(wave(plain, process, port, log, harms))
    assert tally.faults == []
    assert (tally.counts["kills"], tally.counts["freezes"], len(tally.seconds_down)) == (1, 1, 1)
    assert tally.counts["requests"] >= 16 and tally.counts["compared"] >= 8
    found = report.results(tally, [one])
    assert report.well(found)
    report.show(found)


@pytest.mark.slow
def test_an_engine_that_errs_and_keeps_a_page_is_found_out(
    plain: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storm, "VISITS", 2)
    (tmp_path / "sitecustomize.py").write_text(FAULTY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    log = tmp_path / "log"
    with drafting(log) as (process, port):
        tally, one = asyncio.run(wave(plain, process, port, log, []))
    found = report.results(tally, [one])
    assert found["wrong"] and found["pages_at_quiet_moments"] == 1
    assert [fault.told for fault in tally.faults if fault.what == "leaked"] == ["1 pages when all had ended"]
    assert not report.well(found)


def test_equal_seeds_ask_the_same() -> None:
    first, again, other = (RequestSource(seed, "m", 4096, 256) for seed in ("0 a 1", "0 a 1", "0 a 2"))
    visits = [first.visit() for _ in range(60)]
    assert visits == [again.visit() for _ in range(60)] != [other.visit() for _ in range(60)]
    requested = [request for visit in visits for request in visit]
    assert {request.api for request in requested} == set(SHARES)
    assert any(request.wrong for request in requested)
    assert {request.conduct for request in requested} == {"reads", "slow", "leaves", "cancels"}
    assert all(body["stream"] is False for request in requested if not request.wrong for body in request.plain)


def test_a_beginning_is_right_as_far_as_it_goes() -> None:
    right = {"choices": {"0": {"text": "Once upon", "token_ids": [1, 2]}}, "usage": {"read": 1, "written": 2}}
    begun: Json = {"choices": {"0": {"text": "Once", "token_ids": [1]}}, "usage": {"read": 1, "written": 1}}
    assert difference(right, right, cut=False) is None
    assert difference(begun, right, cut=True) is None
    assert "'Once' instead of 'Once upon'" in (difference(begun, right, cut=False) or "")
    begun["choices"]["0"]["token_ids"] = [2]
    assert difference(begun, right, cut=True) == "choices.0.token_ids: [2] instead of [1]"


def test_a_stream_says_what_the_whole_answer_says() -> None:
    def choice(text: str, **more: object) -> dict[str, object]:
        return {"choices": [{"index": 0, "text": text, "finish_reason": None, **more}], "usage": None}

    whole, reply = Reply(), Reply()
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
    whole.whole("completions", choice("a b", finish_reason="stop", seed=7) | {"usage": usage, "id": "x"})
    for event in (choice("a", seed=7), choice(" b"), choice("", finish_reason="stop"), {"choices": [], "usage": usage}):
        reply.take_event("completions", event)
    assert reply.parts == whole.parts


def test_what_every_choice_returns_of_the_prompt_is_one_prompt() -> None:
    reply = Reply()
    for index in (0, 1):
        event = {"choices": [{"index": index, "delta": {"role": "assistant"}}], "prompt_token_ids": [3, 4]}
        reply.take_event("chat", event)
    assert reply.parts["prompt_token_ids"] == [3, 4]


def test_a_response_must_end_as_it_went_on() -> None:
    reply = Reply()
    reply.take_event("socket", {"type": "response.output_text.delta", "delta": "a"})
    response = {"status": "completed", "output": [{"content": [{"text": "b", "logprobs": []}]}], "usage": {}}
    reply.take_event("socket", {"type": "response.completed", "response": response})
    assert reply.unlike


def test_memory_that_rises_is_not_flat() -> None:
    requests = list(range(0, 3000, 100))
    flat = report.memory([300 + (n < 5) * -80 + n % 3 for n in range(30)], requests)
    rising = report.memory([300 + n * 5.0 for n in range(30)], requests)
    assert flat is not None and flat.flat
    assert rising is not None and rising.slope == pytest.approx(50) and not rising.flat
    assert report.memory([300.0, 310.0], [0, 5]) is None
    few = report.memory([300.0 + n for n in range(30)], range(0, 300, 10))
    assert few is not None and few.flat is None


def test_anything_wrong_changes_the_exit_status() -> None:
    tally = Tally(faults=[Fault("hung", "auto, wave 0", "nothing came")])
    found = {"flat": True, "wrong": 0, "leaked": 0, "other_faults": len(tally.faults)}
    assert not report.well(found) and report.well(found | {"other_faults": 0})
    assert report.well(found | {"other_faults": 0, "flat": None})
    assert not report.well(found | {"other_faults": 0, "flat": False})
