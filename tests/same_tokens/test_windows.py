"""The same tokens where layers with a window keep the end of each text alone: with drafts, company, returning texts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from foresay.spec.tree import TreeShape
from tests.combinations import alternating, pairwise
from tests.same_tokens.captured import captured_engine, copy, draft_model, run_freely
from tests.same_tokens.models import Pair
from tests.same_tokens.runs import SELF, assert_same, drafting, expected, jobs_of, whole
from tests.same_tokens.situations import assert_goes_on, assert_same_in
from tests.same_tokens.witness import Text, run

#: Prompts shorter and longer than the window of 24.
LENGTHS = (9, 60, 17, 90, 33, 40)
WINDOWED = ["mistral", "qwen2_window", "gemma3", "gemma4"]


def assert_same_with(models: Pair, drafter: str, windows: int, prefix: bool = False) -> dict[str, Text]:
    """With so many pages for windows."""
    jobs, wanted = jobs_of(models.vocab_size, LENGTHS, 40), expected(models, LENGTHS, 40)
    texts = whole(jobs, wanted)
    engine = drafting(models, drafter, texts, page_size=8, chunk=16, prefix=prefix, windows=windows)
    found = run(engine, jobs)
    assert_same(wanted, found)
    return found


@pytest.mark.parametrize(
    ("family", "drafter"), alternating(WINDOWED, ["none", "chain4", "4,4,2,2,1", "8,8", *SELF, "truth"])
)
def test_every_drafter(pair, family, drafter) -> None:
    """Four texts at once, with room for their windows and one chunk, but not for the texts."""
    assert_same_with(pair(family), drafter, 4 * 12 + 3)


def test_quantized_keys_and_values(pair) -> None:
    """Their scales move along."""
    assert_same_with(replace(pair("qwen2_window"), kv=torch.int8), "4,4,2,2,1", 4 * 12 + 3)


@pytest.mark.parametrize("family", WINDOWED)
def test_few_window_pages(pair, family) -> None:
    """Sequences are preempted for want of window pages alone, and come back."""
    texts = assert_same_with(pair(family), "4,4,2,2,1", 16, prefix=True)
    assert sum(text.statistics.ending.preemptions for text in texts.values() if text.statistics)


@pytest.mark.parametrize(("windows", "family"), alternating([200, 30, 16], WINDOWED))
def test_texts_that_come_back(pair, family, windows) -> None:
    """They are found where their ends are still there; where those had to go, they are computed again."""
    models = pair(family)
    least = {200: 9, 30: 5, 16: 1}[windows]
    assert_same_in("back", models, partial(drafting, models, "3,2,1"), found=least, page_size=8, windows=windows)


@pytest.mark.parametrize("family", WINDOWED)
def test_other_choices_of_a_prompt(pair, family) -> None:
    models = pair(family)
    assert_same_in("forked", models, partial(drafting, models, "4,4,2,2,1"), windows=30)


@pytest.mark.parametrize("family", WINDOWED)
def test_a_text_cut_short_can_be_gone_on_with(pair, family) -> None:
    models = pair(family)
    for cut in (1, 35):
        prompt, cached = assert_goes_on(models, partial(drafting, models, "chain4"), cut, windows=30)
        assert cached >= (prompt - 8 if cut == 1 else 0)


SHAPES = {"chain5": TreeShape.chain(5), "1,3,3": TreeShape((1, 3, 3)), "largest": TreeShape.parse("6,14,18,14,8,3")}


@pytest.mark.parametrize(
    ("family", "shape", "drafter"),
    pairwise(["qwen2_window", "gemma3"], [("chain5", 3), ("1,3,3", 1), ("largest", 2)], [draft_model, copy]),
)
def test_captured_steps(pair, family, shape, drafter) -> None:
    """Ahead of the host, which gives up window pages behind it."""
    models, (name, max_seqs) = pair(family), shape
    jobs = jobs_of(models.vocab_size, LENGTHS, 40)
    wanted = run_freely(captured_engine(models, lambda pool: None, TreeShape(), graphs=False, max_seqs=1), jobs)
    room = {"max_seqs": max_seqs, "windows": 60 + 25 * max_seqs}
    engine = captured_engine(models, drafter(models), SHAPES[name], page_size=8, prefix=True, **room)
    assert_same(wanted, run_freely(engine, jobs, careful=True))
