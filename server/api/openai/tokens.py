"""Text to tokens and back, and rendered conversations, without inference."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from aiohttp import web

from foresay.server.api.common import validation
from foresay.server.api.common.route import Route, json_response
from foresay.server.api.common.turns import chat_prompt, rendered, room_for
from foresay.server.api.openai.completions import completion_prompts
from foresay.server.models.models import MODELS
from foresay.server.models.service import Service
from foresay.server.schemas.bounds import check_count, shown
from foresay.server.schemas.chat import ChatRequest, CompletionRequest, Message, Tool
from foresay.server.schemas.shared import not_done
from foresay.spec.errors import InvalidRequest
from foresay.spec.sampling import check_tokens

# -- schemas ------------------------------------------------------------------------------------------------------


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """``POST /tokenize``. prompt: a text (llama.cpp's name: content); or messages: a conversation, with the fields of
    chat completions that determine how it is rendered.

    add_special_tokens: by default true for a text, false for a conversation, whose template adds them. add_special,
    with_pieces: llama.cpp's names for add_special_tokens and return_token_strs.
    """

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[Message], shown(minItems=1)] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    chat_template: Annotated[Any, not_done()] = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenPiece(msgspec.Struct):
    """A token in llama.cpp's format."""

    id: int
    piece: str


class Tokenized(msgspec.Struct, kw_only=True):
    """The tokens of a text. token_strs: the text of each token, if requested."""

    count: int
    max_model_len: int
    tokens: list[int | TokenPiece]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


class Detokenized(msgspec.Struct, kw_only=True):
    """The text of some tokens, including special ones. content: llama.cpp's name of it."""

    prompt: str
    content: str


class Rendered(msgspec.Struct):
    """A rendered conversation, as the model sees it."""

    prompt: str
    token_ids: list[int]
    count: int
    max_model_len: int


# -- routes ------------------------------------------------------------------------------------------------------------

#: Fields shared by conversations to tokenize and to answer.
_TEMPLATE_FIELDS = {*TokenizeRequest.__struct_fields__} & {*ChatRequest.__struct_fields__}


async def tokenize(http: web.Request, body: TokenizeRequest) -> web.Response:
    """The tokens of a text or of a conversation."""
    async with http.app[MODELS].reading(body.model) as service:
        text, info = service.opened()
        tokens = await _tokens(service, body)
        answer = Tokenized(count=len(tokens), max_model_len=info.max_model_len, tokens=[*tokens])
        if body.return_token_strs:
            answer.token_strs = await asyncio.to_thread(text.tokenizer.token_strings, tokens)
        if body.with_pieces:
            pieces = await asyncio.to_thread(lambda: [text.tokenizer.spelled(token).text for token in tokens])
            answer.tokens = [TokenPiece(*one) for one in zip(tokens, pieces, strict=True)]
    return json_response(answer)


async def _tokens(service: Service, body: TokenizeRequest) -> list[int]:
    text = body.content if body.prompt is None else body.prompt
    if text is not None and body.messages is not None:
        raise InvalidRequest("messages", "prompt and messages cannot be combined")
    given = body.add_special if body.add_special_tokens is None else body.add_special_tokens
    if text is not None:
        special = body.prompt is not None if given is None else given
        return await service.encode(text, special)
    if body.messages is None:
        raise InvalidRequest("prompt", " or messages is required")
    fields = {name: getattr(body, name) for name in _TEMPLATE_FIELDS} | {"add_special_tokens": given}
    return await chat_prompt(service, validation.checked(ChatRequest(**fields)))


async def detokenize(http: web.Request, body: DetokenizeRequest) -> web.Response:
    """The text of some tokens."""
    async with http.app[MODELS].reading(body.model) as service:
        text = await _decoded(service, body.tokens, "tokens")
    return json_response(Detokenized(prompt=text, content=text))


async def _decoded(service: Service, tokens: list[int], field: str) -> str:
    text, info = service.opened()
    check_count(tokens, info.max_model_len, field)
    check_tokens(field, tokens, info.vocab_size)
    return await asyncio.to_thread(text.tokenizer.decode, tokens, False)


async def render(http: web.Request, body: ChatRequest) -> web.Response:
    """The rendered prompt of a chat completion."""
    async with http.app[MODELS].reading(body.model) as service:
        _, info = service.opened()
        (prompt, *_), room = await rendered(service, body), room_for(service, body, "messages")
        tokens = await service.encode(prompt, bool(body.add_special_tokens), room=room)
    answer = Rendered(prompt=prompt.text, token_ids=tokens, count=len(tokens), max_model_len=info.max_model_len)
    return json_response(answer)


async def render_completion(http: web.Request, body: CompletionRequest) -> web.Response:
    """The prompts of a completion."""
    async with http.app[MODELS].reading(body.model) as service:
        _, info = service.opened()
        special, room = body.add_special_tokens is not False, room_for(service, body, "prompt")
        prompts = []
        for given in await completion_prompts(service, body):
            tokens = await service.encode(given, special, room=room) if isinstance(given, str) else given
            prompt = given if isinstance(given, str) else await _decoded(service, given, "prompt")
            prompts.append(Rendered(prompt, tokens, len(tokens), info.max_model_len))
    return json_response(prompts)


async def tokenizer_info(http: web.Request) -> web.Response:
    """The tokenizer's configuration, in the format of tokenizer_config.json."""
    async with http.app[MODELS].reading(http.query.get("model")) as service:
        text, info = service.opened()
        known = text.tokenizer.config | {"chat_template": text.tokenizer.template or None}
    return json_response(known | {"model_max_length": info.max_model_len})


ROUTES = [
    Route("POST", "/tokenize", tokenize, body=TokenizeRequest, answer=Tokenized),
    Route("POST", "/detokenize", detokenize, body=DetokenizeRequest, answer=Detokenized),
    Route("POST", "/v1/chat/completions/render", render, body=ChatRequest, answer=Rendered),
    Route("POST", "/v1/completions/render", render_completion, body=CompletionRequest, answer=list[Rendered]),
    Route("GET", "/tokenizer_info", tokenizer_info, answer=dict[str, Any]),
    Route("POST", "/apply-template", render, body=ChatRequest, answer=Rendered),
]
