"""Heads that read layers of the target, which ``--draft-layers`` can name, and have KV (``--draft-kv-dtype``)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from drafters.fed import FedDrafter
from kvpaging import PagePool, PageTable
from server.engine.checks import Notes, Target
from server.engine.drafters.head import Head, agrees, in_words, note_vocabulary, share, tried
from server.engine.memory import token_bytes
from server.settings.config import EngineConfig
from spec.errors import ConfigurationError
from spec.features import Features
from spec.protocols import FeatureRequest, Rows
from spec.tree import TreeShape
from verifier.heads.dflash_config import DFlashConfig
from verifier.heads.eagle_config import EagleConfig
from verifier.heads.fit import clearly_better
from verifier.model.config import ModelConfig
from verifier.paged_model import PagedModel


@dataclass(frozen=True)
class LayeredHead(Head):
    """layers: the target's layers whose inputs it is to read, whatever its own configuration says. kv_dtype: what its
    KV is kept in."""

    layered = True
    #: What reads its config.json.
    configuration: ClassVar[type[EagleConfig | DFlashConfig]]

    layers: tuple[int, ...] | None = None
    kv_dtype: str = "auto"

    def configured(self, config: EngineConfig) -> Self:
        """With ``--draft-layers`` and ``--draft-kv-dtype``."""
        named = config.draft_layers
        layers = self.layers if named is None else tuple(map(int, named.split(",")))
        return replace(self, layers=layers, kv_dtype=config.draft_kv_dtype)

    def config(self, target: ModelConfig) -> Any:
        """Its configuration for this target; raises ConfigurationError for layers that it cannot read."""
        layers, depth = self.layers, target.num_layers
        if layers is not None and max(layers) > depth:
            raise ConfigurationError(
                f"--draft-layers {_numbers(layers)}: the target has {depth} layers, numbered 0 to {depth - 1}; "
                f"{depth} names the output of the last one"
            )
        config = self.configuration.read(self.directory, target, layers)
        if layers is not None and config.needs.layers != layers:
            raise ConfigurationError(
                f"--draft-layers {_numbers(layers)}: {self.directory} reads the state behind the target's final norm, "
                "no layers; leave the flag out"
            )
        return config

    def shapes(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        """Its layers'."""
        return (self.config(target).layer,)

    def token_bytes(self, target: ModelConfig, dtype: str) -> int:
        """Keys and values of its layers."""
        return token_bytes(self.config(target).layer, dtype, self.kv_dtype)

    @abstractmethod
    def hits(
        self, head: Any, features: Features, text: tuple[Tensor, Tensor], table: PageTable, fed: FedDrafter
    ) -> Tensor:
        """bool[N]: where its first guess is the target's choice (:mod:`verifier.heads.fit`).

        text: its tokens, int64[R], and the target's most likely token after each.
        """

    def doubts(self, drafter: Any, target: PagedModel, pool: PagePool, directory: Path) -> str:
        """Whether it hardly ever agrees with the target, or does so on other layers; texts longer than it knows."""
        found = [tried(lambda table, tokens: self._guessed(drafter, target, table, tokens), target, pool, directory)]
        known = drafter.head.layer.max_positions
        if known < target.max_positions:
            found.append(f"it was trained on texts of up to {known} tokens")
        return "; ".join(filter(None, found))

    def _guessed(self, drafter: Any, target: PagedModel, table: PageTable, tokens: Tensor) -> str:
        """What ``trial.tried`` asks. Layers may be numbered by another convention, so the others are tried."""
        head = drafter.head
        others = head.config.other_layers(target.decoder.config.num_layers)
        forward = target.run([Rows(table, tokens, 0)], _all_layers(head.config.needs, others))
        text = tokens, forward.logits.argmax(dim=-1).cpu()
        hits = self.hits(head, forward.features, text, table, drafter)
        found = {layers: self.hits(head.reading(layers), forward.features, text, table, drafter) for layers in others}
        better = [layers for layers in found if clearly_better(hits, found[layers])]
        if not better:
            return in_words(hits)
        best = max(better, key=lambda layers: int(found[layers].sum()))
        return f"{in_words(hits) or agrees(hits)}, and on {share(found[best])} with --draft-layers {_numbers(best)}"

    @abstractmethod
    def about(self, drafter: Any) -> str:
        """What kind of head it is, in words."""

    def note(self, notes: Notes, target: Target, drafter: Any, name: str, shape: TreeShape | None) -> int:
        """Its shape, and what it reads."""
        config, last = drafter.head.config, target.model.num_layers
        width = config.layer.hidden_size
        notes.ok("draft", f"{self.about(drafter)} of {width}, {name}", kind=drafter.name, hidden_size=width)
        read = list(config.needs.layers)
        if read:
            output = f" ({last} is the last one's output)" if last in read else ""
            reads = f"reads the inputs of layers {_listed(read)} of the target's {last}{output}"
            if config.needs.final:
                reads += ", and the state behind its final norm"
        else:
            reads = "reads the state behind the target's final norm"
        notes.ok("layers", f"{reads}, {target.model.hidden_size} wide", layers=read)
        note_vocabulary(notes, target, config.draft_vocab)
        return int(drafter.head.layer.max_positions)


def _all_layers(needs: FeatureRequest, others: list[tuple[int, ...]]) -> FeatureRequest:
    """What the head reads, and what it might."""
    layers = sorted({layer for read in (needs.layers, *others) for layer in read})
    return FeatureRequest(final=needs.final, layers=tuple(layers))


def _numbers(layers: tuple[int, ...]) -> str:
    return ",".join(map(str, layers))


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}"
