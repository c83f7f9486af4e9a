"""The same tokens with every drafter, for every family, at every sampling, one request at a time."""

from __future__ import annotations

import pytest
import torch

from tests.same_tokens.models import Pair
from tests.same_tokens.runs import CHAINS, DRAFTERS, SELF, TREES, assert_same, drafting, expected, jobs_of, whole
from tests.same_tokens.witness import Text, run
from tests.verifier.families import FAMILIES

LENGTHS = (9, 1, 17, 33, 5, 40)
RECURRENT = (
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "lfm2",
    "lfm2_moe",
    "granite_hybrid",
    "granite_hybrid_moe",
    "nemotron_h",
    "nemotron_h_moe",
    "falcon_h1",
    "falcon_h1_norm",
)
#: Of others' kinds of layers, in another order.
KNOWN = (
    "olmoe",
    "mixtral",
    "granite_moe",
    "glm4_moe",
    "minimax_m2",
    "qwen3_5_moe",
    "qwen3_next",
    "granite_hybrid_moe",
    "falcon_h1_norm",
    "deepseek_v2",
    "deepseek_v3",
)
LOOKUPS = ("ngram", "suffix", "suffix tree")
MAX_TOKENS = 12


def assert_same_tokens(pair: Pair, drafter: str) -> dict[str, Text]:
    jobs = jobs_of(pair.vocab_size, LENGTHS, MAX_TOKENS)
    wanted = expected(pair, LENGTHS, MAX_TOKENS)
    engine = drafting(pair, drafter, whole(jobs, wanted), max_seqs=1)
    texts = run(engine, jobs)
    assert_same(wanted, texts)
    return texts


def _cases() -> list:
    """Each family with six drafters, another chain, tree, copy and lookup from family to family. Of the others each has
    a quarter, which is slow, its neighbours the other quarters, but for mixtures that differ from others in little;
    `make soak` tries the rest."""
    cases = []
    for number, family in enumerate(FAMILIES):
        drafters = [drafter for drafter in DRAFTERS if drafter != "staged chain7" or family not in RECURRENT]
        turns = (kind[number % len(kind)] for kind in (CHAINS, TREES, SELF, LOOKUPS))
        quick = {"garbage", "truth", *turns}
        others = [drafter for drafter in drafters if drafter not in quick]
        spared = family in KNOWN
        marks = {d: pytest.mark.soak if spared or (number + n) % 4 else pytest.mark.slow for n, d in enumerate(others)}
        cases += [pytest.param(family, drafter, marks=marks.get(drafter, ())) for drafter in drafters]
    return cases


@pytest.mark.parametrize(("family", "drafter"), _cases())
def test_every_family_with_every_drafter(pair, family, drafter) -> None:
    assert_same_tokens(pair(family, layers=2), drafter)


@pytest.mark.parametrize("drafter", ["truth", "chain3", "4,4,2,2,1", "self 3,2,1", "garbage"])
@pytest.mark.parametrize("family", ["llama3", "smollm", "qwen2_window"])
def test_bf16(pair, family, drafter) -> None:
    assert_same_tokens(pair(family, torch.bfloat16, layers=2), drafter)


@pytest.mark.parametrize(
    ("drafter", "least", "most"),
    [
        ("chain4", 0.5, 3.0),
        ("3,2,1", 0.5, 3.0),
        ("8,8", 0.5, 2.0),
        ("self chain3", 0.5, 3.0),
        ("truth", 0.5, 3.0),
        ("garbage", 0.0, 0.2),
    ],
)
def test_drafts_are_sometimes_accepted_and_sometimes_not(pair, drafter, least, most) -> None:
    """Or this suite would show little. Tokens accepted per step, mean over all requests."""
    texts = assert_same_tokens(pair("llama2", layers=2), drafter).values()
    totals = [text.statistics for text in texts if text.statistics is not None]
    mean = sum(total.accepted for total in totals) / sum(total.steps for total in totals)
    assert least <= mean <= most
