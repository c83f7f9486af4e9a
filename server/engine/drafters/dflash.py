"""``--draft dflash:PATH``, ``--draft dspark:PATH``, or the path alone; ``--draft-layers``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drafters.dflash import DFlashDrafter
from drafters.dspark import DSparkDrafter
from kvpaging import PagePool, PageTable
from server.engine.checks.report import layers
from server.engine.drafters.layered import LayeredHead
from server.engine.loading import KV_DTYPES
from spec.features import Features
from spec.names import DFLASH, DSPARK
from verifier.heads.dflash import DFlashHead
from verifier.heads.dflash_config import DFlashConfig
from verifier.heads.dflash_weights import DFlashWeights
from verifier.heads.fit import dflash_hits
from verifier.paged_model import PagedModel


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
