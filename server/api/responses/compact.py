"""``/v1/responses/compact``: shortens a conversation to a window of items. A client sends instead of it the user's
messages of the window, and a ``compaction`` that stands for the whole window.

Nothing is summarized, since a small model's summary could be silently wrong: what fits stays verbatim, and the rest is
left out in this order, no more than necessary:

::

    reasoning before the last question             always: chat templates do not show it again
    tool results, and reasoning since              the oldest first; the model reads that a result is missing
    turns                                          the oldest first; the model reads how much is missing

The response's ``warnings`` say how much that was.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from msgspec import UNSET
from msgspec.structs import replace

from foresay.server.api.common.turns import chat_prompt
from foresay.server.api.responses import schemas
from foresay.server.api.responses.items import ADDITIONAL, Toolbox, compaction_of, given_items, unfolded
from foresay.server.api.responses.request import NAMES, chat_request
from foresay.server.api.responses.turn import given_now
from foresay.server.host.service import Service
from foresay.server.text.prompt import Room
from foresay.server.text.warned import Warned, warning
from foresay.spec.errors import InvalidRequest

#: Share of the context for the window; the rest is for what follows.
SHARE = 0.5
MISSING_RESULT = "[This result was left out to make room.]"
MISSING_TURNS = "[{count} earlier items of this conversation were left out to make room.]"
#: Roles of items that always stay.
_RULES = ("system", "developer")


async def compacted(service: Service, body: schemas.CompactRequest) -> tuple[schemas.Compaction, tuple[Warned, ...]]:
    """The window that replaces a conversation, and warnings about what it lacks. Raises
    :class:`~foresay.spec.errors.ContextLengthExceeded` if even the last turn is too long."""
    _, earlier, given = given_now(service, body)
    items = [item for _, item in unfolded([((), item) for item in (*earlier, *given)])]
    if not items:
        raise InvalidRequest("input", " is required: there is nothing to compact")
    longest = service.opened()[1].max_model_len
    always, steps = _steps(items)
    low, high, length = always, len(steps), await _length(service, body, items)
    while low < high:  # in few attempts: each one renders and encodes the conversation
        middle = (low + high) // 2
        fits = await _length(service, body, window(items, steps[:middle])[0]) <= SHARE * longest
        low, high = (low, middle) if fits else (middle + 1, high)
    left, lacks = window(items, steps[:low])
    Room("input", longest).check(await _length(service, body, left), 1)
    usage = schemas.ResponseUsage(length, schemas.InputTokensDetails(0), 0, schemas.OutputTokensDetails(0), length)
    id, now = f"resp_{uuid.uuid4().hex}", int(time.time())
    plain = [item for item in left if item.role == "user" or item.type == ADDITIONAL]
    answer = schemas.Compaction(id=id, created_at=now, output=[*plain, compaction_of(left)], usage=usage)
    warnings = (warning("compacted", "input", **lacks),) if any(lacks.values()) else ()
    answer.warnings = [one.for_client for one in warnings] or UNSET
    return answer, warnings


async def _length(service: Service, body: schemas.CompactRequest, items: Sequence[schemas.InputItem]) -> int:
    """Number of tokens of the items' prompt."""
    request = schemas.ResponseRequest(instructions=body.instructions)
    with NAMES:
        return len(await chat_prompt(service, chat_request(request, (), items, Toolbox.of((), items, ()))))


def _steps(items: Sequence[schemas.InputItem]) -> tuple[int, list[int]]:
    """The number of items that are always left out, and the indices of all that can be, in order; the index of a user
    message means everything before it."""
    questions = [index for index, item in enumerate(items) if item.role == "user"]
    last = questions[-1] if questions else 0
    thoughts = [index for index, item in enumerate(items) if item.type == "reasoning"]
    results = [index for index, item in enumerate(items[:-1]) if _is_result(item)]
    always = [index for index in thoughts if index < last]
    others = sorted({*thoughts, *results} - {*always})
    return len(always), [*always, *others, *questions[1:]]


def window(
    items: Sequence[schemas.InputItem], left_out: Sequence[int]
) -> tuple[list[schemas.InputItem], dict[str, int]]:
    """The items without those at these indices, and counts of what was left out."""
    start = max((index for index in left_out if items[index].role == "user"), default=0)
    rules = [item for item in items[:start] if item.role in _RULES]
    lacks = {"results": 0, "thoughts": 0, "earlier": start - len(rules)}
    kept = []
    for index, item in enumerate(items[start:], start):
        if index in left_out and _is_result(item):
            lacks["results"] += 1
            item = replace(item, output=MISSING_RESULT)
        elif index in left_out and item.type == "reasoning":
            lacks["thoughts"] += 1
            continue
        kept.append(item)
    missing = schemas.InputItem(role="developer", content=MISSING_TURNS.format(count=lacks["earlier"]))
    return [*rules, *(given_items([missing]) if start else ()), *kept], lacks


def _is_result(item: schemas.InputItem) -> bool:
    return (item.type or "").endswith("_output")
