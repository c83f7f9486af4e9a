"""The two shapes of an answer: a completion and a chat completion, each whole or as stream chunks.

An answer owns the choices and turns their pieces into chunks; :mod:`server.streaming` decides when they are sent.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from server import statistics
from server.choice import Choice, Piece
from server.openai import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    Completion,
    CompletionChoice,
    GenerationRequest,
    Metrics,
    MetricsLevel,
    Usage,
)


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where an answer comes from. id: of the request, without prefix. exact: see :class:`~server.openai.Metrics`."""

    id: str
    model: str
    fingerprint: str
    exact: bool


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the client wants to see beside the text. usage, metrics_level: in whole answers and in final chunks."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    metrics_level: MetricsLevel = "summary"

    @classmethod
    def of(cls, request: GenerationRequest, metrics_level: MetricsLevel) -> AnswerOptions:
        """As the request says; ``metrics_level`` unless it names its own."""
        stream = request.stream_options
        return cls(
            stream=bool(request.stream),
            include_usage=bool(stream and stream.include_usage),
            continuous_usage=bool(stream and stream.continuous_usage_stats),
            return_token_ids=bool(request.return_token_ids),
            metrics_level=request.spec_decode_metrics or metrics_level,
        )


class Answer(Protocol):
    """What streaming and collecting need of an answer."""

    choices: Sequence[Choice]
    options: AnswerOptions

    def opening(self, index: int) -> list[msgspec.Struct]:
        """The chunks that introduce a choice."""
        ...

    def chunks(self, index: int, piece: Piece) -> list[msgspec.Struct]:
        """The chunks of a piece."""
        ...

    def closing(self) -> list[msgspec.Struct]:
        """The chunks after the last choice has finished."""
        ...

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> msgspec.Struct:
        """The answer in one piece, from the pieces of each choice."""
        ...


class _Answer:
    """What both shapes share: identity, usage and metrics."""

    prefix = ""

    def __init__(self, origin: Origin, choices: Sequence[Choice], options: AnswerOptions) -> None:
        self.id = f"{self.prefix}-{origin.id}"
        self.model = origin.model
        self.origin = origin
        self.choices = choices
        self.options = options
        self.created = int(time.time())

    def _usage(self) -> Usage | UnsetType | None:
        """The ``usage`` of a chunk with choices."""
        if self.options.continuous_usage:
            return statistics.usage(self.choices)
        return None if self.options.include_usage else UNSET

    def _metrics(self) -> Metrics | UnsetType:
        return statistics.metrics(self.choices, self.options.metrics_level, self.origin.exact) or UNSET

    def _closes(self, piece: Piece) -> bool:
        """Whether the chunk of this piece is the answer's last one."""
        ended = piece.finish_reason is not None and all(choice.finished for choice in self.choices)
        return ended and not self.options.include_usage

    def _ids(self, pieces: Sequence[Piece]) -> list[int] | UnsetType:
        return [token for piece in pieces for token in piece.token_ids] if self.options.return_token_ids else UNSET

    def _prompt_ids(self, index: int) -> list[int] | UnsetType:
        return self.choices[index].request.prompt if self.options.return_token_ids else UNSET


