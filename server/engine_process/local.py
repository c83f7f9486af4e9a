"""An engine in this process, from text to text: what ``from foresay import Engine`` gives and the commands use.

Several streams may be open at once; reading any of them steps all of them. A step is whole: other threads wait for it,
and so does an interrupt.
"""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import count
from typing import Any, Self

import msgspec

from foresay.server.engine.build import build_engine
from foresay.server.engine.costs import Costs
from foresay.server.engine.device import LoadProgress
from foresay.server.engine_process.text_stream import AnswerStream, Completion
from foresay.server.schemas.errors import complaint
from foresay.server.schemas.shared import StructuredOutputs
from foresay.server.settings.config import USUAL_TOKENS, EngineConfig, SamplingConfig
from foresay.server.settings.load import load
from foresay.server.settings.resolved import check_names, target_directory
from foresay.server.text.choice import Choice
from foresay.server.text.grammars.compiler import GrammarCompiler
from foresay.server.text.grammars.fields import of_outputs, refuse_lengths
from foresay.server.text.parts import drafters_of
from foresay.server.text.prompt import strings
from foresay.server.text.tokenizer import Tokenizer, tokenizer_file
from foresay.spec.errors import ForesayError, InvalidRequest
from foresay.spec.request import Delta, EngineInfo, Grammar, Request, TokenLogprobs
from foresay.spec.sampling import SamplingParams

FIELDS = SamplingParams.__struct_fields__


def sampling_of(params: SamplingParams | None, fields: Mapping[str, Any]) -> SamplingParams:
    """``params`` updated with ``fields``, types checked."""
    for name in fields:
        if name not in FIELDS:
            raise InvalidRequest(name, " is not a sampling field")
    given = {**msgspec.structs.asdict(params or SamplingParams()), **fields}
    return SamplingParams(
        **{one.name: _typed(given[one.name], one.type, one.name) for one in msgspec.structs.fields(SamplingParams)}
    )


