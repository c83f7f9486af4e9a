"""``POST /v1/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from server.api.common import validation
from server.api.common.answer import AnswerOptions
from server.api.common.leased import leased
from server.api.common.route import Route, Stream
from server.api.common.sse import EVENTS
from server.api.common.turns import answered, completion_choices
from server.api.openai.completion_answer import CompletionAnswer, Echo, echoed
from server.gateway.caller import REQUEST_ID
from server.host.models.models import MODELS
from server.host.service import Service, Text
from server.schemas.completions import Completion, CompletionRequest
from server.schemas.shared import ErrorBody
from server.text.choice import Choice


async def completions(http: web.Request) -> web.StreamResponse:
    """Write on from one prompt or several."""
    http.app[MODELS].check_open()
    body = validation.decode_completion(await http.read())
    return await leased(
        http, body.model, lambda service: _completions(http, service, body), EVENTS if body.stream else None
    )


async def _completions(http: web.Request, service: Service, body: CompletionRequest) -> web.StreamResponse:
    text, info = service.opened()
    given = validation.prompts(body)
    choices = await completion_choices(service, body, given)
    echoes = await asyncio.to_thread(_echoes, text, body, given, choices) if body.echo else []
    options = AnswerOptions.of(body, choices[0].request.params, service.options.metrics_level)
    origin = service.origin(body.request_id or REQUEST_ID.get(), info, body.model)
    answer = CompletionAnswer(origin, choices, options, echoes)
    return await answered(http, service, answer)


def _echoes(text: Text, body: CompletionRequest, given: Sequence[str | list[int]], choices: list[Choice]) -> list[Echo]:
    """What goes in front of each choice; a prompt may have several."""
    each = len(choices) // len(given)
    made = [echoed(body, one, choices[each * place].request.prompt, text.tokenizer) for place, one in enumerate(given)]
    return [echo for echo in made for _ in range(each)]


ROUTES = [
    Route(
        "POST", "/v1/completions", completions, CompletionRequest, Completion, Stream(EVENTS, (Completion, ErrorBody))
    )
]
