"""Parts become items and events; OpenAI's own accumulator has to come to the same response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
from openai import omit
from openai._models import construct_type_unchecked
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent

from foresay.server.api.responses.answer import Cancelled, ResponseAnswer
from foresay.server.api.responses.items import Toolbox
from foresay.server.api.responses.schemas import FunctionTool, Reasoning, Response, ResponseRequest, TextFormat
from foresay.server.api.responses.schemas import TextOptions as ResponseText
from foresay.server.models.service import AnswerOrigin
from foresay.server.schemas.errors import EngineFailed, described
from foresay.server.text.choice import Choice, Piece
from foresay.server.text.parts import Part, ReasoningPart, TextPart, ToolCallPart
from foresay.spec.request import Request, TokenLogprobs
from foresay.spec.sampling import SamplingParams

CALL = ToolCallPart(index=0, id="call_1", name="look", arguments="")


def answer_of(tokenizer, tools: Sequence[FunctionTool] = ()) -> ResponseAnswer:
    request = Request(id="r", prompt=[1, 2, 3], params=SamplingParams())
    choice = Choice(request, tokenizer, [0])
    response = Response(
        id="resp_1",
        created_at=1,
        status="in_progress",
        model="toy",
        reasoning=Reasoning(),
        temperature=1.0,
        top_p=1.0,
        text=ResponseText(format=TextFormat(type="text")),
    )
    origin = AnswerOrigin(id="1", model="toy", fingerprint="fs", exact=True)
    return ResponseAnswer(origin, choice, ResponseRequest(), response, Toolbox.of(tools, (), ()))


def played(answer: ResponseAnswer, *steps: Sequence[Part], finish: str = "stop") -> list[Any]:
    events: list[Any] = answer.opening(0)
    for parts in steps:
        events += answer.chunks(0, Piece(parts=list(parts)))
    answer.choices[0].finish_reason = finish  # type: ignore[assignment]
    return events + answer.closing()


def accumulated(events: list[Any]) -> Any:
    state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in events:
        parsed = construct_type_unchecked(value=msgspec.to_builtins(event), type_=cast(Any, ResponseStreamEvent))
        state.handle_event(parsed)
    return state._completed_response


def names(events: list[Any]) -> list[str]:
    return [event.type.removeprefix("response.") for event in events]


def test_the_events_of_a_text(tokenizer):
    events = played(answer_of(tokenizer), [TextPart("Once")], [TextPart(" upon")])
    assert names(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].response.output == [] and events[0].response.status == "in_progress"
    assert accumulated(events).output_text == "Once upon"


def test_reasoning_text_and_calls_are_items_in_order(tokenizer):
    steps: list[list[Part]] = [
        [ReasoningPart("Hm"), ReasoningPart(".")],
        [TextPart("See: "), CALL],
        [ToolCallPart(index=0, arguments='{"a":'), ToolCallPart(index=0, arguments="1}")],
        [ToolCallPart(index=1, id="call_2", name="go", arguments="{}"), TextPart("!")],
    ]
    events = played(answer_of(tokenizer), *steps)
    response = accumulated(events)
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "message",
    ]
    assert response.output[0].content[0].text == "Hm."
    calls = [(item.call_id, item.name, item.arguments) for item in response.output[2:4]]
    assert calls == [("call_1", "look", '{"a":1}'), ("call_2", "go", "{}")]
    assert response.output_text == "See: !"
    done = {event.output_index: event.item for event in events if event.type == "response.output_item.done"}
    assert [done[index] for index in range(5)] == events[-1].response.output
    assert len({item.id for item in events[-1].response.output}) == 5


def test_a_text_cut_at_the_token_limit_is_incomplete(tokenizer):
    events = played(answer_of(tokenizer), [TextPart("Once")], finish="length")
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.status == last.response.output[0].status == "incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"


def test_an_answer_without_text_has_an_empty_message(tokenizer):
    response = accumulated(played(answer_of(tokenizer)))
    assert response.output_text == "" and len(response.output) == 1


@pytest.mark.parametrize(
    ("error", "type", "status"),
    [(Cancelled(), "response.incomplete", "cancelled"), (EngineFailed("x"), "response.failed", "failed")],
)
def test_a_response_that_breaks_off_keeps_its_text(tokenizer, error, type, status):
    answer = answer_of(tokenizer)
    before: list[Any] = answer.opening(0) + answer.chunks(0, Piece(parts=[TextPart("Once")]))
    last: Any = answer.broken(described(error)[1])
    assert (last.type, last.response.status) == (type, status)
    assert last.sequence_number == before[-1].sequence_number + 1
    assert last.response.output[0].content[0].text == "Once"
    assert last.response.output[0].status == "incomplete"
    assert (last.response.error is None) is (status == "cancelled")
    assert last.response.usage.input_tokens == 3


def test_logprobs_wait_for_the_text_of_their_tokens(tokenizer):
    answer = answer_of(tokenizer)
    entry = [TokenLogprobs(token=token, logprob=-float(token), top=[(token, -1.0)]) for token in (40, 41, 42)]
    answer.opening(0)
    events: list[Any] = answer.chunks(0, Piece(parts=[], logprobs=entry[:1]))
    assert events == []
    events += answer.chunks(0, Piece(parts=[TextPart("x")], logprobs=entry[1:2]))
    events += answer.chunks(0, Piece(parts=[], logprobs=entry[2:]))
    answer.choices[0].finish_reason = "stop"
    events += answer.closing()
    delta = next(event for event in events if event.type == "response.output_text.delta")
    assert [one.logprob for one in delta.logprobs] == [-40.0, -41.0]
    done = next(event for event in events if event.type == "response.output_text.done")
    assert [one.logprob for one in done.logprobs] == [-40.0, -41.0, -42.0]
    assert done.logprobs[0].top_logprobs[0].logprob == -1.0


def test_events_do_not_change_after_they_were_made(tokenizer):
    answer = answer_of(tokenizer)
    events = played(answer, [TextPart("a")], [TextPart("b")])
    fresh = answer_of(tokenizer)
    first = [msgspec.json.encode(event) for event in fresh.opening(0)]
    assert [len(msgspec.json.encode(event)) for event in events[:2]] == [len(one) for one in first]
    assert events[2].item.content == [] and events[3].part.text == ""
