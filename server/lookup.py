"""Drafters that need no model: they look in texts for what may come next."""

from __future__ import annotations

from collections.abc import Callable

from drafters.ngram import NgramDrafter
from drafters.suffix.drafter import SuffixDrafter
from spec.errors import ConfigurationError
from spec.names import NGRAM, SUFFIX
from spec.protocols import Drafter
from spec.tree import MAX_NODES, TreeShape

#: By name.
LOOKUPS: dict[str, Callable[[], Drafter]] = {NGRAM: NgramDrafter, SUFFIX: SuffixDrafter}


def lookup(text: str, flag: str, tokens: int) -> tuple[Drafter, TreeShape]:
    """The drafter that ``"ngram"`` or ``"suffix:6"`` names, and how far ahead it drafts; ``tokens`` if it does not say.

    Raises ConfigurationError, naming ``flag``, for anything else.
    """
    name, colon, count = text.partition(":")
    if name not in LOOKUPS:
        known = " or ".join(LOOKUPS)
        raise ConfigurationError(f'{flag} {text}: expected {known}, a drafter that needs no model (or "ngram:6")')
    if colon and not (count.isdecimal() and 0 < int(count) < MAX_NODES):
        raise ConfigurationError(
            f"{flag} {text}: expected a number of tokens from 1 to {MAX_NODES - 1} behind the colon"
        )
    return LOOKUPS[name](), TreeShape.chain(int(count) if colon else tokens)
