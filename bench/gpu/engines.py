"""Real engines around models made on the device: whoever drafts, captured or op by op, one request or several."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from bench.gpu import heads
from bench.gpu.device import Device
from bench.gpu.models import BUNDLED, inflated, paged
from bench.gpu.shapes import EagleShape, ModelShape
from foresay.drafters.draft_model import DraftModelDrafter
from foresay.drafters.eagle import EagleDrafter
from foresay.drafters.medusa import MedusaDrafter
from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.proposer import Drafts, on_device
from foresay.kvpaging import PagePool
from foresay.spec.budget import CostModel
from foresay.spec.engine import Engine
from foresay.spec.names import DRAFT_MODEL, EAGLE3, MEDUSA, NGRAM, NONE
from foresay.spec.protocols import Drafter
from foresay.spec.request import EngineInfo, Request
from foresay.spec.sampling import SamplingParams
from foresay.spec.scheduler import Scheduler
from foresay.spec.step import PartsRunner
from foresay.spec.trace import Statistics
from foresay.spec.tree import ROOT_ONLY, TreeShape
from foresay.verifier.graphs.buckets import MakeProposer, buckets, passes
from foresay.verifier.graphs.capture import Capture, CudaGraphs, Direct
from foresay.verifier.graphs.runner import WholeRunner
from foresay.verifier.graphs.step import Drawing, sampled_ids
from foresay.verifier.paged_model import PagedModel

PAGE = 16
_numbers = count()


@dataclass(slots=True)
class Bench:
    """A target made on the device, and the drafters that go with it, made when first asked for. tokens: of KV."""

    device: Device
    shape: ModelShape
    draft: ModelShape
    eagle: EagleShape
    positions: int
    tokens: int
    target: PagedModel = field(init=False)
    _drafters: dict[str, Drafter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pool = PagePool(-(-self.tokens // PAGE) + 1, PAGE)
        _, decoder = inflated(self.device, self.shape, BUNDLED / "target", self.positions)
        self.target = paged(pool, decoder, self.device)

    @property
    def pool(self) -> PagePool:
        """The pages that target and drafters share."""
        return self.target.store.pool

    def drafter(self, name: str) -> Drafter | None:
        """``none``, ``ngram``; ``draft_model``, ``medusa``, ``eagle3``, the bundled ones; or ``random``, a head that
        knows nothing. Raises KeyError for others."""
        if name == NONE:
            return None
        if name not in self._drafters:
            self._drafters[name] = _MAKERS[name](self)
        return self._drafters[name]

    def engine(
        self, name: str, tree: TreeShape, graphs: bool, pages: int, max_seqs: int = 1, sample: Drawing = sampled_ids
    ) -> Engine:
        """An engine whose steps come from graphs (on a CPU: called as they are), or run op by op.

        pages: of the longest table that is captured.
        """
        drafter = self.drafter(name)
        shape = ROOT_ONLY if drafter is None else tree
        parts = PartsRunner(self.target, drafter)
        runner: WholeRunner | PartsRunner = parts
        whole = graphs and on_device(drafter) is drafter
        capture: Capture = CudaGraphs() if self.device.cuda else Direct
        tokens, page_size = pages * self.pool.page_size, self.pool.page_size
        for _ in self.target.capture(
            None, passes(max_seqs, tokens, page_size) if graphs and not whole else [], capture
        ):
            pass
        if whole:
            sizes = [size for size in (1, 2, 4) if size < 2 * max_seqs]
            made = buckets(self.target, self._proposers(drafter, shape), capture, (sizes, [pages]), sample)
            runner = WholeRunner(parts, dict(made))
        cost = CostModel((2, 64, 256), (1.0, 1.1, 2.0))  # only shares out the rows of prompts, which are not timed here
        return Engine(
            info=self._info(name, shape, max_seqs),
            pool=self.pool,
            prefix=None,
            verifier=self.target,
            drafter=drafter,
            scheduler=Scheduler(self.pool, None, shape, cost, max_seqs, plain_every=0),
            runner=runner,
        )

    def _proposers(self, drafter: Drafter | None, shape: TreeShape) -> MakeProposer:
        """Whoever drafts, inside captured steps of so many sequences."""
        if drafter is None:
            return lambda size: None
        captured = on_device(drafter)
        assert captured is not None, "who drafts on the host is not captured"
        return lambda size: Drafts(captured, shape, size, self.target.vocab_size)

    def _info(self, name: str, shape: TreeShape, max_seqs: int) -> EngineInfo:
        return EngineInfo(
            target=self.shape.name,
            drafter=name,
            drafter_reason="measured",
            dtype=str(self.device.dtype).removeprefix("torch."),
            dtype_reason="the device's",
            device=str(self.device.torch),
            exact=True,
            exact_reason="",
            kv_tokens=(self.pool.num_pages - 1) * PAGE,
            page_size=PAGE,
            max_model_len=self.target.max_positions,
            max_seqs=max_seqs,
            draft_shape=shape.widths,
            vocab_size=self.target.vocab_size,
            eos_token_ids=(),
        )


def _draft_model(bench: Bench) -> Drafter:
    _, decoder = inflated(bench.device, bench.draft, BUNDLED / "draft", bench.positions, seed=3)
    return DraftModelDrafter(paged(bench.pool, decoder, bench.device), dynamic=False)


def _eagle(bench: Bench) -> Drafter:
    head = heads.bundled_eagle(bench.device, bench.target.decoder, bench.shape)
    return EagleDrafter(head, bench.pool, dynamic=False)


def _random(bench: Bench) -> Drafter:
    head = heads.random_eagle(bench.device, bench.target.decoder, bench.eagle)
    return EagleDrafter(head, bench.pool, dynamic=False, name="eagle3-shaped")


def _medusa(bench: Bench) -> Drafter:
    medusa = heads.bundled_medusa(bench.device, bench.target.decoder, bench.shape)
    return MedusaDrafter(medusa, bench.pool, dynamic=False)


_MAKERS: dict[str, Callable[[Bench], Drafter]] = {
    NGRAM: lambda _: NgramDrafter(),
    DRAFT_MODEL: _draft_model,
    MEDUSA: _medusa,
    EAGLE3: _eagle,
    "random": _random,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request. gaps: seconds from delta to delta. steps: of the engine that emitted tokens."""

    tokens: list[int]
    gaps: list[float]
    statistics: Statistics

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: all but the tokens of the first delta, over the time since then."""
        return self.statistics.decode_tokens_per_second


def ask(prompt: Sequence[int], sampling: SamplingParams) -> Request:
    """A request with an id of its own."""
    return Request(id=f"gpu-{next(_numbers)}", prompt=list(prompt), params=sampling)


def answers(engine: Engine, requests: Sequence[Request], between: Callable[[], None] = lambda: None) -> list[Answer]:
    """Run all of them together to their ends. Raises RuntimeError where one ends in an error.

    between: called before each step as soon as all requests are decoding.
    """
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    gaps: dict[str, list[float]] = {request.id: [] for request in requests}
    done: dict[str, Statistics] = {}
    for request in requests:
        engine.add(request)
    last = time.perf_counter()
    while len(done) < len(requests):
        if all(tokens.values()):
            between()
        deltas = engine.step()
        now = time.perf_counter()
        for delta in deltas:
            tokens[delta.id] += delta.tokens
            gaps[delta.id].append(now - last)
            if delta.finish_reason is not None:
                if delta.error is not None or delta.statistics is None:
                    raise RuntimeError(f"a request ended as {delta.finish_reason}: {delta.error}")
                done[delta.id] = delta.statistics
        last = now
    return [Answer(tokens[r.id], gaps[r.id][1:], done[r.id]) for r in requests]
