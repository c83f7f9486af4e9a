"""The same tokens from weights, keys and values of few bits: plain and speculative decoding have the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from foresay.verifier.graphs.runner import GraphStepRunner
from tests.combinations import pairwise
from tests.same_tokens.captured import captured_engine, draft_model, run_freely
from tests.same_tokens.matrix import (
    BF16,
    FP8,
    FP16,
    FP32,
    INT8,
    Models,
    assert_row,
    by_rows,
    made,
    rows,
)
from tests.same_tokens.models import Pair
from tests.same_tokens.runs import DRAFTERS, ONE_OF_EACH, assert_same, drafting, jobs_of, plain, shape_of
from tests.same_tokens.situations import assert_same_in
from tests.verifier import mxfp4
from tests.verifier.reading import load_decoder
from tests.verifier.test_quantized_files import published

__all__ = ["made"]

HOW = ("int8", "int4", "fp8", "int4 rounded", "int8 rounded")
#: Drafters that are accepted at all depths, at some, and hardly ever.
FEW = ("truth", "8,8", "garbage")


def keys_of_few_bits() -> Any:
    for kv, dtype, drafters in ((INT8, BF16, ONE_OF_EACH), (FP8, BF16, ("none", *FEW)), (BF16, FP32, ONE_OF_EACH)):
        models = Models("qwen3", dtype, kv=kv)
        yield from rows([models], DRAFTERS, ["at once"], lambda _, drafter, *__, of=drafters: drafter not in of)
    beside = [Models(each, kv=BF16) for each in ("llama2", "mistral", "qwen2_window", "gemma2", "gemma4", "qwen3_5")]
    yield from rows(beside, ["truth"], ["at once"])
    for case in pairwise([INT8, FP8], [FP32, FP16], ["llama2", "smollm", "mistral", "qwen2_window", "gemma4"]):
        kv, dtype, family = case.values
        yield pytest.param(Models(family, dtype, kv=kv), "truth", "at once", {}, marks=case.marks)
    kept = [Models("llama2", kv=kv) for kv in (INT8, FP8, BF16)]
    for case in pairwise(kept, ["none", *FEW], ["in a batch", "preempted", "back", "forked"]):
        yield pytest.param(*case.values, {}, marks=case.marks)


def weights_of_few_bits() -> Any:
    for how in HOW:
        of = ONE_OF_EACH if "int4" in how else FEW
        yield from rows(
            [Models("qwen3", BF16, how)], DRAFTERS, ["at once"], lambda _, drafter, *__, of=of: drafter not in of
        )
    families = enumerate(["llama_bias", "smollm", "mistral", "gemma4"])
    for (turn, how), (at, family), (n, dtype) in product(enumerate(HOW), families, enumerate([FP32, FP16])):
        models = [Models(family, dtype, how)]
        yield from rows(models, ["truth", "4,4,2,2,1"], ["at once"], lambda *_, odd=(at + n + turn) % 2: bool(odd))
    yield from rows([Models("qwen3_moe", BF16, how) for how in HOW], ["truth", "8,8"], ["at once"], chunk=16)


@by_rows(*keys_of_few_bits(), *weights_of_few_bits())
def test_the_same_tokens(made, models, drafter, situation, more) -> None:
    assert_row(made, models, drafter, situation, more)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Callable[[str], Pair]:
    """Published files of few bits: inputs in another order, one scale for each tensor, experts in MXFP4; what they
    stand for, in floats, drafts."""

    @cache
    def found(kind: str) -> Pair:
        directory: Path = tmp_path_factory.mktemp("files")
        if kind.startswith("mxfp4"):
            mxfp4.publish(directory)
            places = directory / "published", directory / "written"
        else:
            published(directory, kind)
            places = directory / "quantized", directory / "plain"
        target, draft = (load_decoder(place, BF16, rounds=rounds) for place, rounds in zip(
            places, ("rounded" in kind, False), strict=True))  # fmt: skip
        return Pair(*places, target, draft)

    return found


@pytest.mark.parametrize("drafter", ["truth", "8,8", "4,4,2,2,1", "self 3,2,1", "garbage"])
@pytest.mark.parametrize("kind", ["gptq order", "fp8 tensor", "mxfp4", "mxfp4 rounded"])
def test_published_files(files, kind, drafter) -> None:
    assert_same_in("at once", files(kind), partial(drafting, files(kind), drafter))


@pytest.mark.parametrize("kv", [INT8, FP8, BF16], ids=str)
def test_captured_steps(pair, kv) -> None:
    models, jobs = replace(pair("llama3", BF16, layers=2), kv=kv), jobs_of(300, (9, 17, 33, 5), 12)
    for shape in ("chain4", "3,2,1"):
        engine = captured_engine(models, draft_model(models), shape_of(shape))
        assert_same(plain(models.target, jobs, kv=kv), run_freely(engine, jobs))
        assert isinstance(engine.runner, GraphStepRunner) and engine.runner.counts["launched"] >= 3
