"""``--draft ngram`` and ``--draft suffix``: they need no model, they look in texts for what may come next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from drafters.ngram import NgramDrafter
from drafters.suffix.drafter import SuffixDrafter
from server.engine import history as draft_history
from server.engine.checks.report import Notes, Target
from server.engine.drafters.entry import Entry
from server.engine.loading import Loading
from spec.names import NGRAM, SUFFIX
from spec.tree import TreeShape
from verifier.paged_model import PagedModel


@dataclass(frozen=True)
class _Lookup(Entry):
    """what: how it finds them, in words."""

    what: ClassVar[str]
    looks = True

    def look_at(self, notes: Notes, target: Target, name: str, shape: TreeShape | None) -> None:
        """There is nothing that could be wrong."""
        notes.ok("draft", f"{self.asked}: {self.what}; goes with every target", kind=self.asked)


@dataclass(frozen=True)
class Ngram(_Lookup):
    """:mod:`drafters.ngram`."""

    names, made = (NGRAM,), NgramDrafter
    what = "looks for the last tokens earlier in the text"


@dataclass(frozen=True)
class Suffix(_Lookup):
    """:mod:`drafters.suffix`."""

    names, made = (SUFFIX,), SuffixDrafter
    what = "looks for the last tokens earlier in the text and in earlier answers"

    def load(self, loading: Loading, target: PagedModel) -> SuffixDrafter:
        """With what it said before, if that was kept."""
        path = loading.config.draft_history
        if path is None:
            return SuffixDrafter()
        loading.say("reading the draft history")
        return SuffixDrafter(draft_history.read(path, loading.model.vocab_size))
