"""``--draft draft_model:PATH``, or only the path: a smaller model drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from foresay.drafters.draft_model import DraftModelDrafter, RecurrentDraftDrafter
from foresay.server.engine.checks import Notes, Target, described, facts, look_at_files
from foresay.server.engine.device import LoadContext
from foresay.server.engine.drafters.entry import FromFiles
from foresay.server.engine.parameters import drafted_bytes, model_bytes, quantized, token_bytes
from foresay.server.engine.vocabulary import SMALL_SHARE, Translation, drafted_tokens, overlap, translation
from foresay.server.settings.config import EngineConfig
from foresay.server.text.tokenizer import tokenizer_file
from foresay.spec.names import DRAFT_MODEL
from foresay.spec.tree import TreeShape
from foresay.verifier.model.config import ModelConfig, idle_parameters, parameters
from foresay.verifier.model.families import FAMILIES
from foresay.verifier.model_runner import ModelRunner

#: A draft model with more than this share of the target's weights seldom pays.
_LARGE = 0.5


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

    def look_at(self, notes: Notes, target: Target, name: str, shape: TreeShape | None) -> int | None:
        """Check its files, its size relative to the target's, and what both vocabularies share."""
        other = f"take a model of a supported family ({', '.join(f.models for f in FAMILIES.values())})"
        model = notes.attempt("draft", other, lambda: self.model)
        if model is not None:
            look_at_files(notes, "draft", self.directory, model, target.dtype.value)
            if not notes.failed("draft"):
                self._note(notes, target, name)
        self._look_at_vocabulary(notes, target, model)
        return None if model is None else model.max_positions

    def _note(self, notes: Notes, target: Target, name: str) -> None:
        share = _met(self.model) / _met(target.model)
        shape = described(self.model, target.dtype.value, target.activations.value)
        text = f"{shape} ({share:.0%} of the target's), {name}"
        notes.ok("draft", text, kind=DRAFT_MODEL, **facts(self.model))
        if share > _LARGE:
            notes.warn(
                "draft",
                f"the draft model has {share:.0%} as many weights as the target, so drafting is slow as well",
                "name a smaller model of the family; foresay bench measures what this one gains",
            )

    def _look_at_vocabulary(self, notes: Notes, target: Target, model: ModelConfig | None) -> None:
        """Note whether both models use the same token ids; if not, how many tokens they share."""
        fetch = f"put the target's tokenizer.json into {self.directory}"
        # A list, since "nothing to compare" (None) is a result too.
        found = notes.attempt("vocabulary", fetch, lambda: [overlap(target.directory, self.directory)])
        if found is None:
            return
        shared = found[0]
        if shared is None:
            here = self.directory if tokenizer_file(target.directory) else target.directory
            notes.warn(
                "vocabulary",
                f"{here} has no tokenizer.json, so it is unknown whether the token ids of both mean the same",
                f"put the model's tokenizer.json into {here}",
            )
        elif shared.whole:
            notes.ok("vocabulary", f"all {shared.ours:,} tokens agree", target=shared.ours, draft=shared.theirs)
        elif model is not None:
            checked = notes.attempt("vocabulary", "", lambda: self.checked(target.directory, target.model))
            if checked is not None and checked.between is not None:
                _note_translation(notes, checked.between)


def _note_translation(notes: Notes, made: Translation) -> None:
    text = f"the draft model has another vocabulary, with {made.described}"
    facts = {"target": made.tokens, "shared": len(made.token_ids), "share": round(made.share, 3)}
    if made.share < SMALL_SHARE:
        notes.warn(
            "vocabulary", text, "foresay bench measures whether that is enough; a model of the family has all", **facts
        )
    else:
        notes.ok("vocabulary", text, **facts)


def _met(model: ModelConfig) -> int:
    """The number of weights that each row is multiplied with."""
    return parameters(model) - idle_parameters(model)
