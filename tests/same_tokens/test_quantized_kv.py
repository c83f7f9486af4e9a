"""The same tokens with keys and values of fewer bits than the engine computes with: of 8, whose scales follow from a
row alone and move with it; of bf16 beside fp32."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import msgspec
import pytest
import torch

from foresay.server.engine.build import build_engine
from foresay.server.settings.config import EngineConfig, KVDtype
from foresay.server.settings.resolved import BUNDLED, BUNDLED_HEADS
from foresay.verifier.graphs.runner import GraphStepRunner
from tests.combinations import alternating, pairwise
from tests.same_tokens.captured import captured_engine, draft_model, run_freely
from tests.same_tokens.heads import KINDS, SHAPES, head_drafter, head_of, target_of, whispered
from tests.same_tokens.models import Pair, engine_of
from tests.same_tokens.runs import DRAFTERS, ONE_OF_EACH, assert_same, drafting, jobs_of, plain, shape_of, whole
from tests.same_tokens.situations import assert_same_in
from tests.same_tokens.test_bundled_heads import jobs as bundled_jobs
from tests.same_tokens.witness import Text, Witness, run
from tests.verifier.reading import load_decoder

LENGTHS = (9, 17, 33, 5)
KV = [torch.int8, torch.float8_e4m3fn]
#: Drafters that are accepted at all depths, at some, and hardly ever.
FEW = ("none", "truth", "8,8", "garbage")


@cache
def expected(pair: Pair) -> dict[str, Text]:
    return plain(pair.target, jobs_of(pair.vocab_size, LENGTHS, 12), kv=pair.kv)


def assert_same_tokens(pair: Pair, drafter: str) -> None:
    jobs = jobs_of(pair.vocab_size, LENGTHS, 12)
    assert_same(expected(pair), run(drafting(pair, drafter, whole(jobs, expected(pair))), jobs))


@pytest.mark.parametrize(
    ("kv", "dtype", "drafter"),
    [
        pytest.param(kv, dtype, drafter, marks=() if drafter in drafters else pytest.mark.soak)
        for kv, dtype, drafters in (
            (torch.int8, torch.bfloat16, ONE_OF_EACH),
            (torch.float8_e4m3fn, torch.bfloat16, FEW),
            (torch.bfloat16, torch.float32, ONE_OF_EACH),
        )
        for drafter in DRAFTERS
    ],
    ids=str,
)
def test_every_drafter(pair, kv, dtype, drafter) -> None:
    assert_same_tokens(replace(pair("qwen3", dtype, layers=2), kv=kv), drafter)


@pytest.mark.parametrize("family", ["llama2", "mistral", "qwen2_window", "gemma2", "gemma4", "qwen3_5"])
def test_families_on_bf16_beside_fp32(pair, family) -> None:
    assert_same_tokens(replace(pair(family, torch.float32, layers=2), kv=torch.bfloat16), "truth")


@pytest.mark.parametrize(
    ("kv", "dtype", "family"),
    pairwise(KV, [torch.float32, torch.float16], ["llama2", "smollm", "mistral", "qwen2_window", "gemma4"]),
    ids=str,
)
def test_families_and_dtypes(pair, kv, dtype, family) -> None:
    assert_same_tokens(replace(pair(family, dtype, layers=2), kv=kv), "truth")


@pytest.mark.parametrize(("kv", "kind"), alternating(KV, KINDS), ids=str)
def test_heads(pair, kv, kind) -> None:
    models = replace(target_of(pair, kind, "llama2", torch.bfloat16), kv=kv)
    jobs = jobs_of(models.vocab_size, LENGTHS, 12)
    drafter = whispered(head_of(models, kind, "tree"), whole(jobs, expected(models)))
    assert_same(expected(models), run(engine_of(models.target, drafter, SHAPES["tree"], kv=kv), jobs))


@pytest.mark.parametrize(
    ("kv", "drafter", "situation"),
    pairwise([*KV, torch.bfloat16], FEW, ["in a batch", "preempted", "back", "forked"]),
    ids=str,
)
def test_in_every_situation(pair, kv, drafter, situation) -> None:
    """Choices share the pages of their prompt; the one that is not whole is copied, with its scales."""
    models = replace(pair("llama2", layers=2), kv=kv)
    assert_same_in(situation, models, partial(drafting, models, drafter))


@pytest.mark.parametrize("kv", [*KV, torch.bfloat16], ids=str)
def test_captured_steps(pair, kv) -> None:
    models = replace(pair("llama3", torch.bfloat16, layers=2), kv=kv)
    for shape in ("chain4", "3,2,1"):
        engine = captured_engine(models, draft_model(models), shape_of(shape))
        assert_same(expected(models), run_freely(engine, jobs_of(models.vocab_size, LENGTHS, 12)))
        assert isinstance(engine.runner, GraphStepRunner) and engine.runner.counts["launched"] >= 3


def bundled(draft: str, kv_dtype: KVDtype) -> dict[str, Text]:
    """Those who draft keep their KV in the same way."""
    config = EngineConfig(draft=draft, kv_dtype=kv_dtype, kv_tokens=640, max_model_len=160, threads=1)
    engine = build_engine(msgspec.structs.replace(config, draft_kv_dtype=kv_dtype))
    assert engine.info.exact and engine.info.kv_dtype == kv_dtype
    engine.runner = Witness(engine.runner.verifier, engine.drafter)
    return run(engine, bundled_jobs())


@pytest.fixture(scope="module", params=["int8", "fp8"])
def kept_plain(request) -> tuple[KVDtype, dict[str, Text]]:
    return request.param, bundled("none", request.param)


def test_bundled_drafters(kept_plain) -> None:
    kv_dtype, texts = kept_plain
    for draft in ("auto", *BUNDLED_HEADS):
        assert_same(texts, bundled(draft, kv_dtype))


@pytest.mark.parametrize("kind", ["dflash", "dspark", "peagle"])
def test_heads_of_blocks(kept_plain, tmp_path, kind) -> None:
    """Random ones, which are hardly ever right; what was injected or run for accepted tokens is kept in 8 bits too."""
    kv_dtype, texts = kept_plain
    head_drafter(kind, tmp_path, load_decoder(BUNDLED / "target", torch.bfloat16), "tree")
    assert_same(texts, bundled(f"{kind}:{tmp_path}", kv_dtype))
