"""What the routes share: the engine, the tokenizer, who is running, and whether new requests are taken."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Protocol

import msgspec

from server.answers.base import Origin
from server.bounds import largest_body
from server.choice import Choice
from server.config import ServeConfig
from server.control import Rendered
from server.engine_status import EngineStatus, unavailable
from server.errors import EngineFailed, ModelNotFound, QueueFull, TooManyWaiting, Unavailable
from server.gateway.admission import admitted
from server.gateway.deadlines import deadlines
from server.gateway.pace import Pace
from server.gateway.share import Shared
from server.generation import MOST_PENDING_TOKENS, Generation, TokenEngine
from server.names import Names
from server.parsers.dialect import Dialect
from server.responses.state import Responses
from server.room import Room
from server.selfcheck.check import SelfCheck, Unpicked
from server.telemetry.exposition import Exposition
from server.telemetry.telemetry import Telemetry
from server.text import SamplingDefaults, Tokenizer
from server.warned import WarningLog, renamed
from server.wire.shared import MetricsLevel
from spec.request import EngineInfo

#: Bodies and messages of the largest size whose bytes may be held at once, by all callers together.
MOST_BODIES = 64
#: Texts longer than this are tokenized in a thread: a millisecond on the event loop would delay every stream.
INLINE_CHARACTERS = 2000


class ServedEngine(TokenEngine, Protocol):
    """A token engine that says how it is. info: None until it was ready once."""

    @property
    def status(self) -> EngineStatus:
        """What it is doing."""
        ...

    @property
    def info(self) -> EngineInfo | None:
        """What is running."""
        ...

    def keep_warm(self, tokens: list[int], salt: str) -> None:
        """Let the KV of this text be the last to make room."""
        ...


class ServiceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How clients are treated.

    model: the name they use. aliases: others for the same. any_model: whatever name they use is served. strict_limits:
    more output than there is room for is refused, not clamped. most_running: requests running and waiting. seed: of
    requests that bring none. ping_seconds: between the comments in a stream that has nothing to say. config: what the
    server was started with.
    max_output_tokens, max_body_bytes, request_timeout, first_token_timeout, self_check: the settings of these names.
    """

    model: str
    aliases: tuple[str, ...] = ()
    any_model: bool = False
    strict_limits: bool = False
    most_running: int = 260
    seed: int | None = None
    metrics_level: MetricsLevel = "summary"
    ping_seconds: float = 15.0
    most_pending_tokens: int = MOST_PENDING_TOKENS
    config: ServeConfig | None = None
    max_output_tokens: int | None = None
    max_body_bytes: int | None = None
    request_timeout: float | None = None
    first_token_timeout: float | None = None
    self_check: float = 0.0

    @property
    def names(self) -> Names:
        """What the model is called."""
        return Names((self.model, *self.aliases), self.any_model)

    @classmethod
    def of(cls, config: ServeConfig, names: Sequence[str]) -> ServiceOptions:
        """As the settings say. names: of the model, the first one for answers."""
        return cls(
            model=names[0],
            aliases=tuple(names[1:]),
            any_model=config.any_model_name,
            strict_limits=config.strict_limits,
            most_running=config.max_seqs + config.max_queue,
            seed=config.seed,
            config=config,
            max_output_tokens=config.max_output_tokens,
            max_body_bytes=config.max_body_bytes,
            request_timeout=config.request_timeout,
            first_token_timeout=config.first_token_timeout,
            self_check=config.self_check,
        )


class Text(msgspec.Struct, frozen=True):
    """What the checkpoint's directory says about text and sampling. dialect: how the model writes tool calls."""

    tokenizer: Tokenizer
    defaults: SamplingDefaults
    dialect: Dialect = Dialect()


