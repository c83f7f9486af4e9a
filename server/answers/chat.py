"""The answers of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from server import statistics
from server.answers.base import BaseAnswer
from server.choice import Piece
from server.wire.chat import AssistantMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta


class ChatAnswer(BaseAnswer):
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
