"""An engine in this process, from text to text: what ``from foresay import Engine`` gives and the commands use.

Several streams may be open at once; reading any of them steps all of them. A step is whole: other threads wait for it,
and so does an interrupt.
"""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import count
from typing import Any, Self, overload

import msgspec

from foresay.server.engine.build import build_engine
from foresay.server.engine.costs import Costs
from foresay.server.engine.device import LoadProgress
from foresay.server.engine_process.text_stream import Completion, TextStream
from foresay.server.schemas.shared import StructuredOutputs
from foresay.server.settings.config import USUAL_TOKENS, EngineConfig, SamplingConfig
from foresay.server.settings.fields import nearest
from foresay.server.settings.load import load
from foresay.server.settings.resolved import check_names, target_directory
from foresay.server.text.grammars.compiler import GrammarCompiler
from foresay.server.text.grammars.fields import of_outputs, refuse_lengths
from foresay.server.text.options import checked_count, forked, spelled_words, typed
from foresay.server.text.tokenizer import Tokenizer, tokenizer_file
from foresay.spec.errors import ForesayError, InvalidRequest
from foresay.spec.request import EngineInfo, Grammar, Request
from foresay.spec.sampling import SamplingParams

FIELDS = SamplingParams.__struct_fields__
#: Further keyword arguments of ``generate``.
OTHER_ARGUMENTS = ("n", "stop", "structured_outputs")


def sampling_of(params: SamplingParams | None, fields: Mapping[str, Any], tokenizer: Tokenizer) -> SamplingParams:
    """``params`` updated with ``fields``, types checked; bad words given as text become token ids."""
    for name in fields:
        if name not in FIELDS:
            raise InvalidRequest(name, f" is not a sampling field{nearest(name, {*FIELDS, *OTHER_ARGUMENTS} - {name})}")
    params = msgspec.structs.replace(params or SamplingParams(), **_spelled(fields, tokenizer))
    return SamplingParams(
        **{
            field.name: typed(getattr(params, field.name), field.type, field.name)
            for field in msgspec.structs.fields(SamplingParams)
        }
    )


def _spelled(fields: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    words = typed(fields.get("bad_words", ()), list[str | list[int]], "bad_words")
    texts = [word for word in words if isinstance(word, str)]
    if not texts:
        return dict(fields)
    ids = tuple(tuple(word) for word in words if not isinstance(word, str))
    return {**fields, "bad_words": ids + spelled_words(texts, tokenizer)}


def is_one(prompt: str | list[Any]) -> bool:
    """Whether this is a single prompt: text, or token ids."""
    return isinstance(prompt, str) or any(not isinstance(entry, str | list | tuple) for entry in prompt)


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
    def crowded(self) -> float:
        """Share of recent runnable time that the engine's threads waited for a core."""
        return 0.0 if self._engine.trace is None else self._engine.trace.crowded

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

    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = ..., *, n: None = ..., **given: Any
    ) -> Completion: ...

    @overload
    def generate(
        self, prompt: Sequence[Prompt], params: SamplingParams | None = ..., *, n: None = ..., **given: Any
    ) -> list[Completion]: ...

    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = ..., *, n: int, **given: Any
    ) -> list[Completion]: ...

    @overload
    def generate(
        self, prompt: Sequence[Prompt], params: SamplingParams | None = ..., *, n: int, **given: Any
    ) -> list[list[Completion]]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        n: int | None = None,
        stop: Sequence[str] = (),
        structured_outputs: Structured | None = None,
        **sampling: Any,
    ) -> Completion | list[Completion] | list[list[Completion]]:
        """Continue a prompt (text or token ids), or several at once; a list gives a list.

        n: number of texts for each prompt, as a list; the seed of the first reproduces all of them. stop: strings that
        end the output, not included in it. structured_outputs: what the output must match, such as ``{"json":
        schema}``, ``{"regex": ...}``, ``{"choice": [...]}``, ``{"grammar": ...}``. sampling: fields of
        :class:`SamplingParams` that override ``params``; bad_words may be texts. Raises
        :class:`~foresay.spec.errors.InvalidRequest` naming the wrong field.
        """
        given = typed(prompt, str | list[Any], "prompt")
        one = is_one(given)
        prompts = [self._ids(each) for each in ([given] if one else given)]
        with ExitStack() as opened:  # on an error, no stream is left running
            groups = [
                [
                    opened.enter_context(each)
                    for each in self._submit(ids, params, stop, structured_outputs, sampling, n)
                ]
                for ids in prompts
            ]
            several = [[stream.result() for stream in group] for group in groups]
        if n is None:
            one_each = [completions[0] for completions in several]
            return one_each[0] if one else one_each
        return several[0] if one else several

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        structured_outputs: Structured | None = None,
        **sampling: Any,
    ) -> TextStream:
        """Like :meth:`generate` for one prompt, but an iterator of pieces of text."""
        return self._submit(self._ids(prompt), params, stop, structured_outputs, sampling)[0]

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
        given: list[dict[str, Any]] = typed(messages, list[dict[str, Any]], "messages")
        for index, message in enumerate(given):
            if not isinstance(message.get("content", ""), str | None):
                raise InvalidRequest(f"messages[{index}].content", ": expected text")
        prompt = self.tokenizer.render(given)
        ids = self.tokenizer.encode_after((), prompt, add_special_tokens=False)
        return self._submit(ids, params, stop, structured_outputs, sampling, None, speculate, provenance)[0]

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
        n: int | None = None,
        speculate: bool = True,
        provenance: bool = False,
    ) -> list[TextStream]:
        self._refuse_if_closed()
        n = checked_count(typed(1 if n is None else n, int, "n"))
        stop = typed((stop,) if isinstance(stop, str) else stop, tuple[str, ...], "stop")
        if "" in stop:
            raise InvalidRequest("stop", ": a stop string must not be empty")
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidRequest("params", f" must be SamplingParams, got {type(params).__name__}")
        params = sampling_of(params, sampling, self.tokenizer)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(32) if self._seed is None else self._seed)
        if params.max_tokens is None and self.usual_tokens is not None:
            room = max(1, self.info.max_model_len - len(prompt))
            params = msgspec.structs.replace(params, max_tokens=min(self.usual_tokens, room))
        grammar = None if structured is None else _grammar(structured, params)
        id = str(next(self._numbers))
        request = Request(id=id, prompt=prompt, params=params, grammar=grammar, speculate=speculate)
        return [self.run(one, stop, provenance) for one in forked(request, n)]

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

    def _ids(self, prompt: object) -> list[int]:
        given: str | list[int] = typed(prompt, str | list[int], "prompt")
        return self.tokenizer.encode(given) if isinstance(given, str) else given


def _grammar(structured: Structured, params: SamplingParams) -> Grammar | None:
    """What the output must match."""
    if not isinstance(structured, StructuredOutputs):
        try:
            fields = typed(structured, dict[str, Any], "structured_outputs")
            structured = msgspec.convert(fields, StructuredOutputs, strict=True)
        except msgspec.ValidationError as error:
            raise InvalidRequest("structured_outputs", f": {error}") from None
    grammar = of_outputs(structured)
    if grammar is not None:
        refuse_lengths(params, grammar.param)
    return grammar