def _typed(value: object, kind: Any, field: str) -> Any:
    """``value`` as a ``kind``; raises for any other type, naming the field."""
    try:
        "".join(strings(value)).encode()  # a lone surrogate, as in a text that is not UTF-8, is a ValueError
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _ = complaint(error)
        raise InvalidRequest(field, f": {message[0].lower()}{message[1:]}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, f": {error}") from None


Prompt = str | Sequence[int]
#: What an output must match; a mapping has the fields of :class:`StructuredOutputs`.
Structured = StructuredOutputs | Mapping[str, Any]


class Engine:
    """A target, a drafter and a KV cache in this process.

    target: a short name such as ``"smollm2"`` (``foresay models`` lists them), a hub id, a directory or a GGUF file;
    ``"bundled"`` is the toy. draft: ``"auto"``, ``"none"``, ``"ngram"``, ``"suffix"``, a hub id, a directory or a GGUF
    file.
    settings: any other field of :class:`~foresay.server.settings.config.EngineConfig`, such as ``draft_tokens=6``.
    progress: called with what is being loaded and the share done (0 to 1, None if unknown). Raises
    :class:`~foresay.spec.errors.ConfigurationError` for settings or models that do not fit together.
    """

    def __init__(
        self, target: str = "bundled", draft: str = "auto", *, progress: LoadProgress | None = None, **settings: Any
    ) -> None:
        given = {"target": target, "draft": draft, **settings}
        try:
            config = load(EngineConfig, given, {}, given_as="argument").config
            check_names(config)
            self._start(config, progress)
        except ForesayError as error:
            raise error.with_traceback(None) from None  # the argument is wrong: one sentence, no traceback

    @classmethod
    def from_config(cls, config: EngineConfig, progress: LoadProgress | None = None) -> Self:
        """The engine that ``config`` describes."""
        engine = cls.__new__(cls)
        engine._start(config, progress)
        return engine

    def _start(self, config: EngineConfig, progress: LoadProgress | None) -> None:
        self._directory = target_directory(config)
        self.tokenizer = Tokenizer.load(self._directory)
        self._engine = build_engine(config, progress, costs=Costs(), cached=True)
        self._seed = config.seed
        #: max_tokens of requests without one; None: whatever the context leaves.
        self.usual_tokens: int | None = None
        if isinstance(config, SamplingConfig) and config.max_tokens is None:
            self.usual_tokens = USUAL_TOKENS
        self._streams: dict[str, TextStream] = {}
        self._numbers = count()
        self._lock = threading.RLock()
        self._closed = False

    def __repr__(self) -> str:
        info, closed = self.info, ", closed" if self._closed else ""
        return f"<Engine {info.target}, drafted by {info.draft or info.drafter}, {info.dtype} on {info.device}{closed}>"

    @property
    def info(self) -> EngineInfo:
        """What was loaded, the memory it holds, and whether it is exact."""
        return self._engine.info

    @property
    def warnings(self) -> list[str]:
        """Warnings for the operator, a sentence each."""
        length, warnings = self.info.max_model_len, list(self.info.warnings)
        if self.usual_tokens is not None and length <= self.usual_tokens:
            warnings.append(f"answers are limited to what the context of {length} tokens leaves")
        return warnings

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what still runs, and refuse new requests. Memory is freed with the last reference to the engine."""
        self._closed = True
        for stream in list(self._streams.values()):
            stream.close()
        self._engine.notify()

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **given: Any) -> Completion:
        """Continue a prompt: text or token ids. given: see :meth:`stream`."""
        with self.stream(prompt, params, **given) as stream:
            return stream.result()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        structured_outputs: Structured | None = None,
        **sampling: Any,
    ) -> TextStream:
        """Like :meth:`generate`, but an iterator of pieces of text.

        stop: strings that end the output, not included in it. structured_outputs: what the output must match, such as
        ``{"json": schema}``, ``{"regex": ...}``, ``{"choice": [...]}``, ``{"grammar": ...}``. sampling: fields of
        :class:`SamplingParams` that override ``params``. Raises :class:`~foresay.spec.errors.InvalidRequest` naming the
        wrong field.
        """
        given: str | list[int] = _typed(prompt, str | list[int], "prompt")
        ids = self.tokenizer.encode(given) if isinstance(given, str) else given
        return self._submit(ids, params, stop, structured_outputs, sampling)

    def chat(
        self, messages: str | Sequence[Mapping[str, str]], params: SamplingParams | None = None, **given: Any
    ) -> Completion:
        """The model's answer to ``[{"role": "user", "content": "..."}, ...]``, or to the text of one user message, with
        its chat template. given: see :meth:`stream_chat`."""
        with self.stream_chat(messages, params, **given) as stream:
            return stream.result()

    def stream_chat(
        self,
        messages: str | Sequence[Mapping[str, str]],
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        structured_outputs: Structured | None = None,
        speculate: bool = True,
        provenance: bool = False,
        **sampling: Any,
    ) -> TextStream:
        """Like :meth:`chat`, but an iterator of pieces of text. speculate: false decodes without drafts. provenance:
        keep the origin of each token."""
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        given: list[dict[str, Any]] = _typed(messages, list[dict[str, Any]], "messages")
        for index, message in enumerate(given):
            if not isinstance(message.get("content", ""), str | None):
                raise InvalidRequest(f"messages[{index}].content", ": expected text")
        prompt = self.tokenizer.render(given)
        ids = self.tokenizer.encode_after((), prompt, add_special_tokens=False)
        return self._submit(ids, params, stop, structured_outputs, sampling, speculate, provenance)

    @property
    def has_grammars(self) -> bool:
        """Whether outputs can be structured: this needs a file with the vocabulary."""
        return tokenizer_file(self._directory) is not None

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        compiler = GrammarCompiler.load(self._directory, self.info.vocab_size, self.info.eos_token_ids)
        if compiler is None:
            raise InvalidRequest(
                "structured_outputs", f"{self._directory} has no tokenizer.json, which structured outputs need"
            )
        return compiler

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Keep other threads out, and until the end an interrupt (Ctrl-C, a notebook's stop button): half a step would
        break all that follow."""
        late: list[int] = []
        guarded = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT)
        if guarded:
            signal.signal(signal.SIGINT, lambda number, _: late.append(number))
        try:
            with self._lock:
                yield
        finally:
            if guarded:
                signal.signal(signal.SIGINT, guarded)
            if late:
                signal.raise_signal(late[0])

    def step(self) -> None:
        self._refuse_if_closed()
        with self._whole():
            for delta in self._engine.step():
                stream = self._streams.get(delta.id)
                if stream is not None:
                    if delta.finish_reason is not None:
                        del self._streams[delta.id]
                    stream.take(delta)
            self._engine.notify()

    def cut(self, id: str, at_token: int) -> None:
        self._engine.finish(id, at_token)

    def forget(self, id: str) -> None:
        with self._whole():
            if self._streams.pop(id, None) is not None:
                self._engine.cancel(id)

    def _submit(
        self,
        prompt: list[int],
        params: SamplingParams | None,
        stop: Sequence[str],
        structured: Structured | None,
        sampling: Mapping[str, Any],
        speculate: bool = True,
        provenance: bool = False,
    ) -> TextStream:
        self._refuse_if_closed()
        stop = _typed((stop,) if isinstance(stop, str) else stop, tuple[str, ...], "stop")
        if "" in stop:
            raise InvalidRequest("stop", ": a stop string must not be empty")
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidRequest("params", f" must be SamplingParams, got {type(params).__name__}")
        params = sampling_of(params, sampling)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(32) if self._seed is None else self._seed)
        if params.max_tokens is None and self.usual_tokens is not None:
            room = max(1, self.info.max_model_len - len(prompt))
            params = msgspec.structs.replace(params, max_tokens=min(self.usual_tokens, room))
        grammar = None if structured is None else _grammar(structured, params)
        id = str(next(self._numbers))
        request = Request(id=id, prompt=prompt, params=params, grammar=grammar, speculate=speculate)
        return self.run(request, stop, provenance)

    def run(self, request: Request, stop: Sequence[str] = (), provenance: bool = False) -> TextStream:
        """Start a request as it is; its id must not be in use."""
        constraint = None if request.grammar is None else self._compiler.compile(request.grammar, request.salt)
        with self._whole():
            self._engine.add(request, constraint)
            stream = self._streams[request.id] = TextStream(self, request, stop, provenance)
        return stream

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ForesayError("this engine is closed: open another one, with Engine(...)")


