"""``--draft draft_model:PATH``, or only the path: a smaller model drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from foresay.drafters.draft_model import DraftModelDrafter, RecurrentDraftDrafter
from foresay.server.engine.device import LoadContext
from foresay.server.engine.drafters.entry import FromFiles
from foresay.server.engine.parameters import drafted_bytes, model_bytes, quantized, token_bytes
from foresay.server.engine.vocabulary import Translation, drafted_tokens, translation
from foresay.server.settings.config import EngineConfig
from foresay.spec.names import DRAFT_MODEL
from foresay.verifier.model.checkpoint import Checkpoint
from foresay.verifier.model.config import ModelConfig
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
