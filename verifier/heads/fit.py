"""Does a head belong to its target? Where its first guess is the target's own most likely token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foresay.kvpaging import KVStore, PageTable
from foresay.spec.features import Features
from foresay.spec.protocols import Rows
from foresay.spec.sampling import SamplingParams
from foresay.verifier.graphs.state import Joined, StepState
from foresay.verifier.heads.dflash import Block, DFlashHead
from foresay.verifier.heads.eagle import EagleHead
from foresay.verifier.heads.medusa import MedusaHeads


def medusa_hits(heads: MedusaHeads, features: Features, wanted: Tensor) -> Tensor:
    """bool[R - 1]: whether the first head, at each position, names the target's choice one token later.

    features: of a text's R positions. wanted: int64[R], the target's most likely token after each.
    """
    return _hits(_named(heads(features["final"], 0).argmax(dim=-1).cpu(), heads.token_map), wanted)


def eagle_hits(
    head: EagleHead, features: Features, tokens: Tensor, wanted: Tensor, table: PageTable, store: KVStore
) -> Tensor:
    """bool[R - 1]: whether each row, made of the true feature before it, names the target's choice.

    tokens: int64[R]. table: a sequence whose R pages are reserved; nothing in ``store`` counts as filled by this.
    """
    store.clear(table.slots(0, 1))
    logits, _ = head.run([Rows(table, tokens[1:], 1)], head.fuse(features)[:-1], store)
    return _hits(_named(logits.argmax(dim=-1).cpu(), head.token_ids), wanted)


@torch.inference_mode()
def dflash_hits(
    head: DFlashHead, features: Features, tokens: Tensor, wanted: Tensor, table: PageTable, store: KVStore
) -> Tensor:
    """bool[R / 2 - 1]: the same for the first guess of blocks at every other position. ``table`` as there."""
    count, device = len(tokens), head.device
    head.inject(features, torch.arange(count, device=device), table.slots(0, count).to(device), store)
    block = Block(1, 1 if head.config.anchored else 2, head.config, device)
    state = StepState(1, len(table.pages), table.pool.page_size, 1, device)
    guesses, anchors = [], range(1, count - 1, 2)
    for anchor in reversed(anchors):  # a block's rows take the place of what was injected behind its root
        state.join([Joined(table.pages, anchor, [int(tokens[anchor])], SamplingParams(temperature=0.0), 0)])
        guesses.append(head.logits(head.guess(block, state, state.roots.contiguous(), store)).argmax(dim=-1))
    return _named(torch.cat(guesses[::-1]).cpu(), head.token_ids) == wanted[torch.tensor(list(anchors))]


def clearly_better(hits: Tensor, others: Tensor) -> bool:
    """Whether ``others`` has more hits than chance would give it: two deviations of a sign test where they differ."""
    won, lost = int((others & ~hits).sum()), int((hits & ~others).sum())
    return won - lost > 2 * math.sqrt(won + lost)


def _named(guesses: Tensor, token_ids: Tensor | None) -> Tensor:
    """The target's ids of a head's guesses, on the host."""
    return guesses if token_ids is None else token_ids.cpu()[guesses]


def _hits(guesses: Tensor, wanted: Tensor) -> Tensor:
    """Guess i is about the token that the target chose at row i + 1."""
    rows = len(wanted) - 1
    return guesses[:rows] == wanted[1:]
