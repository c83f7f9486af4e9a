"""The kinds of heads that ``--draft`` names: ``medusa:PATH``, ``eagle3:PATH``, ``eagle:PATH``, ``peagle:PATH``,
``dflash:PATH``, ``dspark:PATH``, or only the path; ``mtp``; and ``mtp:PATH``, one of Gemma 4's assistants, which drafts
over the target's own KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from foresay.drafters.assistant import AssistantDrafter
from foresay.drafters.eagle import EagleDrafter, MtpDrafter, PEagleDrafter
from foresay.drafters.levels import TreeDrafter
from foresay.drafters.parallel import DFlashDrafter, DSparkDrafter, MedusaDrafter
from foresay.kvpaging import KVStore, PagePool, StatePages
from foresay.server.engine.device import KV_DTYPES, LoadContext
from foresay.server.engine.drafters.entry import FromFiles
from foresay.server.engine.parameters import drafted_bytes, item_bytes, token_bytes
from foresay.server.engine.vocabulary import drafted_tokens
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import CannotRun, target_directory
from foresay.spec.budget.members import MODEL_LEVELS
from foresay.spec.errors import ConfigurationError
from foresay.spec.names import DFLASH, DSPARK, EAGLE, EAGLE3, MEDUSA, MTP, PEAGLE
from foresay.spec.protocols import Drafter
from foresay.verifier.heads.assistant import AssistantConfig, AssistantHead
from foresay.verifier.heads.config import HeadConfig
from foresay.verifier.heads.layouts import ACCEPTANCE, PATTERNS, HeadTensors, Kind, kind_of
from foresay.verifier.heads.medusa import JOINT_PREFIX, MedusaHeads
from foresay.verifier.heads.paged import DFlashHead, EagleHead
from foresay.verifier.heads.reader import read_mtp, read_weights
from foresay.verifier.heads.vocabulary import DraftVocabulary
from foresay.verifier.model.checkpoint import header_names
from foresay.verifier.model.config import ModelConfig, kv_shapes, parameters
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.mtp_layout import mtp_layout
from foresay.verifier.model.weights import allocate
from foresay.verifier.model_runner import ModelRunner


@dataclass(frozen=True)
class Head(FromFiles):
    """kind: of the head in the directory."""

    files, only_one = PATTERNS, "head"
    kind: ClassVar[Kind]

    @classmethod
    def named(cls, part: str) -> Self | None:
        """By its prefix. Raises ConfigurationError if the directory holds no head of this kind."""
        head = super().named(part)
        if head is not None and not cls.holds(head.directory):
            found = kind_of(head.directory)
            held = f"holds {found} heads" if found else "holds no head"
            raise ConfigurationError(f"--draft {part}: {head.directory} {held}")
        return head

    @classmethod
    def holds(cls, directory: Path) -> bool:
        """By the head's own configuration and the names of its files and tensors."""
        return kind_of(directory) == cls.kind

    def weights(self, dtype: str, packed: bool) -> Mapping[str, int]:
        """Counted exactly from the tensors; mapped files are not read for that."""
        stored = HeadTensors.read(self.directory, prefix=JOINT_PREFIX).tensors.values()
        sizes = (item_bytes(dtype) if one.is_floating_point() else one.element_size() for one in stored)
        return {"head": sum(one.numel() * size for one, size in zip(stored, sizes, strict=True))}

    def load(self, loading: LoadContext, target: ModelRunner) -> Drafter:
        loading.report("reading the head's weights")
        made = self.drafter(target, loading.pool)
        config = self.directory / "config.json"
        if config.exists() and (judged := Fields.read(config).section(ACCEPTANCE)):
            made.calibration.expect(judged.shares("greedy"), judged.shares("sampled"))
        return made

    def drafter(self, target: ModelRunner, pool: PagePool) -> TreeDrafter:
        """The drafter, for this target."""
        raise NotImplementedError

    def check_files(self, target: ModelConfig, dtype: str) -> None:
        """Make the drafter of its files for a target that has no weights."""
        self.drafter(meta_model(target, dtype), PagePool(2, 1))


