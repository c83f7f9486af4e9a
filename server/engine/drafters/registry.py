"""All kinds of drafters, and the drafters that ``--draft`` names: those that look texts up, and a user's own, found by
import (``--draft package.module:Class``, docs/drafters.md). No code from a model's repository is run.

Adding one is a file in ``drafters``, an entry in this folder, and its name here and in :mod:`foresay.spec.names`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from foresay.drafters.custom import CustomDrafter
from foresay.drafters.ngram import NgramDrafter
from foresay.drafters.suffix.drafter import SuffixDrafter
from foresay.server.catalog.hub import resolve
from foresay.server.engine.device import LoadContext
from foresay.server.engine.drafters.entry import Entry, FromFiles
from foresay.server.engine.drafters.heads import Assistant, DFlash, Eagle, Medusa, Mtp
from foresay.server.engine.drafters.models import DraftModel, Own
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import named_in, stages
from foresay.spec.errors import ConfigurationError
from foresay.spec.names import ALIASES, DRAFTERS, NGRAM, NONE, SUFFIX
from foresay.spec.protocols import Drafter, FeatureRequest
from foresay.spec.wall import where_raised
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model_runner import ModelRunner


@dataclass(frozen=True)
class Ngram(Entry):
    """:mod:`foresay.drafters.ngram`."""

    names, made, looks = (NGRAM,), NgramDrafter, True


@dataclass(frozen=True)
class Suffix(Entry):
    """:mod:`foresay.drafters.suffix`."""

    names, made, looks = (SUFFIX,), SuffixDrafter, True


# -- a user's own -----------------------------------------------------------------------------------------------------


_NAMED = re.compile(r"(?!\d)\w+(\.(?!\d)\w+)*:(?!\d)\w+")
#: Valid names of drafters: they appear in flags, requests, metrics and traces.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
#: Words that mean something else where drafters are named.
_TAKEN = frozenset({*DRAFTERS, *ALIASES, NONE, "auto", "bundled", "combined", "recorded"})
_METHODS = ("propose", "extend", "committed", "finished")
_LOOK = "see docs/drafters.md"


@dataclass(frozen=True)
class Custom(Entry):
    """A user's drafter, wrapped by :mod:`foresay.drafters.custom`."""

    made = CustomDrafter
    looks = True

    @classmethod
    def named(cls, part: str) -> Self | None:
        """By a dotted module and a class, unless the first word is reserved or a directory has that name."""
        known = part.partition(":")[0] in _TAKEN
        return cls(part) if _NAMED.fullmatch(part) and not known and not Path(part).is_dir() else None

    def setting(self, name: str, location: str) -> str:
        """The module and class, since the drafter's name does not suffice to find it."""
        return self.option

    def checked(self, target: Path, model: ModelConfig) -> Self:
        """Import it before anything large is read."""
        self._class()
        return self

    def load(self, loading: LoadContext, target: ModelRunner) -> CustomDrafter:
        """Make an instance, and check what only an instance has: its name, and the features it needs."""
        own = self._made(loading)
        name, needs = getattr(own, "name", None), getattr(own, "needs", self)
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _TAKEN:
            self._refuse(
                f"its name is {name!r}, and must be a word of up to 40 letters, digits, - and _ that is not the name "
                "of another Foresay drafter"
            )
        if needs is not None:
            self._check_needs(own, needs, loading)
        return CustomDrafter(own, loading.model.vocab_size)

    def _made(self, loading: LoadContext) -> Drafter:
        """An instance, made with those of the available arguments that its constructor declares."""
        given = {
            "vocab_size": loading.model.vocab_size,
            "max_model_len": loading.length,
            "target": str(loading.target),
        }
        found = self._class()
        declared = _declared(found)
        try:
            own: Drafter = found(**{name: value for name, value in given.items() if name in declared})
        except (Exception, SystemExit) as error:
            raise self._refusal(f"it cannot be made: {where_raised(error)}") from error
        return own

    def _class(self) -> type[Any]:
        """The class. Raises ConfigurationError if it cannot be imported, or is not a drafter."""
        module_name, _, name = self.option.partition(":")
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)  # at the end: a torch.py in the working directory must not shadow torch
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
            where = f"; looked on Python's path and in {here}" if missing else ""
            raise self._refusal(f"the module {module_name} cannot be imported: {where_raised(error)}{where}") from error
        found = getattr(module, name, None)
        if not inspect.isclass(found):
            file = getattr(module, "__file__", None) or "built in"
            self._refuse(f"the module {module_name} ({file}) has no class {name}")
        lacking = [method for method in _METHODS if not callable(getattr(found, method, None))]
        if lacking:
            self._refuse(f"{name} is not a drafter: it lacks {', '.join(lacking)}")
        return found

    def _check_needs(self, own: Drafter, needs: object, loading: LoadContext) -> None:
        depth = loading.model.num_layers
        if not isinstance(needs, FeatureRequest) or not all(0 <= layer <= depth for layer in needs.layers):
            self._refuse(f"its needs must be None or a FeatureRequest of layers from 0 to {depth}")
        if not callable(getattr(own, "observe", None)):
            self._refuse("it needs features of the target, but lacks observe, which takes them")

    def _refusal(self, why: str) -> ConfigurationError:
        return ConfigurationError(f"--draft {self.option}: {why} ({_LOOK})")

    def _refuse(self, why: str) -> NoReturn:
        raise self._refusal(why)


def _declared(found: type[Any]) -> set[str]:
    """The names of a constructor's parameters that can be given by name."""
    try:
        parameters = inspect.signature(found).parameters
    except ValueError:  # written in C without a signature
        return set()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name for name, parameter in parameters.items() if parameter.kind in named}


# -- what --draft names -----------------------------------------------------------------------------------------------


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
