"""The routes' view of one model: its engine and tokenizer, running requests, and whether new ones are taken; and what
all models of a server share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from copy import copy
from typing import TypeVar

import msgspec

from foresay.server.engine.generation import MOST_PENDING_TOKENS, Generation, ServedEngine, deadline, unavailable
from foresay.server.engine_process.child import import_tokenizers
from foresay.server.gateway.keys import CONTEXT
from foresay.server.metrics.records import Connections
from foresay.server.metrics.selfcheck import SelfCheck
from foresay.server.metrics.telemetry import Telemetry
from foresay.server.models.residency import Lease
from foresay.server.schemas.errors import EngineFailed, QueueFull, Unavailable, going_away
from foresay.server.settings.config import ServeConfig
from foresay.server.settings.resolved import LATEST, target_directory
from foresay.server.text.choice import Choice
from foresay.server.text.parsers.chat_format import ChatFormat
from foresay.server.text.prompt import RenderedPrompt, Room
from foresay.server.text.tokenizer import SamplingDefaults, Tokenizer, loader_of
from foresay.server.text.warned import Warned, warning
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import EngineInfo

K = TypeVar("K")


class ServerState:
    """draining: no more requests are taken. body_timeout: seconds that a body may take. created: in seconds since 1970.
    reading: held while files are read, since not all libraries for that can be imported by two threads at once.
    on_drain: called when the server shuts down, each for an open WebSocket."""

    def __init__(self, *kept: object) -> None:
        self.draining = False
        self._kept: dict[type, object] = {type(one): one for one in kept}
        self.on_drain: set[Callable[[], None]] = set()
        self.body_timeout = 60.0
        self.connections = Connections()
        self.created = int(time.time())
        self.reading = asyncio.Lock()

    def of(self, kind: type[K]) -> K:
        """What an API keeps for all its connections, by its class; made on first use."""
        kept = self._kept.get(kind)
        if kept is None:
            self._kept[kind] = kept = kind()
        assert isinstance(kept, kind)
        return kept

    def drain(self) -> None:
        self.draining = True
        for drain in list(self.on_drain):
            drain()

    def refusal(self) -> Unavailable | None:
        """Why requests are refused, for any model; None if they are taken."""
        return going_away() if self.draining else None


#: Texts longer than this are tokenized in a thread: a millisecond on the event loop would delay every stream.
INLINE_CHARACTERS = 2000
log = logging.getLogger("foresay.server")


class ModelNames(msgspec.Struct, frozen=True):
    """known: all names; responses use the first. any: any other name is accepted, too."""

    known: tuple[str, ...]
    any: bool = False

    @property
    def own(self) -> str:
        """The name in responses."""
        return self.known[0]

    def has(self, name: str) -> bool:
        """Whether it is one of the names, with or without Ollama's tag."""
        return name.removesuffix(LATEST) in {name.removesuffix(LATEST) for name in self.known}


#: Agents send the same tools with every request: the log repeats a field's warning only after this many seconds.
QUIET_SECONDS = 60.0


class WarningLog:
    """Writes warnings to the log: at most one a minute for each code and field, of unknown fields for all together."""

    def __init__(self) -> None:
        self._logged_at: dict[tuple[str, tuple[str, ...]], float] = {}

    def note(self, warnings: Iterable[Warned]) -> None:
        """Log warnings that were not logged recently."""
        now = time.monotonic()
        for one in warnings:
            ours = one.code != "unknown_field"  # else clients could have it remember any number of names
            about = one.code, tuple(step for step in one.path if ours and isinstance(step, str))
            if now - self._logged_at.get(about, -QUIET_SECONDS) >= QUIET_SECONDS:
                self._logged_at[about] = now
                log.warning("request %s: %s", CONTEXT.get().id or "-", one.message)


class AnswerOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer reports about its origin. id: of the request, without prefix. exact: as in
    :class:`~foresay.server.schemas.shared.Metrics`. waited: seconds for the model. warnings: about the model's name
    and fields that the API does not have.
    """

    id: str
    model: str
    fingerprint: str
    exact: bool
    waited: float = 0.0
    warnings: tuple[Warned, ...] = ()


class Text(msgspec.Struct, frozen=True):
    """Tokenizer and sampling defaults from the checkpoint's directory. chat_format: how the model writes tool calls."""

    tokenizer: Tokenizer
    defaults: SamplingDefaults
    chat_format: ChatFormat = ChatFormat()

    @classmethod
    def load(cls, config: ServeConfig) -> Text:
        """Load it for the target, downloaded first if it is a hub id."""
        directory = target_directory(config)
        import_tokenizers(loader_of(directory))
        tokenizer = Tokenizer.load(directory)
        chat_format = ChatFormat.of(tokenizer, config.tool_parser, config.reasoning_parser)
        if tokenizer.has_template:  # compiled now rather than while the first chat request waits
            with contextlib.suppress(InvalidRequest):
                tokenizer.render([{"role": "user", "content": ""}])
        return cls(tokenizer, SamplingDefaults.read(directory), chat_format)


class Service:
    """What routes use of one model: its settings and names, its engine, and its text (None until the tokenizer is
    loaded).

    server: what it shares with the other models. known_length: the context length, by the files. lease: of the request
    that this is a view for (:meth:`leased`)."""

    #: Seconds between keep-alive comments in an idle stream, and tokens buffered for a slow reader.
    ping_seconds, most_pending_tokens = 15.0, MOST_PENDING_TOKENS

    def __init__(
        self,
        engine: ServedEngine,
        config: ServeConfig,
        names: ModelNames,
        text: Text | None = None,
        server: ServerState | None = None,
    ) -> None:
        self.engine = engine
        self.config, self.names = config, names
        self.text = text
        self.server = server or ServerState()
        self.lease = Lease()
        self.known_length: int | None = None
        self.warned = WarningLog()
        self.telemetry = Telemetry(names.own, engine, connections=self.server.connections)
        self._running: dict[Generation, int] = {}  # with the number of its choices
        self._idle = asyncio.Event()
        self._idle.set()
        self.self_check: SelfCheck | None = None
        if config.self_check:
            counts, taking = self.telemetry.self_check, lambda: self.refusal() is None
            self.self_check = SelfCheck(engine, config.self_check, counts, self._idle, taking)

    def leased(self, lease: Lease) -> Service:
        """A view for the request that holds this lease; a reload meanwhile changes neither its settings nor its
        text."""
        view = copy(self)
        view.lease = lease
        return view

    @property
    def longest(self) -> int | None:
        """The context length, from the engine, else from the files; None if unknown."""
        return self.known_length if self.engine.info is None else self.engine.info.max_model_len

    @property
    def running(self) -> int:
        """Requests that run or wait in the engine."""
        return sum(self._running.values()) + self.telemetry.arriving

    def refusal(self) -> Unavailable | None:
        """Why requests are refused now; None if they are taken."""
        if (draining := self.server.refusal()) is not None:
            return draining
        if self.engine.status.state != "ready":
            return unavailable(self.engine.status)
        if not self.known:
            return Unavailable("Loading model: the tokenizer", "loading")
        return None

    @property
    def known(self) -> bool:
        """Whether a request can be parsed: tokenizer and engine were loaded once."""
        return self.text is not None and self.engine.info is not None

    def opened(self) -> tuple[Text, EngineInfo]:
        """What parsing a request needs; raises :class:`Unavailable` if it is not loaded, or requests are refused."""
        refusal = self.server.refusal() if self.known else self.refusal()
        if refusal is not None:
            raise refusal
        assert self.text is not None, "what is known has its tokenizer"
        assert self.engine.info is not None, "and has said what it is"
        return self.text, self.engine.info

    @property
    def fingerprint(self) -> str:
        """Identifies all that its texts depend on besides the request (:mod:`foresay.server.engine.handover`)."""
        return self.opened()[1].fingerprint

    def origin(self, request_id: str, requested: str | None) -> AnswerOrigin:
        """What an answer reports about its origin. requested: the model that the request names."""
        info, name = self.opened()[1], self.names.own
        known = requested is None or self.names.has(requested)
        warnings = [] if known else [warning("model_renamed", "model", requested=requested, name=name)]
        warnings += [warning("unknown_field", (field,)) for field in CONTEXT.get().unknown]
        return AnswerOrigin(
            id=request_id,
            model=name,
            fingerprint=self.fingerprint,
            exact=info.exact,
            waited=self.lease.waited,
            warnings=tuple(warnings),
        )

    @asynccontextmanager
    async def generation(self, choices: Sequence[Choice]) -> AsyncIterator[Generation]:
        """Run choices; raises :class:`QueueFull`, or what the engine raises.

        All routes pass through here, so the limits of the queue and of time are enforced here.
        """
        requests, count = [choice.request for choice in choices], len(choices)
        self._check_queue(count)
        with self.telemetry.watching(choices) as all_stats:
            meter, over = CONTEXT.get().meter, self.lease.close
            meter.prompt_tokens += sum(len(request.prompt) for request in requests if request.fork_of is None)
            generation = Generation(self.engine, requests, self.most_pending_tokens, meter.wrote, all_stats, over)
            watching = nullcontext() if self.self_check is None else self.self_check.watching(choices)
            with self._present(generation, count), watching, deadline(generation, self.config.request_timeout):
                async with generation:
                    yield generation

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Count a request that waits for the model against the queue limit; raises :class:`QueueFull`."""
        self._check_queue(1)
        self.telemetry.arriving += 1
        try:
            yield
        finally:
            self.telemetry.arriving -= 1

    @contextmanager
    def _present(self, generation: Generation, count: int) -> Iterator[None]:
        """Count a generation's choices as running."""
        self._running[generation] = count
        self._idle.clear()
        try:
            yield
        finally:
            del self._running[generation]
            if not self._running:
                self._idle.set()

    def _check_queue(self, requested: int) -> None:
        """Raise :class:`QueueFull` if ``requested`` more choices can neither run nor wait."""
        config, running = self.config, self.running
        engines = 1 if config.replicas is None else int(config.replicas.rpartition("-")[2])
        most = config.max_seqs * engines + config.max_queue
        if requested > most:
            raise QueueFull(f"This request asks for {requested} choices at once; this server runs {most}", None)
        if running + requested > most:
            raise QueueFull(f"{running} requests are running or waiting already; try again")

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, let running ones finish for ``seconds``, then end them with an error."""
        self.telemetry.draining = True
        self.server.drain()
        for timeout in (seconds, 1.0):
            try:
                async with asyncio.timeout(timeout):
                    await self._idle.wait()
            except TimeoutError:
                for generation in list(self._running):
                    generation.abort(EngineFailed("the server is shutting down"))

    async def encode(
        self,
        prompt: str | RenderedPrompt,
        add_special_tokens: bool,
        spoken: Sequence[int] = (),
        room: Room | None = None,
    ) -> list[int]:
        """Token ids of ``prompt``, made in a thread if it is long. spoken: see :meth:`Tokenizer.encode_after`.

        Raises :class:`~foresay.spec.errors.ContextLengthExceeded` for a prompt that exceeds ``room``.
        """
        tokenizer = self.opened()[0].tokenizer
        rendered = RenderedPrompt(prompt) if isinstance(prompt, str) else prompt
        if len(rendered.marked) <= INLINE_CHARACTERS:
            return tokenizer.encode_after(spoken, rendered, add_special_tokens, room)
        return await asyncio.to_thread(tokenizer.encode_after, spoken, rendered, add_special_tokens, room)
