"""The name of each drafter: the same word in flags, requests, metrics, the page, the log, traces and benchmarks; vLLM's
word where vLLM has the drafter too.

Several drafters in one tree are named with a ``+`` between them, always in the order below.
"""

from __future__ import annotations

from collections.abc import Iterable

#: Where the tokens come from: the request's own prediction, lookup in texts, a smaller model, the target quantized to
#: fewer bits, heads, or forced by a grammar.
PREDICTION, SUFFIX, NGRAM = "prediction", "suffix", "ngram"
DRAFT_MODEL, SELF, MEDUSA, EAGLE, EAGLE3 = "draft_model", "self", "medusa", "eagle", "eagle3"
PEAGLE, DFLASH, DSPARK, MTP = "peagle", "dflash", "dspark", "mtp"
GRAMMAR = "grammar"
#: No drafter.
NONE = "none"

DRAFTERS = (PREDICTION, SUFFIX, NGRAM, DRAFT_MODEL, SELF, MEDUSA, EAGLE, EAGLE3, PEAGLE, DFLASH, DSPARK, MTP, GRAMMAR)
#: Old names that are still accepted.
ALIASES = {"draft": DRAFT_MODEL}


def canonical(name: str) -> str:
    """The name that an alias stands for; other names unchanged."""
    return ALIASES.get(name, name)


def together(names: Iterable[str]) -> str:
    """The name of several drafters in one tree, such as ``suffix+draft_model``; "" for none. Each may itself be such a
    name."""
    return "+".join(sorted({one for name in names for one in name.split("+")} - {""}, key=_order))


def _order(name: str) -> tuple[int, str]:
    return (DRAFTERS.index(name) if name in DRAFTERS else len(DRAFTERS), name)
