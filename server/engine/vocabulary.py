"""Whether two models mean the same by their token ids, from their tokenizers alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from verifier.model.errors import ModelError


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two vocabularies beside each other.

    ours, theirs: how many tokens the target and the other have. same: tokens that are in both under one id.
    """

    ours: int
    theirs: int
    same: int

    @property
    def whole(self) -> bool:
        """Whether they are equal."""
        return self.ours == self.theirs == self.same


def tokenizer(directory: Path) -> Tokenizer | None:
    """What tokenizer.json holds; None where there is none. Raises ModelError for a damaged one."""
    file = directory / "tokenizer.json"
    if not file.exists():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more special
        raise ModelError(f"{file}: not a whole tokenizer ({error})") from error


def vocabulary(directory: Path) -> dict[str, int] | None:
    """Token ids by token; None where there is no tokenizer.json. Raises ModelError for a damaged one."""
    found = tokenizer(directory)
    return None if found is None else found.get_vocab(with_added_tokens=True)


def overlap(target: Path, other: Path) -> Overlap | None:
    """How far the tokenizers in two directories agree; None where one of them has none."""
    ours, theirs = vocabulary(target), vocabulary(other)
    if ours is None or theirs is None:
        return None
    same = sum(1 for token, index in theirs.items() if ours.get(token) == index)
    return Overlap(len(ours), len(theirs), same)
