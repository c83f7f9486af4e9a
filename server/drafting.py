"""From what ``--draft`` names to drafters, and to the budget that chooses among them.

::

    draft_model, a head, ngram, suffix   each a member, with what it costs on this machine (server.rehearsal)
    Budget                               chooses at every step, unless one drafter has one shape (--draft-tokens)
    CombinedDrafter                      all of them as one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from drafters.combined import CombinedDrafter
from drafters.medusa import MedusaDrafter
from drafters.prediction import PredictionDrafter
from drafters.routed import RoutedDrafter
from drafters.suffix.drafter import SuffixDrafter
from kvpaging import PagePool
from server import draft_history
from server.config import EngineConfig
from server.heads import Head, find_head
from server.lookup import LOOKUPS
from server.rehearsal import Rehearsal
from spec.budget import StepCost
from spec.budget.budget import Budget
from spec.budget.members import MODEL_LEVELS, Member
from spec.errors import ConfigurationError
from spec.names import DRAFT_MODEL, NONE, SUFFIX
from spec.protocols import Drafter, Verifier
from spec.request import EngineInfo
from spec.scheduler import PREDICTED_LEVELS
from spec.tree import TreeShape
from verifier.model.hub import resolve

#: Tokens drafted ahead where a shape is fixed and nobody says how far.
DEFAULT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Drafts:
    """What ``--draft`` names, before anything is loaded. lookups: by name; model, directory: of a draft model."""

    lookups: tuple[str, ...] = ()
    model: str = ""
    directory: Path | None = None
    head: Head | None = None

    @classmethod
    def of(cls, config: EngineConfig, named: str) -> Drafts:
        """named: names with commas between them. Raises ConfigurationError for two of a kind."""
        parts = named_in(named)
        lookups = tuple(part for part in parts if part in LOOKUPS)
        heads: list[Head] = []
        models: list[str] = []
        for part in parts:
            if part in LOOKUPS or part == NONE:
                continue
            head = find_head(part, config.draft_layers) if len(parts) == 1 else find_head(part)
            if head is not None:
                heads.append(head)
            else:
                models.append(model_in(part))
        for several, what in ((len(heads), "head"), (len(models), "draft model")):
            if several > 1:
                raise ConfigurationError(f"--draft {named}: names two of one kind; one {what} can draft, not several")
        if config.draft_layers is not None:
            named_head = heads[0].asked if heads else parts[0]
            heads = [head for head in [find_head(named_head, config.draft_layers)] if head is not None]
        model = models[0] if models else ""
        return cls(lookups, model, resolve(model, flag="--draft") if model else None, heads[0] if heads else None)

    def lookup_drafters(self, config: EngineConfig, vocab_size: int) -> list[Drafter]:
        """Those that need no model."""
        made = {name: LOOKUPS[name] for name in self.lookups}
        if config.draft_history is not None and SUFFIX in made:
            history = draft_history.read(config.draft_history, vocab_size)
            made[SUFFIX] = lambda: SuffixDrafter(history)
        return [make() for make in made.values()]


def named_in(draft: str) -> tuple[str, ...]:
    """The drafters that a setting names, in order. Raises ConfigurationError for one that is named twice."""
    parts = tuple(part.strip() for part in draft.split(","))
    if len(set(parts)) < len(parts) or not all(parts) or (NONE in parts and len(parts) > 1):
        raise ConfigurationError(
            f"--draft {draft}: name each drafter once, with a comma between two, such as ngram,suffix"
        )
    return parts


def model_in(part: str) -> str:
    """The directory or hub id of a draft model that a setting names. Raises ConfigurationError if none is there."""
    place = part.removeprefix(f"{DRAFT_MODEL}:")
    if not place:
        raise ConfigurationError(f"--draft {part}: a directory or hub id must stand behind the colon")
    return place


def alone(drafters: Sequence[Drafter]) -> Drafter:
    """Who drafts where only one can: a model before a lookup, of lookups the one that is named last (auto: suffix)."""
    return next((drafter for drafter in drafters if drafter.name not in LOOKUPS), drafters[-1])


def pinned(config: EngineConfig) -> TreeShape | None:
    """The shape that the settings ask for in every step: a given tree or a chain; None if they leave it open."""
    if config.draft_tree is not None:
        return TreeShape.parse(config.draft_tree)
    return None if config.draft_tokens is None else TreeShape.chain(config.draft_tokens)


@dataclass(frozen=True, slots=True)
class Drafting:
    """Who drafts, all as one, and who chooses: nobody where one drafter has one shape. shape: the largest drafted.

    What a request predicts of its answer is drafted in any case.
    """

    drafter: Drafter
    budget: Budget | None
    shape: TreeShape

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        drafters: Sequence[Drafter],
        info: EngineInfo,
        verifier: Verifier,
        pool: PagePool,
        cost: StepCost,
        captured: bool,
        say: Callable[[str], None],
    ) -> Drafting:
        """Measures what each costs, if there is anything to choose.

        cost: of a pass, by its rows. captured: whether steps are captured: their shape is fixed, so nobody chooses.
        """
        shape = pinned(config)
        if not drafters or (shape is not None and not shape.levels):
            return cls._fixed(drafters[0] if drafters else None, TreeShape(), cost)
        if captured or (len(drafters) == 1 and shape is not None):
            return cls._fixed(drafters[0], shape or TreeShape.chain(DEFAULT_TOKENS), cost)
        say("measuring what drafting costs")
        rehearsal = Rehearsal(info, verifier, pool)
        members = [_member(drafter, rehearsal) for drafter in drafters]
        # First: of a token that several propose it is said that the request predicted it.
        budget = Budget([Member.looking(PredictionDrafter(), PREDICTED_LEVELS), *members], rehearsal.curve(), shape)
        return cls(CombinedDrafter(budget), budget, budget.shape)

    @classmethod
    def _fixed(cls, drafter: Drafter | None, shape: TreeShape, cost: StepCost) -> Drafting:
        return cls(RoutedDrafter(PredictionDrafter(cost), drafter, shape), None, shape)


def _member(drafter: Drafter, rehearsal: Rehearsal) -> Member:
    if drafter.name in LOOKUPS:
        return Member.looking(drafter)
    levels = len(drafter.heads) if isinstance(drafter, MedusaDrafter) else MODEL_LEVELS
    return Member.model(drafter, rehearsal.draft_cost(drafter, levels), levels)
