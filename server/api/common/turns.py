"""From a decoded request to the choices that run, with the model that it names, for all routes.

Every route with messages converts its body to a :class:`~foresay.server.schemas.chat.ChatRequest` first; so each option
is handled in one place.

OpenAI refuses a ``prediction`` together with ``n``, logprobs, penalties and tools. Here all of these apply at every
drafted token; only contradictions are refused.

A client that waits for a stream is kept alive: after a second the stream starts, with periodic comments.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Any

import msgspec
from aiohttp import web

from foresay.server.api.common import validation
from foresay.server.api.common.answer import Answer
from foresay.server.api.common.route import LINES, EventStream, Framing, Handler, error_shape, json_response
from foresay.server.api.common.streaming import HEADERS_AFTER_SECONDS, Broken, collect, reported, stream
from foresay.server.gateway.keys import CONTEXT
from foresay.server.models.models import MODELS
from foresay.server.models.residency import Keep
from foresay.server.models.service import AnswerOrigin, Service
from foresay.server.schemas import bounds
from foresay.server.schemas.chat import ChatRequest, CompletionRequest
from foresay.server.schemas.shared import GenerationRequest, Speculation
from foresay.server.text import conversation
from foresay.server.text.choice import Choice
from foresay.server.text.grammars.answers import chat_grammar, wanted
from foresay.server.text.options import (
    bias_list,
    check_choices,
    check_echoed,
    forked,
    scores_only,
    spelled_words,
    truncated,
)
from foresay.server.text.options import choices as choices_of
from foresay.server.text.parsers.chat_format import ChatFormat
from foresay.server.text.parts import OutputParser, PlainText
from foresay.server.text.prompt import RenderedPrompt, Room, left_out
from foresay.server.text.warned import Warned, warning
from foresay.spec.errors import ContextLengthExceeded, InvalidRequest
from foresay.spec.names import NONE, canonical
from foresay.spec.request import EngineInfo, Grammar, Request
from foresay.spec.sampling import SamplingParams, check_tokens


async def prediction_of(service: Service, body: GenerationRequest, prompts: int = 1) -> list[int] | None:
    """The tokens of the predicted text; None if nothing is predicted. prompts: number of prompts.

    Raises :class:`InvalidRequest` naming the wrong or conflicting field.
    """
    if body.prediction is None:
        return None
    content = body.prediction.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    _check_company(body, prompts)
    most = service.opened()[1].max_model_len
    try:
        return await service.encode(text, False, room=Room("prediction.content", most + 1))
    except ContextLengthExceeded:
        wrong = f" has more tokens than the answer may have ({most})"
        raise InvalidRequest("prediction.content", wrong) from None


def _check_company(body: GenerationRequest, prompts: int) -> None:
    """Raise for what contradicts a prediction."""
    if body.speculation is not None and body.speculation.off:
        raise InvalidRequest("prediction", " and speculation.off cannot be combined: one drafts, the other does not")
    if prompts > 1:
        raise InvalidRequest("prediction", f" is for a single answer, but prompt holds {prompts} prompts")
    if scores_only(body):
        raise InvalidRequest("prediction", " and max_tokens 0 cannot be combined: no tokens are generated")


#: The method that leaves the choice of the drafter to the server.
AUTO = "auto"


def speculation_params(speculation: Speculation | None, info: EngineInfo) -> dict[str, Any]:
    """``speculation`` as fields of a :class:`~foresay.spec.request.Request`. Raises InvalidRequest naming the field."""
    if speculation is None:
        return {}
    method, most = canonical(speculation.method or AUTO), speculation.max_tokens
    known = (AUTO, NONE, *info.drafters)
    if method not in known:
        raise InvalidRequest(
            "speculation.method", f' must be one of {", ".join(known)} on this server, got "{speculation.method}"'
        )
    if speculation.off and (method not in (AUTO, NONE) or most):
        other = "max_tokens" if most else "method"
        raise InvalidRequest("speculation.off", f" turns drafting off: leave out either {other} or off")
    named = method if method in info.drafters and len(info.drafters) > 1 else ""
    return {
        "speculate": not speculation.off and method != NONE and most != 0,
        "draft_method": named,
        "most_drafted": most,
    }


async def completion_choices(
    service: Service, body: CompletionRequest, given: Sequence[str | list[int]]
) -> list[Choice]:
    """``n`` choices for each of the given prompts, in order."""
    special = body.add_special_tokens is not False
    room = room_for(service, body, "prompt")
    prompts = [await service.encode(one, special, room=room) if isinstance(one, str) else one for one in given]
    predicted = await prediction_of(service, body, len(prompts))
    return _choices(service, body, prompts, "prompt", follows=True, grammar=await wanted(body), predicted=predicted)


async def chat_choices(
    service: Service, body: ChatRequest, spoken: Sequence[int] = (), strict: bool = False
) -> list[Choice]:
    """The choices for a conversation. spoken: the token ids of its beginning, if known. strict: refuse more output than
    there is room for.
    """
    continues = bool(body.continue_final_message)
    said, offer, warnings = await rendered(service, body)
    room = room_for(service, body, "messages")
    prompt = await service.encode(said, bool(body.add_special_tokens), spoken, room)
    text, chat_format = said.text, service.opened()[0].chat_format
    opened = chat_format.opened_by(text, continues)
    grammar = await chat_grammar(body, offer, chat_format, service.opened()[0].tokenizer, text, opened)
    free = grammar is None and not continues
    return _choices(
        service,
        body,
        [prompt],
        "messages",
        follows=continues,
        grammar=grammar,
        predicted=await prediction_of(service, body),
        parser=partial(chat_format.parser, offer=offer, opened=opened, prompt=text, free=free),
        warnings=warnings,
        strict=strict,
    )


async def chat_prompt(service: Service, body: ChatRequest) -> list[int]:
    """The token ids of the conversation, rendered by the model's chat template."""
    prompt, _, _ = await rendered(service, body)
    return await service.encode(prompt, add_special_tokens=bool(body.add_special_tokens))


