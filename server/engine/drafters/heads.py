"""The kinds of heads that ``--draft`` names: ``medusa:PATH``, ``eagle3:PATH``, ``eagle:PATH``, ``peagle:PATH``,
``dflash:PATH``, ``dspark:PATH``, or the path alone; ``--draft-layers``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.dflash import DFlashDrafter
from drafters.dspark import DSparkDrafter
from drafters.eagle import EagleDrafter
from drafters.medusa import MedusaDrafter
from drafters.peagle import PEagleDrafter
from kvpaging import PagePool, PageTable
from server.engine.checks import Notes, Target, layers
from server.engine.drafters.head import Head, in_words, note_vocabulary, tried
from server.engine.drafters.layered import LayeredHead
from server.engine.loading import KV_DTYPES
from server.engine.memory import item_bytes
from spec.budget.members import MODEL_LEVELS
from spec.features import Features
from spec.names import DFLASH, DSPARK, EAGLE, EAGLE3, MEDUSA, PEAGLE
from spec.protocols import FeatureRequest, Rows
from spec.tree import TreeShape
from verifier.heads.dflash import DFlashHead
from verifier.heads.dflash_config import DFlashConfig
from verifier.heads.dflash_weights import DFlashWeights
from verifier.heads.eagle import EagleHead
from verifier.heads.eagle_config import EagleConfig
from verifier.heads.eagle_weights import EagleWeights
from verifier.heads.fit import dflash_hits, eagle_hits, medusa_hits
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


@dataclass(frozen=True)
class Eagle(LayeredHead):
    """:mod:`drafters.eagle`, :mod:`drafters.peagle`."""

    names, made = (EAGLE, EAGLE3, PEAGLE), EagleDrafter
    kind, trained = "eagle", EAGLE3
    configuration = EagleConfig

    def token_bytes(self, target: ModelConfig, dtype: str) -> int:
        """Its own KV, and the fused feature."""
        layer = self.config(target).layer
        return super().token_bytes(target, dtype) + item_bytes(dtype) * int(layer.hidden_size)

    def drafter(self, target: PagedModel, pool: PagePool, dynamic: bool) -> EagleDrafter:
        """With stores on the pool's pages."""
        decoder = target.decoder
        config = self.config(decoder.config)
        head = EagleHead(config, EagleWeights.read(self.directory, config, decoder), decoder.max_positions)
        made = EagleDrafter if config.mask is None else PEagleDrafter
        return made(head, pool, dynamic, kv=KV_DTYPES.get(self.kv_dtype))

    def hits(self, head: Any, features: Features, text: tuple[Tensor, Tensor], table: PageTable, fed: Any) -> Tensor:
        """At every position."""
        return eagle_hits(head, features, *text, table, fed.store)

    @staticmethod
    def levels(drafter: Any) -> int:
        """As many as were guessed at once in training, of P-EAGLE."""
        return drafter.head.config.guesses or MODEL_LEVELS

    def about(self, drafter: Any) -> str:
        """Its generation and layers."""
        config = drafter.head.config
        kind = "EAGLE-3" if config.generation == 3 else "EAGLE"
        if config.mask is not None:
            kind = f"P-EAGLE, {config.guesses} tokens at once"
        return f"{kind}, {layers(config.layer.num_layers)}"


@dataclass(frozen=True)
class DFlash(LayeredHead):
    """:mod:`drafters.dflash`, :mod:`drafters.dspark`."""

    names, made = (DFLASH, DSPARK), DFlashDrafter
    kind, trained = "dflash", DFLASH
    at_once = True
    configuration = DFlashConfig

    def drafter(self, target: PagedModel, pool: PagePool, dynamic: bool) -> DFlashDrafter:
        """With a store on the pool's pages."""
        decoder = target.decoder
        config = self.config(decoder.config)
        head = DFlashHead(config, DFlashWeights.read(self.directory, config, decoder), decoder.max_positions)
        made = DFlashDrafter if head.markov is None else DSparkDrafter
        return made(head, pool, dynamic, kv=KV_DTYPES.get(self.kv_dtype))

    def hits(self, head: Any, features: Features, text: tuple[Tensor, Tensor], table: PageTable, fed: Any) -> Tensor:
        """At every other position."""
        return dflash_hits(head, features, *text, table, fed.fed)

    @staticmethod
    def levels(drafter: Any) -> int:
        """As many as a block guesses."""
        return int(drafter.head.config.guesses)

    def about(self, drafter: Any) -> str:
        """Its block and layers."""
        config = drafter.head.config
        kind = "DFlash" if config.markov is None else f"DSpark ({config.markov.kind}, rank {config.markov.rank})"
        return f"{kind}, blocks of {config.block} that guess {config.guesses} tokens, {layers(config.layer.num_layers)}"