@dataclass(frozen=True)
class LayeredHead(Head):
    """kv_dtype: of its KV cache. vocabulary: which tokens it drafts, as ``--draft-vocab`` says."""

    kv_dtype: str = "auto"
    vocabulary: str = "auto"

    def configured(self, config: EngineConfig) -> Self:
        """With ``--draft-kv-dtype`` and ``--draft-vocab``."""
        return replace(self, kv_dtype=config.draft_kv_dtype, vocabulary=config.draft_vocab)

    def config(self, target: ModelConfig) -> HeadConfig:
        """Its configuration for this target."""
        return HeadConfig.read(self.directory, target)

    def shapes(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        return (self.config(target).layer,)

    def token_bytes(self, target: ModelConfig, dtype: str) -> int:
        return token_bytes(self.config(target).layer, dtype, self.kv_dtype)


@dataclass(frozen=True)
class Medusa(Head):
    """:mod:`foresay.drafters.parallel`."""

    names, made = (MEDUSA,), MedusaDrafter
    kind = "medusa"

    def drafter(self, target: ModelRunner, pool: PagePool) -> MedusaDrafter:
        """The drafter with a store on the pool's pages."""
        return MedusaDrafter(MedusaHeads.load(self.directory, target.decoder), pool)

    def token_bytes(self, target: ModelConfig, dtype: str) -> int:
        """Bytes of the target's last hidden state."""
        return item_bytes(dtype) * target.hidden_size

    @staticmethod
    def levels(drafter: Any) -> int:
        """One level per head."""
        return len(drafter.heads)


@dataclass(frozen=True)
class Eagle(LayeredHead):
    """:mod:`foresay.drafters.eagle`."""

    names: ClassVar[tuple[str, ...]] = (EAGLE, EAGLE3, PEAGLE)
    made: ClassVar[type] = EagleDrafter
    cuts = True
    kind = "eagle"

    def token_bytes(self, target: ModelConfig, dtype: str) -> int:
        """Bytes of its own KV, and of the fused feature."""
        layer = self.config(target).layer
        return super().token_bytes(target, dtype) + item_bytes(dtype) * int(layer.hidden_size)

    def drafter(self, target: ModelRunner, pool: PagePool) -> EagleDrafter:
        """With stores on the pool's pages."""
        decoder = target.decoder
        config = self.config(decoder.config)
        head = EagleHead(config, read_weights(self.directory, config, decoder), decoder.max_positions)
        made = EagleDrafter if config.mask is None else PEagleDrafter
        kv, vocabulary = KV_DTYPES.get(self.kv_dtype), self._vocabulary(head, target)
        return made(head, pool, kv=kv, vocabulary=vocabulary)

    def _vocabulary(self, head: EagleHead, target: ModelRunner) -> DraftVocabulary | None:
        return drafted_tokens(head.decoder.head, self.vocabulary, target.decoder.config, head.token_ids)

    @staticmethod
    def levels(drafter: Any) -> int:
        """For P-EAGLE, as many as were predicted at once in training."""
        return drafter.head.config.guesses or MODEL_LEVELS


@dataclass(frozen=True)
class Mtp(Eagle):
    """The checkpoint's own extra layer that predicts further tokens; ``--draft mtp``."""

    names, made = (MTP,), MtpDrafter

    @classmethod
    def named(cls, part: str) -> Self | None:
        """By its name only: it is in the target's own directory."""
        return cls(part) if part in cls.names else None

    @classmethod
    def holds(cls, directory: Path) -> bool:
        """Never: it is only in the target's own directory."""
        return False

    def configured(self, config: EngineConfig) -> Self:
        """In the directory of the settings' target."""
        return replace(super().configured(config), directory=target_directory(config))

    def checked(self, target: Path, model: ModelConfig) -> Self:
        """Raises CannotRun for a target without such a layer, or with an unknown layout."""
        if mtp_layout(header_names(target), model) is None:
            fault = (
                f"--draft {self.option}: {target} has no layer that predicts further tokens (as checkpoints of "
                "Qwen3.5, GLM, DeepSeek, MiMo and ERNIE have it), or one that is not known beside such layers"
            )
            raise CannotRun(fault, "name another drafter, such as suffix")
        return replace(self, directory=target)

    def config(self, target: ModelConfig) -> HeadConfig:
        """Its configuration, like the target's own layers."""
        layout = mtp_layout(header_names(self.directory), target)
        assert layout is not None, "it was checked"
        return HeadConfig.of_mtp(target, layout)

    def weights(self, dtype: str, packed: bool) -> Mapping[str, int]:
        """Bytes of its tensors, all floats."""
        target = ModelConfig.from_directory(self.directory)
        layer = self.config(target).layer
        own = parameters(layer) - 2 * layer.vocab_size * layer.hidden_size + 2 * layer.hidden_size**2
        return {"head": item_bytes(dtype) * own + (drafted_bytes(target, dtype, self.vocabulary) if packed else 0)}

    def drafter(self, target: ModelRunner, pool: PagePool) -> MtpDrafter:
        """With stores on the pool's pages."""
        head = EagleHead(*read_mtp(self.directory, target.decoder), target.decoder.max_positions)
        return MtpDrafter(head, pool, MTP, KV_DTYPES.get(self.kv_dtype), self._vocabulary(head, target))


@dataclass(frozen=True)
class DFlash(LayeredHead):
    """:mod:`foresay.drafters.parallel`."""

    names, made = (DFLASH, DSPARK), DFlashDrafter
    kind = "dflash"

    def drafter(self, target: ModelRunner, pool: PagePool) -> DFlashDrafter:
        """The drafter with a store on the pool's pages."""
        decoder = target.decoder
        config = self.config(decoder.config)
        head = DFlashHead(config, read_weights(self.directory, config, decoder), decoder.max_positions)
        made = DFlashDrafter if head.markov is None else DSparkDrafter
        return made(head, pool, kv=KV_DTYPES.get(self.kv_dtype))

    @staticmethod
    def levels(drafter: Any) -> int:
        """As many as a block predicts."""
        return int(drafter.head.config.guesses)


# -- an assistant ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assistant(Head):
    """:mod:`foresay.drafters.assistant`. page_size: of the KV cache."""

    names, made = (MTP,), AssistantDrafter
    kind = "assistant"

    page_size: int = 16

    def configured(self, config: EngineConfig) -> Self:
        """With ``--page-size``."""
        return replace(self, page_size=config.page_size)

    def config(self, target: ModelConfig) -> AssistantConfig:
        """Its configuration for this target; raises ConfigError if it was made for another."""
        return AssistantConfig.read(self.directory, target)

    def shapes(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        return (self.config(target).model,)

    def token_bytes(self, target: ModelConfig, dtype: str) -> int:
        """Bytes of the target's last state, of which a page has two."""
        return -(-2 * item_bytes(dtype) * target.hidden_size // self.page_size)

    def drafter(self, target: ModelRunner, pool: PagePool) -> AssistantDrafter:
        """The drafter on the target's store."""
        return AssistantDrafter(AssistantHead.load(self.directory, target.decoder), target.store)


# -- a target without weights ------------------------------------------------------------------------------------------
# Loaders of heads need only a target's shape, and put their tensors on its device. With this meta model they run as
# with the real one, and raise the same errors for what does not fit.


def meta_model(model: ModelConfig, dtype: str) -> ModelRunner:
    """The target on torch's meta device; it cannot be run."""
    kind: torch.dtype = getattr(torch, dtype)
    decoder = Decoder(model, allocate(model, kind, "meta"), max_positions=1)
    pool = PagePool(2, 1)
    if model.stack.recurrence is not None:
        pool.attach(StatePages(1, 2, pool.page_size))
    store = KVStore(pool, kv_shapes(model), kind, "meta")
    return ModelRunner(decoder, store, model.max_positions)
