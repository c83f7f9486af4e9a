"""The same 500 tokens from models so wide that a product of one row has other bits than a product of many."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from tests.same_tokens.models import Pair
from tests.same_tokens.runs import LARGEST, SAMPLINGS, assert_same, drafting, plain, replace_params, whole
from tests.same_tokens.witness import Job, Text, run
from tests.verifier.reading import random_tokens

FP32, BF16 = torch.float32, torch.bfloat16
TOKENS = 500
SLOW, SOAK = pytest.mark.slow, pytest.mark.soak


def jobs(pair: Pair, sampling: str) -> list[Job]:
    prompt = random_tokens(random.Random(sampling), 23, pair.vocab_size)
    return [Job("long", prompt, replace_params(SAMPLINGS[sampling], seed=7, max_tokens=TOKENS, ignore_eos=True))]


@cache
def expected(pair: Pair, sampling: str) -> dict[str, Text]:
    return plain(pair.target, jobs(pair, sampling))


def case(model: str, dtype: torch.dtype, drafter: str, sampling: str, *marks: pytest.MarkDecorator):
    name = f"{model}-{str(dtype).removeprefix('torch.')}-{drafter}-{sampling}"
    return pytest.param(model, dtype, drafter, sampling, id=name, marks=marks)


@pytest.mark.parametrize(
    ("model", "dtype", "drafter", "sampling"),
    [
        case("wide1536", FP32, "4,4,2,2,1", "warm"),
        case("wide3072", FP32, "truth", "greedy"),
        case("half1536", FP32, LARGEST, "warm"),
        case("wide1536", BF16, "truth", "cool_filtered", SLOW),
        case("wide1536", BF16, "chain3", "cool_filtered", SOAK),
        *(case("wide1536", FP32, drafter, "warm", SOAK) for drafter in ("chain5", "garbage", "truth")),
        *(case("wide3072", FP32, drafter, "greedy", SOAK) for drafter in ("chain3", LARGEST)),
    ],
)
def test_500_tokens(pair, model, dtype, drafter, sampling) -> None:
    models = pair(model, dtype)
    wanted = expected(models, sampling)
    assert len(wanted["long"].tokens) == TOKENS
    texts = whole(jobs(models, sampling), wanted)
    assert_same(wanted, run(drafting(models, drafter, texts), jobs(models, sampling)))
