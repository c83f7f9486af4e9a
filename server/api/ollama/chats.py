"""Ollama's requests as chat requests, and the answers of ``/api/chat`` and ``/api/generate``: lines of JSON, the
last one with the statistics."""

from __future__ import annotations

import hashlib
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from foresay.server.api.common import validation
from foresay.server.api.common.answer import Answer, Item, Items, parsed_arguments
from foresay.server.api.common.route import LINES
from foresay.server.api.common.validation import FieldNames, naming, thinking
from foresay.server.api.ollama import schemas
from foresay.server.catalog.formats import EFFORTS
from foresay.server.models.residency import Keep
from foresay.server.models.service import AnswerOrigin
from foresay.server.schemas.bounds import MOST_CALLS, check_count
from foresay.server.schemas.chat import ChatRequest
from foresay.server.schemas.shared import ErrorBody, GenerationRequest
from foresay.server.settings.resolved import tagged
from foresay.server.settings.units import count_in_words, moment, seconds_of
from foresay.server.text.choice import Choice, Piece
from foresay.server.text.parsers.chat_format import ChatFormat
from foresay.server.text.parts import Part, ToolCallPart, text_of, thought_of
from foresay.spec.errors import InvalidRequest, inside
from foresay.spec.request import EngineInfo

Json = dict[str, Any]

#: Seconds from which keep_alive means for ever.
_FOREVER = 1e9

#: The options by the chat request's names.
_SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
_OPTIONS = {name: name for name in _SAME} | {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
#: The client's names of fields that the chat request names differently.
NAMES = FieldNames(
    {field: f"options.{name}" for field, name in _OPTIONS.items()}
    | {
        "response_format": "format",
        "response_format.json_schema.schema": "format",
        "chat_template_kwargs": "think",
        "reasoning_effort": "think",
    }
)
NAMES_OF_PROMPT = NAMES.also({"messages.*": "prompt"})


def chat_of(body: schemas.OllamaChatRequest | schemas.OllamaGenerateRequest, chat_format: ChatFormat) -> ChatRequest:
    """The equivalent chat request. Errors call the messages of one that has a prompt ``prompt``."""
    fields = _shared(body) | _thinking(body.think, chat_format)
    if isinstance(body, schemas.OllamaChatRequest):
        fields |= {"messages": _messages(body.messages or []), "tools": body.tools}
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        fields["messages"] = [*system, {"role": "user", "content": body.prompt}]
    return validation.converted(fields, ChatRequest)


def fields_of_raw(body: schemas.OllamaGenerateRequest) -> Json:
    """The completion request's fields for a raw prompt, without the prompt."""
    if body.system:
        raise InvalidRequest("system", " and raw cannot be combined")
    if body.think:
        raise InvalidRequest("think", " and raw cannot be combined")
    listed = body.top_logprobs or 0
    if listed and not body.logprobs:
        raise InvalidRequest("top_logprobs", " is only allowed with logprobs: true")
    return _shared(body) | {"logprobs": listed if body.logprobs else None, "top_logprobs": None}


def refuse_unsupported(body: schemas.OllamaRequest) -> None:
    """Raise for a known but unsupported field whose value is not harmless."""
    validation.refuse(body)
    if isinstance(body, schemas.OllamaChatRequest):
        for index, message in enumerate(body.messages or ()):
            with inside("messages", index):
                validation.refuse(message)
    if body.options is not None:
        with inside("options"):
            validation.refuse(body.options)
            validation.check_window(body.options)


def keep_alive(body: schemas.OllamaRequest) -> Keep:
    """How long the model stays loaded after the request, in seconds; None: for ever."""
    given = body.keep_alive
    if given is None:
        return "usual"
    try:
        seconds = given if not isinstance(given, str) else 0.0 if given == "0" else seconds_of(given)
    except ValueError as error:
        raise InvalidRequest("keep_alive", f": {error}") from None
    return seconds if 0 <= seconds < _FOREVER else None


def _shared(body: schemas.OllamaRequest) -> Json:
    """Fields that chat and completion requests share."""
    options = body.options or schemas.OllamaOptions()
    drawn = {field: getattr(options, name) for field, name in _OPTIONS.items()}
    if options.num_predict is not None and options.num_predict < 0:
        drawn["max_tokens"] = None
    return drawn | {
        "stream": body.stream is not False,
        "response_format": _format(body.format),
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
    }


def _format(wanted: str | Json | None) -> Json | None:
    if wanted is None or wanted == "":
        return None
    if wanted == "json":
        return {"type": "json_object"}
    if isinstance(wanted, str):
        raise InvalidRequest("format", f" must be json or a JSON schema, got {wanted!r}")
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": wanted, "strict": True}}


def _thinking(think: bool | str | None, chat_format: ChatFormat) -> Json:
    if isinstance(think, str):
        if think not in EFFORTS:
            raise InvalidRequest("think", f" must be true, false, low, medium or high, got {think!r}")
        return thinking(chat_format, True, "think") | {"reasoning_effort": think}
    if think is False and chat_format.form.efforts:  # Ollama ignores it for gpt-oss; the template warns of the effort
        return {"reasoning_effort": "false"}
    return {} if think is None else thinking(chat_format, think, "think")


def _messages(messages: list[schemas.OllamaMessage]) -> list[Json]:
    """The conversation; calls without an id get one, and results get the id of their call."""
    converted: list[Json] = []
    waiting: list[tuple[str, str]] = []
    for index, message in enumerate(messages):
        check_count(message.tool_calls, MOST_CALLS, ("messages", index, "tool_calls"))
        one: Json = {"role": message.role, "content": message.content}
        if message.thinking is not None:
            one["reasoning_content"] = message.thinking
        if message.tool_calls:
            waiting = [
                (call.id or f"call_{index}_{n}", call.function.name) for n, call in enumerate(message.tool_calls)
            ]
            one["tool_calls"] = [_call(id, call) for (id, _), call in zip(waiting, message.tool_calls, strict=True)]
        if message.role == "tool":
            one["tool_call_id"] = _answered(message, waiting)
        converted.append(one)
    return converted


def _call(id: str, call: schemas.OllamaToolCall) -> Json:
    arguments = msgspec.json.encode(call.function.arguments).decode()
    return {"id": id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _answered(message: schemas.OllamaMessage, waiting: list[tuple[str, str]]) -> str | None:
    """The id of a result's call: by its id, else by the tool's name, else the first call without a result."""
    if message.tool_call_id is not None:
        return message.tool_call_id
    found = next((call for call in waiting if call[1] == message.tool_name), waiting[0] if waiting else None)
    if found is None:
        return None
    waiting.remove(found)
    return found[0]


# -- answers ----------------------------------------------------------------------------------------------------------


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


# -- descriptions of models: only true facts --------------------------------------------------------------------------


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
