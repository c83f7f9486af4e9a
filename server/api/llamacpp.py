"""llama.cpp's ``/completion``, ``/infill``, ``/props`` and ``/slots``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType
from msgspec.structs import asdict, astuple

import foresay
from foresay.server.api.common import validation
from foresay.server.api.common.answer import Answer, timings
from foresay.server.api.common.route import EVENTS, Route, Stream, json_response
from foresay.server.api.common.turns import answered, completion_choices, infilled, leasing, room_for
from foresay.server.api.common.validation import FieldNames
from foresay.server.models.models import MODELS
from foresay.server.models.service import Service
from foresay.server.schemas.bounds import shown
from foresay.server.schemas.chat import ChatTokenLogprob, CompletionRequest, TopLogprob
from foresay.server.schemas.shared import (
    ErrorBody,
    GenerationRequest,
    PromptProgress,
    RequestWarning,
    Timings,
    not_done,
    not_followed,
)
from foresay.server.text.choice import Piece
from foresay.spec.names import NONE
from foresay.spec.request import TokenLogprobs
from foresay.spec.sampling import Logprobs, RepetitionPenalty

HERE = "/completion"


class NativeRequest(GenerationRequest, kw_only=True):
    """The fields shared by ``POST /completion`` and ``/infill``: the sampling fields of completions, some under
    llama.cpp's names. n_predict: maximum number of tokens to generate; negative: as many as fit; 0: only prefill the
    prompt, for later requests. n_probs: like logprobs of completions."""

    n_predict: int | None = None
    n_probs: Logprobs | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: int | None = None
    return_tokens: bool | None = None

    n: Annotated[int | None, not_done(1, by=HERE)] = None
    post_sampling_probs: Annotated[Any, not_done(False, by=HERE)] = None
    lora: Annotated[Any, not_done([], by=HERE)] = None

    response_fields: Annotated[list[str] | None, not_followed([], why="answers have all their fields")] = None
    t_max_prompt_ms: Annotated[int | None, not_followed(0, -1, why="prompts are read whole, however long it takes")] = (
        None
    )
    t_max_predict_ms: Annotated[int | None, not_followed(0, -1, why="n_predict bounds what is written, not time")] = (
        None
    )
    n_indent: Annotated[int | None, not_followed(0, why="lines may be indented less")] = None


class NativeCompletion(NativeRequest, kw_only=True):
    """``POST /completion``. prompt: a text, or token ids."""

    prompt: Annotated[str, shown(minLength=1)] | list[int]


class Extra(msgspec.Struct, kw_only=True):
    """A file for context."""

    text: str
    filename: str | None = None


class InfillRequest(NativeRequest, kw_only=True):
    """``POST /infill``: generates the text between a prefix and a suffix. prompt: its beginning, if already written."""

    input_prefix: str
    input_suffix: str
    prompt: str = ""
    input_extra: list[Extra] | None = None


class NativeTop(TopLogprob, kw_only=True):
    """One of the most likely tokens, with its id."""

    id: int


class NativeTokenLogprob(ChatTokenLogprob, kw_only=True):
    """A token of the answer with its id, and the most likely tokens at its position."""

    id: int
    top_logprobs: list[NativeTop]  # type: ignore[assignment]


class NativeAnswer(msgspec.Struct, kw_only=True):
    """An answer, or a chunk of one. Only the last chunk has the fields from ``model`` on."""

    index: int = 0
    content: str
    tokens: list[int]
    id_slot: int = -1
    stop: bool = False
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[NativeTokenLogprob] | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    model: str | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: Literal["eos", "word", "limit"] | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    warnings: list[RequestWarning] | UnsetType = UNSET


#: Its streams end with the chunk that has ``stop``, without ``[DONE]``.
FRAMING = msgspec.structs.replace(EVENTS, done=b"")
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
#: The client's names of fields that a completion request names differently.
NAMES = FieldNames({"max_tokens": "n_predict", "logprobs": "n_probs", "repetition_penalty": "repeat_penalty"})
_OWN = {"n_predict", "repeat_penalty", "n"}
_SHARED = sorted({*GenerationRequest.__struct_fields__} - _OWN)


class Native(Answer):
    """llama.cpp's answer: the text, and at its end all other fields."""

    framing = FRAMING

    def progress(self, progress: PromptProgress) -> list[msgspec.Struct]:
        answer = self._answer(Piece())
        answer.prompt_progress = progress
        return [answer]

    def chunks(self, index: int, piece: Piece) -> list[msgspec.Struct]:
        return [self._answer(piece)] if piece.text or piece.token_ids else []

    def closing(self) -> list[msgspec.Struct]:
        return [self._ended(self._answer(Piece()))]

    def whole(self, pieces: Sequence[Piece]) -> msgspec.Struct:
        answer = self._answer(pieces[0])
        answer.tokens = answer.tokens if self.body.return_token_ids else []
        return self._ended(answer)

    def _answer(self, piece: Piece) -> NativeAnswer:
        choice = self.choices[0]
        answer = NativeAnswer(
            content=piece.text,
            tokens=piece.token_ids,
            tokens_predicted=choice.completion_tokens,
            tokens_evaluated=len(choice.request.prompt),
        )
        if self.listed is not None:
            answer.completion_probabilities = [self._likely(entry) for entry in piece.logprobs]
        return answer

    def _likely(self, entry: TokenLogprobs) -> NativeTokenLogprob:
        (facts,) = self._token_decoder.chat([entry]).content
        top = [NativeTop(*astuple(one), id=id) for one, (id, _) in zip(facts.top_logprobs, entry.top, strict=True)]
        return NativeTokenLogprob(id=entry.token, **asdict(facts) | {"top_logprobs": top})

    def _ended(self, answer: NativeAnswer) -> NativeAnswer:
        choice, params = self.choices[0], self.choices[0].request.params
        word = choice.stop_reason if isinstance(choice.stop_reason, str) else ""
        answer.stop, answer.model, answer.truncated = True, self.model, False
        answer.generation_settings = {name: getattr(params, name) for name in _SETTINGS}
        answer.generation_settings |= {"seed": choice.seed, "n_predict": params.max_tokens}
        answer.prompt = choice.tokenizer.decode(choice.request.prompt, skip_special_tokens=False)
        answer.has_new_line = "\n" in choice.tokenizer.decode(choice.tokens)
        answer.stop_type = "limit" if choice.finish_reason == "length" else "word" if word else "eos"
        answer.stopping_word, answer.tokens_cached = word, choice.cached_tokens
        answer.timings, answer.warnings = timings(self.choices) or UNSET, self._warnings()
        return answer


