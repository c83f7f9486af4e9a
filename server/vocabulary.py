"""Whether two models mean the same by their token ids, from their tokenizers alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from server.unfit import Unfit
from spec.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two vocabularies beside each other.

    ours, theirs: how many tokens the target and the other have. same: tokens that are in both under one id. examples: a
    few that are not, in words.
    """

    ours: int
    theirs: int
    same: int
    examples: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Whether they are equal."""
        return self.ours == self.theirs == self.same


def vocabulary(directory: Path) -> dict[str, int] | None:
    """Token ids by token; None where there is no tokenizer.json. Raises ConfigurationError for a damaged one."""
    file = directory / "tokenizer.json"
    if not file.exists():
        return None
    try:
        return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises nothing more special
        raise ConfigurationError(f"{file}: not a whole tokenizer ({error})") from error


def overlap(target: Path, other: Path) -> Overlap | None:
    """How far the tokenizers in two directories agree; None where one of them has none."""
    ours, theirs = vocabulary(target), vocabulary(other)
    if ours is None or theirs is None:
        return None
    same = sum(1 for token, index in theirs.items() if ours.get(token) == index)
    return Overlap(len(ours), len(theirs), same, tuple(_differences(ours, theirs)))


def require_same(draft: str, target: Path, other: Path) -> None:
    """Raise Unfit unless the draft model ``draft``, in the directory ``other``, shares the target's vocabulary."""
    found = overlap(target, other)
    if found is not None and not found.whole:
        raise Unfit(
            f"--draft {draft}: its vocabulary has {found.theirs} tokens, the target's has {found.ours}, "
            f"and {found.same} of them agree",
            "a draft model must share the target's vocabulary; name a smaller model of the target's family, ngram or "
            "suffix",
        )


def _differences(ours: dict[str, int], theirs: dict[str, int], most: int = 3) -> list[str]:
    """The first tokens, by id, on which they differ."""
    told: list[str] = []
    for token, index in sorted(ours.items(), key=lambda entry: entry[1]):
        if len(told) == most:
            break
        if token not in theirs:
            told.append(f"{token!r} ({index}) is the target's alone")
        elif theirs[token] != index:
            told.append(f"{token!r} is {index} in the target and {theirs[token]} in the draft model")
    if not told:
        alone = [token for token in theirs if token not in ours]
        told = [f"{token!r} ({theirs[token]}) is the draft model's alone" for token in alone[:most]]
    return told
