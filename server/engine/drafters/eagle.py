"""``--draft eagle3:PATH``, ``--draft eagle:PATH``, ``--draft peagle:PATH``, or the path alone; ``--draft-layers``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drafters.eagle import EagleDrafter
from drafters.peagle import PEagleDrafter
from kvpaging import PagePool, PageTable
from server.engine.checks.report import layers
from server.engine.drafters.layered import LayeredHead
from server.engine.loading import KV_DTYPES
from server.engine.memory import item_bytes
from spec.budget.members import MODEL_LEVELS
from spec.features import Features
from spec.names import EAGLE, EAGLE3, PEAGLE
from verifier.heads.eagle import EagleHead
from verifier.heads.eagle_config import EagleConfig
from verifier.heads.eagle_weights import EagleWeights
from verifier.heads.fit import eagle_hits
from verifier.model.config import ModelConfig
from verifier.paged_model import PagedModel


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
