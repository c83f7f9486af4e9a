"""The same tokens where layers with a window keep the end of each text alone: with drafts, company, returning texts."""

from __future__ import annotations

from functools import partial

import pytest

from foresay.spec.tree import TreeShape
from tests.combinations import pairwise
from tests.same_tokens.captured import captured_engine, copy, draft_model, run_freely
from tests.same_tokens.runs import assert_same, drafting, jobs_of
from tests.same_tokens.situations import assert_goes_on

#: Prompts shorter and longer than the window of 24.
LENGTHS = (9, 60, 17, 90, 33, 40)
WINDOWED = ["mistral", "qwen2_window", "gemma3", "gemma4"]


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
