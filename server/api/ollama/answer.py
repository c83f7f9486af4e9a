"""The answers of Ollama's ``/api/chat`` and ``/api/generate``: lines of JSON, the last one with the statistics."""

from __future__ import annotations

import hashlib
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from foresay.server.api.common.answer import Answer, Item, Items, parsed_arguments
from foresay.server.api.common.route import LINES
from foresay.server.api.common.validation import naming
from foresay.server.api.ollama import schemas
from foresay.server.models.service import AnswerOrigin
from foresay.server.schemas.shared import ErrorBody, GenerationRequest
from foresay.server.settings.resolved import tagged
from foresay.server.settings.units import count_in_words, moment
from foresay.server.text.choice import Choice, Piece
from foresay.server.text.parts import Part, ToolCallPart, text_of, thought_of
from foresay.spec.request import EngineInfo

NANOSECONDS = 1_000_000_000


def error_shape(status: int, body: ErrorBody) -> schemas.OllamaError:
    """An error in Ollama's format: a sentence."""
    return schemas.OllamaError(naming(body.error))


class OllamaAnswer(Answer):
    """What both shapes share. There is one choice."""

    framing = LINES

    def __init__(self, origin: AnswerOrigin, choices: Sequence[Choice], body: GenerationRequest) -> None:
        super().__init__(origin, choices, body)
        self._choice = choices[0]
        self._began = time.perf_counter()
        self._calls = Calls()

    @abstractmethod
    def _line(self, text: str, thought: str, calls: list[schemas.OllamaToolCall]) -> schemas.OllamaProgress:
        """A line with this content."""

    def chunks(self, index: int, piece: Piece) -> list[msgspec.Struct]:
        calls = self._calls.of(piece.parts, last=piece.finish_reason is not None)
        text, thought = text_of(piece.parts), thought_of(piece.parts)
        if not (text or thought or calls or piece.logprobs):
            return []
        return [self._scored(self._line(text, thought, calls), piece)]

    def closing(self) -> list[msgspec.Struct]:
        return [self._ended(self._line("", "", []))]

    def whole(self, pieces: Sequence[Piece]) -> msgspec.Struct:
        parts = pieces[0].parts
        line = self._line(text_of(parts), thought_of(parts), self._calls.of(parts, last=True))
        return self._ended(self._scored(line, pieces[0]))

    def broken(self, error: ErrorBody) -> msgspec.Struct:
        """The error as a line."""
        return error_shape(500, error)

    def _scored(self, line: schemas.OllamaProgress, piece: Piece) -> schemas.OllamaProgress:
        if self.listed is not None:
            line.logprobs = self._token_decoder.chat(piece.logprobs).content
        return line

    def _ended(self, line: schemas.OllamaProgress) -> schemas.OllamaProgress:
        choice, statistics = self._choice, self._choice.statistics
        line.done, line.done_reason = True, "length" if choice.finish_reason == "length" else "stop"
        line.total_duration = int((self.origin.waited + time.perf_counter() - self._began) * NANOSECONDS)
        line.load_duration = int(self.origin.waited * NANOSECONDS)  # mostly 0: the model was already loaded
        line.prompt_eval_count, line.prompt_eval_cached_count = len(choice.request.prompt), choice.cached_tokens
        line.eval_count = choice.completion_tokens
        if statistics is not None:
            line.prompt_eval_duration = int(statistics.time_to_first_token * NANOSECONDS)
            line.eval_duration = int(statistics.decode_seconds * NANOSECONDS)
        line.metrics, line.warnings = self._metrics(), self._warnings()
        return line


class OllamaChat(OllamaAnswer):
    """The answer of ``/api/chat``."""

    def _line(self, text: str, thought: str, calls: list[schemas.OllamaToolCall]) -> schemas.OllamaProgress:
        message = schemas.OllamaAnswerMessage(content=text, thinking=thought or UNSET, tool_calls=calls or UNSET)
        return schemas.OllamaChatLine(model=self.model, created_at=moment(), done=False, message=message)


class OllamaGenerate(OllamaAnswer):
    """The answer of ``/api/generate``."""

    def _line(self, text: str, thought: str, calls: list[schemas.OllamaToolCall]) -> schemas.OllamaProgress:
        thinking: str | UnsetType = thought or UNSET
        return schemas.OllamaGenerateLine(
            model=self.model, created_at=moment(), done=False, response=text, thinking=thinking
        )


class Calls(Items[schemas.OllamaToolCall]):
    """Tool calls, which Ollama sends whole: a call is complete when the next one begins or the answer ends."""

    def of(self, parts: Sequence[Part], last: bool) -> list[schemas.OllamaToolCall]:
        """The calls that are complete after ``parts``."""
        complete = self.take(part for part in parts if isinstance(part, ToolCallPart))
        return [*complete, *self.close()] if last else complete

    def closes(self, item: Item) -> list[schemas.OllamaToolCall]:
        """The call."""
        assert isinstance(item.first, ToolCallPart), "nothing else is taken"
        function = schemas.OllamaFunction(name=item.first.name or "", arguments=parsed_arguments(item.text))
        return [schemas.OllamaToolCall(id=item.first.id or UNSET, function=function)]


# -- descriptions of models: only true facts ----------------------------------------------------------


#: Ollama's names of dtypes.
_STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_UNKNOWN = "foresay"


def described(name: str, created: int, info: EngineInfo | None) -> schemas.OllamaModel:
    """A model under one of its names. info: None if never loaded."""
    return schemas.OllamaModel(
        name=tagged(name),
        model=tagged(name),
        modified_at=moment(created),
        size=0 if info is None else info.weight_bytes,
        digest=hashlib.sha256(msgspec.json.encode(name if info is None else info)).hexdigest(),
        details=details(info),
    )


def details(info: EngineInfo | None) -> schemas.ModelDetails:
    """The kind of model, as far as known."""
    family = architecture(info)
    if info is None:
        return schemas.ModelDetails(family=family, families=(family,), parameter_size="", quantization_level="")
    return schemas.ModelDetails(
        family=family,
        families=(family,),
        parameter_size=count_in_words(info.parameters) if info.parameters else "",
        quantization_level=info.quantization.partition(" ")[0] or _STORED.get(info.dtype, info.dtype),
    )


def model_info(name: str, target: str, info: EngineInfo | None, longest: int | None) -> dict[str, Any]:
    """Facts under GGUF's names, which begin with the architecture, and some of ours. longest: the context length."""
    family = architecture(info)
    facts: dict[str, Any] = {"general.architecture": family, "general.basename": name}
    if longest is not None:
        facts |= {f"{family}.context_length": longest, "foresay.context_length": longest}
    facts["foresay.target"] = target
    if info is not None:
        facts |= {
            "general.parameter_count": info.parameters,
            f"{family}.vocab_size": info.vocab_size,
            f"{family}.embedding_length": info.hidden_size,
            f"{family}.block_count": info.layers,
            "foresay.drafter": info.drafter,
        }
    return facts


def architecture(info: EngineInfo | None) -> str:
    """GGUF's name of the architecture: ``llama`` for ``LlamaForCausalLM``."""
    return (info.family if info is not None else "") or _UNKNOWN
