"""``--draft medusa:PATH``, or the path alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.medusa import MedusaDrafter
from kvpaging import PagePool, PageTable
from server.engine.checks.report import Notes, Target
from server.engine.drafters.head import Head, in_words, note_vocabulary, tried
from server.engine.memory import item_bytes
from spec.names import MEDUSA
from spec.protocols import FeatureRequest, Rows
from spec.tree import TreeShape
from verifier.heads.fit import medusa_hits
from verifier.heads.medusa import MedusaHeads
from verifier.model.config import ModelConfig
from verifier.paged_model import PagedModel


@dataclass(frozen=True)
class Medusa(Head):
    """:mod:`drafters.medusa`."""

    names, made = (MEDUSA,), MedusaDrafter
    kind, trained = "medusa", MEDUSA
    at_once = True

    def drafter(self, target: PagedModel, pool: PagePool, dynamic: bool) -> MedusaDrafter:
        """With a store on the pool's pages."""
        return MedusaDrafter(MedusaHeads.load(self.directory, target.decoder), pool, dynamic)

    def token_bytes(self, target: ModelConfig, dtype: str) -> int:
        """The target's last hidden state."""
        return item_bytes(dtype) * target.hidden_size

    def doubts(self, drafter: Any, target: PagedModel, pool: PagePool, directory: Path) -> str:
        """Whether it hardly ever agrees with the target."""

        def guessed(table: PageTable, tokens: Tensor) -> str:
            forward = target.run([Rows(table, tokens, 0)], FeatureRequest(final=True))
            return in_words(medusa_hits(drafter.heads, forward.features, forward.logits.argmax(dim=-1).cpu()))

        return tried(guessed, target, pool, directory)

    @staticmethod
    def levels(drafter: Any) -> int:
        """One for each head."""
        return len(drafter.heads)

    def note(self, notes: Notes, target: Target, drafter: Any, name: str, shape: TreeShape | None) -> None:
        """Heads, and whether they reach as deep as is asked for."""
        heads: MedusaHeads = drafter.heads
        text = f"Medusa, {len(heads)} heads on a hidden size of {target.model.hidden_size}, {name}"
        notes.ok("draft", text, kind=drafter.name, heads=len(heads), hidden_size=target.model.hidden_size)
        if shape is not None and shape.levels > len(heads):
            notes.warn(
                "draft",
                f"{shape.levels} levels are asked for, but {len(heads)} heads reach {len(heads)} deep",
                f"give --draft-tokens {len(heads)}, or a --draft-tree with {len(heads)} numbers",
            )
        note_vocabulary(notes, target, target.model.vocab_size if heads.token_map is None else len(heads.token_map))
