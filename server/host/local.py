"""The engine in this process with text around it: what ``from foresay import Engine`` gives and the commands use.

One thread steps the engine. Several streams may be open at once; whoever asks for text steps for all of them.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import count
from typing import Any, Self, overload

import msgspec

from foresay.server.engine.build import build_engine
from foresay.server.engine.observers import EngineObservers
from foresay.server.host.arguments import is_one, of_arguments, sampling_of
from foresay.server.host.completion import Completion, drafters_of
from foresay.server.schemas.shared import StructuredOutputs
from foresay.server.schemas.tokens import StepProvenance, TokenProvenance
from foresay.server.settings.config import USUAL_TOKENS, EngineConfig, SamplingConfig
from foresay.server.settings.load import load
from foresay.server.settings.resolved import target_directory
from foresay.server.text.choice import Choice, TextOptions
from foresay.server.text.grammars.compiler import GrammarCompiler
from foresay.server.text.grammars.fields import of_outputs, refuse_lengths
from foresay.server.text.options import checked_count, forked, typed
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.errors import ForesayError, InvalidRequest
from foresay.spec.request import Delta, EngineInfo, Grammar, Request, TokenLogprobs
from foresay.spec.sampling import SamplingParams
from foresay.spec.trace import ShadowReport

Prompt = str | Sequence[int]
#: What an output must match; a mapping has the fields of the other.
Structured = StructuredOutputs | Mapping[str, Any]
#: Told what is being loaded, and where known how much of it (0 to 1).
Progress = Callable[..., None]


class TextStream:
    """The text of one request, piece by piece as it is written; ``completion`` once it is over.

    Closing it early, or leaving its ``with`` block, cancels the request. steps, tokens: where the text comes from so
    far, if that was asked for (``provenance``).
    """

    def __init__(self, engine: Engine, request: Request, stop: Sequence[str], provenance: bool = False) -> None:
        self.completion: Completion | None = None
        self.steps: list[StepProvenance] = []
        self.tokens: list[TokenProvenance] = []
        self._engine = engine
        self._request = request
        options = TextOptions(stop=tuple(stop), by_token=provenance, provenance=provenance)
        self._choice = Choice(request, engine.tokenizer, options, engine.info.eos_token_ids, request.prompt)
        self._unwanted = False
        self._pieces: deque[str] = deque()
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._offsets: list[int] = []
        self._drafters: list[str] = []
        self._logprobs: list[TokenLogprobs] | None = None if request.params.logprobs is None else []
        self._error: ForesayError | None = None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None

    def __repr__(self) -> str:
        return f"<TextStream: {len(self._tokens)} tokens{' so far' if self.completion is None else ''}>"

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not self._pieces:
            if self.completion is not None:
                raise StopIteration
            self._step_or_close()
        return self._pieces.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the request if it still runs; what was written so far becomes the completion."""
        if self.completion is None:
            self._engine.forget(self._request.id)
            self._finish("cancelled")

    def close_soon(self) -> None:
        """Close it once the step that runs is over: for signal handlers, which must not change an engine that steps."""
        self._unwanted = True

    def result(self) -> Completion:
        """Run to the end and return the completion."""
        while self.completion is None:
            self._step_or_close()
        return self.completion

    def _step_or_close(self) -> None:
        if self._unwanted:
            self.close()
        else:
            self._step()

    def _step(self) -> None:
        """One step for all; raises what ended this request, and nothing that ended another."""
        if self._error is None:
            self._engine.step()
        if self._error is not None:
            raise self._error

    def take(self, delta: Delta) -> None:
        """Turn the tokens of one step into text; called by the engine that steps."""
        if delta.finish_reason == "error":
            message = delta.error or "the engine gave up on this request"
            blamed = delta.error_param is not None
            self._error = InvalidRequest(delta.error_param or "", message) if blamed else ForesayError(message)
            return
        piece = self._choice.take(delta)
        self._tokens += piece.token_ids
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
            token_ids=self._tokens,
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


