"""What a step should take on a GPU, over its floor: ``python -m bench.gpu.model``. Nothing is measured.

The launches are those that the code makes, counted without a GPU (:mod:`bench.binder`); what each takes is
arithmetic (:mod:`bench.arithmetic`). *Before* is the same arithmetic with constants of the code as they were.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from bench import made as heads
from bench import record, shapes
from bench.arithmetic import CARDS, Card, Product, Step, prompt_seconds, roles
from bench.binder import DEVICE, Launches, bound
from bench.gpu import settings
from bench.gpu.device import Device
from bench.gpu.drafting import Ground
from bench.made import BUNDLED, paged
from bench.shapes import EagleShape, ModelShape, eagle_bytes, kv_bytes_per_token, step_bytes
from foresay.drafters.eagle import EagleDrafter
from foresay.drafters.proposer import Drafts
from foresay.kvpaging import PagePool
from foresay.server.engine.device import GPU_CHUNK
from foresay.spec.tree import TreeShape
from foresay.verifier.graphs.plain import RootOnly
from foresay.verifier.graphs.proposer import Proposer
from foresay.verifier.graphs.step import SpeculativeStep
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.weights import allocate
from foresay.verifier.ops.kernels import key_blocks, linear, tree_attention
from foresay.verifier.paged_model import PagedModel

#: What is predicted is what is measured. Prompts are not: tokens of those.
_CHOSEN = settings.full()
LEVELS, PROMPTS = _CHOSEN.levels[0], (128, 1024)
#: Constants of the code before weights were prefetched this far ahead, tiles were this wide and splits this short.
BEFORE: tuple[tuple[Any, str, Any], ...] = (
    (linear, "AHEAD", 4),
    (linear, "AHEAD_OF_OUTPUT", 4),
    (linear, "AHEAD_OF_NEXT", 0),
    (linear, "WIDE", linear.SMALL),
    (key_blocks, "SPLIT", 16),
    (key_blocks, "STAGES", 0),
    (tree_attention, "BRING", False),
    (tree_attention, "DEPTH", 8),
    (tree_attention, "MERGED", ()),
)


def target_of(shape: ModelShape) -> PagedModel:
    """A model of shapes alone, with a store for 32k tokens."""
    config = shape.config(ModelConfig.from_directory(BUNDLED / "target"))
    decoder = Decoder(config, allocate(config, torch.bfloat16, DEVICE), shapes.POSITIONS)
    return paged(PagePool(2 + shapes.POSITIONS // 16, 16), decoder, OnShapes())


class OnShapes(Device):
    """A device of shapes alone, that computes as a GPU does."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.torch, self.cuda = DEVICE, True

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16


def steps(shape: ModelShape, eagle: EagleShape, levels: int, context: int) -> list[Step]:
    """A plain step, and one with a chain of an EAGLE-3 head of so many levels."""
    target = target_of(shape)
    config = target.decoder.config
    products = roles([(m.out_features, m.in_features) for m in target.decoder.linears])
    about = context, (config.num_heads, config.num_kv_heads, config.head_dim)
    fixed, token = step_bytes(config, 0), float(kv_bytes_per_token(config))
    plain = Step("plain", launches_of(target, RootOnly(1, DEVICE), context), products, 1, *about, fixed, token)
    with bound():
        head = heads.random_eagle(OnShapes(), target.decoder, eagle)
        drafter = EagleDrafter(head, target.store.pool, dynamic=False, name="eagle3")
    chain = Drafts(drafter, TreeShape.chain(levels), 1, target.vocab_size)
    own = (Product("mixing", *eagle.mixing), *roles(eagle.products) * levels)
    fixed += eagle_bytes(eagle, levels, 0)
    token += eagle_bytes(eagle, levels, 1) - eagle_bytes(eagle, levels, 0)
    launches, name = launches_of(target, chain, context), f"EAGLE-3, chain of {levels}"
    return [plain, Step(name, launches, products + own, levels + 1, *about, fixed, token)]


def launches_of(target: PagedModel, proposer: Proposer, context: int) -> Launches:
    """Of one whole step; what is made once is made before."""
    with bound() as launches:
        ground = Ground(target, proposer, context)
        step = SpeculativeStep(target, proposer, ground.state)
        step()
        ground.reset()
        launches.kernels.clear()
        launches.torch.clear()
        step()
    return launches