class CompletionAnswer(_Answer):
    """``text_completion``. echoes: text put in front of each choice."""

    prefix = "cmpl"

    def __init__(
        self, origin: Origin, choices: Sequence[Choice], options: AnswerOptions, echoes: Sequence[str]
    ) -> None:
        super().__init__(origin, choices, options)
        self._echoes = echoes

    def opening(self, index: int) -> list[msgspec.Struct]:
        """The echoed prompt, if asked for; a completion needs no introduction otherwise."""
        if not self._echoes[index] and not self.options.return_token_ids:
            return []
        choice = CompletionChoice(index=index, text=self._echoes[index], prompt_token_ids=self._prompt_ids(index))
        return [self._chunk([choice], self._usage())]

    def chunks(self, index: int, piece: Piece) -> list[msgspec.Struct]:
        """One chunk; the last one of a choice carries its finish reason."""
        if not piece.text and piece.finish_reason is None and not (self.options.return_token_ids and piece.token_ids):
            return []
        choice = CompletionChoice(index=index, text=piece.text, token_ids=self._ids([piece]))
        if piece.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = piece.finish_reason, self.choices[index].stop_reason
            choice.seed = self.choices[index].seed
        chunk = self._chunk([choice], self._usage())
        return [self._final(chunk) if self._closes(piece) else chunk]

    def closing(self) -> list[msgspec.Struct]:
        """The usage chunk, if asked for."""
        if not self.options.include_usage:
            return []
        return [self._final(self._chunk([], statistics.usage(self.choices)))]

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> msgspec.Struct:
        """All choices with usage and metrics."""
        choices = [
            CompletionChoice(
                index=index,
                text=self._echoes[index] + "".join(piece.text for piece in of_choice),
                finish_reason=self.choices[index].finish_reason,
                stop_reason=self.choices[index].stop_reason,
                seed=self.choices[index].seed,
                token_ids=self._ids(of_choice),
                prompt_token_ids=self._prompt_ids(index),
            )
            for index, of_choice in enumerate(pieces)
        ]
        return self._final(self._chunk(choices, statistics.usage(self.choices)))

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)

    def _final(self, completion: Completion) -> Completion:
        completion.system_fingerprint, completion.metrics = self.origin.fingerprint, self._metrics()
        return completion


class ChatAnswer(_Answer):
    """``chat.completion`` and its chunks."""

    prefix = "chatcmpl"

    def opening(self, index: int) -> list[msgspec.Struct]:
        """The chunk that names the role."""
        chunk = self._chunk(index, ChatDelta(role="assistant", content=""))
        chunk.prompt_token_ids = self._prompt_ids(index)
        return [chunk]

    def chunks(self, index: int, piece: Piece) -> list[msgspec.Struct]:
        """A chunk for the text, and one more with the finish reason behind the last."""
        chunks: list[msgspec.Struct] = []
        if piece.text or (self.options.return_token_ids and piece.token_ids):
            chunks.append(self._chunk(index, ChatDelta(content=piece.text), self._ids([piece])))
        if piece.finish_reason is not None:
            last = self._chunk(index, ChatDelta())
            last.choices[0].finish_reason = piece.finish_reason
            last.choices[0].stop_reason = self.choices[index].stop_reason
            last.choices[0].seed = self.choices[index].seed
            chunks.append(self._final(last) if self._closes(piece) else last)
        return chunks

    def closing(self) -> list[msgspec.Struct]:
        """The usage chunk, if asked for: no choices, so that only clients that asked must expect it."""
        if not self.options.include_usage:
            return []
        usage = statistics.usage(self.choices)
        return [self._final(ChatChunk(id=self.id, created=self.created, model=self.model, choices=[], usage=usage))]

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> msgspec.Struct:
        """All choices with usage and metrics."""
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._choice(index, of_choice) for index, of_choice in enumerate(pieces)],
            usage=statistics.usage(self.choices),
            system_fingerprint=self.origin.fingerprint,
            prompt_token_ids=self._prompt_ids(0),
            metrics=self._metrics(),
        )

    def _choice(self, index: int, pieces: Sequence[Piece]) -> ChatChoice:
        choice = self.choices[index]
        return ChatChoice(
            index=index,
            message=AssistantMessage(content="".join(piece.text for piece in pieces)),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            seed=choice.seed,
            token_ids=self._ids(pieces),
        )

    def _chunk(self, index: int, delta: ChatDelta, token_ids: list[int] | UnsetType = UNSET) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=delta, token_ids=token_ids)
        return ChatChunk(id=self.id, created=self.created, model=self.model, choices=[choice], usage=self._usage())

    def _final(self, chunk: ChatChunk) -> ChatChunk:
        chunk.system_fingerprint, chunk.metrics = self.origin.fingerprint, self._metrics()
        return chunk
