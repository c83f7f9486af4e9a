"""``--draft medusa:PATH``, ``--draft eagle3:PATH``, or the path of a head alone: from its name to a drafter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from drafters.eagle import EagleDrafter
from drafters.medusa import MedusaDrafter
from kvpaging import PagePool
from server.lookup import LOOKUPS
from server.trial import misfit
from spec.errors import ConfigurationError
from spec.names import DRAFT_MODEL, EAGLE, EAGLE3, MEDUSA, NONE
from verifier.heads.eagle import EagleHead
from verifier.heads.eagle_config import EagleConfig
from verifier.heads.eagle_weights import EagleWeights
from verifier.heads.kind import PATTERNS, Kind, kind_of
from verifier.heads.medusa import MedusaHeads
from verifier.model.config import ModelConfig
from verifier.model.hub import resolve
from verifier.paged_model import PagedModel

#: What may stand before the colon, and the kind of head it asks for.
PREFIXES: dict[str, Kind] = {MEDUSA: "medusa", EAGLE: "eagle", EAGLE3: "eagle"}


@dataclass(frozen=True, slots=True)
class Head:
    """A head that was asked for, before its weights are read.

    layers: the target's layers whose inputs it is to read, whatever its own configuration says.
    """

    kind: Kind
    directory: Path
    asked: str
    layers: tuple[int, ...] | None = None

    @property
    def place(self) -> str:
        """Where it was asked for from: a directory or a hub id."""
        prefix, _, path = self.asked.partition(":")
        return path if prefix in PREFIXES and path else self.asked

    def layer(self, target: ModelConfig) -> ModelConfig | None:
        """The shape of an EAGLE head's layers; None for Medusa heads, which keep nothing of a text."""
        return None if self.kind == "medusa" else self.eagle_config(target).layer

    def numbers_per_token(self, target: ModelConfig) -> int:
        """How many numbers its stores hold for each token of the KV cache."""
        layer = self.layer(target)
        if layer is None:
            return 0
        return layer.num_layers * 2 * layer.num_kv_heads * layer.head_dim + layer.hidden_size

    def eagle_config(self, target: ModelConfig) -> EagleConfig:
        """An EAGLE head's configuration for this target; raises ConfigurationError for layers that it cannot read."""
        layers, depth = self.layers, target.num_layers
        if layers is not None and max(layers) > depth:
            raise ConfigurationError(
                f"--draft-layers {_listed(layers)}: the target has {depth} layers, numbered 0 to {depth - 1}; "
                f"{depth} names the output of the last one"
            )
        config = EagleConfig.read(self.directory, target, layers)
        if layers is not None and config.aux != layers:
            raise ConfigurationError(
                f"--draft-layers {_listed(layers)}: {self.directory} reads the state behind the target's final norm, "
                "no layers; leave the flag out"
            )
        return config


def _listed(layers: tuple[int, ...]) -> str:
    return ",".join(map(str, layers))


def find_head(draft: str, layers: str | None = None) -> Head | None:
    """The head that ``--draft`` names; None where it names something else. layers: ``--draft-layers``.

    Raises ConfigurationError if what is there is not what was asked for, ModelNotFound if nothing is there.
    """
    head = _named(draft)
    if layers is None:
        return head
    if head is None or head.kind != "eagle":
        raise ConfigurationError(f"--draft-layers {layers}: is for EAGLE heads, but --draft is {draft}")
    return replace(head, layers=tuple(map(int, layers.split(","))))


def _named(draft: str) -> Head | None:
    prefix, _, path = draft.partition(":")
    if prefix in PREFIXES and path:
        directory = resolve(path, extra=PATTERNS, flag="--draft")
        found = kind_of(directory)
        if found != PREFIXES[prefix]:
            held = f"holds {found} heads" if found else "holds no head"
            raise ConfigurationError(f"--draft {draft}: {directory} {held}")
        return Head(found, directory, draft)
    if draft in (NONE, *LOOKUPS) or prefix == DRAFT_MODEL:
        return None
    kind = kind_of(resolve(draft, flag="--draft"))
    # Of a hub repository only a model's files were fetched so far; heads may be stored as others.
    return Head(kind, resolve(draft, extra=PATTERNS), draft) if kind else None


def load_head(head: Head, verifier: PagedModel, pool: PagePool, dynamic: bool) -> MedusaDrafter | EagleDrafter:
    """The drafter. dynamic: how its trees grow, see :mod:`drafters.growth`."""
    target = verifier.decoder
    if head.kind == "medusa":
        return MedusaDrafter(MedusaHeads.load(head.directory, target), dynamic)
    return EagleDrafter(load_eagle(head, verifier), pool, dynamic)


def load_eagle(head: Head, verifier: PagedModel) -> EagleHead:
    """The EAGLE head, for this target."""
    target = verifier.decoder
    config = head.eagle_config(target.config)
    return EagleHead(config, EagleWeights.read(head.directory, config, target), target.max_positions)


def doubts(
    head: Head, drafter: MedusaDrafter | EagleDrafter, verifier: PagedModel, pool: PagePool, target: Path
) -> str:
    """What speaks against the head, in words for the banner; empty if nothing does.

    target: the target's directory, whose tokenizer makes tokens of the trial text.
    """
    found = [misfit(drafter, verifier, pool, target)]
    if isinstance(drafter, EagleDrafter) and drafter.trained_positions < verifier.max_positions:
        found.append(f"it was trained on texts of up to {drafter.trained_positions} tokens")
    return "; ".join(filter(None, found))
