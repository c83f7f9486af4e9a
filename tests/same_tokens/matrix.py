"""A table of who drafts for which models in which situation: the same tokens, row by row.

What rows have in common is in :mod:`tests.same_tokens.situations`: the requests, what the engine is like, and what must
have taken place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from tests.same_tokens.edits import predicted
from tests.same_tokens.models import Pair
from tests.same_tokens.runs import drafting
from tests.same_tokens.situations import assert_same_in

FP32, BF16, FP16, INT8, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn
soak = pytest.mark.soak
RECURRENT = ("qwen3_5", "lfm2", "falcon_h1")


class Models(NamedTuple):
    """A pair. how: what its weights are quantised to, and perhaps that activations are rounded. kv: what keys and
    values are kept in."""

    family: str
    dtype: torch.dtype = FP32
    how: str = ""
    kv: torch.dtype | None = None
    layers: int = 2

    def __str__(self) -> str:
        kinds = (str(kind).removeprefix("torch.") for kind in (self.dtype, self.kv) if kind not in (FP32, None))
        return " ".join((self.family, *kinds, *([self.how] if self.how else [])))


def rows(models: Any, drafters: Any, situations: Any, soaked: Callable[..., bool] = lambda *_: False, **more: Any):
    """The product; of which some are for `make soak`."""
    for each in product(models, drafters, situations):
        yield pytest.param(*each, more, marks=soak if soaked(*each) else ())


def paired(cases: list[Any], situation: str, **more: Any) -> list[Any]:
    return [pytest.param(*case.values, situation, more, marks=case.marks) for case in cases]


@pytest.fixture(scope="session")
def made(pair) -> Callable[[Models], Pair]:
    @cache
    def found(models: Models) -> Pair:
        one: Pair = pair(models.family, FP32 if models.how else models.dtype, layers=models.layers)
        if models.how:
            one = one.quantized(models.how, models.dtype)
            linears: Any = one.target.linears
            rounded = {linear._packed.rounds for linear in linears}
            assert (("rounded" in models.how) in rounded and len(rounded) == 1) or models.family != "qwen3"
        return one if models.kv is None else replace(one, kv=models.kv)

    return found


def assert_row(
    made: Callable[[Models], Pair], models: Models, drafter: str, situation: str, more: dict[str, Any]
) -> None:
    found, how = made(models), dict(more)
    predicts = drafter.startswith("predicted") and situation != "with options"
    change: dict[str, Any] = {"change": predicted} if predicts else {}
    preempted = how.pop("preempted", False)
    _, texts = assert_same_in(situation, found, partial(drafting, found, drafter), **change, **how)
    assert not preempted or any(text.statistics and text.statistics.ending.preemptions for text in texts.values())
    if change and situation == "alone" and not how:
        # The first one's prediction is its text: all but the tokens of the target's own samples come from it.
        for (name, text), least in zip(texts.items(), (0.8, 0.4), strict=False):
            assert text.statistics is not None and text.statistics.accepted >= least * len(text.tokens), name


def by_rows(*cases: Any) -> Any:
    """Parametrize by rows."""
    return pytest.mark.parametrize(("models", "drafter", "situation", "more"), [*cases], ids=str)
