"""``--draft draft_model:PATH``, or only the path: a smaller model drafts. ``--draft self``, ``self:int4``,
``self:int8``: a copy of the target in fewer bits drafts, on the target's own KV pages; and ``PATH > self``: a
draft model, a head or a lookup drafts for that copy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from foresay.drafters.draft_model import DraftModelDrafter, RecurrentDraftDrafter
from foresay.drafters.proposer import on_device
from foresay.drafters.self_draft import SelfDrafter
from foresay.server.engine.device import LoadContext
from foresay.server.engine.drafters.entry import Entry, FromFiles
from foresay.server.engine.parameters import (
    choose_activations,
    drafted_bytes,
    held_table_bytes,
    item_bytes,
    model_bytes,
    quantized,
    token_bytes,
)
from foresay.server.engine.vocabulary import Translation, drafted_tokens, translation
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import CannotRun, target_directory
from foresay.spec.errors import ConfigurationError
from foresay.spec.names import DRAFT_MODEL, SELF
from foresay.spec.protocols import Drafter, Lookup
from foresay.spec.shape import MAX_NODES
from foresay.verifier.model.checkpoint import Checkpoint
from foresay.verifier.model.config import ModelConfig, parameters
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.quantization import Quantization
from foresay.verifier.model.weights import check
from foresay.verifier.model_runner import ModelRunner


@dataclass(frozen=True)
class DraftModel(FromFiles):
    """:mod:`foresay.drafters.draft_model`. quantize: what its float weights become. kv_dtype: of its KV cache.
    vocabulary: which tokens it drafts. between: the translation between both vocabularies, once compared; None if they
    are the same. anyway: even if these have little in common."""

    names, made = (DRAFT_MODEL,), DraftModelDrafter
    only_one, cuts = "draft model", True

    between: Translation | None = None
    quantize: str | None = None
    kv_dtype: str = "auto"
    vocabulary: str = "auto"
    anyway: bool = False

    def configured(self, config: EngineConfig) -> Self:
        """With ``--draft-quantize``, ``--draft-kv-dtype``, ``--draft-vocab`` and ``--anyway``."""
        quantize, kv_dtype = config.draft_quantize, config.draft_kv_dtype
        return replace(self, quantize=quantize, kv_dtype=kv_dtype, vocabulary=config.draft_vocab, anyway=config.anyway)

    @cached_property
    def model(self) -> ModelConfig:
        """Its configuration, as loaded. Raises a loader's error if it cannot be read, or its family is unknown."""
        return quantized(ModelConfig.from_directory(self.directory), self.quantize, "--draft-quantize")

    def checked(self, target: Path, model: ModelConfig) -> Self:
        """Compare both vocabularies. Raises CannotRun if they have too little in common."""
        made = translation(self.location, target, model, self.directory, self.model, self.anyway)
        return replace(self, between=made)

    def shapes(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        return (self.model,)

    def token_bytes(self, target: ModelConfig, dtype: str) -> int:
        return token_bytes(self.model, dtype, self.kv_dtype)

    def weights(self, dtype: str, packed: bool) -> Mapping[str, int]:
        """Counted like the target's."""
        copied = drafted_bytes(self.model, dtype, self.vocabulary) if packed else 0
        return {DRAFT_MODEL: model_bytes(self.model, dtype, packed) + copied}

    def load(self, loading: LoadContext, target: ModelRunner) -> DraftModelDrafter:
        columns, read, ids = (None,) * 3
        if (between := self.between) is not None:
            columns, read, ids = between.columns, between.read, between.token_ids
        model = loading.paged_model("draft model", self.directory, self.model, columns, self.kv_dtype)
        model.record(None)
        vocabulary = drafted_tokens(model.decoder.head, self.vocabulary, self.model, ids)
        made = DraftModelDrafter if self.model.stack.recurrence is None else RecurrentDraftDrafter
        return made(model, read=read, token_ids=ids, vocabulary=vocabulary)

    @property
    def remark(self) -> str:
        """How many of the target's tokens it shares, if not all."""
        return "" if self.between is None else f", knows {self.between.described}"

    @property
    def warning(self) -> str:
        """A warning if these are few."""
        return "" if self.between is None else self.between.warning(self.location)

    def check_files(self, target: ModelConfig, dtype: str) -> None:
        """Compare its files' headers with its configuration."""
        check(Checkpoint.open(self.directory), self.model)


# -- the target's copy ------------------------------------------------------------------------------------------------


#: Bits of the copy's weights; and the model size below which 4 bits predict too badly to pay (measured at 135M, where
#: half of the likeliest tokens change).
BITS = {"int4": 4, "int8": 8}
_SMALL = 500_000_000
#: How often a copy's first choice comes, given that those above it did: what it begins with, as at 135M and 1B.
_RIGHT = {"int4": 0.8, "int8": 0.95}


@dataclass(frozen=True)
class Own(Entry):
    """:mod:`foresay.drafters.self_draft`. requested_bits: what the target's floats become; "": what pays. directory:
    the target's. first: the drafter that drafts for it. shared: whether that one drafts for the target too."""

    names, made = (SELF,), SelfDrafter
    only_one = "copy of the target"

    requested_bits: str = ""
    directory: Path = Path()
    first: Entry | None = None
    shared: bool = False

    @classmethod
    def named(cls, part: str) -> Self | None:
        """By its name, optionally with a colon and the number of bits."""
        word, colon, how = part.partition(":")
        if word != SELF:
            return None
        if colon and how not in BITS:
            raise ConfigurationError(f"--draft {part}: expected self, or {' or '.join(f'self:{one}' for one in BITS)}")
        return cls(part, requested_bits=how)

    @property
    def spared(self) -> Entry | None:
        """The drafter before it."""
        return self._with

    @property
    def _with(self) -> Entry | None:
        """The drafter that is loaded with it."""
        return None if self.shared else self.first

    def alongside(self, others: Collection[str]) -> Self:
        """The drafter before it is only loaded once."""
        return replace(self, shared=self.first is not None and self.first.option in others)

    def behind(self, first: Entry, part: str) -> Self:
        """The same with another drafter before it, by ``part`` of ``--draft``. Raises ConfigurationError for a
        kind that cannot be."""
        if isinstance(first, Own) or not first.names:
            raise ConfigurationError(
                f"--draft {part}: expected a draft model, a head, ngram or suffix before >, not {first.option}"
            )
        return replace(self, option=part, location=first.location, first=first)

    def setting(self, name: str, location: str) -> str:
        """Its name with the number of bits."""
        own, first = f"{SELF}:{self.how}", self.first
        if first is None:
            return own
        word = first.option.partition(":")[0]
        return f"{first.setting(word if word in first.names else first.names[0], location)} > {own}"

    def configured(self, config: EngineConfig) -> Self:
        """In the directory of the settings' target."""
        first = None if self.first is None else self.first.configured(config)
        return replace(self, directory=target_directory(config), first=first)

    @cached_property
    def how(self) -> str:
        """What its weights become: ``int4`` or ``int8``."""
        small = not self.requested_bits and parameters(ModelConfig.from_directory(self.directory)) < _SMALL
        return "int8" if small else self.requested_bits or "int4"

    @cached_property
    def model(self) -> ModelConfig:
        """The copy's configuration. Raises CannotRun for files without floats."""
        model = ModelConfig.from_directory(self.directory)
        if model.quantization is not None:
            fault = f"--draft {self.option}: its files are quantised ({model.quantization})"
            raise CannotRun(fault, "name the model that they were made from as the target, or another drafter")
        return replace(model, quantization=Quantization.from_name(self.how))

    def checked(self, target: Path, model: ModelConfig) -> Self:
        """Raises CannotRun if the target has no more bits than its copy, and for recurrent layers before it."""
        if isinstance(self.first, DraftModel) and self.first.model.stack.recurrence is not None:
            fault = f"--draft {self.option}: a draft model with recurrent layers cannot draft for another drafter"
            raise CannotRun(fault, "name one of the two")
        own, found = self.model.quantization, model.quantization
        if found is not None and dict(found.rules)["Linear"].bits <= BITS[self.how]:
            fault = f"--draft {self.option}: the target's weights ({found}) are no larger than its copy's ({own})"
            raise CannotRun(fault, "leave --quantize out, or name another drafter")
        return self if self.first is None else replace(self, first=self.first.checked(target, model))

    def shapes(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        """The copy, and the drafter that drafts for it."""
        return (self.model,) if self._with is None else (self.model, *self._with.shapes(target))

    def with_states(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        """The drafter before it: the copy reads the target's states."""
        return () if self._with is None else self._with.with_states(target)

    def token_bytes(self, target: ModelConfig, dtype: str) -> int:
        """The KV of the drafter that drafts for it."""
        return 0 if self._with is None else self._with.token_bytes(target, dtype)

    def weights(self, dtype: str, packed: bool) -> Mapping[str, int]:
        """All weights but the embeddings, which are the target's."""
        model = self.model
        shared = item_bytes(dtype) * model.vocab_size * model.hidden_size
        own = model_bytes(model, dtype, packed) - shared - held_table_bytes(model, dtype, packed)
        return {SELF: own} if self._with is None else {SELF: own, **self._with.weights(dtype, packed)}

    def load(self, loading: LoadContext, target: ModelRunner) -> SelfDrafter:
        """The copy, made of the target's files like ``--quantize``. Raises CannotRun for a chain of drafters on a GPU,
        whose captured steps have no rounds."""
        config, model = loading.config, self.model
        if self.first is not None and loading.device.is_gpu:
            raise CannotRun(f"--draft {self.option}: chains of drafters run on a CPU alone", "name one of the two")
        rounds = choose_activations(config, model, loading.device).value == "int8"
        packed = replace(loading, rounds=rounds).packed("draft", self.directory, model)
        packed.embed, packed.table = target.decoder.embedding, target.decoder.table
        copy = ModelRunner(Decoder(model, packed, loading.length + MAX_NODES), target.store, loading.length)
        first: Drafter | None = None
        if self.first is not None:
            first = loading.made[self.first.option] if self.shared else self.first.load(loading, target)
        lookup = first if isinstance(first, Lookup) else None
        made = SelfDrafter(copy, on_device(first), lookup, self.shared)
        made.calibration.expect(*[(_RIGHT[self.how],)] * 2)
        return made

    @property
    def remark(self) -> str:
        """That of the drafter before it."""
        return "" if self._with is None else self._with.remark

    @property
    def warning(self) -> str:
        """That of the drafter before it."""
        return "" if self._with is None else self._with.warning

    def check_files(self, target: ModelConfig, dtype: str) -> None:
        """Check the drafter before it: the copy is made of the target's files."""
        if self._with is not None:
            self._with.check_files(target, dtype)
