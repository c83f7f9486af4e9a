"""A head beside its target: is it whole, does it fit, what does it read, which tokens can it draft?"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from drafters.eagle import EagleDrafter
from drafters.medusa import MedusaDrafter
from server.build import Choice
from server.checking.origin import look_at_origin, made_for
from server.checking.outline import outline_head
from server.checking.report import Notes
from server.checking.target import Target, layers, named
from server.heads import Head
from server.vocabulary import overlap
from spec.errors import ForesayError
from spec.names import EAGLE3, MEDUSA
from spec.tree import TreeShape
from verifier.heads.eagle import EagleHead
from verifier.heads.files import HeadTensors
from verifier.heads.medusa import BESIDE_MODEL, MedusaHeads

_FETCH = "fetch the head's files again from where it was published, or train it again"


def look_at_head(notes: Notes, target: Target, choice: Choice, head: Head, shape: TreeShape | None) -> int | None:
    """Note what there is to say of the head; returns the longest text that it was trained on, where it says so.

    shape: of the tree that each step drafts, where it is known.
    """
    files = notes.attempt("draft", _FETCH, lambda: HeadTensors.read(head.directory, prefix=BESIDE_MODEL))
    if files is None:
        return None
    found = notes.attempt("draft", _another(head, target), lambda: outline_head(head, target.model, target.dtype.value))
    if found is None:
        return None
    name = named(choice)
    look_at_origin(notes, "draft", head.directory, target)
    _look_at_tokenizer(notes, head, target)
    if isinstance(found, EagleDrafter):
        _note_eagle(notes, target, found, name)
        return found.trained_positions
    _note_medusa(notes, target, found, name, shape)
    return None


def _another(head: Head, target: Target) -> str:
    """Where a head that fits comes from."""
    kind = MEDUSA if head.kind == "medusa" else EAGLE3
    where = f" (this one says {origin})" if (origin := made_for(head.directory)) else ""
    train = f"foresay train {kind} --target {shlex.quote(target.name)} --prompts FILE --out DIR"
    return f"name a head that was made for {target.name}{where}, or make one: {train}"


def _note_eagle(notes: Notes, target: Target, drafter: EagleDrafter, name: str) -> None:
    head: EagleHead = drafter.head
    config = head.config
    shape = (
        f"EAGLE{'-3' if config.generation == 3 else ''}, {layers(head.layer.num_layers)} of {head.layer.hidden_size}"
    )
    notes.ok("draft", f"{shape}, {name}", kind=drafter.name, hidden_size=head.layer.hidden_size)
    if config.aux:
        last = f" ({target.model.num_layers} is the last one's output)" if target.model.num_layers in config.aux else ""
        numbers = _listed(config.aux)
        reads = f"reads the inputs of layers {numbers} of the target's {target.model.num_layers}{last}"
    else:
        reads = "reads the state behind the target's final norm"
    notes.ok("layers", f"{reads}, {target.model.hidden_size} wide", layers=list(config.aux))
    _note_vocabulary(notes, target, config.draft_vocab)


def _note_medusa(notes: Notes, target: Target, drafter: MedusaDrafter, name: str, shape: TreeShape | None) -> None:
    heads: MedusaHeads = drafter.heads
    text = f"Medusa, {len(heads)} heads on a hidden size of {target.model.hidden_size}, {name}"
    notes.ok("draft", text, kind=drafter.name, heads=len(heads), hidden_size=target.model.hidden_size)
    if shape is not None and shape.levels > len(heads):
        notes.warn(
            "draft",
            f"{shape.levels} levels are asked for, but {len(heads)} heads reach {len(heads)} deep",
            f"give --draft-tokens {len(heads)}, or a --draft-tree with {len(heads)} numbers",
        )
    drafts = target.model.vocab_size if heads.token_map is None else len(heads.token_map)
    _note_vocabulary(notes, target, drafts)


def _note_vocabulary(notes: Notes, target: Target, drafts: int) -> None:
    """Which of the target's tokens can be drafted; the others are only ever written by the target itself."""
    vocab = target.model.vocab_size
    which = "every one" if drafts == vocab else f"{drafts:,} ({drafts / vocab:.0%})"
    notes.ok("vocabulary", f"drafts {which} of the target's {vocab:,} tokens", target=vocab, draft=drafts)


def _look_at_tokenizer(notes: Notes, head: Head, target: Target) -> None:
    """A head uses the target's tokenizer; one that it brings along tells for which target it was made."""
    try:
        found = overlap(target.directory, head.directory)
    except ForesayError:  # nobody needs it, so a broken one is nobody's trouble
        return
    if found is not None and not found.whole:
        notes.warn(
            "vocabulary",
            f"a tokenizer of {found.theirs:,} tokens lies beside the head, and {found.same:,} of them agree with the "
            f"target's {found.ours:,}",
            _another(head, target),
            same=found.same,
        )


def _listed(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last
