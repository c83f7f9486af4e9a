"""The kinds of heads that ``--draft`` names: ``medusa:PATH``, ``eagle3:PATH``, ``eagle:PATH``, ``peagle:PATH``,
``dflash:PATH``, ``dspark:PATH``, or only the path; ``mtp``; and ``mtp:PATH``, one of Gemma 4's assistants, which drafts
over the target's own KV cache.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from foresay.drafters.assistant import AssistantDrafter
from foresay.drafters.eagle import EagleDrafter, MtpDrafter, PEagleDrafter
from foresay.drafters.parallel import DFlashDrafter, DSparkDrafter, MedusaDrafter
from foresay.kvpaging import PagePool
from foresay.server.engine.checks import Notes, Target
from foresay.server.engine.device import KV_DTYPES
from foresay.server.engine.drafters.head import Head, meta_model, note_vocabulary
from foresay.server.engine.parameters import drafted, drafted_bytes, item_bytes, token_bytes
from foresay.server.engine.vocabulary import drafted_tokens
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import CannotRun, target_directory
from foresay.server.settings.units import counted
from foresay.spec.budget.members import MODEL_LEVELS
from foresay.spec.names import DFLASH, DSPARK, EAGLE, EAGLE3, MEDUSA, MTP, PEAGLE
from foresay.spec.tree import TreeShape
from foresay.verifier.heads.assistant import AssistantConfig, AssistantHead
from foresay.verifier.heads.config import HeadConfig
from foresay.verifier.heads.layouts import HeadTensors
from foresay.verifier.heads.medusa import MedusaHeads
from foresay.verifier.heads.paged import DFlashHead, EagleHead
from foresay.verifier.heads.reader import read_mtp, read_weights
from foresay.verifier.heads.vocabulary import DraftVocabulary
from foresay.verifier.model.checkpoint import header_names
from foresay.verifier.model.config import ModelConfig, parameters
from foresay.verifier.model.predicting import mtp_layout
from foresay.verifier.model_runner import ModelRunner


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

    @abstractmethod
    def about(self, drafter: Any) -> str:
        """The kind of head, in words."""

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
                reads += ", and the state after its final norm"
        else:
            reads = "reads the state after the target's final norm"
        notes.ok("layers", f"{reads}, {target.model.hidden_size} wide", layers=read)
        note_vocabulary(notes, target, self.tokens(config))
        return int(drafter.head.layer.max_positions)

    def tokens(self, config: HeadConfig) -> int:
        """How many of the target's tokens it drafts."""
        return config.draft_vocab


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}"


@dataclass(frozen=True)
class Medusa(Head):
    """:mod:`foresay.drafters.parallel`."""

    names, made = (MEDUSA,), MedusaDrafter
    kind, trained = "medusa", MEDUSA

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

    def note(self, notes: Notes, target: Target, drafter: Any, name: str, shape: TreeShape | None) -> None:
        """Note the heads, and whether they draft as deep as requested."""
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
    """:mod:`foresay.drafters.eagle`."""

    names: ClassVar[tuple[str, ...]] = (EAGLE, EAGLE3, PEAGLE)
    made: ClassVar[type] = EagleDrafter
    cuts = True
    kind, trained = "eagle", EAGLE3

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

    def tokens(self, config: HeadConfig) -> int:
        """Of a large vocabulary, only tokens that were said lately."""
        return drafted(config.draft_vocab, self.vocabulary)

    @staticmethod
    def levels(drafter: Any) -> int:
        """For P-EAGLE, as many as were predicted at once in training."""
        return drafter.head.config.guesses or MODEL_LEVELS

    def about(self, drafter: Any) -> str:
        config = drafter.head.config
        kind = "EAGLE-3" if config.generation == 3 else "EAGLE"
        if config.mask is not None:
            kind = f"P-EAGLE, {config.guesses} tokens at once"
        return f"{kind}, {counted(config.layer.num_layers, 'layer')}"


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

    def look_at(self, notes: Notes, target: Target, name: str, shape: TreeShape | None) -> int | None:
        """Note whether it exists and is complete."""

        def made() -> MtpDrafter:
            found = self.checked(target.directory, target.model)
            return found.drafter(meta_model(target.model, target.dtype.value), PagePool(2, 1))

        found = notes.attempt("draft", "name another drafter, such as suffix", made)
        return None if found is None else self.note(notes, target, found, name, shape)

    def about(self, drafter: Any) -> str:
        return "the checkpoint's own layer for further tokens (MTP)"


@dataclass(frozen=True)
class DFlash(LayeredHead):
    """:mod:`foresay.drafters.parallel`."""

    names, made = (DFLASH, DSPARK), DFlashDrafter
    kind, trained = "dflash", DFLASH

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

    def about(self, drafter: Any) -> str:
        config = drafter.head.config
        kind = "DFlash" if config.markov is None else f"DSpark ({config.markov.kind}, rank {config.markov.rank})"
        size = counted(config.layer.num_layers, "layer")
        return f"{kind}, blocks of {config.block} that guess {config.guesses} tokens, {size}"


# -- an assistant ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assistant(Head):
    """:mod:`foresay.drafters.assistant`. page_size: of the KV cache."""

    names, made = (MTP,), AssistantDrafter
    kind, trained = "assistant", ""

    page_size: int = 16

    def configured(self, config: EngineConfig) -> Self:
        """With ``--page-size``."""
        return replace(self, page_size=config.page_size)

    def config(self, target: ModelConfig) -> AssistantConfig:
        """Its configuration for this target; raises ConfigError if it was made for another."""
        return AssistantConfig.read(self.directory, target)

    def shapes(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        return (self.config(target).model,)

    def weights(self, dtype: str, packed: bool) -> Mapping[str, int]:
        """With clusters, its output matrix stays as it is in the file; else it is packed like the others."""
        stored = HeadTensors.read(self.directory).tensors.values()
        return {"head": sum(one.numel() * (item_bytes(dtype) if one.is_floating_point() else 8) for one in stored)}

    def token_bytes(self, target: ModelConfig, dtype: str) -> int:
        """Bytes of the target's last state, of which a page has two."""
        return -(-2 * item_bytes(dtype) * target.hidden_size // self.page_size)

    def drafter(self, target: ModelRunner, pool: PagePool) -> AssistantDrafter:
        """The drafter on the target's store."""
        return AssistantDrafter(AssistantHead.load(self.directory, target.decoder), target.store)

    def note(self, notes: Notes, target: Target, drafter: Any, name: str, shape: TreeShape | None) -> None:
        """Its shape, and whose keys and values it reads."""
        config = drafter.assistant.config
        model, sources = config.model, sorted({layer.attention.source for layer in config.model.stack.layers})
        size, width = counted(model.num_layers, "layer"), model.hidden_size
        notes.ok("draft", f"Gemma 4's assistant, {size} of {width}, {name}", kind=drafter.name, hidden_size=width)
        read = f"the keys and values of the target's layer{'s' * (len(sources) > 1)} {' and '.join(map(str, sources))}"
        notes.ok("layers", f"reads {read}, and the state after its final norm", layers=sources)
        note_vocabulary(notes, target, model.vocab_size)

    def _another(self, target: Target) -> str:
        """How to get one that fits."""
        return f"name the assistant that was published for {target.name}, or another drafter, such as suffix"
