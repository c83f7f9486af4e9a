from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foresay.server.api.responses.events import ArgumentsDelta, OutputTextDelta, OutputTextDone, ReasoningTextDelta
from foresay.server.api.responses.queues import SendQueue, decoded
from foresay.spec.errors import InvalidRequest


def text(number: int, delta: str, item: str = "m") -> OutputTextDelta:
    return OutputTextDelta(item_id=item, output_index=0, content_index=0, delta=delta, sequence_number=number)


def done(number: int) -> OutputTextDone:
    return OutputTextDone(item_id="m", output_index=0, content_index=0, text="", sequence_number=number)


async def taken(send_queue: SendQueue) -> list[dict[str, Any]]:
    return [json.loads(message) for message in await send_queue.take()]


async def test_deltas_that_wait_become_one():
    send_queue = SendQueue(1 << 20)
    send_queue.put("a", [text(1, "On"), text(2, "ce")])
    send_queue.put("b", [text(5, "The")])
    send_queue.put("a", [text(3, " upon"), done(4)])
    output = [(one["sequence_number"], one.get("delta")) for one in await taken(send_queue)]
    assert output == [(3, "Once upon"), (5, "The"), (4, None)]


async def test_what_was_taken_is_not_touched_any_more():
    send_queue = SendQueue(1 << 20)
    event = text(1, "a")
    send_queue.put("a", [event])
    await send_queue.take()
    send_queue.put("a", [text(2, "b")])
    assert [one["delta"] for one in await taken(send_queue)] == ["b"]
    assert event.delta == "a"


async def test_only_deltas_of_one_part_are_merged():
    send_queue = SendQueue(1 << 20)
    place: Any = {"item_id": "m", "output_index": 0}
    thought = ReasoningTextDelta(**place, content_index=0, delta="x", sequence_number=2)
    call = ArgumentsDelta(**place, delta="y", sequence_number=3)
    send_queue.put("a", [text(1, "a"), thought, call, text(4, "b", item="n"), text(5, "c", item="n")])
    assert [one["delta"] for one in await taken(send_queue)] == ["a", "x", "y", "bc"]


async def test_it_waits_when_empty_and_tells_when_all_is_out():
    send_queue = SendQueue(1 << 20)
    taking = asyncio.create_task(send_queue.take())
    await asyncio.sleep(0)
    assert not taking.done()
    send_queue.put("a", [done(0)])
    flushed = asyncio.create_task(send_queue.flushed())
    await taking
    await asyncio.sleep(0)
    assert not flushed.done()
    send_queue.written()
    await flushed


async def test_a_thousand_deltas_cost_their_text_and_one_message():
    send_queue = SendQueue(64_000)
    for number in range(1000):
        send_queue.put("a", [text(number, "word ")])
    assert send_queue.bytes < 6000 and not send_queue.full
    send_queue.put("a", [text(1000, "x" * 60_000)])
    assert send_queue.full


events = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["m", "n", "done"]), st.text(max_size=3)))


@given(events, st.sets(st.integers(0, 30)))
def test_nothing_is_lost_or_reordered(script, takes):
    async def play() -> list[dict[str, Any]]:
        send_queue, output = SendQueue(1 << 20), []
        for number, (response, kind, delta) in enumerate(script):
            event = done(number) if kind == "done" else text(number, delta, item=f"{response}{kind}")
            send_queue.put(response, [event])
            if number in takes:
                output += await taken(send_queue)
        return output + (await taken(send_queue) if send_queue._waiting else [])

    output = asyncio.run(play())
    for response in "ab":
        wanted = [(kind, delta) for owner, kind, delta in script if owner == response and kind != "done"]
        got = [(one["item_id"], one["delta"]) for one in output if "delta" in one and one["item_id"][0] == response]
        for kind in "mn":
            assert "".join(d for k, d in got if k[1] == kind) == "".join(d for k, d in wanted if k == kind)
        numbers = [one["sequence_number"] for one in output if one.get("item_id", " ")[0] == response]
        assert numbers == sorted(numbers)


def test_a_value_that_looks_like_a_complaint_does_not_rename_its_field():
    requested = {"type": "response.create", "model": "toy", "input": "x", "spec_decode_metrics": "x' - at `$.model`"}
    with pytest.raises(InvalidRequest) as caught:
        decoded(json.dumps(requested))
    assert caught.value.param == "spec_decode_metrics"
