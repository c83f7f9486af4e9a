"""Who drafts, beside the target: nobody, the text itself, a smaller model, or a head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from server.build import Choice, choose_draft, draft_shape
from server.checking.files import look_at_files
from server.checking.head import look_at_head
from server.checking.origin import look_at_origin
from server.checking.report import Notes
from server.checking.target import Target, described, facts, named
from server.config import EngineConfig
from server.drafting import model_in, named_in
from server.heads import Head, find_head
from server.lookup import LOOKUPS
from server.parameters import parameters
from server.translation import SMALL_SHARE, translation
from server.vocabulary import overlap
from spec.names import DRAFT_MODEL, NGRAM, NONE, SUFFIX
from verifier.model.config import FAMILIES, ModelConfig
from verifier.model.hub import resolve

#: What the drafters that need no model do.
_LOOKS = {
    NGRAM: "looks for the last tokens earlier in the text",
    SUFFIX: "looks for the last tokens earlier in the text and in earlier answers",
}
#: A draft model with more than this share of the target's weights seldom pays.
_LARGE = 0.5


@dataclass(frozen=True, slots=True)
class Draft:
    """Who drafts. model: of a draft model. head: a head. positions: the longest text that either was made for."""

    choice: Choice
    model: ModelConfig | None = None
    head: Head | None = None
    positions: int | None = None


def look_at_draft(notes: Notes, config: EngineConfig, target: Target | None) -> Draft | None:
    """Note what there is to say of the drafter; None if it cannot be found, or not be looked at without a target."""
    choice = notes.attempt("draft", "see foresay check --help", lambda: choose_draft(config))
    if choice is None:
        return None
    parts = named_in(choice.value)
    if len(parts) > 1:
        return _look_at_several(notes, config, target, choice, parts)
    counts = 'give numbers of nodes per level, such as "3,2,1", that add up to at most 63'
    shape = notes.attempt("drafting", counts, lambda: draft_shape(config, choice))
    if choice.value in (NONE, *LOOKUPS) and config.draft_layers is None:
        return _without_files(notes, choice)
    # A list, since that there is no head is an answer too.
    found = notes.attempt("draft", _which(config), lambda: [find_head(choice.value, config.draft_layers)])
    if found is None or target is None:
        return None
    if found[0] is not None:
        return Draft(choice, head=found[0], positions=look_at_head(notes, target, choice, found[0], shape))
    return _look_at_model(notes, target, choice)


def _look_at_several(
    notes: Notes, config: EngineConfig, target: Target | None, choice: Choice, parts: tuple[str, ...]
) -> Draft | None:
    """Each on its own; together they are what is loaded."""
    found = []
    for part in parts:
        layers = config.draft_layers if "eagle" in part else None
        found.append(look_at_draft(notes, msgspec.structs.replace(config, draft=part, draft_layers=layers), target))
    drafts = [draft for draft in found if draft is not None]
    if len(drafts) < len(parts):
        return None
    for field, what in (("model", "draft model"), ("head", "head")):
        if sum(getattr(draft, field) is not None for draft in drafts) > 1:
            notes.fail("draft", f"{config.draft} names several of a kind", f"name one {what}; lookups go with it")
            return None
    return Draft(
        choice,
        model=next((draft.model for draft in drafts if draft.model is not None), None),
        head=next((draft.head for draft in drafts if draft.head is not None), None),
        positions=min((draft.positions for draft in drafts if draft.positions is not None), default=None),
    )


def _which(config: EngineConfig) -> str:
    if config.draft_layers is not None:
        return "leave --draft-layers out, or name the folder of an EAGLE head with --draft"
    return "name a directory with config.json and weights, or a hub id; medusa:PATH and eagle3:PATH are for heads alone"


def _without_files(notes: Notes, choice: Choice) -> Draft:
    if choice.value in _LOOKS:
        notes.ok("draft", f"{choice.value}: {_LOOKS[choice.value]}; goes with every target", kind=choice.value)
    else:
        notes.ok("draft", f"{NONE}: the target writes alone", kind=NONE)
    return Draft(choice)


def _look_at_model(notes: Notes, target: Target, choice: Choice) -> Draft | None:
    wrong = "name a directory that holds config.json, the tokenizer and *.safetensors, or a hub id"
    directory = notes.attempt("draft", wrong, lambda: resolve(model_in(choice.value), flag="--draft"))
    if directory is None:
        return None
    other = f"take an unquantised model of a supported family ({', '.join(f.models for f in FAMILIES.values())})"
    model = notes.attempt("draft", other, lambda: ModelConfig.from_directory(directory))
    if model is not None:
        look_at_files(notes, "draft", directory, model, target.dtype.value)
        if not notes.failed("draft"):
            _note_model(notes, target, choice, directory, model)
    look_at_vocabulary(notes, model_in(choice.value), target, directory, model)
    return None if model is None else Draft(choice, model=model, positions=model.max_positions)


def _note_model(notes: Notes, target: Target, choice: Choice, directory: Path, model: ModelConfig) -> None:
    share = parameters(model) / parameters(target.model)
    text = f"{described(model)} ({share:.0%} of the target's), {named(choice)}"
    notes.ok("draft", text, kind=DRAFT_MODEL, **facts(model))
    look_at_origin(notes, "draft", directory, target)
    if share > _LARGE:
        notes.warn(
            "draft",
            f"the draft model has {share:.0%} as many weights as the target, so drafting is slow as well",
            "name a smaller model of the family; --probe measures what this one gains",
        )


def look_at_vocabulary(notes: Notes, draft: str, target: Target, directory: Path, model: ModelConfig | None) -> None:
    """Whether two models mean the same by their token ids; where they do not, how many tokens they share."""
    fetch = f"put the target's tokenizer.json into {directory}"
    # A list, since that there is nothing to compare is an answer too.
    found = notes.attempt("vocabulary", fetch, lambda: [overlap(target.directory, directory)])
    if found is None:
        return
    shared = found[0]
    if shared is None:
        here = directory if (target.directory / "tokenizer.json").exists() else target.directory
        notes.warn(
            "vocabulary",
            f"{here} has no tokenizer.json, so nobody knows whether both mean the same by their token ids",
            f"put the model's tokenizer.json into {here}",
        )
    elif shared.whole:
        notes.ok("vocabulary", f"all {shared.ours:,} tokens agree", target=shared.ours, draft=shared.theirs)
    elif model is not None:
        _note_translation(notes, draft, target, directory, model)


def _note_translation(notes: Notes, draft: str, target: Target, directory: Path, model: ModelConfig) -> None:
    made = notes.attempt("vocabulary", "", lambda: translation(draft, target.directory, target.model, directory, model))
    if made is None:
        return
    text = f"the draft model has another vocabulary, with {made.described}"
    facts = {"target": made.tokens, "shared": len(made.token_ids)}
    if made.share < SMALL_SHARE:
        notes.warn(
            "vocabulary", text, "--probe measures whether that is enough; a model of the family has all", **facts
        )
    else:
        notes.ok("vocabulary", text, **facts)
