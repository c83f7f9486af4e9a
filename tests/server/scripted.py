"""A token engine whose tokens are written down beforehand, at the seam below HTTP, and a client for its server."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from foresay.server.engine.generation import EngineStatus, ServedEngine, Sink
from foresay.server.http.app import create_app
from foresay.server.models.service import Service, Text
from foresay.server.schemas.errors import EngineFailed
from foresay.server.text.parsers.chat_format import ChatFormat
from foresay.server.text.tokenizer import SamplingDefaults, Tokenizer
from foresay.spec.request import Delta, EngineInfo, FinishReason, Footprint, Origin, Request, RequestEnd, TokenLogprobs
from foresay.spec.trace import StepTrace
from tests.replicas.scripted import asked
from tests.server.staying import alone, service_of

END = 0
INFO = EngineInfo(
    target="toy",
    drafter="script",
    drafter_reason="",
    dtype="float32",
    dtype_reason="",
    device="cpu",
    exact=True,
    exact_reason="",
    kv_tokens=4096,
    page_size=16,
    max_model_len=512,
    max_seqs=4,
    draft_shape=(1, 1, 1),
    drafters=("draft_model", "ngram"),
    chosen=True,
    vocab_size=330,
    eos_token_ids=(END,),
    architecture="LlamaForCausalLM",
    parameters=1_234_567,
    weight_bytes=4_938_268,
    footprint=Footprint(9_000_000, 1 << 34, "cpu"),
)


#: One of a request alone that wrote a token and drafted nothing.
STEP = StepTrace(number=1, rows=1, sequences=1, prefill_rows=0, drafted=0, accepted=0, emitted=1, seconds={})
#: Of every step, by phase.
SECONDS = {"propose": 0.0005, "forward": 0.002}


class ScriptedEngine:
    """Says the same tokens to every request, ``run`` of them per step, a step every ``pause`` seconds.

    Ends as the real engine does: at the end token, at max_tokens, or where the server found a stop string.
    fail_after: tokens after which a request breaks. hold_after: tokens after which it writes nothing more until it is
    cancelled. resumed: where it says that it went on for another engine.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        run: int = 1,
        pause: float = 0.0,
        fail_after: int | None = None,
        hold_after: float = math.inf,
    ) -> None:
        self.status = EngineStatus("ready")
        self.info: EngineInfo | None = INFO
        self.tokens, self.run, self.pause, self.fail_after = list(tokens), run, pause, fail_after
        self.hold_after = hold_after
        self.requests: list[Request] = []
        self.emitted = self.steps = 0
        self.cancelled: list[str] = []
        self.refusal: Exception | None = None
        self.resumed: list[int] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._finish: dict[str, int] = {}

    def add(self, request: Request, sink: Sink) -> None:
        self.requests.append(request)
        if self.refusal is not None:
            sink.fail(self.refusal)
            return
        self._tasks[request.id] = asyncio.create_task(self._say(request, sink))

    def cancel(self, id: str) -> None:
        task = self._tasks.pop(id, None)
        if task is not None:
            self.cancelled.append(id)
            task.cancel()

    def finish(self, id: str, at_token: int) -> None:
        self._finish[id] = at_token

    async def _say(self, request: Request, sink: Sink) -> None:
        begun = time.perf_counter()
        limit = request.params.max_tokens or 200
        emitted = 0
        while True:
            await (asyncio.sleep(self.pause) if emitted < self.hold_after else asyncio.Event().wait())
            if self.fail_after is not None and emitted >= self.fail_after:
                self._tasks.pop(request.id)
                sink.fail(EngineFailed("the script breaks here"))
                return
            before, origin = emitted, None
            run, reason, stop_token = self._next_run(request, emitted, limit)
            if reason is None or run:
                emitted += len(run)
                origin = self.origin(before, run)
            self.emitted += len(run)
            if reason is not None:
                self._tasks.pop(request.id)
            sink.put(
                Delta(
                    id=request.id,
                    tokens=run,
                    finish_reason=reason,
                    stop_token=stop_token,
                    seed=request.params.seed or 7,
                    cached_tokens=3,
                    logprobs=logprobs_of(request, run, before),
                    prompt_logprobs=None if before else prompt_logprobs_of(request),
                    elapsed=time.perf_counter() - begun,
                    ending=RequestEnd(self.run - 1, resumed=list(self.resumed)) if reason else None,
                    origin=origin,
                )
            )
            if reason is not None:
                return

    def origin(self, emitted: int, run: list[int]) -> Origin:
        """Where a run comes from: a chain was drafted, and accepted but for the last token of the run."""
        drafted = self.run - 1 if emitted or len(run) > 1 else 0
        self.steps += 1
        return Origin(self.steps, "script" if drafted else "", [*range(-1, drafted)], 0, [*range(1, len(run))], SECONDS)

    def script_of(self, request: Request) -> Sequence[int]:
        """What to say to this request, over and over."""
        return self.tokens

    def run_length(self, request: Request, emitted: int) -> int:
        """The tokens of the step after ``emitted`` tokens."""
        return self.run if emitted else 1

    def _next_run(
        self, request: Request, emitted: int, limit: int
    ) -> tuple[list[int], FinishReason | None, int | None]:
        if request.id in self._finish:
            return [], "stop", None
        run: list[int] = []
        script = self.script_of(request)
        while len(run) < self.run_length(request, emitted):
            token = script[(emitted + len(run)) % len(script)]
            run.append(token)
            if (token == END and not request.params.ignore_eos) or token in request.params.stop_token_ids:
                return run, "stop", token
            if emitted + len(run) >= limit:
                return run, "length", None
        return run, None, None


def logprobs_of(request: Request, run: list[int], emitted: int) -> list[TokenLogprobs] | None:
    """A made-up entry for each token, from which it and its position can be read."""
    count = request.params.logprobs
    return None if count is None else [entry(token, emitted + place, count) for place, token in enumerate(run)]


def prompt_logprobs_of(request: Request) -> list[TokenLogprobs | None] | None:
    """The same for the prompt; forks have none."""
    count = request.params.prompt_logprobs
    if count is None or request.fork_of is not None:
        return None
    return [None, *(entry(token, place, count) for place, token in enumerate(request.prompt[1:], start=1))]


def entry(token: int, place: int, count: int) -> TokenLogprobs:
    """``count`` likeliest tokens, the token itself the second of them."""
    top = [(token if rank == 1 else (token + 7 + rank) % INFO.vocab_size, -place - rank / 100) for rank in range(count)]
    return TokenLogprobs(token, -place - 0.01, top)


@asynccontextmanager
async def served(
    engine: ScriptedEngine | ServedEngine,
    tokenizer: Tokenizer,
    change: Callable[[Service], None] = lambda service: None,
    defaults: SamplingDefaults | None = None,
    **options: Any,
) -> AsyncIterator[TestClient]:
    """A client of a server around ``engine``."""
    text = Text(tokenizer, defaults or SamplingDefaults(), ChatFormat.of(tokenizer))
    async with asked(engine) as asking:
        service = service_of(asking, text, **options)
        change(service)
        server = TestServer(create_app(alone(service)))
        await server.start_server(auto_decompress=False)
        async with TestClient(server) as client:
            yield client
