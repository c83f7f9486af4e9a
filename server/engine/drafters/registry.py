"""All kinds of drafters, and the drafters that ``--draft`` names.

Adding one is a file in ``drafters``, an entry in this folder, and its name here and in :mod:`foresay.spec.names`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.suffix.drafter import SuffixDrafter
from foresay.server.catalog.hub import resolve
from foresay.server.engine.drafters.custom import Custom
from foresay.server.engine.drafters.entry import Entry, FromFiles
from foresay.server.engine.drafters.heads import Assistant, DFlash, Eagle, Medusa, Mtp
from foresay.server.engine.drafters.models import DraftModel, Own
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import named_in, stages
from foresay.spec.errors import ConfigurationError
from foresay.spec.names import NGRAM, NONE, SUFFIX
from foresay.spec.protocols import Drafter


@dataclass(frozen=True)
class Ngram(Entry):
    """:mod:`foresay.drafters.ngram`."""

    names, made, looks = (NGRAM,), NgramDrafter, True


@dataclass(frozen=True)
class Suffix(Entry):
    """:mod:`foresay.drafters.suffix`."""

    names, made, looks = (SUFFIX,), SuffixDrafter, True


#: In the order in which a directory is tested for them, which is also the order in which models draft. A directory that
#: no other kind holds is taken for a draft model.
ENTRIES: tuple[type[Entry], ...] = (
    Medusa, Mtp, Assistant, Eagle, DFlash, DraftModel, Own, Ngram, Suffix, Custom,
)  # fmt: skip


def find(part: str) -> Entry:
    """The drafter that a part of ``--draft`` names. What is on the hub is downloaded.

    Raises ConfigurationError if what is found is not of the named kind, NoSuchModel if nothing is found.
    """
    first, *rest = stages(part)
    if rest:
        own = find(" > ".join(rest))
        if not isinstance(own, Own) or own.first is not None:
            raise ConfigurationError(f"--draft {part}: expected a drafter, >, and self, self:int4 or self:int8")
        return own.behind(find(first), part)
    for entry in ENTRIES:
        if (found := entry.named(part)) is not None:
            return found
    directory = resolve(part, flag="--draft")
    kind = next((entry for entry in ENTRIES if issubclass(entry, FromFiles) and entry.holds(directory)), DraftModel)
    # From a hub repository only a model's files were fetched so far; other kinds may need others.
    return kind.at(part, part)


def settled(found: Sequence[Entry], config: EngineConfig, draft: str) -> list[Entry]:
    """The drafters that a setting names, models first, with the other settings applied.

    Raises ConfigurationError for two of a kind that allows one, and for a number of tokens if none of them can do with
    fewer.
    """
    counts = Counter(one.only_one for one in found if one.only_one)
    for what, count in counts.items():
        if count > 1:
            raise ConfigurationError(f"--draft {draft}: names two of one kind; one {what} can draft, not several")
    if config.draft_vocab.isdecimal() and not any(one.cuts for one in found):
        raise ConfigurationError(
            f"--draft-vocab {config.draft_vocab}: is for draft models, EAGLE and MTP heads, but --draft is {draft}"
        )
    named = {one.option for one in found if not one.looks}
    return sorted((one.alongside(named).configured(config) for one in found), key=_order)


def _order(one: Entry) -> int:
    return len(ENTRIES) if one.looks else ENTRIES.index(type(one))


def drafts(config: EngineConfig, draft: str) -> list[Entry]:
    """The drafters that ``--draft`` names. draft: names separated by commas. Raises what :func:`find` and
    :func:`settled` raise."""
    return settled([find(part) for part in named_in(draft) if part != NONE], config, draft)


def entry_of(drafter: Drafter | None) -> type[Entry]:
    """The kind of a loaded drafter; the base class for one that cannot be requested by name."""
    return next((entry for entry in ENTRIES if isinstance(drafter, entry.made)), Entry)
