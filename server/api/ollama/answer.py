"""The answers of Ollama's ``/api/chat`` and ``/api/generate``: lines of JSON, the last one with the statistics."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from server.api.common.answer import AnswerOptions, BaseAnswer, parsed_arguments
from server.api.common.sse import LINES
from server.api.common.words import naming
from server.api.ollama.schemas import (
    OllamaAnswerMessage,
    OllamaChatLine,
    OllamaError,
    OllamaFunction,
    OllamaGenerateLine,
    OllamaProgress,
    OllamaToolCall,
)
from server.host.models.patience import WAITED
from server.host.service import Origin
from server.schemas.shared import ErrorBody
from server.settings.durations import moment
from server.text.choice import Choice, Piece
from server.text.parts import Part, ReasoningPart, TextPart, ToolCallPart, joined

NANOSECONDS = 1_000_000_000


def error_shape(status: int, body: ErrorBody) -> OllamaError:
    """An error as Ollama tells it: a sentence."""
    return OllamaError(naming(body.error))


class OllamaAnswer(BaseAnswer):
    """What both shapes share. There is one choice."""

    framing = LINES

    def __init__(self, origin: Origin, choices: Sequence[Choice], options: AnswerOptions) -> None:
        super().__init__(origin, choices, options)
        self._choice = choices[0]
        self._began = time.perf_counter()
        self._calls = Calls()

    @abstractmethod
    def _line(self, text: str, thought: str, calls: list[OllamaToolCall]) -> OllamaProgress:
        """A line that says this."""

    def opening(self, index: int) -> list[msgspec.Struct]:
        """Nothing introduces an answer."""
        return []

    def chunks(self, index: int, piece: Piece) -> list[msgspec.Struct]:
        """A line for what a piece says, if it says anything."""
        calls = self._calls.take(piece.parts, last=piece.finish_reason is not None)
        text, thought = _text(piece.parts), _thought(piece.parts)
        if not (text or thought or calls or piece.logprobs):
            return []
        return [self._scored(self._line(text, thought, calls), [piece])]

    def closing(self) -> list[msgspec.Struct]:
        """The line that ends the stream."""
        return [self._ended(self._line("", "", []))]

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> msgspec.Struct:
        """The answer in one line."""
        parts = joined([part for piece in pieces[0] for part in piece.parts])
        line = self._line(_text(parts), _thought(parts), self._calls.take(parts, last=True))
        return self._ended(self._scored(line, pieces[0]))

    def broken(self, error: ErrorBody) -> msgspec.Struct:
        """The error as a line."""
        return error_shape(500, error)

    def _scored(self, line: OllamaProgress, pieces: Sequence[Piece]) -> OllamaProgress:
        if self.options.logprobs is not None:
            line.logprobs = self._speller.chat([entry for piece in pieces for entry in piece.logprobs]).content
        return line

    def _ended(self, line: OllamaProgress) -> OllamaProgress:
        choice, statistics = self._choice, self._choice.statistics
        line.done, line.done_reason = True, "length" if choice.finish_reason == "length" else "stop"
        line.total_duration = int((WAITED.get() + time.perf_counter() - self._began) * NANOSECONDS)
        line.load_duration = int(WAITED.get() * NANOSECONDS)  # mostly 0: the model was there before the request came
        line.prompt_eval_count, line.eval_count = len(choice.request.prompt), choice.completion_tokens
        if statistics is not None:
            line.prompt_eval_duration = int(statistics.time_to_first_token * NANOSECONDS)
            line.eval_duration = int(statistics.decode_seconds * NANOSECONDS)
        line.metrics, line.warnings = self._metrics(), self._warnings()
        return line


class OllamaChat(OllamaAnswer):
    """The answer of ``/api/chat``."""

    def _line(self, text: str, thought: str, calls: list[OllamaToolCall]) -> OllamaProgress:
        message = OllamaAnswerMessage(content=text, thinking=thought or UNSET, tool_calls=calls or UNSET)
        return OllamaChatLine(model=self.model, created_at=moment(), done=False, message=message)


class OllamaGenerate(OllamaAnswer):
    """The answer of ``/api/generate``."""

    def _line(self, text: str, thought: str, calls: list[OllamaToolCall]) -> OllamaProgress:
        thinking: str | UnsetType = thought or UNSET
        return OllamaGenerateLine(model=self.model, created_at=moment(), done=False, response=text, thinking=thinking)


class Calls:
    """Calls of tools, which Ollama tells whole: a call is complete when the next one begins or the answer ends."""

    def __init__(self) -> None:
        self._open: ToolCallPart | None = None

    def take(self, parts: Sequence[Part], last: bool) -> list[OllamaToolCall]:
        """The calls that are complete after ``parts``."""
        complete: list[OllamaToolCall] = []
        for part in parts:
            if not isinstance(part, ToolCallPart):
                continue
            if self._open is not None and self._open.index == part.index:
                arguments = self._open.arguments + part.arguments
                self._open = msgspec.structs.replace(self._open, arguments=arguments)
            else:
                complete += self._close()
                self._open = part
        return complete + self._close() if last else complete

    def _close(self) -> list[OllamaToolCall]:
        call, self._open = self._open, None
        if call is None:
            return []
        function = OllamaFunction(name=call.name or "", arguments=parsed_arguments(call.arguments))
        return [OllamaToolCall(id=call.id or UNSET, function=function)]


def _text(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def _thought(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, ReasoningPart))
