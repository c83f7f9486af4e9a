"""``POST /v1/completions``."""

from __future__ import annotations

from aiohttp import web

from server import validation
from server.answers.base import AnswerOptions
from server.answers.completion import CompletionAnswer
from server.service import Text
from server.turns import REQUEST_ID, SERVICE, answered, completion_choices
from server.wire.completions import CompletionRequest


async def completions(http: web.Request) -> web.StreamResponse:
    """Write on from one prompt or several."""
    service = http.app[SERVICE]
    text, info = service.opened()
    body = validation.decode_completion(await http.read())
    service.check_model(body.model)
    choices = await completion_choices(service, body)
    echoes = [_echo(text, body, one) for one in validation.prompts(body)]
    options = AnswerOptions.of(body, service.options.metrics_level)
    answer = CompletionAnswer(service.origin(body.request_id or REQUEST_ID.get(), info), choices, options, echoes)
    return await answered(http, service, answer)


def _echo(text: Text, body: CompletionRequest, prompt: str | list[int]) -> str:
    if not body.echo:
        return ""
    if isinstance(prompt, str):
        return prompt
    return text.tokenizer.decode(prompt, skip_special_tokens=body.skip_special_tokens is not False)


ROUTES = [web.post("/v1/completions", completions)]