def room_for(service: Service, body: GenerationRequest, field: str) -> Room | None:
    """The limit for a prompt; None if it will be truncated to fit."""
    return None if body.truncate_prompt_tokens is not None else Room(field, service.opened()[1].max_model_len)


async def infilled(
    service: Service, before: Sequence[str | list[int]], after: str, field: str, special: bool
) -> list[list[int]]:
    """For each text or list of tokens in ``before`` the prompt to fill in what is between it and ``after``: the
    tokenizer's own beginning (if ``special``), then both texts, in which a control token's name is text.

    field: of the request, which errors name.
    """
    tokenizer, room = service.opened()[0].tokenizer, Room(field, service.opened()[1].max_model_len)
    if tokenizer.infilling is None:
        raise InvalidRequest(field, ": this model has no tokens for infilling")
    prefix, hole, end = tokenizer.infilling
    begun = await service.encode("", special)
    behind = [hole, *await service.encode(tokenizer.as_text(after), False, room=room), end]
    texts = [
        await service.encode(tokenizer.as_text(one), False, room=room) if isinstance(one, str) else one
        for one in before
    ]
    return [[*begun, prefix, *text, *behind] for text in texts]


#: A conversation as the model reads it, the tools it may call, and warnings about what was changed.
Said = tuple[RenderedPrompt, conversation.Offer, tuple[Warned, ...]]


async def rendered(service: Service, body: ChatRequest) -> Said:
    """Render the conversation with the model's chat template, in a thread, since a template is an untrusted program."""
    return await asyncio.to_thread(_rendered, service, body)


