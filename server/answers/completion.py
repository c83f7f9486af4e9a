"""The answers of ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UnsetType

from server import statistics
from server.answers.base import AnswerOptions, BaseAnswer, Origin
from server.choice import Choice, Piece
from server.wire.completions import Completion, CompletionChoice
from server.wire.shared import Usage


class CompletionAnswer(BaseAnswer):
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
