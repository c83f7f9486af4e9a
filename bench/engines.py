"""Models made on the device (:mod:`bench.made`), their drafters, and engines around both as in a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench import prompts
from bench.made import (
    BUNDLED,
    Device,
    bundled_eagle,
    bytes_read,
    head_bytes_read,
    inflated,
    paged,
    random_dflash,
    random_eagle,
    random_model,
    scribble,
)
from bench.shapes import DFlashShape, EagleShape, ModelShape, kv_bytes_per_token
from foresay.drafters.combined import RoutedDrafter
from foresay.drafters.draft_model import DraftModelDrafter
from foresay.drafters.eagle import EagleDrafter
from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.parallel import DFlashDrafter
from foresay.drafters.prediction import PredictionDrafter
from foresay.drafters.proposer import Drafts, on_device
from foresay.kvpaging import PagePool
from foresay.server.engine.drafting import Drafting, capture_levels, capture_passes, runner_of
from foresay.server.engine.parameters import GPU_CHUNK
from foresay.spec.budget import CostModel
from foresay.spec.engine import EngineCore
from foresay.spec.names import DRAFT_MODEL
from foresay.spec.request import EngineInfo
from foresay.spec.scheduler import Scheduler
from foresay.spec.step import StepRunner
from foresay.spec.tree import TreeShape
from foresay.verifier.graphs.capture import CudaGraphs, Eager
from foresay.verifier.graphs.proposer import Proposer
from foresay.verifier.model_runner import ModelRunner

PAGE = 16
#: A head of a published shape with random weights: it costs what a trained one costs, and no draft is accepted.
PUBLISHED = "eagle3 of a published shape"
PUBLISHED_INT8, PUBLISHED_DFLASH = f"{PUBLISHED} in int8", "dflash of a published shape"
_COST = CostModel((2, 64, 256), (1.0, 1.1, 2.0))  # only for sharing out the rows of prompts, which are not timed here


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, and the draft model and the heads of random weights that are made for it. quantize: as the flag; such
    targets are random."""

    target: ModelShape
    draft: ModelShape
    eagle: EagleShape
    dflash: DFlashShape | None = None
    quantize: str | None = None


@dataclass(slots=True)
class Bench:
    """A target made on the device, and its drafters, made on first use. positions: of the longest text, for whose KV
    there is room. random: whether weights are random, or the bundled ones embedded."""

    device: Device
    pair: Pair
    positions: int
    random: bool = False
    target: ModelRunner = field(init=False)
    _drafters: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pool = PagePool(-(-self.positions // PAGE) + 1, PAGE)
        self.target = self._model(pool, self.pair.target, "target")

    def _model(self, pool: PagePool, shape: ModelShape, name: str) -> ModelRunner:
        if self.random:
            decoder = random_model(self.device, shape, self.positions, self.pair.quantize)
        else:
            decoder = inflated(self.device, shape, BUNDLED / name, self.positions, seed=len(name))[1]
        model = paged(pool, decoder, self.device)
        scribble(model.store)
        return model

    def drafter(self, name: str) -> Any:
        """``none``, ``ngram``; ``draft_model``, ``eagle3``, the bundled ones; or a head of a published shape."""
        if name not in self._drafters:
            self._drafters[name] = self._made(name)
        return self._drafters[name]

    def _made(self, name: str) -> Any:
        pool, decoder = self.target.store.pool, self.target.decoder
        match name:
            case "none":
                return None
            case "ngram":
                return NgramDrafter()
            case "draft_model":
                return DraftModelDrafter(self._model(pool, self.pair.draft, "draft"))
            case "eagle3":
                return EagleDrafter(bundled_eagle(self.device, decoder, self.pair.target), pool)
        drafter = self._published(name)
        for store in {getattr(drafter, "store", drafter.hidden_states), drafter.hidden_states}:
            scribble(store)
        return drafter

    def _published(self, name: str) -> EagleDrafter | DFlashDrafter:
        pool, decoder = self.target.store.pool, self.target.decoder
        if name == PUBLISHED_DFLASH:
            assert self.pair.dflash is not None, "the pair has one"
            return DFlashDrafter(random_dflash(self.device, decoder, self.pair.dflash), pool, name=name)
        head = random_eagle(self.device, decoder, self.pair.eagle, int8=name == PUBLISHED_INT8)
        return EagleDrafter(head, pool, name=name)

    def read_by_step(self, drafter: str, levels: int, context: float, rows: int = 1) -> float:
        """Bytes that a step of one sequence reads at this context, at the least: rows of the target's pass, and as many
        levels of drafts."""
        passes, item = [(self.target.decoder, rows)], self.device.dtype.itemsize
        made, needed = self.drafter(drafter), 0.0
        if drafter == DRAFT_MODEL:
            passes += [(made.model.decoder, 1)] * levels
        elif levels and made is not None:
            turns = 1 if drafter == PUBLISHED_DFLASH else levels
            needed = head_bytes_read(made.head, turns) + turns * context * kv_bytes_per_token(made.head.layer, item)
        return needed + sum(bytes_read(one, n) + context * kv_bytes_per_token(one.config, item) for one, n in passes)

    def proposer(self, name: str, shape: TreeShape) -> Proposer | None:
        """The drafter of captured steps of one sequence; None without one."""
        captured = on_device(self.drafter(name))
        return None if captured is None else Drafts(captured, shape, 1, self.target.vocab_size)

    def engine(self, name: str, tree: str, graphs: bool, tokens: int, max_seqs: int = 1) -> EngineCore:
        """An engine for texts of so many tokens, with a server's captures for it (on a CPU: called directly), or in
        eager mode. tree: widths of its levels, "" for none."""
        drafter, shape = self.drafter(name), TreeShape.parse(tree) if tree else TreeShape()
        drafting = Drafting(RoutedDrafter(PredictionDrafter(_COST), drafter, shape), None, shape, _COST)
        runner = StepRunner(self.target, drafting.drafter)
        self.target._replayed.clear()  # captures of an earlier engine
        if graphs:
            capture = CudaGraphs() if self.device.torch.type == "cuda" else Eager
            drafters = [drafter] if drafter is not None else []
            capture_passes(self.target, drafters, tokens, max_seqs, GPU_CHUNK, capture, _ignore)
            for _ in capture_levels(self.target, drafting, tokens, max_seqs, capture):
                pass
            chunk = 0 if self.device.torch.type == "cpu" else GPU_CHUNK
            runner = runner_of(self.target, drafting, tokens, max_seqs, chunk, capture, _ignore)
        pool = self.target.store.pool
        info = EngineInfo(
            target=self.pair.target.name, drafter=name, drafter_reason="", dtype="", dtype_reason="", exact=True,
            device=str(self.device.torch), exact_reason="", kv_tokens=(pool.num_pages - 1) * PAGE, page_size=PAGE,
            max_model_len=self.target.max_positions, max_seqs=max_seqs, draft_shape=shape.widths,
            vocab_size=self.target.vocab_size, eos_token_ids=(),
        )  # fmt: skip
        scheduler = Scheduler(pool, None, shape, _COST, max_seqs, GPU_CHUNK)
        return EngineCore(
            info=info, pool=pool, prefix=None, verifier=self.target, drafter=drafting.drafter, scheduler=scheduler,
            runner=runner,
        )  # fmt: skip


def _ignore(phase: str, share: float | None = None) -> None:
    pass


def texts(number: int) -> list[list[int]]:
    """Token ids of our own prompts, by the bundled tokenizer: that of the model that the target was made of."""
    return list(prompts.encoded(BUNDLED / "target", limit=number).values())