def _rendered(service: Service, body: ChatRequest) -> Said:
    text = service.opened()[0]
    offer = conversation.offered(body)
    text.chat_format.check(body, offer)
    continues = bool(body.continue_final_message)
    opens = body.add_generation_prompt is not False
    if continues and body.add_generation_prompt:
        raise InvalidRequest("continue_final_message", " and add_generation_prompt cannot be combined")
    given, noted = _variables(body, text.chat_format)
    messages, more = _template_messages(service, body, offer)
    noted = (*offer.warnings, *noted, *more)
    offered = [] if text.chat_format.generic else offer.rendered()

    def render(messages: list[dict[str, Any]]) -> RenderedPrompt:
        return text.tokenizer.render(messages, opens and not continues, continues, given, offered)

    try:
        return render(messages), offer, noted
    except InvalidRequest:
        folded, moved = conversation.folded(messages)
        if not moved:
            raise
        with suppress(InvalidRequest):
            prompt = render(folded)
            warnings = (warning("system_moved", ("messages", index)) for index in moved)
            return prompt, offer, (*noted, *warnings)
        raise


def _variables(body: ChatRequest, chat_format: ChatFormat) -> tuple[dict[str, Any], tuple[Warned, ...]]:
    """The template's arguments besides messages and tools; and what is left out of them."""
    bounds.check_bytes(body.chat_template_kwargs, bounds.MOST_TEMPLATE_BYTES, "chat_template_kwargs")
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    given = effort | (body.chat_template_kwargs or {})
    wanted = given.get("reasoning_effort")
    if not chat_format.form.efforts or wanted in (None, *chat_format.form.efforts):
        return given, ()
    del given["reasoning_effort"]
    return given, (warning("hint_left_out", "reasoning_effort", value=str(wanted)),)


def _template_messages(
    service: Service, body: ChatRequest, offer: conversation.Offer
) -> tuple[list[dict[str, Any]], tuple[Warned, ...]]:
    """The conversation in the form of the model's template; and what differs from the request."""
    text, noted = service.opened()[0], tuple[Warned, ...]()
    messages = conversation.messages(body)
    if shape := text.chat_format.form.conversation:
        messages, moved = conversation.SHAPES[shape](messages, text.chat_format.words)
        noted += tuple(warning("system_moved", ("messages", index)) for index in moved)
    if text.chat_format.generic:
        messages = conversation.spelled_out(messages, offer.rendered())
        noted += (warning("generic_tools", "tools"),) if offer.listed else ()
    if not service.config.keep_client_noise:
        messages, noise = left_out(messages, lambda: text.tokenizer.hoists_system)
        noted += noise
    return messages, noted


def _choices(
    service: Service,
    body: GenerationRequest,
    prompts: Sequence[list[int]],
    field: str,
    *,
    follows: bool,
    grammar: Grammar | None,
    predicted: list[int] | None,
    parser: Callable[[str], OutputParser] = lambda request_id: PlainText(),
    warnings: tuple[Warned, ...] = (),
    strict: bool = False,
) -> list[Choice]:
    """``n`` choices per prompt, checked.

    field: the request's field with the prompts. follows: whether the answer's text continues the prompt's. grammar:
    what all choices must match. predicted: tokens that they will probably have. parser: makes the parser of a choice,
    given its request's id. warnings: about the prompt. strict: as in :func:`chat_choices`.
    """
    text, info = service.opened()
    params = _params(service, body)
    drafted = speculation_params(body.speculation, info)
    count = choices_of(body)
    check_choices(len(prompts), count)
    check_echoed(body, prompts, count)
    unique, salt, ignored = uuid.uuid4().hex, _salt(body), validation.not_followed(body)
    made = partial(
        Choice,
        tokenizer=text.tokenizer,
        eos_token_ids=info.eos_token_ids,
        stop=validation.stop_strings(body),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        silent=scores_only(body),
        provenance=bool(body.provenance),
    )
    choices = []
    for index, given in enumerate(prompts):
        prompt, own, shortened = _fitted(service, body, field, strict, params, given)
        request = Request(
            id=f"{unique}-{index}",
            prompt=prompt,
            params=own,
            salt=salt,
            grammar=grammar,
            prediction=predicted,
            private=getattr(body, "store", None) is False,
            **drafted,
        )
        noted = (*warnings, *shortened, *ignored)
        for one in forked(request, count):
            choices.append(made(one, context=prompt if follows else (), parser=parser(one.id), warnings=noted))
    return choices


