"""What heads that read the target's hidden states share, as drafters that ``--draft`` names."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from foresay.drafters.levels import TreeDrafter
from foresay.kvpaging import KVStore, PagePool, StatePages
from foresay.server.engine.checks import Notes, Target
from foresay.server.engine.device import LoadContext
from foresay.server.engine.drafters.entry import FromFiles
from foresay.server.engine.parameters import item_bytes
from foresay.spec.errors import ConfigurationError
from foresay.spec.protocols import Drafter
from foresay.spec.tree import TreeShape
from foresay.verifier.heads.layouts import ACCEPTANCE, PATTERNS, HeadTensors, Kind, kind_of
from foresay.verifier.heads.medusa import JOINT_PREFIX
from foresay.verifier.model.config import ModelConfig, kv_shapes
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.weights import allocate
from foresay.verifier.model_runner import ModelRunner

_FETCH = "fetch the head's files again from where it was published, or train it again"


@dataclass(frozen=True)
class Head(FromFiles):
    """kind: of the head in the directory. trained: its name in ``foresay train``."""

    files, only_one = PATTERNS, "head"
    kind: ClassVar[Kind]
    trained: ClassVar[str]

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
        floats = sum(tensor.numel() for tensor in stored if tensor.is_floating_point())
        return {"head": item_bytes(dtype) * floats + sum(t.numel() for t in stored if t.dtype is torch.int8)}

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

    def note(self, notes: Notes, target: Target, drafter: Any, name: str, shape: TreeShape | None) -> int | None:
        """Note what it is; returns the longest text that it was trained on, if known. name: for people."""
        raise NotImplementedError

    def look_at(self, notes: Notes, target: Target, name: str, shape: TreeShape | None) -> int | None:
        """Note whether it is complete and fits, which layers it reads and which tokens it can draft."""
        files = notes.attempt("draft", _FETCH, lambda: HeadTensors.read(self.directory, prefix=JOINT_PREFIX))
        if files is None:
            return None
        dtype = target.dtype.value
        found = notes.attempt(
            "draft",
            self._another(target),
            lambda: self.drafter(meta_model(target.model, dtype), PagePool(2, 1)),
        )
        return None if found is None else self.note(notes, target, found, name, shape)

    def _another(self, target: Target) -> str:
        """How to get a head that fits."""
        train = f"foresay train {self.trained} --target {shlex.quote(target.name)} --prompts FILE --out DIR"
        return f"name a head that was made for {target.name}, or make one: {train}"


def note_vocabulary(notes: Notes, target: Target, drafts: int) -> None:
    """Note how many of the target's tokens can be drafted; only the target itself emits the others."""
    vocab = target.model.vocab_size
    which = "every one" if drafts == vocab else f"{drafts:,} ({drafts / vocab:.0%})"
    notes.ok("vocabulary", f"drafts {which} of the target's {vocab:,} tokens", target=vocab, draft=drafts)


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
