"""The same tokens in any company: others coming and going, prefill in chunks, too few pages, pages already computed;
where rows go to experts, layers are recurrent or have windows, and with predictions, right, edited and wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.combinations import alternating, pairwise
from tests.same_tokens.matrix import (
    BF16,
    INT8,
    RECURRENT,
    Models,
    assert_row,
    by_rows,
    made,
    paired,
    rows,
)
from tests.same_tokens.runs import SELF, drafting
from tests.same_tokens.situations import assert_same_in

__all__ = ["made"]

#: A softmax of all or of the chosen, sigmoids with corrections and groups, biases and clamped gates, a shared expert by
#: itself, and one with a gate next to recurrent layers; one with latent attention; and experts beside an MLP.
MIXTURES = ("qwen3_moe", "glm4_moe", "gpt_oss", "qwen3_5_moe", "deepseek_v3", "gemma4_moe")
WINDOWED = ("mistral", "qwen2_window", "gemma3", "gemma4")

#: Room for the windows of four texts and one chunk, but not for the texts.
ROOM = 4 * 12 + 3


def with_pairs(situations: Any, **more: Any) -> Any:
    """Any two of a family, a drafter and a situation together."""
    families = [Models(each) for each in ("llama2", "smollm", "mistral", "qwen3")]
    drafters = ["none", "ngram", "chain4", "4,4,2,2,1", "self 3,2,1", "staged chain7", "truth"]
    return [pytest.param(*case.values, more, marks=case.marks) for case in pairwise(families, drafters, situations)]


def windows() -> Any:
    drafters = ["none", "chain4", "4,4,2,2,1", "8,8", *SELF, "truth"]
    yield from paired(alternating([Models(each, layers=3) for each in WINDOWED], drafters), "long", windows=ROOM)
    yield from rows([Models("qwen2_window", kv=INT8, layers=3)], ["4,4,2,2,1"], ["long"], windows=ROOM)
    models = [Models(each, layers=3) for each in WINDOWED]
    yield from rows(models, ["4,4,2,2,1"], ["long"], windows=16, prefix=True, preempted=True)
    yield from rows(models, ["4,4,2,2,1"], ["forked"], windows=30)
    for case in alternating([(200, 9), (30, 5), (16, 1)], models):
        (pages, found), each = case.values
        more = {"found": found, "page_size": 8, "windows": pages}
        yield pytest.param(each, "3,2,1", "back", more, marks=case.marks)


@by_rows(
    *with_pairs(["in a batch", "preempted", "back", "crowded", "forked"]),
    *paired(alternating([Models(each, BF16, layers=3) for each in MIXTURES],
                        ["none", "truth", "suffix tree", "chain4", "8,8", "garbage"]), "crowded"),
    *rows([Models("glm4_moe", layers=3)], ["none", "truth"], ["back"], found=9, page_size=8, tokens=2048),
    *paired(alternating([Models(each, layers=3) for each in RECURRENT],
                        ["none", "truth", "suffix tree", "chain4", "8,8", "garbage", "ngram"]),
            "crowded", preempted=True),
    *rows([Models("qwen3_5", BF16, layers=3)], ["ngram", "truth"], ["crowded"], tokens=1024),
    *rows([Models(each, layers=3) for each in RECURRENT], ["none", "truth", "chain4"], ["back"],
          found=9, page_size=8, tokens=2048),
    *paired(alternating([Models("llama2")], [f"predicted {each}" for each in ("none", "ngram", "chain4", "truth")]),
            "preempted", tokens=224),
    *(pytest.param(Models("llama2"), *case.values, {}, marks=case.marks) for case in pairwise(
        [f"predicted {each}" for each in ("none", "ngram", "suffix tree", "chain4", "4,4,2,2,1", "garbage", "truth")],
        ["alone", "in a batch", "back", "with options"])),
    *rows([Models(each, BF16) for each in ("smollm", "qwen2_window")], ["predicted 3,2,1"], ["alone"], max_seqs=4),
    *windows(),
)  # fmt: skip
def test_the_same_tokens(made, models, drafter, situation, more) -> None:
    assert_row(made, models, drafter, situation, more)


@pytest.mark.parametrize("drafter", ["none", "4,4,2,2,1", "truth"])
@pytest.mark.parametrize("page_size", [8, 32])
def test_page_sizes(pair, page_size, drafter) -> None:
    """Pages are the blocks of attention, so the bits are those of plain decoding with pages of the same size."""
    models = pair("qwen3", layers=2)
    assert_same_in("at once", models, partial(drafting, models, drafter), plain_size=page_size, page_size=page_size)
