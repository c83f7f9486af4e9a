"""The same tokens with every drafter for every family, at every sampling, one request at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.same_tokens.matrix import (
    BF16,
    RECURRENT,
    Models,
    assert_row,
    by_rows,
    made,
    rows,
    soak,
)
from tests.same_tokens.runs import CHAINS, DRAFTERS, SELF, TREES, drafting
from tests.same_tokens.situations import accepted_per_step, assert_same_in
from tests.verifier.families import FAMILIES

__all__ = ["made"]

LOOKUPS = ("ngram", "suffix", "suffix tree")
HYBRID = (*RECURRENT, "qwen3_5_moe", "qwen3_next", "lfm2_moe", "granite_hybrid", "granite_hybrid_moe", "nemotron_h",
          "nemotron_h_moe", "falcon_h1_norm")  # fmt: skip


def every_family() -> Any:
    """Each with six drafters, another chain, tree, copy and lookup from family to family; `make soak` tries others."""
    for number, family in enumerate(FAMILIES):
        quick = {"garbage", "truth", *(kind[number % len(kind)] for kind in (CHAINS, TREES, SELF, LOOKUPS))}
        for drafter in DRAFTERS:
            if drafter == "staged chain7" and family in HYBRID:
                continue
            yield pytest.param(Models(family), drafter, "short", {}, marks=() if drafter in quick else soak)


@by_rows(
    *every_family(),
    *rows([Models(each, BF16) for each in ("llama3", "smollm", "qwen2_window")],
          ["truth", "chain3", "4,4,2,2,1", "self 3,2,1", "garbage"], ["short"]),
)  # fmt: skip
def test_the_same_tokens(made, models, drafter, situation, more) -> None:
    assert_row(made, models, drafter, situation, more)


@pytest.mark.parametrize(
    ("drafter", "least", "most"),
    [("chain4", 0.5, 3.0), ("3,2,1", 0.5, 3.0), ("8,8", 0.5, 2.0), ("self chain3", 0.5, 3.0), ("truth", 0.5, 3.0),
     ("garbage", 0.0, 0.2)],
)  # fmt: skip
def test_drafts_are_sometimes_accepted_and_sometimes_not(pair, drafter, least, most) -> None:
    """Or this suite would show little. Tokens accepted per step, mean over all requests."""
    models = pair("llama2", layers=2)
    _, texts = assert_same_in("short", models, partial(drafting, models, drafter))
    assert least <= accepted_per_step(texts) <= most