def fields_of(body: NativeRequest) -> dict[str, Any]:
    """The fields of the completion request, without the prompt."""
    validation.check_window(body)
    validation.refuse(body)
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SHARED}
    fields |= {"return_token_ids": bool(body.return_tokens), "logprobs": body.n_probs}
    if body.repeat_penalty is not None:
        fields["repetition_penalty"] = body.repeat_penalty
    if body.n_predict is not None:
        # A completion of no tokens is one that echoes; these answers have no echo.
        fields |= {"max_tokens": body.n_predict if body.n_predict >= 0 else None, "echo": body.n_predict == 0}
    return fields


@leasing(FRAMING)
async def native(http: web.Request, service: Service, body: NativeCompletion | InfillRequest) -> web.StreamResponse:
    """Continue a prompt, or fill in the text between a prefix and a suffix."""
    with NAMES as names:
        if isinstance(body, InfillRequest):
            extra = "".join(f"--- {one.filename or 'snippet'} ---\n\n{one.text}\n\n" for one in body.input_extra or ())
            before, special = extra + body.input_prefix + body.prompt, body.add_special_tokens is not False
            (tokens,) = await infilled(service, [before], body.input_suffix, "input_prefix", special)
        elif isinstance(body.prompt, str):
            room = room_for(service, body, "prompt")
            tokens = await service.encode(body.prompt, body.add_special_tokens is not False, room=room)
        else:
            tokens = body.prompt
        fields = fields_of(body)
        if fields["max_tokens"] is None:
            fields["max_tokens"] = max(1, service.opened()[1].max_model_len - len(tokens))
        request = validation.converted({"prompt": tokens, **fields}, CompletionRequest)
        choices = names.warned(await completion_choices(service, request, [tokens]))
        ignored = [one for one in validation.not_followed(body) if one.path[0] not in _SHARED]
        choices[0].warnings = (*choices[0].warnings, *ignored)
        return await answered(http, service, request, choices, Native)


async def props(http: web.Request) -> web.Response:
    """The model and its default sampling, in llama.cpp's format."""
    async with http.app[MODELS].reading(http.query.get("model")) as service:
        text, info = service.opened()
    known = {name: value for name in _SETTINGS if (value := getattr(text.defaults, name, None)) is not None}
    usual = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": -1, "n_predict": -1}
    answer: dict[str, Any] = {
        "default_generation_settings": {"n_ctx": info.max_model_len, "params": usual | known},
        "total_slots": info.max_seqs,
        "model_path": info.target,
        "model_alias": service.names.own,
        "chat_template": text.tokenizer.template,
        "bos_token": text.tokenizer.config.get("bos_token", ""),
        "eos_token": "".join(text.tokenizer.token_strings(info.eos_token_ids[:1])),
        "modalities": {"vision": False, "audio": False},
        "build_info": f"foresay-{foresay.__version__}",
        "is_sleeping": False,
    }
    return json_response(answer)


async def slots(http: web.Request) -> web.Response:
    """The slots for sequences, the busy ones first, in llama.cpp's format."""
    async with http.app[MODELS].reading(http.query.get("model")) as service:
        info, busy = service.opened()[1], service.running
    usual = {"n_ctx": info.max_model_len, "speculative": info.drafter != NONE}
    return json_response([{"id": index, **usual, "is_processing": index < busy} for index in range(info.max_seqs)])


_STREAM = Stream(FRAMING, (NativeAnswer, ErrorBody))
ROUTES = [
    Route("POST", "/completion", native, NativeCompletion, NativeAnswer, _STREAM),
    Route("POST", "/completions", native, NativeCompletion, NativeAnswer, _STREAM),
    Route("POST", "/infill", native, InfillRequest, NativeAnswer, _STREAM),
    Route("GET", "/props", props, answer=dict[str, Any]),
    Route("GET", "/slots", slots, answer=list[dict[str, Any]]),
]
