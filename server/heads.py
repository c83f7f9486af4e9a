"""``--draft medusa:PATH``, ``--draft eagle3:PATH``, or the path of a head alone: from its name to a drafter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from drafters.eagle import EagleDrafter
from drafters.medusa import MedusaDrafter
from kvpaging import PagePool, PageTable
from spec.errors import ConfigurationError
from spec.protocols import FeatureRequest, Rows
from verifier.heads.eagle import EagleHead
from verifier.heads.eagle_config import EagleConfig
from verifier.heads.eagle_weights import EagleWeights
from verifier.heads.fit import eagle_agreement, medusa_agreement
from verifier.heads.kind import PATTERNS, Kind, kind_of
from verifier.heads.medusa import MedusaHeads
from verifier.model.config import ModelConfig
from verifier.model.hub import resolve
from verifier.paged_model import PagedModel

#: What may stand before the colon, and the kind of head it asks for.
PREFIXES: dict[str, Kind] = {"medusa": "medusa", "eagle": "eagle", "eagle3": "eagle"}
#: Below this share of right first guesses a head hardly belongs to its target; chance is far below it.
LEAST_AGREEMENT = 0.2
#: What heads are tried on at load: plain text of the kind that any model continues well.
TRIAL = (
    "Once upon a time there was a king who had three sons. The first was strong and the second was clever, but the "
    "third was so simple that nobody thought he would ever come to anything. One day the king said to them: whoever "
    "brings me the most beautiful bird in the world shall have the kingdom when I am dead."
)


@dataclass(frozen=True, slots=True)
class Head:
    """A head that was asked for, before its weights are read."""

    kind: Kind
    directory: Path
    asked: str

    def numbers_per_token(self, target: ModelConfig) -> int:
        """How many numbers its stores hold for each token of the KV cache."""
        if self.kind == "medusa":
            return 0
        layer = EagleConfig.read(self.directory, target).layer
        return 2 * layer.num_kv_heads * layer.head_dim + layer.hidden_size


def find_head(draft: str) -> Head | None:
    """The head that ``--draft`` names; None where it names something else.

    Raises ConfigurationError if what is there is not what was asked for, ModelNotFound if nothing is there.
    """
    prefix, _, path = draft.partition(":")
    if prefix in PREFIXES and path:
        directory = resolve(path, extra=PATTERNS)
        found = kind_of(directory)
        if found != PREFIXES[prefix]:
            held = f"holds {found} heads" if found else "holds no head"
            raise ConfigurationError(f"--draft {draft}: {directory} {held}")
        return Head(found, directory, draft)
    if draft in ("none", "ngram"):
        return None
    directory = resolve(draft)
    kind = kind_of(directory)
    return Head(kind, directory, draft) if kind else None


def load_head(head: Head, verifier: PagedModel, pool: PagePool, dynamic: bool) -> MedusaDrafter | EagleDrafter:
    """The drafter. dynamic: how its trees grow, see :mod:`drafters.growth`."""
    target = verifier.decoder
    if head.kind == "medusa":
        return MedusaDrafter(MedusaHeads.load(head.directory, target), dynamic)
    return EagleDrafter(load_eagle(head.directory, verifier), pool, dynamic)


def load_eagle(directory: Path, verifier: PagedModel) -> EagleHead:
    """The EAGLE head in ``directory``, for this target."""
    target = verifier.decoder
    config = EagleConfig.read(directory, target.config)
    return EagleHead(config, EagleWeights.read(directory, config, target), target.max_positions)


def doubts(
    head: Head, drafter: MedusaDrafter | EagleDrafter, verifier: PagedModel, pool: PagePool, target: Path
) -> str:
    """What speaks against the head, in words for the banner; empty if nothing does.

    target: the target's directory, whose tokenizer makes tokens of the trial text.
    """
    found = []
    share = _agreement(drafter, verifier, pool, target)
    if share is not None and share < LEAST_AGREEMENT:
        found.append(
            f"its first guess agrees with the target on {share:.0%} of a plain text: "
            "it may be made for another model, or read other layers"
        )
    if isinstance(drafter, EagleDrafter) and drafter.trained_positions < verifier.max_positions:
        found.append(f"it was trained on texts of up to {drafter.trained_positions} tokens")
    return "; ".join(found)


def _agreement(
    drafter: MedusaDrafter | EagleDrafter, verifier: PagedModel, pool: PagePool, target: Path
) -> float | None:
    """The share of the trial text on which the head's first guess is the target's most likely token."""
    file = target / "tokenizer.json"
    if not file.exists():
        return None
    most = min(verifier.max_positions, (pool.num_pages - 1) * pool.page_size)
    tokens = torch.tensor(Tokenizer.from_file(str(file)).encode(TRIAL).ids[:most])
    table = PageTable(pool)
    table.reserve(len(tokens))
    try:
        forward = verifier.run([Rows(table, tokens, 0)], drafter.needs or FeatureRequest())
        wanted = forward.logits.argmax(dim=-1)
        if isinstance(drafter, MedusaDrafter):
            return medusa_agreement(drafter.heads, forward.features, wanted)
        return eagle_agreement(drafter.head, forward.features, tokens, wanted, table, drafter.store)
    finally:
        table.release()