def _params(service: Service, body: GenerationRequest) -> SamplingParams:
    """The sampling parameters, before max_tokens is fitted to the context."""
    text, info = service.opened()
    params = validation.sampling_params(body, text.defaults, info.vocab_size)
    if params.seed is None:
        params = msgspec.structs.replace(params, seed=service.config.seed)
    if body.bad_words:
        params = msgspec.structs.replace(params, bad_words=spelled_words(body.bad_words, text.tokenizer))
    if isinstance(body.logit_bias, list):
        biases, never = bias_list(body.logit_bias, text.tokenizer)
        check_tokens("logit_bias", never, info.vocab_size)
        bans = (*params.bad_words, *((token,) for token in never))
        params = msgspec.structs.replace(params, logit_bias=biases, bad_words=bans)
        params.validate(info.vocab_size)
    return validation.capped(body, params, service.config.max_output_tokens)


def _fitted(
    service: Service, body: GenerationRequest, field: str, strict: bool, params: SamplingParams, given: list[int]
) -> tuple[list[int], SamplingParams, tuple[Warned, ...]]:
    """A prompt and its parameters, fitted to the context, and warnings about that."""
    info = service.opened()[1]
    prompt = truncated(body, given, info.max_model_len - (params.max_tokens or 1))
    left = info.max_model_len - len(prompt)
    own, shortened = validation.clamped(body, params, left, service.config.max_output_tokens, strict)
    validation.check_prompt(prompt, field, own, info.vocab_size, info.max_model_len)
    return prompt, own, shortened


def _salt(body: GenerationRequest) -> str:
    """The salt: prompts share KV only within one tenant and one ``cache_salt``."""
    tenant, given = CONTEXT.get().caller.tenant, body.cache_salt or ""
    return f"{tenant}:{given}" if tenant else given


async def _ping(events: EventStream, ping: bytes, seconds: float) -> None:
    """Show the client of a waiting request that the server lives, the first time after a second."""
    await asyncio.sleep(min(seconds, HEADERS_AFTER_SECONDS))
    with suppress(ConnectionError):  # without its client the request ends, too
        while True:
            await events.write(ping)
            await asyncio.sleep(seconds)


def leasing(
    framing: Framing, broken: Broken | None = None, keep: Callable[[Any], Keep] = lambda body: "usual"
) -> Callable[[Handler], Handler]:
    """Make a route's handler of a function that answers a request, given its model's leased service and its body.

    framing: of the stream, if one is requested; one of lines is the default. broken: makes the stream's error before
    there is an answer; by default the API's error body. keep: see :meth:`foresay.server.models.models.Models.lease`.
    """

    def handling(answer: Handler) -> Handler:
        @wraps(answer)
        async def handler(http: web.Request, body: Any) -> web.StreamResponse:
            models = http.app[MODELS]
            if not (body.stream is not False if framing is LINES else body.stream):
                async with models.lease(body.model, keep(body)) as service:
                    return await answer(http, service, body)
            events, shape = EventStream.of(http, framing), error_shape(http)
            ping = models.find(body.model).service.ping_seconds
            waiting = asyncio.create_task(_ping(events, framing.ping, ping))
            try:
                async with models.lease(body.model, keep(body)) as service:
                    waiting.cancel()
                    return await answer(http, service, body)
            except Exception as error:
                waiting.cancel()
                make = broken or (shape.make if shape else lambda status, body: body)
                return await reported(error, events, make)
            finally:
                waiting.cancel()

        return handler

    return handling


async def answered(
    http: web.Request,
    service: Service,
    body: GenerationRequest,
    choices: Sequence[Choice],
    kind: Callable[[AnswerOrigin, Sequence[Choice], Any], Answer],
    origin: AnswerOrigin | None = None,
) -> web.StreamResponse:
    """Run the choices of a request and send their answer, streamed or whole. origin: by default as the request says."""
    answer = kind(origin or service.origin(body.request_id or CONTEXT.get().id, body.model), choices, body)
    service.warned.note(answer.warnings)
    async with service.generation(answer.choices) as generation:
        if body.stream:
            return await stream(http, answer, generation, service.ping_seconds)
        whole = await collect(answer, generation)
    return json_response(whole)
