"""``POST /v1/completions``."""

from __future__ import annotations

import asyncio

from aiohttp import web

from server import validation
from server.answers.base import AnswerOptions
from server.answers.completion import CompletionAnswer
from server.choice import Choice
from server.doors.leased import leased
from server.doors.route import Route, Stream
from server.echo import Echo, echoed
from server.gateway.caller import REQUEST_ID
from server.models.models import MODELS
from server.service import Service, Text
from server.sse import EVENTS
from server.turns import answered, completion_choices
from server.wire.completions import Completion, CompletionRequest
from server.wire.shared import ErrorBody


async def completions(http: web.Request) -> web.StreamResponse:
    """Write on from one prompt or several."""
    http.app[MODELS].check_open()
    body = validation.decode_completion(await http.read())
    return await leased(
        http, body.model, lambda service: _completions(http, service, body), EVENTS if body.stream else None
    )


async def _completions(http: web.Request, service: Service, body: CompletionRequest) -> web.StreamResponse:
    text, info = service.opened()
    choices = await completion_choices(service, body)
    echoes = await asyncio.to_thread(_echoes, text, body, choices) if body.echo else []
    options = AnswerOptions.of(body, service.options.metrics_level)
    origin = service.origin(body.request_id or REQUEST_ID.get(), info, body.model)
    answer = CompletionAnswer(origin, choices, options, echoes)
    return await answered(http, service, answer)


def _echoes(text: Text, body: CompletionRequest, choices: list[Choice]) -> list[Echo]:
    """What goes in front of each choice; a prompt may have several."""
    given = validation.prompts(body)
    each = len(choices) // len(given)
    made = [echoed(body, one, choices[each * place].request.prompt, text.tokenizer) for place, one in enumerate(given)]
    return [echo for echo in made for _ in range(each)]


ROUTES = [
    Route(
        "POST", "/v1/completions", completions, CompletionRequest, Completion, Stream(EVENTS, (Completion, ErrorBody))
    )
]
