"""The same tokens where rows go to experts: in batches and chunks, behind reused prefixes, quantised."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.same_tokens.models import Pair
from tests.same_tokens.runs import DRAFTERS, ONE_OF_EACH, assert_same, drafting, expected, jobs_of, plain, whole
from tests.same_tokens.situations import assert_same_in
from tests.same_tokens.witness import run
from tests.verifier.mxfp4 import publish
from tests.verifier.reading import load_decoder

LENGTHS = (9, 60, 17, 1, 33, 3)
#: A softmax of all or of the chosen, sigmoids with corrections and groups, biases and clamped gates, a shared expert by
#: itself, and one with a gate next to recurrent layers; one with latent attention; and experts beside an MLP.
FAMILIES = ("qwen3_moe", "glm4_moe", "gpt_oss", "qwen3_5_moe", "deepseek_v3", "gemma4_moe")


@pytest.mark.parametrize("drafter", ["none", "suffix tree", "chain4", "8,8", "garbage", "truth"])
@pytest.mark.parametrize("family", FAMILIES)
def test_four_at_once_in_chunks_with_too_few_pages(pair, family, drafter) -> None:
    models = pair(family, torch.bfloat16)
    assert_same_in("crowded", models, partial(drafting, models, drafter))


@pytest.mark.parametrize("how", ["int8", "int4", "fp8", "int4 rounded", "int8 rounded"])
def test_quantised(pair, how) -> None:
    models = pair("qwen3_moe", layers=2).quantized(how)
    jobs, wanted = jobs_of(models.vocab_size, LENGTHS, 20), expected(models, LENGTHS, 20)
    for drafter in ("truth", "8,8"):
        assert_same(wanted, run(drafting(models, drafter, whole(jobs, wanted), chunk=16), jobs))


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Pair:
    """gpt-oss in MXFP4; its draft model is what it stands for, in floats."""
    directory: Path = tmp_path_factory.mktemp("mxfp4")
    publish(directory)
    directories = directory / "published", directory / "written"
    return Pair(*directories, *(load_decoder(each, torch.bfloat16) for each in directories))


@pytest.mark.parametrize(
    "drafter", [pytest.param(each, marks=() if each in ONE_OF_EACH else pytest.mark.soak) for each in DRAFTERS]
)
def test_mxfp4_with_every_drafter(published, drafter) -> None:
    """At temperature 0 and above; they are the tokens of the checkpoint written out."""
    jobs = jobs_of(published.vocab_size, LENGTHS, 20, ("greedy", "warm", "warm_filtered", "cool"))
    wanted = plain(published.draft, jobs)
    assert_same(wanted, run(drafting(published, drafter, whole(jobs, wanted)), jobs))


@pytest.mark.parametrize("drafter", ["truth", "8,8"])
def test_mxfp4_with_rounded_activations(published, drafter) -> None:
    models = replace(published, target=load_decoder(published.directory, torch.bfloat16, rounds=True))
    jobs, wanted = jobs_of(models.vocab_size, LENGTHS, 20), expected(models, LENGTHS, 20)
    assert_same(wanted, run(drafting(models, drafter, whole(jobs, wanted), chunk=16), jobs))


@pytest.mark.parametrize("drafter", ["none", "truth"])
def test_texts_that_come_back(pair, drafter) -> None:
    models = pair("glm4_moe")
    assert_same_in("back", models, partial(drafting, models, drafter), found=9, page_size=8, tokens=2048)
