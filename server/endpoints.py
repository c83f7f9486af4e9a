"""The two endpoints that generate: from the body of a request to its answer."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextvars import ContextVar

import msgspec
from aiohttp import web

from server import validation
from server.answers import Answer, AnswerOptions, ChatAnswer, CompletionAnswer
from server.choice import Choice, TextOptions
from server.openai import ChatRequest, CompletionRequest, GenerationRequest
from server.service import Service, Text
from server.streaming import collect, stream
from spec.errors import InvalidRequest
from spec.request import Request

SERVICE = web.AppKey("service", Service)
#: The id of the HTTP request that the running task serves.
REQUEST_ID: ContextVar[str] = ContextVar("request_id")


async def completions(http: web.Request) -> web.StreamResponse:
    """``POST /v1/completions``."""
    service = http.app[SERVICE]
    text, info = service.opened()
    body = validation.decode_completion(await http.read())
    service.check_model(body.model)
    given = validation.prompts(body)
    special = body.add_special_tokens is not False
    prompts = [await service.encode(one, special) if isinstance(one, str) else one for one in given]
    choices = _choices(service, body, prompts, "prompt", follows=True)
    echoes = [_echo(text, body, one) for one in given]
    options = AnswerOptions.of(body, service.options.metrics_level)
    answer = CompletionAnswer(service.origin(body.request_id or REQUEST_ID.get(), info), choices, options, echoes)
    return await _answered(http, service, answer)


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """``POST /v1/chat/completions``."""
    service = http.app[SERVICE]
    _, info = service.opened()
    body = validation.decode_chat(await http.read())
    service.check_model(body.model)
    prompt = await _rendered(service, body)
    choices = _choices(service, body, [prompt], "messages", follows=bool(body.continue_final_message))
    options = AnswerOptions.of(body, service.options.metrics_level)
    answer = ChatAnswer(service.origin(body.request_id or REQUEST_ID.get(), info), choices, options)
    return await _answered(http, service, answer)


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
    unique = uuid.uuid4().hex
    choices = []
    for index, prompt in enumerate(prompts):
        validation.check_prompt(prompt, field, params, info.vocab_size, info.max_model_len)
        request = Request(id=f"{unique}-{index}", prompt=prompt, params=params, salt=body.cache_salt or "")
        context = prompt if follows else ()
        choices.append(Choice(request, text.tokenizer, options, info.eos_token_ids, context))
    return choices


def _echo(text: Text, body: CompletionRequest, prompt: str | list[int]) -> str:
    if not body.echo:
        return ""
    if isinstance(prompt, str):
        return prompt
    return text.tokenizer.decode(prompt, skip_special_tokens=body.skip_special_tokens is not False)


async def _answered(http: web.Request, service: Service, answer: Answer) -> web.StreamResponse:
    async with service.generation([choice.request for choice in answer.choices]) as generation:
        if answer.options.stream:
            return await stream(http, answer, generation, service.options.ping_seconds)
        whole = await collect(answer, generation)
    return web.Response(body=msgspec.json.encode(whole), content_type="application/json")