class Engine:
    """A target, a drafter and a KV cache in this process. Not to be shared between threads.

    target: a short name such as ``"smollm2"`` (``foresay models`` lists them), a hub id, a directory or a GGUF file;
    ``"bundled"`` is the toy. draft: ``"auto"``, ``"none"``, ``"ngram"``, ``"suffix"``, a hub id, a directory or a GGUF
    file.
    settings: any other field of :class:`~foresay.server.settings.config.EngineConfig`, such as ``draft_tokens=6``.
    progress: called with what is being loaded and, where known, how much of it (0 to 1).
    Raises :class:`~foresay.spec.errors.ConfigurationError` for settings or models that do not fit together.
    """

    def __init__(
        self, target: str = "bundled", draft: str = "auto", *, progress: Progress | None = None, **settings: Any
    ) -> None:
        given = {"target": target, "draft": draft, **settings}
        try:
            self._start(load(EngineConfig, given, {}, given_as="argument").config, progress)
        except ForesayError as error:
            error.args = (of_arguments(str(error)),)
            raise

    @classmethod
    def from_config(cls, config: EngineConfig, progress: Progress | None = None) -> Self:
        """The engine that ``config`` describes."""
        engine = cls.__new__(cls)
        engine._start(config, progress)
        return engine

    def _start(self, config: EngineConfig, progress: Progress | None) -> None:
        self._directory = target_directory(config)
        self.tokenizer = Tokenizer.load(self._directory)
        self._watchers = EngineObservers.of(config)
        try:
            self._engine = build_engine(config, progress, self._watchers.observers)
        except BaseException:
            self._watchers.close()
            raise
        self._watchers.started(self._engine)
        self._seed = config.seed
        #: For requests that do not say how many tokens they want; None: as many as there is room for.
        self.usual_tokens: int | None = None
        if isinstance(config, SamplingConfig) and config.max_tokens is None:
            self.usual_tokens = USUAL_TOKENS
        self._streams: dict[str, TextStream] = {}
        self._numbers = count()
        self._closed = False

    def __repr__(self) -> str:
        info, closed = self.info, ", closed" if self._closed else ""
        return f"<Engine {info.target}, drafted by {info.draft or info.drafter}, {info.dtype} on {info.device}{closed}>"

    @property
    def info(self) -> EngineInfo:
        """What was loaded, how much it holds, and whether it is exact."""
        return self._engine.info

    @property
    def warnings(self) -> list[str]:
        """What whoever started it should know, a sentence each."""
        length, told = self.info.max_model_len, list(self.info.warnings)
        if self.usual_tokens is not None and length <= self.usual_tokens:
            told.append(f"answers are limited to what the context of {length} tokens leaves")
        return told

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what still runs, and take no more. The memory goes with the last reference to the engine."""
        self._closed = True
        for stream in list(self._streams.values()):
            stream.close()
        self._engine.tell()
        self._watchers.close()

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
        """Write on from a prompt (text or token ids), or from several at once; a list gives a list.

        n: so many texts for each prompt, as a list; the seed of the first gives all of them again. stop: texts that end
        the output, themselves left out. structured_outputs: what the output must match, such as ``{"json": schema}``,
        ``{"regex": ...}``, ``{"choice": [...]}``, ``{"grammar": ...}``. sampling: fields of :class:`SamplingParams`, on
        top of ``params``; bad_words may be texts. Raises :class:`~foresay.spec.errors.InvalidRequest` naming the field
        that is wrong.
        """
        given = typed(prompt, str | list[Any], "prompt")
        one = is_one(given)
        prompts = [self._ids(each) for each in ([given] if one else given)]
        with ExitStack() as opened:  # none is left to write on for nobody
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
        """The model's answer to ``[{"role": "user", "content": "..."}, ...]``, or to the text of one such message, by
        its chat template. given: as to :meth:`stream_chat`."""
        return self.stream_chat(messages, params, **given).result()

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
        keep where each token comes from."""
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        prompt = self.tokenizer.render(typed(messages, list[dict[str, Any]], "messages"))
        ids = self.tokenizer.encode_after((), prompt, add_special_tokens=False)
        return self._submit(ids, params, stop, structured_outputs, sampling, None, speculate, provenance)[0]

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        compiler = GrammarCompiler.load(self._directory, self.info.vocab_size, self.info.eos_token_ids)
        if compiler is None:
            raise InvalidRequest(
                "structured_outputs", f"{self._directory} has no tokenizer.json, which structured outputs need"
            )
        return compiler

    def step(self) -> None:
        """One step of the engine for every open stream."""
        self._refuse_if_closed()
        for delta in self._engine.step():
            stream = self._streams.get(delta.id)
            if stream is not None:
                if delta.finish_reason is not None:
                    del self._streams[delta.id]
                stream.take(delta)
        self._engine.tell()

    def shadowed(self) -> list[ShadowReport]:
        """What the drafter of ``shadow`` would have done for the requests that ended since the last call."""
        return [] if self._watchers.shadow is None else self._watchers.shadow.reports()

    def cut(self, id: str, at_token: int) -> None:
        """The text of a request ended in its output token number ``at_token``."""
        self._engine.finish(id, at_token)

    def forget(self, id: str) -> None:
        """Cancel a request and free what it holds."""
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
            raise InvalidRequest("stop", "stop: a stop string must not be empty")
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidRequest("params", f"params must be SamplingParams, got {type(params).__name__}")
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
        """Begin a request as it is; its id must not be that of one that runs."""
        constraint = None if request.grammar is None else self._compiler.compile(request.grammar, request.salt)
        self._engine.add(request, constraint)
        stream = self._streams[request.id] = TextStream(self, request, stop, provenance)
        return stream

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ForesayError("this engine is closed: open another one, with Engine(...)")

    def _ids(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        ids: list[int] = typed(prompt, list[int], "prompt")
        return ids


def _grammar(structured: Structured, params: SamplingParams) -> Grammar | None:
    """What the output must match."""
    if not isinstance(structured, StructuredOutputs):
        try:
            fields = typed(structured, dict[str, Any], "structured_outputs")
            structured = msgspec.convert(fields, StructuredOutputs, strict=True)
        except msgspec.ValidationError as error:
            raise InvalidRequest("structured_outputs", f"structured_outputs: {error}") from None
    grammar = of_outputs(structured)
    if grammar is not None:
        refuse_lengths(params, grammar.param)
    return grammar
