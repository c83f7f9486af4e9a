"""From a decoded request to the choices that run, whatever door it came through.

Every door that speaks of messages turns its body into a :class:`~server.wire.chat.ChatRequest` first; so each option is
understood in one place.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextvars import ContextVar

import msgspec
from aiohttp import web

from server import validation
from server.answers.base import Answer
from server.choice import Choice, TextOptions
from server.gateway.caller import CALLER
from server.service import Service
from server.streaming import collect, stream
from server.wire.chat import ChatRequest
from server.wire.completions import CompletionRequest
from server.wire.shared import GenerationRequest
from spec.errors import InvalidRequest
from spec.request import Request

SERVICE = web.AppKey("service", Service)
#: The id of the HTTP request that the running task serves.
REQUEST_ID: ContextVar[str] = ContextVar("request_id")


async def completion_choices(service: Service, body: CompletionRequest) -> list[Choice]:
    """One choice per prompt."""
    special = body.add_special_tokens is not False
    given = validation.prompts(body)
    prompts = [await service.encode(one, special) if isinstance(one, str) else one for one in given]
    return _choices(service, body, prompts, "prompt", follows=True)


async def chat_choices(service: Service, body: ChatRequest) -> list[Choice]:
    """The answers to a conversation."""
    prompt = await _rendered(service, body)
    return _choices(service, body, [prompt], "messages", follows=bool(body.continue_final_message))


async def _rendered(service: Service, body: ChatRequest) -> list[int]:
    """The token ids of the conversation, as the model's chat template writes it."""
    tokenizer = service.opened()[0].tokenizer
    continues = bool(body.continue_final_message)
    opens = body.add_generation_prompt is not False
    if continues and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message", "continue_final_message and add_generation_prompt exclude each other"
        )
    prompt = tokenizer.render(
        validation.messages(body), opens and not continues, continues, template_kwargs=body.chat_template_kwargs
    )
    return await service.encode(prompt, add_special_tokens=bool(body.add_special_tokens))


def _choices(
    service: Service, body: GenerationRequest, prompts: Sequence[list[int]], field: str, follows: bool
) -> list[Choice]:
    """One choice per prompt, checked. follows: whether the answer's text goes on where the prompt's ends."""
    text, info = service.opened()
    params = validation.sampling_params(body, text.defaults, info.vocab_size)
    if params.seed is None:
        params = msgspec.structs.replace(params, seed=service.options.seed)
    options = TextOptions(
        stop=validation.stop_strings(body),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )
    unique, salt = uuid.uuid4().hex, _salt(body)
    choices = []
    for index, prompt in enumerate(prompts):
        validation.check_prompt(prompt, field, params, info.vocab_size, info.max_model_len)
        request = Request(id=f"{unique}-{index}", prompt=prompt, params=params, salt=salt)
        context = prompt if follows else ()
        choices.append(Choice(request, text.tokenizer, options, info.eos_token_ids, context))
    return choices


def _salt(body: GenerationRequest) -> str:
    """Prompts share their KV only within one tenant, and within one ``cache_salt`` of it."""
    tenant, given = CALLER.get().tenant, body.cache_salt or ""
    return f"{tenant}:{given}" if tenant else given


async def answered(http: web.Request, service: Service, answer: Answer) -> web.StreamResponse:
    """Run an answer and send it, streamed or whole."""
    async with service.generation([choice.request for choice in answer.choices]) as generation:
        if answer.options.stream:
            return await stream(http, answer, generation, service.options.ping_seconds)
        whole = await collect(answer, generation)
    return web.Response(body=msgspec.json.encode(whole), content_type="application/json")
