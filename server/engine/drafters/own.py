"""``--draft self``, ``self:int4``, ``self:int8``: the target in fewer bits drafts, over the target's own pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self

from foresay.drafters.self_draft import SelfDrafter
from foresay.server.engine.checks import Notes, Target, described
from foresay.server.engine.device import Loading, choose_activations
from foresay.server.engine.drafters.entry import Entry
from foresay.server.engine.parameters import item_bytes, model_bytes
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import Unfit, target_directory
from foresay.spec.errors import ConfigurationError
from foresay.spec.names import SELF
from foresay.spec.shape import MAX_NODES
from foresay.spec.tree import TreeShape
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.quantization import Quantization
from foresay.verifier.model_runner import ModelRunner

#: What the weights can become, and what they do where nothing is said.
BITS = {"int4": 4, "int8": 8}
DEFAULT = "int4"


@dataclass(frozen=True)
class Own(Entry):
    """:mod:`foresay.drafters.self_draft`. how: what the target's floats become. directory: the target's."""

    names, made = (SELF,), SelfDrafter
    only_one: ClassVar[str] = "copy of the target"

    how: str = DEFAULT
    directory: Path = Path()

    @classmethod
    def named(cls, part: str) -> Self | None:
        """By its name, perhaps with a colon and how many bits."""
        word, colon, how = part.partition(":")
        if word != SELF:
            return None
        if colon and how not in BITS:
            raise ConfigurationError(f"--draft {part}: expected self, or {' or '.join(f'self:{one}' for one in BITS)}")
        return cls(part, how=how or DEFAULT)

    def setting(self, name: str, place: str) -> str:
        """With the number of bits."""
        return f"{SELF}:{self.how}"

    def configured(self, config: EngineConfig) -> Self:
        """In the directory of the settings' target."""
        return replace(self, directory=target_directory(config))

    @cached_property
    def model(self) -> ModelConfig:
        """The copy's configuration. Raises Unfit for files that are no floats, and for recurrent layers, of which a
        pass over a tree's level would need the state that the levels above left."""
        model = ModelConfig.from_directory(self.directory)
        if model.quantization is not None:
            fault = f"--draft {self.asked}: the target's files are quantised already ({model.quantization})"
            raise Unfit(fault, "name the model that they were made from as the target, or another drafter")
        if model.stack.recurrence is not None:
            fault = (
                f"--draft {self.asked}: a model with recurrent layers ({model.architecture}) cannot draft for itself"
            )
            raise Unfit(fault, "name mtp, where its checkpoint has that layer, or a lookup (ngram, suffix)")
        return replace(model, quantization=Quantization.made(self.how))

    def checked(self, target: Path, model: ModelConfig) -> Self:
        """Raises Unfit if the target has no more bits than its copy would have."""
        own, found = self.model.quantization, model.quantization
        if found is not None and dict(found.rules)["Linear"].bits <= BITS[self.how]:
            fault = f"--draft {self.asked}: the target's weights ({found}) are no larger than its copy's ({own})"
            raise Unfit(fault, "leave --quantize out, or name another drafter")
        return self

    def shapes(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        """The copy."""
        return (self.model,)

    def weights(self, dtype: str, packed: bool) -> Mapping[str, int]:
        """All but the embedding, which is the target's."""
        model = self.model
        return {SELF: model_bytes(model, dtype, packed) - item_bytes(dtype) * model.vocab_size * model.hidden_size}

    def load(self, loading: Loading, target: ModelRunner) -> SelfDrafter:
        """Made of the target's files, as ``--quantize`` makes it."""
        config, model = loading.config, self.model
        rounds = choose_activations(config, model, loading.device).value == "int8"
        packed = replace(loading, rounds=rounds).packed("draft", self.directory, model)
        packed.embed = target.decoder.embedding
        decoder = Decoder(model, packed, loading.length + MAX_NODES)
        return SelfDrafter(decoder, target.store, config.draft_growth == "dynamic")

    def look_at(self, notes: Notes, target: Target, name: str, shape: TreeShape | None) -> None:
        """Whether there are floats to make it of."""
        other = "name another drafter, such as suffix"
        if notes.attempt("draft", other, lambda: self.checked(target.directory, target.model)) is not None:
            copy = described(self.model, target.dtype.value, target.activations.value)
            notes.ok("draft", f"the target itself in fewer bits, on its own KV cache: {copy}, {name}", kind=SELF)