class Service:
    """The state behind the routes. ``text`` is None until the tokenizer is loaded."""

    def __init__(self, engine: ServedEngine, options: ServiceOptions, text: Text | None = None) -> None:
        self.engine = engine
        self.options = options
        self.text = text
        self.draining = False
        self.warned = WarningLog()
        self.responses = Responses()
        self.created = int(time.time())
        self.pace = Pace()
        self.telemetry = Telemetry(options.model, engine)
        self.exposition = Exposition(self.telemetry)
        self.places = Shared(options.most_running)
        self.bodies = Shared(MOST_BODIES * self.largest_body)  # until the context is known
        self._running: set[Generation] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        counts = self.telemetry.self_check
        self.self_check = SelfCheck(engine, options.self_check, counts, self._idle, lambda: self.refusal() is None)

    @property
    def largest_body(self) -> int:
        """Bytes that a body, or a message on a WebSocket, may have."""
        info = self.engine.info
        return self.options.max_body_bytes or largest_body(0 if info is None else info.max_model_len)

    @property
    def running(self) -> int:
        """Requests that run or wait in the engine."""
        return self.places.used

    def refusal(self) -> Unavailable | None:
        """Why no request is taken now; None if they are."""
        if self.draining:
            return Unavailable("The server is shutting down", "draining")
        if self.engine.status.state != "ready":
            return unavailable(self.engine.status)
        if self.text is None or self.engine.info is None:
            return Unavailable("Loading model: the tokenizer", "loading")
        return None

    def opened(self) -> tuple[Text, EngineInfo]:
        """What a request needs to be understood; raises :class:`Unavailable` if none is taken now."""
        refusal = self.refusal()
        if refusal is not None:
            raise refusal
        assert self.text is not None, "a service that takes requests has its tokenizer"
        assert self.engine.info is not None, "a ready engine has said what it is"
        return self.text, self.engine.info

    def check_model(self, name: str | None) -> None:
        """Raise unless the request means the model served here."""
        names = self.options.names
        if name is not None and not names.mean(name):
            known = " or ".join(map(repr, names.known))
            raise ModelNotFound(f"The model {name!r} was not found; this server has {known}")

    def origin(self, request_id: str, info: EngineInfo, asked: str | None) -> Origin:
        """What the answer says about where it comes from. asked: the model that the request names."""
        made_by = f"{info.target} {info.dtype} {info.device} {info.exact}"
        fingerprint = f"fs_{zlib.crc32(made_by.encode()):08x}"
        name = self.options.model
        other = asked is not None and not self.options.names.has(asked)
        warnings = (renamed(asked, name),) if other and asked is not None else ()
        return Origin(id=request_id, model=name, fingerprint=fingerprint, exact=info.exact, warnings=warnings)

    @asynccontextmanager
    async def generation(self, choices: Sequence[Choice], keeps_text: bool = True) -> AsyncIterator[Generation]:
        """Run choices; :class:`QueueFull` if there is no room, and whatever the caller's limits or the engine refuse.

        Every door comes through here, so limits and time limits are kept here. keeps_text: whether their text may be
        kept, for the dashboard, where their key can read it again, and for the self-check.
        """
        requests, count = [choice.request for choice in choices], len(choices)
        words = {choice.request.id: choice.words for choice in choices}
        with (
            self.places.holding(count, lambda: self._queue_full(count)),
            admitted(requests) as spend,
            self.telemetry.watching(requests, keeps_text, words) as ledgers,
        ):
            engine = self.self_check if keeps_text else Unpicked(self.self_check)
            generation = Generation(engine, requests, self.options.most_pending_tokens, spend, ledgers)
            with self._present(generation), self._deadlines(generation):
                async with generation:
                    yield generation

    @contextmanager
    def _present(self, generation: Generation) -> Iterator[None]:
        """Count a generation among those that run."""
        began = time.monotonic()
        self._running.add(generation)
        self._idle.clear()
        try:
            yield
        finally:
            self._running.remove(generation)
            self.pace.finished(time.monotonic() - began)
            if not self._running:
                self._idle.set()

    def crowded(self) -> TooManyWaiting:
        """Why no more bytes can be taken from the caller now."""
        held = f"{self.bodies.used:,} bytes of bodies and messages are held already, {self.bodies.own:,} of them yours"
        return TooManyWaiting(f"{held}; try again when some of these requests are answered")

    def _queue_full(self, asked: int) -> QueueFull:
        most = self.options.most_running
        if asked > most:
            return QueueFull(f"This request asks for {asked} choices at once; this server runs {most}", None)
        message = f"{self.running} requests are running or waiting already, {self.places.own} of them yours; try again"
        return QueueFull(message, self.pace.retry_after(len(self._running)))

    def _deadlines(self, generation: Generation) -> AbstractContextManager[None]:
        first, whole = self.options.first_token_timeout, self.options.request_timeout
        return deadlines(generation, first, whole, lambda: self.pace.retry_after(len(self._running)))

    async def drain(self, seconds: float) -> None:
        """Take no more requests, let the running ones finish for ``seconds``, then end them with an error."""
        self.draining = self.telemetry.draining = True
        self.responses.drain()
        for patience in (seconds, 1.0):
            try:
                async with asyncio.timeout(patience):
                    await self._idle.wait()
            except TimeoutError:
                for generation in list(self._running):
                    generation.abort(EngineFailed("the server is shutting down"))

    async def encode(
        self,
        prompt: str | Rendered,
        add_special_tokens: bool,
        spoken: Sequence[int] = (),
        room: Room | None = None,
    ) -> list[int]:
        """Token ids of ``prompt``, made in a thread if it is long. spoken: see :meth:`Tokenizer.encode_after`.

        Raises :class:`~spec.errors.ContextLengthExceeded` for a prompt that ``room`` does not hold; one whose length
        alone tells is not read.
        """
        tokenizer = self.opened()[0].tokenizer
        rendered = Rendered(prompt) if isinstance(prompt, str) else prompt
        if room is not None:
            room.check(tokenizer.fewest(rendered.text), about="at least ")
        if len(rendered.marked) <= INLINE_CHARACTERS:
            return tokenizer.encode_after(spoken, rendered, add_special_tokens, room)
        return await asyncio.to_thread(tokenizer.encode_after, spoken, rendered, add_special_tokens, room)