@contextmanager
def as_before(constants: tuple[tuple[Any, str, Any], ...] = BEFORE) -> Iterator[None]:
    """In this block these constants of the code are as they were."""
    with ExitStack() as stack:
        for module, name, value in constants:
            stack.enter_context(patch.object(module, name, value))
        yield


def predicted(size: str, counted: list[Step], card: Card) -> dict[str, float]:
    """What a run will be held against, by the names of its bars: over the floor, but for nanoseconds."""
    plain, chain = counted
    found = {f"{size}, EAGLE-3 chain of {LEVELS} over its floor": chain.over_floor(card)}
    for context in _CHOSEN.contexts:
        name = f"{size}, plain step at {round(context / 1000)}k over its floor"
        found[name] = replace(plain, context=context).over_floor(card)
    for rows in (16, 32, 64):
        found[f"{size}, {rows} rows over their floor"] = replace(plain, rows=rows).over_floor(card)
    found[f"{size}, 64 rows over one"] = replace(plain, rows=64).seconds(card) / plain.seconds(card)
    longest = replace(plain, context=_CHOSEN.contexts[-1]).seconds(card) - plain.seconds(card)
    found[f"{size}, ns for a token of context"] = 1e9 * longest / (_CHOSEN.contexts[-1] - plain.context)
    return found


def both(counted: dict[str, list[Step]]) -> dict[str, dict[str, dict[str, float]]]:
    """Of each card, before and now."""
    found: dict[str, dict[str, dict[str, float]]] = {card.name: {"before": {}, "now": {}} for card in CARDS}
    for size, made in counted.items():
        for card in CARDS:
            found[card.name]["now"] |= predicted(size, made, card)
            with as_before():
                found[card.name]["before"] |= predicted(size, made, card)
    return found


def show_each(counted: dict[str, list[Step]]) -> None:
    """What a step takes over what is served if one constant is as it was."""
    kinds = [(size, made[0], rows) for size, made in counted.items() for rows in (1, 64)]
    rows = []
    for constant in BEFORE:
        taken = []
        for step, card in product([replace(step, rows=rows) for _, step, rows in kinds], CARDS):
            now = step.seconds(card)
            with as_before((constant,)):
                taken.append(step.seconds(card) / now)
        rows.append([f"{constant[0].__name__.rpartition('.')[2]}.{constant[1]}", *taken])
    columns = [f"{size}, {rows}, {card.name}" for (size, _, rows), card in product(kinds, CARDS)]
    record.table("one constant as it was, over now", ["size, rows, card", *columns], rows)


def show_prompts(plain: Step) -> None:
    """Milliseconds of reading a prompt of an 8B."""
    config, rows = _CHOSEN.pairs["8B"].target.config(ModelConfig.from_directory(BUNDLED / "target")), []
    for name, chunk, large in (("64 x 64, chunks of 256", 256, False), (f"128 x 128, of {GPU_CHUNK}", GPU_CHUNK, True)):
        for tokens in PROMPTS:
            taken = [1e3 * prompt_seconds(card, plain, config, tokens, chunk, large) for card in CARDS]
            rows.append([f"{tokens} tokens in tiles of {name}", *taken])
    record.table("expected, ms", ["reading a prompt", *(card.name for card in CARDS)], rows)


def counted() -> dict[str, list[Step]]:
    """By size, a plain step and one with a chain."""
    torch.set_grad_enabled(False)
    return {size: steps(pair.target, pair.eagle, LEVELS, _CHOSEN.contexts[0]) for size, pair in _CHOSEN.pairs.items()}


def main() -> int:
    """Print the tables."""
    made = counted()
    launched = [[size, one.name, one.launches.total] for size, steps in made.items() for one in steps]
    record.table("launches", ["model", "step", ""], launched)
    with bound():
        found, names = both(made), [card.name for card in CARDS]
        columns = [(card, when) for card in names for when in ("before", "now")]
        rows = [[says, *(found[card][when][says] for card, when in columns)] for says in found[names[0]]["now"]]
        record.table("expected", ["", *(f"{card} {when}" for card, when in columns)], rows)
        show_each(made)
        show_prompts(made["8B"][0])
    print("Arithmetic, nothing was measured.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
