"""The interface of a kind of drafter for the rest of the server. An entry of the registry is a class that implements
it.

::

    named, holds                          does --draft name it: by a word, a prefix, the contents of a directory
    checked, check_files                  can it draft for the target, and be loaded
    shapes, token_bytes, weights          its memory, known before a weight is read
    load, remark                          the drafter itself, and a remark once it is loaded
    looks, levels                         whether it is nearly free, else how deep it can draft: for the budget
    passes                                its models' passes

An instance is one drafter that ``--draft`` names, found but not loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from foresay.server.catalog.hub import resolve
from foresay.server.engine.device import LoadContext
from foresay.server.settings.config import EngineConfig
from foresay.spec.budget.members import MODEL_LEVELS
from foresay.spec.errors import ConfigurationError
from foresay.spec.protocols import Drafter
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model_runner import ModelRunner


@dataclass(frozen=True)
class Entry:
    """A kind of drafter that needs no files and no features of the target; subclasses override what they need.

    names: its drafters' names, also in ``--draft``. made: their class. looks: whether they use lookups or own code, at
    nearly no cost, instead of running a model. only_one: the word for kinds of which only one may draft; "" for any
    number. cuts: whether it can draft fewer tokens than it has (``--draft-vocab``).

    option: the part of ``--draft`` that names it. location: the directory or hub id in that, "" if there is none.
    """

    names: ClassVar[tuple[str, ...]] = ()
    made: ClassVar[type]
    looks: ClassVar[bool] = False
    only_one: ClassVar[str] = ""
    cuts: ClassVar[bool] = False

    option: str
    location: str = ""

    @classmethod
    def named(cls, part: str) -> Self | None:
        """The drafter of this kind that a part of ``--draft`` names by a word or prefix; None if it names none.

        Raises ConfigurationError if what is found is not of this kind, NoSuchModel if nothing is found.
        """
        return cls(part) if part in cls.names else None

    @classmethod
    def holds(cls, directory: Path) -> bool:
        """Whether a directory that ``--draft`` names without a kind holds one of this kind."""
        return False

    def setting(self, name: str, location: str) -> str:
        """How ``--draft`` would name the drafter called ``name``. location: its directory or hub id, for people."""
        return f"{name}:{location}" if location else name

    @property
    def spared(self) -> Entry | None:
        """What ``auto`` takes in its place where there is no room for it, or no measurement; None: nothing."""
        return self

    def alongside(self, others: Collection[str]) -> Self:
        """The same next to other drafters. others: their parts of ``--draft``, including its own."""
        return self

    def configured(self, config: EngineConfig) -> Self:
        """The same, with the other settings applied."""
        return self

    def checked(self, target: Path, model: ModelConfig) -> Self:
        """The same, checked against this target before anything is loaded.

        Raises one of Foresay's errors if it cannot draft for it.
        """
        return self

    def check_files(self, target: ModelConfig, dtype: str) -> None:
        """Raise one of Foresay's errors if its files cannot be loaded, as far as their headers say. dtype: the
        engine's."""

    def shapes(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        """The models that it runs: their passes need a workspace."""
        return ()

    def with_states(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        """Those of them that keep recurrent states of their own, if they have such layers."""
        return self.shapes(target)

    def token_bytes(self, target: ModelConfig, dtype: str) -> int:
        """What its stores hold for each token of the KV cache. dtype: the engine's."""
        return 0

    def weights(self, dtype: str, packed: bool) -> Mapping[str, int]:
        """Bytes of its weights, by whose they are. packed: as on a CPU, see
        :class:`foresay.server.engine.memory.Demand`."""
        return {}

    def load(self, loading: LoadContext, target: ModelRunner) -> Drafter:
        """The drafter; by default made without arguments."""
        drafter: Drafter = self.made()
        return drafter

    @property
    def remark(self) -> str:
        """A remark to append to the reason why it drafts; "" for none."""
        return ""

    @property
    def warning(self) -> str:
        """A warning at start-up; "" for none. Requires :meth:`checked`."""
        return ""

    @staticmethod
    def levels(drafter: Any) -> int:
        """How deep it can draft."""
        return MODEL_LEVELS


@dataclass(frozen=True)
class FromFiles(Entry):
    """A kind of drafter that is loaded from a directory. files: patterns of files that its hub repository may have in
    addition to a model's."""

    files: ClassVar[tuple[str, ...]] = ()

    directory: Path = Path()

    @classmethod
    def named(cls, part: str) -> Self | None:
        """By its name, a colon and a directory or hub id."""
        word, colon, location = part.partition(":")
        if word not in cls.names or not colon:
            return None
        if not location:
            raise ConfigurationError(f"--draft {part}: a directory or hub id must follow the colon")
        return cls.at(part, location)

    @classmethod
    def at(cls, part: str, location: str) -> Self:
        """The drafter in a directory or hub repository, which is downloaded first. Raises NoSuchModel."""
        return cls(part, location, resolve(location, extra=cls.files, flag="--draft"))