def _grammar(structured: Structured, params: SamplingParams) -> Grammar | None:
    """What the output must match."""
    if not isinstance(structured, StructuredOutputs):
        try:
            fields = _typed(structured, dict[str, Any], "structured_outputs")
            structured = msgspec.convert(fields, StructuredOutputs, strict=True)
        except msgspec.ValidationError as error:
            raise InvalidRequest("structured_outputs", f": {error}") from None
    grammar = of_outputs(structured)
    if grammar is not None:
        refuse_lengths(params, grammar.param)
    return grammar


# -- its streams -------------------------------------------------------------------------------------------------------


class TextStream(AnswerStream):
    """The text of one request of an in-process engine, delta by delta."""

    def __init__(self, engine: Engine, request: Request, stop: Sequence[str], provenance: bool = False) -> None:
        super().__init__()
        self._engine = engine
        self._request = request
        ends = engine.info.eos_token_ids
        self._choice = Choice(request, engine.tokenizer, ends, request.prompt, stop=stop, provenance=provenance)
        self._text: list[str] = []
        self._offsets: list[int] = []
        self._drafters: list[str] = []
        self._logprobs: list[TokenLogprobs] | None = None if request.params.logprobs is None else []
        self._error: ForesayError | None = None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None

    def __repr__(self) -> str:
        return f"<TextStream: {self._choice.completion_tokens} tokens{' so far' if self.completion is None else ''}>"

    def close(self) -> None:
        if self.completion is None:
            self._engine.forget(self._request.id)
            self._finish("cancelled")

    def _step(self) -> None:
        """One step for all streams; raises only this request's error."""
        if self._error is None:
            self._engine.step()
        if self._error is not None:
            raise self._error

    def take(self, delta: Delta) -> None:
        """Turn the tokens of one step into text; called by the engine."""
        if delta.finish_reason == "error":
            message = delta.error or "the engine gave up on this request"
            self._error = ForesayError(message) if delta.fault is None else InvalidRequest(*delta.fault)
            return
        piece = self._choice.take(delta)
        self.steps += piece.steps
        self.tokens += piece.tokens
        self._offsets += piece.offsets
        self._drafters += drafters_of(delta.origin, len(piece.token_ids))
        if self._logprobs is not None:
            self._logprobs += piece.logprobs
        self._prompt_logprobs = self._prompt_logprobs or piece.prompt_logprobs
        if piece.text:
            self._pieces.append(piece.text)
            self._text.append(piece.text)
        if piece.finish_at is not None:
            self._engine.cut(self._request.id, piece.finish_at)
        if piece.finish_reason is not None:
            self._finish(piece.finish_reason)

    def _finish(self, reason: str) -> None:
        seed = self._request.params.seed
        assert seed is not None, "the engine was given a seed"
        self.completion = Completion(
            text="".join(self._text),
            token_ids=self._choice.tokens,
            prompt_token_ids=self._request.prompt,
            finish_reason=reason,
            seed=seed,
            exact=self._engine.info.exact,
            statistics=self._choice.statistics,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            drafters=self._drafters,
            offsets=self._offsets,
        )
