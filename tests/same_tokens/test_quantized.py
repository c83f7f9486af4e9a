"""The same tokens from a quantised target with every drafter: plain and speculative decoding have the same weights."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from foresay.server.engine.build import build_engine
from foresay.server.settings.config import EngineConfig, Quantize
from tests.same_tokens.models import Pair
from tests.same_tokens.runs import DRAFTERS, ONE_OF_EACH, assert_same, drafting, jobs_of, plain, whole
from tests.same_tokens.test_bundled_heads import jobs
from tests.same_tokens.witness import Text, Witness, run
from tests.verifier.reading import load_decoder
from tests.verifier.test_quantized_files import published

HOW = ["int8", "int4", "fp8"]
#: The same, with activations rounded as ``--activations int8`` wants it.
ROUNDED = ["int4 rounded", "int8 rounded"]
#: Drafters that are accepted at all depths, at some, and hardly ever; with int4 one of each kind, else in `make soak`.
FEW = ("truth", "8,8", "garbage")
LENGTHS = (9, 17, 33, 5)
SAMPLINGS = ("greedy", "warm", "warm_filtered", "cool")
MAX_TOKENS = 12


@pytest.fixture(scope="session")
def quantized(pair):
    """Pairs, both models quantised, each made once."""

    @cache
    def made(family: str, how: str, dtype: torch.dtype = torch.bfloat16) -> Pair:
        found: Pair = pair(family, layers=2)
        return found.quantized(how, dtype)

    return made


@cache
def expected(pair: Pair) -> dict[str, Text]:
    return plain(pair.target, jobs_of(pair.vocab_size, LENGTHS, MAX_TOKENS, SAMPLINGS))


def assert_same_tokens(pair: Pair, drafter: str) -> None:
    jobs = jobs_of(pair.vocab_size, LENGTHS, MAX_TOKENS, SAMPLINGS)
    texts = run(drafting(pair, drafter, whole(jobs, expected(pair))), jobs)
    assert_same(expected(pair), texts)


@pytest.mark.parametrize(
    ("how", "drafter"),
    [
        pytest.param(how, drafter, marks=() if drafter in (ONE_OF_EACH if "int4" in how else FEW) else pytest.mark.soak)
        for how in (*HOW, *ROUNDED)
        for drafter in DRAFTERS
    ],
)
def test_every_drafter(quantized, how, drafter) -> None:
    linears = quantized("qwen3", how).target.linears
    assert all(one._packed.rounds == (how in ROUNDED) for one in linears)
    assert_same_tokens(quantized("qwen3", how), drafter)


#: How, family and dtype: any two of them together; any three in `make soak`.
CASES = [
    pytest.param(how, family, dtype, marks=() if (at + number + turn) % 2 == 0 else pytest.mark.soak)
    for turn, how in enumerate((*HOW, *ROUNDED))
    for at, family in enumerate(["llama_bias", "smollm", "mistral", "gemma4"])
    for number, dtype in enumerate([torch.float32, torch.float16])
]


@pytest.mark.parametrize(("how", "family", "dtype"), CASES, ids=str)
def test_families_and_dtypes(quantized, how, family, dtype) -> None:
    assert_same_tokens(quantized(family, how, dtype), "truth")
    assert_same_tokens(quantized(family, how, dtype), "4,4,2,2,1")


@pytest.mark.parametrize("kind", ["gptq order", "fp8 tensor"])
def test_published_files(tmp_path, kind) -> None:
    """With inputs in another order, and with one scale for each tensor."""
    published(tmp_path, kind)
    target, draft = (load_decoder(tmp_path / each, torch.bfloat16) for each in ("quantized", "plain"))
    pair = Pair(tmp_path / "quantized", tmp_path / "plain", target, draft)
    for drafter in ("truth", "4,4,2,2,1"):
        assert_same_tokens(pair, drafter)


def bundled(draft: str, how: Quantize) -> dict[str, Text]:
    """Texts of the bundled target, whose draft model and heads were made for its floats."""
    config = EngineConfig(draft=draft, quantize=how, draft_quantize="int8", kv_tokens=640, max_model_len=160, threads=1)
    engine = build_engine(config)
    assert engine.info.exact and how in engine.info.quantization
    engine.runner = Witness(engine.runner.verifier, engine.drafter)
    return run(engine, jobs())


OWN = ["self:int4", "draft_model > self:int4", "eagle3,eagle3 > self:int4,suffix"]


@pytest.mark.parametrize("how", ["int8", "int4", "fp8"])
def test_bundled_drafters(how) -> None:
    texts = bundled("none", how)
    for draft in ("auto", "medusa", "eagle3", *(OWN if how != "int4" else [])):
        assert_same(texts, bundled(draft, how))
