"""``--draft eagle3:PATH``, ``--draft eagle:PATH``, or the path alone; ``--draft-layers``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from drafters.eagle import EagleDrafter
from kvpaging import PagePool, PageTable
from server.engine.checks.report import Notes, Target, layers
from server.engine.drafters.head import Head, agrees, in_words, note_vocabulary, share, tried
from server.engine.parameters import numbers_per_token
from server.settings.config import EngineConfig
from spec.errors import ConfigurationError
from spec.names import EAGLE, EAGLE3
from spec.protocols import FeatureRequest, Rows
from spec.tree import TreeShape
from verifier.heads.eagle import EagleHead
from verifier.heads.eagle_config import EagleConfig
from verifier.heads.eagle_weights import EagleWeights
from verifier.heads.fit import clearly_better, eagle_hits
from verifier.model.config import ModelConfig
from verifier.paged_model import PagedModel


@dataclass(frozen=True)
class Eagle(Head):
    """:mod:`drafters.eagle`. layers: the target's layers whose inputs it is to read, whatever its own configuration
    says."""

    names, made = (EAGLE, EAGLE3), EagleDrafter
    kind, trained = "eagle", EAGLE3
    layered = True

    layers: tuple[int, ...] | None = None

    def configured(self, config: EngineConfig) -> Self:
        """With ``--draft-layers``."""
        named = config.draft_layers
        return self if named is None else replace(self, layers=tuple(map(int, named.split(","))))

    def config(self, target: ModelConfig) -> EagleConfig:
        """Its configuration for this target; raises ConfigurationError for layers that it cannot read."""
        layers, depth = self.layers, target.num_layers
        if layers is not None and max(layers) > depth:
            raise ConfigurationError(
                f"--draft-layers {_numbers(layers)}: the target has {depth} layers, numbered 0 to {depth - 1}; "
                f"{depth} names the output of the last one"
            )
        config = EagleConfig.read(self.directory, target, layers)
        if layers is not None and config.aux != layers:
            raise ConfigurationError(
                f"--draft-layers {_numbers(layers)}: {self.directory} reads the state behind the target's final norm, "
                "no layers; leave the flag out"
            )
        return config

    def shapes(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        """Its layers'."""
        return (self.config(target).layer,)

    def numbers_per_token(self, target: ModelConfig) -> int:
        """Its own KV, and the fused feature."""
        layer = self.config(target).layer
        return numbers_per_token(layer) + layer.hidden_size

    def drafter(self, target: PagedModel, pool: PagePool, dynamic: bool) -> EagleDrafter:
        """With stores on the pool's pages."""
        decoder = target.decoder
        config = self.config(decoder.config)
        head = EagleHead(config, EagleWeights.read(self.directory, config, decoder), decoder.max_positions)
        return EagleDrafter(head, pool, dynamic)

    def doubts(self, drafter: Any, target: PagedModel, pool: PagePool, directory: Path) -> str:
        """Whether it hardly ever agrees with the target, or does so on other layers; texts longer than it knows."""
        found = [tried(lambda table, tokens: _guessed(drafter, target, table, tokens), target, pool, directory)]
        if drafter.trained_positions < target.max_positions:
            found.append(f"it was trained on texts of up to {drafter.trained_positions} tokens")
        return "; ".join(filter(None, found))

    def note(self, notes: Notes, target: Target, drafter: Any, name: str, shape: TreeShape | None) -> int:
        """Its shape, and what it reads."""
        head: EagleHead = drafter.head
        config, last = head.config, target.model.num_layers
        kind = f"EAGLE{'-3' if config.generation == 3 else ''}"
        text = f"{kind}, {layers(head.layer.num_layers)} of {head.layer.hidden_size}, {name}"
        notes.ok("draft", text, kind=drafter.name, hidden_size=head.layer.hidden_size)
        if config.aux:
            output = f" ({last} is the last one's output)" if last in config.aux else ""
            reads = f"reads the inputs of layers {_listed(config.aux)} of the target's {last}{output}"
        else:
            reads = "reads the state behind the target's final norm"
        notes.ok("layers", f"{reads}, {target.model.hidden_size} wide", layers=list(config.aux))
        note_vocabulary(notes, target, config.draft_vocab)
        return int(drafter.trained_positions)


def _guessed(drafter: EagleDrafter, target: PagedModel, table: PageTable, tokens: Tensor) -> str:
    """What ``trial.tried`` asks. Layers may be numbered by another convention, so the others are tried."""
    head = drafter.head
    others = head.config.other_layers(target.decoder.config.num_layers)
    forward = target.run([Rows(table, tokens, 0)], _all_layers(head.config, others))
    wanted = forward.logits.argmax(dim=-1).cpu()
    hits = eagle_hits(head, forward.features, tokens, wanted, table, drafter.store)
    found = {
        layers: eagle_hits(head.reading(layers), forward.features, tokens, wanted, table, drafter.store)
        for layers in others
    }
    better = [layers for layers in found if clearly_better(hits, found[layers])]
    if not better:
        return in_words(hits)
    best = max(better, key=lambda layers: int(found[layers].sum()))
    return f"{in_words(hits) or agrees(hits)}, and on {share(found[best])} with --draft-layers {_numbers(best)}"


def _all_layers(config: EagleConfig, others: list[tuple[int, ...]]) -> FeatureRequest:
    """What the head reads, and what it might."""
    layers = sorted({layer for aux in (config.aux, *others) for layer in aux})
    return FeatureRequest(final=config.needs.final, layers=tuple(layers))


def _numbers(layers: tuple[int, ...]) -> str:
    return ",".join(map(str, layers))


def _listed(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last
