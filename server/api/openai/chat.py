"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from foresay.server.api.common.answer import Answer, known
from foresay.server.api.common.route import EVENTS, Route, Stream
from foresay.server.api.common.turns import answered, chat_choices, leasing
from foresay.server.models.service import AnswerOrigin, Service
from foresay.server.schemas import chat as schemas
from foresay.server.schemas.chat import ChatLogprobs, Provenance
from foresay.server.schemas.shared import ErrorBody, PromptProgress
from foresay.server.text.choice import Choice, Piece
from foresay.server.text.parts import Part, ReasoningPart, TextPart, ToolCallPart, joined, text_of, thought_of


class ChatAnswer(Answer):
    """``chat.completion`` and its chunks."""

    prefix = "chatcmpl"

    def __init__(self, origin: AnswerOrigin, choices: Sequence[Choice], body: schemas.ChatRequest) -> None:
        super().__init__(origin, choices, body)
        self._include_reasoning = body.include_reasoning is not False

    def opening(self, index: int) -> list[msgspec.Struct]:
        chunk = self._chunk(index, schemas.ChatDelta(role="assistant", content=None))
        chunk.prompt_token_ids = self._prompt_ids(index)
        return [chunk]

    def progress(self, progress: PromptProgress) -> list[msgspec.Struct]:
        chunk = self._chunk(0, schemas.ChatDelta())
        chunk.prompt_progress = progress
        return [chunk]

    def chunks(self, index: int, piece: Piece) -> list[msgspec.Struct]:
        """A chunk for each part, and a last one with the finish reason."""
        self._note_prompt(index, piece)
        deltas = [delta_of(part) for part in self._shown(piece)]
        if not deltas and self._has_token_fields(piece):
            deltas = [schemas.ChatDelta(content="")]
        chunked = [self._chunk(index, delta) for delta in deltas]
        if chunked:  # per-token fields go with the first of them
            first = chunked[0].choices[0]
            first.token_ids, first.logprobs = self._ids(piece), self._logprobs(piece)
            first.provenance = self._provenance(piece)
            if piece.prompt_logprobs is not None:
                chunked[0].prompt_logprobs = self._prompt_logprobs(index)
        chunks: list[msgspec.Struct] = [*chunked]
        if piece.finish_reason is not None:
            last = self._chunk(index, schemas.ChatDelta())
            last.choices[0].finish_reason = piece.finish_reason
            last.choices[0].stop_reason = self.choices[index].stop_reason
            last.choices[0].seed = self.choices[index].seed
            chunks.append(self._final(last) if self._closes(piece) else last)
        return chunks

    def closing(self) -> list[msgspec.Struct]:
        """The usage chunk, if requested: it has no choices, so only clients that requested it need to handle it."""
        if not self._reports_usage:
            return []
        chunk = schemas.ChatChunk(id=self.id, created=self.created, model=self.model, choices=[], usage=self.usage)
        return [self._final(chunk)]

    def whole(self, pieces: Sequence[Piece]) -> msgspec.Struct:
        self._note_prompt(0, pieces[0])
        whole = schemas.ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._choice(index, piece) for index, piece in enumerate(pieces)],
            usage=self.usage,
            prompt_token_ids=known(self._prompt_ids(0)),
            prompt_logprobs=known(self._prompt_logprobs(0)),
        )
        return self._final(whole)

    def _shown(self, piece: Piece) -> list[Part]:
        return [part for part in piece.parts if self._include_reasoning or not isinstance(part, ReasoningPart)]

    def _has_token_fields(self, piece: Piece) -> bool:
        """Whether a chunk is due although it has no content."""
        ids = self.body.return_token_ids and piece.token_ids
        return bool(ids or piece.logprobs or piece.prompt_logprobs or piece.steps or piece.tokens)

    def _provenance(self, piece: Piece) -> Provenance | UnsetType:
        """The provenance, without reasoning if the client does not want it."""
        provenance = super()._provenance(piece)
        if not self._include_reasoning and provenance is not UNSET:
            for token in provenance.tokens:
                token.reasoning = UNSET
        return provenance

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return None if self.listed is None else self._token_decoder.chat(piece.logprobs, chosen_first=True)

    def _choice(self, index: int, piece: Piece) -> schemas.ChatChoice:
        choice = self.choices[index]
        return schemas.ChatChoice(
            index=index,
            message=message_of(self._shown(piece)),
            logprobs=self._logprobs(piece),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            seed=choice.seed,
            token_ids=known(self._ids(piece)),
            provenance=self._provenance(piece),
        )

    def _chunk(self, index: int, delta: schemas.ChatDelta) -> schemas.ChatChunk:
        choice = schemas.ChatChunkChoice(index=index, delta=delta)
        return schemas.ChatChunk(
            id=self.id, created=self.created, model=self.model, choices=[choice], usage=self._usage()
        )


# -- the parts of a message, whole or in deltas ------------------------------------------------------------------------


def delta_of(part: Part) -> schemas.ChatDelta:
    """What a part adds to the message."""
    match part:
        case TextPart(text=text):
            return schemas.ChatDelta(content=text)
        case ReasoningPart(text=text):
            return schemas.ChatDelta(reasoning_content=text, reasoning=text)
        case ToolCallPart():
            return schemas.ChatDelta(tool_calls=[_call_delta(part)])


def message_of(parts: Sequence[Part]) -> schemas.AssistantMessage:
    """The message made of all parts."""
    text, thought = text_of(parts), thought_of(parts)
    calls = [_call(part) for part in joined(list(parts)) if isinstance(part, ToolCallPart)]
    return schemas.AssistantMessage(
        content=text or (None if thought or calls else ""),
        reasoning_content=thought or UNSET,
        reasoning=thought or UNSET,
        tool_calls=calls or UNSET,
    )


def _call_delta(part: ToolCallPart) -> schemas.ToolCallDelta:
    if part.id is None:
        return schemas.ToolCallDelta(index=part.index, function=schemas.FunctionDelta(arguments=part.arguments))
    function = schemas.FunctionDelta(name=part.name or "", arguments=part.arguments)
    return schemas.ToolCallDelta(index=part.index, id=part.id, type="function", function=function)


def _call(part: ToolCallPart) -> schemas.ToolCall:
    return schemas.ToolCall(
        id=part.id or "", function=schemas.CalledFunction(name=part.name or "", arguments=part.arguments)
    )


@leasing(EVENTS)
async def chat_completions(http: web.Request, service: Service, body: schemas.ChatRequest) -> web.StreamResponse:
    """Answer a conversation."""
    return await answered(http, service, body, await chat_choices(service, body), ChatAnswer)


_STREAM = Stream(EVENTS, (schemas.ChatChunk, ErrorBody))
_ROUTE = "/v1/chat/completions"
ROUTES = [Route("POST", _ROUTE, chat_completions, schemas.ChatRequest, schemas.ChatCompletion, _STREAM)]
