"""What the rest of the server asks of a kind of drafter. An entry of the registry is a class that says it.

::

    named, holds                          is it what --draft names: by a word, a prefix, what a directory holds
    checked, look_at                      can it draft for the target; the same for people (foresay check)
    shapes, token_bytes, weights          what memory it takes, before a weight is read
    load, remark, doubts                  the drafter itself, and what to say of it now that it is there
    looks, levels                         whether it costs next to nothing, else how deep it can go: for the budget
    passes                                its models' passes

An instance is one drafter that ``--draft`` names, found, but with nothing of it loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from foresay.kvpaging import PagePool
from foresay.server.engine.checks import Notes, Target
from foresay.server.engine.device import LoadContext
from foresay.server.settings.config import EngineConfig
from foresay.spec.budget.members import MODEL_LEVELS
from foresay.spec.errors import ConfigurationError
from foresay.spec.protocols import Drafter
from foresay.spec.tree import TreeShape
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.hub import resolve
from foresay.verifier.model_runner import ModelRunner


@dataclass(frozen=True)
class Entry:
    """A kind of drafter that needs nothing of the target and no files; what others need, they say.

    names: what its drafters are called, which is what ``--draft`` names them by. made: their class. looks: whether they
    look something up or think for themselves, at next to no cost, instead of running a model. only_one: what it is,
    of which only one may draft; "" for any number. layered: whether it reads layers that ``--draft-layers`` can name.

    asked: the part of ``--draft`` that names it. place: the directory or hub id in that, "" if there is none.
    """

    names: ClassVar[tuple[str, ...]] = ()
    made: ClassVar[type]
    looks: ClassVar[bool] = False
    only_one: ClassVar[str] = ""
    layered: ClassVar[bool] = False

    asked: str
    place: str = ""

    @classmethod
    def named(cls, part: str) -> Self | None:
        """The drafter of this kind that a part of ``--draft`` names by a word or prefix; None if it does not.

        Raises ConfigurationError if what is there is not what was asked for, ModelNotFound if nothing is there.
        """
        return cls(part) if part in cls.names else None

    @classmethod
    def holds(cls, directory: Path) -> bool:
        """Whether a directory, which ``--draft`` names without saying of what kind it is, holds one of this kind."""
        return False

    def setting(self, name: str, place: str) -> str:
        """How ``--draft`` would name the drafter that is called ``name``. place: its own, for people."""
        return f"{name}:{place}" if place else name

    @property
    def spared(self) -> Entry | None:
        """What ``auto`` takes in its place where there is no room for it, or no measurement; None: nothing."""
        return self

    def beside(self, others: Collection[str]) -> Self:
        """The same where these are asked for too, by what names them: models, the one itself among them."""
        return self

    def configured(self, config: EngineConfig) -> Self:
        """The same as the other settings want it."""
        return self

    def checked(self, target: Path, model: ModelConfig) -> Self:
        """The same, with what is to be known of it beside this target before anything is loaded.

        Raises one of Foresay's errors if it cannot draft for it.
        """
        return self

    def look_at(self, notes: Notes, target: Target, name: str, shape: TreeShape | None) -> int | None:
        """Note what there is to say of it beside the target; returns the longest text it was made for, if it says so.

        name: for people. shape: of the tree that each step drafts, if it is known.
        """
        raise NotImplementedError

    def shapes(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        """The models that it runs: passes of theirs need a workspace."""
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
        """The drafter; this one is made of nothing."""
        drafter: Drafter = self.made()
        return drafter

    @property
    def remark(self) -> str:
        """What to say behind the reason why the drafter drafts; "" for nothing."""
        return ""

    def doubts(self, drafter: Any, target: ModelRunner, pool: PagePool, directory: Path) -> str:
        """What speaks against it, now that it is loaded; "" if nothing does. directory: the target's."""
        return ""

    @property
    def warning(self) -> str:
        """What to warn of at start-up; "" for nothing. Of one that was checked."""
        return ""

    @staticmethod
    def levels(drafter: Any) -> int:
        """How deep it can draft."""
        return MODEL_LEVELS


@dataclass(frozen=True)
class FromFiles(Entry):
    """A kind of drafter that is loaded from a directory. files: patterns of what its hub repository may hold beside a
    model's."""

    files: ClassVar[tuple[str, ...]] = ()

    directory: Path = Path()

    @classmethod
    def named(cls, part: str) -> Self | None:
        """By its name, a colon and a place."""
        word, colon, place = part.partition(":")
        if word not in cls.names or not colon:
            return None
        if not place:
            raise ConfigurationError(f"--draft {part}: a directory or hub id must follow the colon")
        return cls.at(part, place)

    @classmethod
    def at(cls, part: str, place: str) -> Self:
        """The one in a directory or hub repository, which is downloaded first. Raises ModelNotFound."""
        return cls(part, place, resolve(place, extra=cls.files, flag="--draft"))
