"""The same tokens with predictions, right, edited and wrong, with any drafter where they end."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from foresay.drafters.combined import RoutedDrafter
from foresay.drafters.prediction import PredictionDrafter
from foresay.kvpaging import PagePool
from foresay.spec.engine import EngineCore
from tests.combinations import pairwise
from tests.same_tokens.edits import predicted
from tests.same_tokens.models import Pair, engine_of
from tests.same_tokens.runs import maker, shape_of
from tests.same_tokens.situations import assert_same_in

CONFIGURED = ["none", "ngram", "suffix tree", "chain4", "4,4,2,2,1", "garbage", "truth"]


def engine_with(pair: Pair, configured: str, texts: dict[str, list[int]], **changes: int | bool) -> EngineCore:
    """Predictions first, then one of the other drafters."""
    make, shape = maker(pair, configured, texts), shape_of(configured)

    def routed(pool: PagePool) -> RoutedDrafter:
        return RoutedDrafter(PredictionDrafter(), make(pool), shape)

    return engine_of(pair.target, routed, shape, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("configured", "situation"), pairwise(CONFIGURED, ["alone", "in a batch", "preempted", "back", "with options"])
)
def test_together_with_every_drafter(pair, configured, situation) -> None:
    """All samplings, temperature 0 and 1 among them; chains far beyond the configured shape."""
    models = pair("llama2", layers=2)
    more = {"tokens": 224} if situation == "preempted" else {}
    _, texts = assert_same_in(situation, models, partial(engine_with, models, configured), predicted, **more)
    if situation == "alone":
        # The first one's prediction is its text: all but the tokens of the target's own samples come from it.
        for (name, text), least in zip(texts.items(), (0.8, 0.4), strict=False):
            assert text.statistics is not None and text.statistics.accepted >= least * len(text.tokens), name


@pytest.mark.parametrize("family", ["smollm", "qwen2_window"])
def test_bf16(pair, family) -> None:
    models = pair(family, torch.bfloat16, layers=2)
    assert_same_in("alone", models, partial(engine_with, models, "3,2,1"), predicted, max_seqs=4)
