"""Pairs of a random target and a draft model that often agrees with it, and engines assembled from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from foresay.drafters.draft_model import DraftModelDrafter, RecurrentDraftDrafter
from foresay.drafters.proposer import on_device
from foresay.drafters.self_draft import SelfDrafter
from foresay.kvpaging import KVStore, PagePool, PrefixIndex, StatePages, WindowPages
from foresay.spec.budget import CostModel
from foresay.spec.engine import EngineCore
from foresay.spec.protocols import Drafter, Lookup
from foresay.spec.request import EngineInfo
from foresay.spec.scheduler import Scheduler
from foresay.spec.tree import TreeShape
from foresay.verifier.model.config import kv_shapes, window_shapes
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model_runner import ModelRunner
from tests.same_tokens.witness import Witness
from tests.verifier.families import OF_BF16, make, round_to_bf16
from tests.verifier.reading import load_decoder

#: How far the draft's weights lie from the target's, in their own size: it agrees with most of the target's samples.
DISTANCE = 0.05
MAX_SEQS = 4


@dataclass(frozen=True)
class Pair:
    """A target and its draft model, as checkpoints and as decoders. kv: what the target's KV is kept in; None: as it is
    computed."""

    directory: Path
    draft_directory: Path
    target: Decoder
    draft: Decoder
    kv: torch.dtype | None = field(default=None, kw_only=True)

    @property
    def vocab_size(self) -> int:
        return self.target.config.vocab_size

    def quantized(self, how: str, dtype: torch.dtype = torch.bfloat16) -> Pair:
        """The same as ``--quantize`` and ``--draft-quantize`` make it. how: what, and perhaps " rounded"."""
        kind, rounded, _ = how.partition(" rounded")
        settings: dict[str, Any] = {"quantize": kind, "rounds": bool(rounded)}
        target, draft = (load_decoder(each, dtype, **settings) for each in (self.directory, self.draft_directory))
        return replace(self, target=target, draft=draft)

    def draft_model(self, pool: PagePool) -> DraftModelDrafter:
        if self.draft.config.stack.recurrence is None:
            return DraftModelDrafter(paged(self.draft, pool))
        return RecurrentDraftDrafter(paged(self.draft, pool, own_states=True))

    def copy(self, pool: PagePool, before: Drafter | None = None) -> SelfDrafter:
        """The draft's weights on the target's pages, as the target in fewer bits drafts. before: who drafts for it."""
        target = pool.find_store(KVStore)
        assert target is not None
        copy, lookup = ModelRunner(self.draft, target, self.draft.max_positions), isinstance(before, Lookup)
        return SelfDrafter(copy, on_device(before), before if lookup else None)  # type: ignore[arg-type]


def make_pair(family: str, directory: Path, dtype: torch.dtype, **shape: Any) -> Pair:
    """Both checkpoints in ``directory``; shape: configuration keys for both."""
    target, draft = directory / "target", directory / "draft"
    make(family, target, **shape)
    oracle = make(family, draft, **shape)
    blur(oracle)
    if family in OF_BF16:
        round_to_bf16(oracle)
    oracle.save_pretrained(draft)
    return Pair(target, draft, load_decoder(target, dtype), load_decoder(draft, dtype))


@torch.no_grad()
def blur(model: Any, distance: float = DISTANCE) -> None:
    """Move every weight a little."""
    generator = torch.Generator().manual_seed(99)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(noise.to(parameter.dtype) * parameter.std() * distance)


def paged(decoder: Decoder, pool: PagePool, kv: torch.dtype | None = None, own_states: bool = False) -> ModelRunner:
    """A model with a store on the pool. kv: its dtype; None: the model's. own_states: whether it is no target."""
    config, sizes = decoder.config, (MAX_SEQS, 1 + 4 * MAX_SEQS + 16)
    if config.stack.recurrence is not None and not own_states:
        pool.attach(StatePages(*sizes, pool.page_size))
    states = StatePages(*sizes, pool.page_size) if own_states else None
    store = KVStore(pool, kv_shapes(config), kv or decoder.dtype, decoder.device, states)
    return ModelRunner(decoder, store, config.max_positions)


def windowed(decoder: Decoder, pool: PagePool, kv: torch.dtype | None, windows: int) -> ModelRunner:
    """A target that keeps what layers with a window see in so many pages of their own; 0: in the pool's."""
    if not windows:
        return paged(decoder, pool, kv)
    config = decoder.config
    assert config.sliding_window is not None
    pool.attach(WindowPages(1 + windows, config.sliding_window, pool.num_pages, pool.page_size))
    store = KVStore(pool, window_shapes(config), kv or decoder.dtype, decoder.device)
    return ModelRunner(decoder, store, config.max_positions)


#: Makes a drafter whose KV, if it has any, lies in the pages of this pool.
MakeDrafter = Callable[[PagePool], Drafter | None]


def engine_of(
    target: Decoder,
    drafter: MakeDrafter,
    shape: TreeShape,
    *,
    max_seqs: int = MAX_SEQS,
    tokens: int = 1024,
    page_size: int = 16,
    chunk: int = 256,
    prefix: bool = False,
    kv: torch.dtype | None = None,
    windows: int = 0,
) -> EngineCore:
    """An engine with a pool of ``tokens`` tokens, its steps witnessed. chunk: most prefill rows of a step. kv: see
    :class:`Pair`. windows: see :func:`windowed`.
    """
    pool = PagePool(1 + tokens // page_size, page_size)
    verifier, proposing = windowed(target, pool, kv, windows), drafter(pool)
    index = PrefixIndex(pool) if prefix else None
    engine = EngineCore(
        info=info_of(target, pool, max_seqs, shape),
        pool=pool,
        prefix=index,
        verifier=verifier,
        drafter=proposing,
        # A pass over twice the rows takes twice the time: prefill rides along in small and changing pieces.
        scheduler=Scheduler(pool, index, shape, CostModel([1], [1.0]), max_seqs, chunk),
    )
    engine.runner = Witness(verifier, proposing)
    return engine


def info_of(target: Decoder, pool: PagePool, max_seqs: int, shape: TreeShape) -> EngineInfo:
    config = target.config
    tokens = (pool.num_pages - 1) * pool.page_size
    return EngineInfo(
        target="random",
        drafter="",
        drafter_reason="",
        dtype=str(target.dtype),
        dtype_reason="",
        device="cpu",
        exact=True,
        exact_reason="",
        kv_tokens=tokens,
        page_size=pool.page_size,
        max_model_len=min(config.max_positions, tokens - 64),
        max_seqs=max_seqs,
        draft_shape=shape.widths,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
    )
