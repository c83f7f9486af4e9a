"""What provenance costs: calls for a delta of four tokens, from the engine's record to bytes for the client."""

from __future__ import annotations

import sys
from typing import Any

from foresay.server.api.common.route import EVENTS
from foresay.server.api.openai.chat import ChatAnswer
from foresay.server.host.service import AnswerOrigin as AnswerOrigin
from foresay.server.schemas.chat import ChatRequest
from foresay.server.text.choice import Choice, ChoiceOptions
from foresay.spec.request import Delta, Origin, Request
from foresay.spec.sampling import SamplingParams
from tests.server.scripted import END

RUN = 4
#: Calls, of Python and of C, that provenance may add to a delta; times would depend on the machine.
MOST_CALLS = 60
SECONDS = {"plan": 1.2e-5, "propose": 1.2e-3, "forward": 9e-3, "draw": 3e-4, "commit": 2e-4}


def calls(tokenizer: Any, tokens: list[int], with_provenance: bool) -> float:
    """For one delta, on average."""
    options = ChoiceOptions(by_token=with_provenance, provenance=with_provenance)
    choice = Choice(Request(id="r", prompt=[5], params=SamplingParams()), tokenizer, options, [END])
    origin = AnswerOrigin(id="1", model="toy", fingerprint="fs", exact=True)
    answer = ChatAnswer(origin, [choice], ChatRequest(messages=[], stream=True, provenance=with_provenance))
    tree = Origin(1, "draft_model", [-1, 0, 0, 1, 1, 3, 3, 5], 0, [1, 3, 5], SECONDS)
    deltas = [
        Delta(id="r", tokens=tokens[start : start + RUN], origin=tree) for start in range(0, len(tokens) - RUN, RUN)
    ]
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    for delta in deltas:
        for chunk in answer.chunks(0, choice.take(delta)):
            EVENTS.encode(chunk)
    sys.setprofile(None)
    return count / len(deltas)


def test_provenance_costs_few_calls(tokenizer: Any) -> None:
    tokens = tokenizer.encode("Once upon a time there was a fox. Who stole the tart? " * 20)
    added = calls(tokenizer, tokens, True) - calls(tokenizer, tokens, False)
    assert 0 < added < MOST_CALLS, added
