"""A head is tried at load: does it guess a plain text as a head of this target would?

The target reads the text once. A head of another model is hardly ever right. One whose layers are numbered by another
convention may be right quite often, so the other ways to read the numbers are tried too.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from drafters.eagle import EagleDrafter
from drafters.medusa import MedusaDrafter
from kvpaging import PagePool, PageTable
from spec.protocols import FeatureRequest, Rows
from verifier.heads.eagle_config import EagleConfig
from verifier.heads.fit import clearly_better, eagle_hits, medusa_hits
from verifier.paged_model import PagedModel

#: Below this share of right first guesses a head hardly belongs to its target; chance is far below it.
LEAST_AGREEMENT = 0.2
#: Plain text of the kind that any model continues well.
TRIAL = (
    "Once upon a time there was a king who had three sons. The first was strong and the second was clever, but the "
    "third was so simple that nobody thought he would ever come to anything. One day the king said to them: whoever "
    "brings me the most beautiful bird in the world shall have the kingdom when I am dead."
)


def misfit(drafter: MedusaDrafter | EagleDrafter, verifier: PagedModel, pool: PagePool, target: Path) -> str | None:
    """Why the head seems not to be this target's, in words for the banner; None if it seems to be.

    target: the target's directory, whose tokenizer makes tokens of the text. Without two that the target has nothing is
    tried.
    """
    file = target / "tokenizer.json"
    if not file.exists():
        return None
    most = min(verifier.max_positions, (pool.num_pages - 1) * pool.page_size)
    known = [token for token in Tokenizer.from_file(str(file)).encode(TRIAL).ids if token < verifier.vocab_size]
    tokens = torch.tensor(known[:most])
    if len(tokens) < 2:
        return None
    table = PageTable(pool)
    table.reserve(len(tokens))
    try:
        if isinstance(drafter, MedusaDrafter):
            forward = verifier.run([Rows(table, tokens, 0)], FeatureRequest(final=True))
            return _in_words(medusa_hits(drafter.heads, forward.features, forward.logits.argmax(dim=-1)))
        return _eagle_misfit(drafter, verifier, table, tokens)
    finally:
        table.release()


def _eagle_misfit(drafter: EagleDrafter, verifier: PagedModel, table: PageTable, tokens: Tensor) -> str | None:
    head = drafter.head
    others = head.config.other_layers(verifier.decoder.config.num_layers)
    forward = verifier.run([Rows(table, tokens, 0)], _all_layers(head.config, others))
    wanted = forward.logits.argmax(dim=-1)
    hits = eagle_hits(head, forward.features, tokens, wanted, table, drafter.store)
    found = {
        layers: eagle_hits(head.reading(layers), forward.features, tokens, wanted, table, drafter.store)
        for layers in others
    }
    better = [layers for layers in found if clearly_better(hits, found[layers])]
    if not better:
        return _in_words(hits)
    best = max(better, key=lambda layers: int(found[layers].sum()))
    advice = f"{_share(found[best])} with --draft-layers {','.join(map(str, best))}"
    return f"{_in_words(hits) or _agrees(hits)}, and on {advice}"


def _all_layers(config: EagleConfig, others: list[tuple[int, ...]]) -> FeatureRequest:
    """What the head reads, and what it might."""
    layers = sorted({layer for aux in (config.aux, *others) for layer in aux})
    return FeatureRequest(final=config.needs.final, layers=tuple(layers))


def _in_words(hits: Tensor) -> str | None:
    if hits.float().mean() >= LEAST_AGREEMENT:
        return None
    return f"{_agrees(hits)} (it may be made for another model, or read other layers)"


def _agrees(hits: Tensor) -> str:
    return f"its first guess agrees with the target on {_share(hits)} of a plain text"


def _share(hits: Tensor) -> str:
    return f"{float(hits.float().mean()):.0%}"
