"""Who drafts, beside the target: nobody, the text itself, a smaller model, or a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from server.engine.build import draft_shape
from server.engine.checks.report import Notes, Target
from server.engine.checks.words import named as for_people
from server.engine.drafters.entry import Entry
from server.engine.drafters.registry import find, settled
from server.settings.config import EngineConfig
from server.settings.resolved import Resolved, choose_draft, named_in
from spec.names import NONE


@dataclass(frozen=True, slots=True)
class Draft:
    """Who drafts. positions: the longest text that all of them were made for; None if none says so."""

    drafters: Sequence[Entry]
    positions: int | None = None


def look_at_draft(notes: Notes, config: EngineConfig, target: Target | None) -> Draft | None:
    """Note what there is to say of the drafters; None if one cannot be found, or not be looked at without a target."""
    choice = notes.attempt("draft", "see foresay check --help", lambda: choose_draft(config))
    if choice is None:
        return None
    counts = 'give numbers of nodes per level, such as "3,2,1", that add up to at most 63'
    shape = notes.attempt("drafting", counts, lambda: draft_shape(config, choice))
    parts = named_in(choice.value)
    found = [notes.attempt("draft", _which(config), partial(find, part)) for part in parts if part != NONE]
    there = [drafter for drafter in found if drafter is not None]
    if len(there) < len(found):
        return None
    drafters = notes.attempt("draft", _which(config), lambda: settled(there, config, choice.value))
    if drafters is None or target is None:
        return None
    if not drafters:
        notes.ok("draft", f"{NONE}: the target writes alone", kind=NONE)
    reason = choice.reason if len(drafters) == 1 else "asked for"
    positions = [one.look_at(notes, target, for_people(Resolved(one.asked, reason)), shape) for one in drafters]
    return Draft(drafters, min((longest for longest in positions if longest is not None), default=None))


def _which(config: EngineConfig) -> str:
    if config.draft_layers is not None:
        return "leave --draft-layers out, or name the folder of an EAGLE or DFlash head with --draft"
    kinds = "medusa:PATH, eagle3:PATH, peagle:PATH, dflash:PATH and dspark:PATH are for heads alone"
    return f"name a directory with config.json and weights, or a hub id; {kinds}"
