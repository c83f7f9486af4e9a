"""``--draft mtp:PATH``, or only the path: one of Gemma 4's assistants drafts, over the target's own KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from foresay.drafters.assistant import AssistantDrafter
from foresay.kvpaging import PagePool, PageTable
from foresay.server.engine.checks import Notes, Target
from foresay.server.engine.drafters.head import Head, in_words, note_vocabulary, tried
from foresay.server.engine.parameters import item_bytes
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.units import counted
from foresay.spec.names import MTP
from foresay.spec.protocols import FeatureRequest, Rows
from foresay.spec.tree import TreeShape
from foresay.verifier.heads.assistant import AssistantConfig, AssistantHead
from foresay.verifier.heads.layouts import HeadTensors
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model_runner import ModelRunner


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

    def doubts(self, drafter: Any, target: ModelRunner, pool: PagePool, directory: Path) -> str:
        """Whether it hardly ever agrees with the target."""

        def guessed(table: PageTable, tokens: Tensor) -> str:
            forward = target.run([Rows(table, tokens, 0)], FeatureRequest(final=True))
            wanted = forward.logits.argmax(dim=-1).cpu()
            return in_words(drafter.assistant.hits(forward.features, tokens, wanted, table, target.store))

        return tried(guessed, target, pool, directory)

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
