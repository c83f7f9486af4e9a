"""What each drafter is called: one word, wherever it is named. Flags, requests, metrics, the page, the log, traces,
benchmarks; where vLLM has the drafter too, its word.

Several whose tokens stand in one tree are named with a ``+`` between them, always in the order below.
"""

from __future__ import annotations

from collections.abc import Iterable

#: Whose tokens: of the request's own prediction, found in texts, of a smaller model, of the target
#: in fewer bits, of heads, forced by a grammar.
PREDICTION, SUFFIX, NGRAM = "prediction", "suffix", "ngram"
DRAFT_MODEL, SELF, MEDUSA, EAGLE, EAGLE3 = "draft_model", "self", "medusa", "eagle", "eagle3"
PEAGLE, DFLASH, DSPARK, MTP = "peagle", "dflash", "dspark", "mtp"
GRAMMAR = "grammar"
#: That nobody drafts.
NONE = "none"

DRAFTERS = (PREDICTION, SUFFIX, NGRAM, DRAFT_MODEL, SELF, MEDUSA, EAGLE, EAGLE3, PEAGLE, DFLASH, DSPARK, MTP, GRAMMAR)
#: What one of them was called, for whoever still says so.
ALIASES = {"draft": DRAFT_MODEL}


def canonical(name: str) -> str:
    """The name that an alias stands for; any other one as it is."""
    return ALIASES.get(name, name)


def together(names: Iterable[str]) -> str:
    """The name of several drafters in one tree, such as ``suffix+draft_model``; "" of none. Each may be several too."""
    return "+".join(sorted({one for name in names for one in name.split("+")} - {""}, key=_place))


def _place(name: str) -> tuple[int, str]:
    return (DRAFTERS.index(name) if name in DRAFTERS else len(DRAFTERS), name)
