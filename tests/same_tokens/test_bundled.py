"""The same tokens from the bundled pair, on real text, with every drafter."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from tokenizers import Tokenizer

from foresay.server.engine.build import build_engine
from foresay.server.settings.config import Dtype, EngineConfig
from foresay.server.settings.resolved import BUNDLED
from foresay.spec.engine import EngineCore
from tests.same_tokens.proposers import RandomTrees
from tests.same_tokens.runs import CHAINS, TREES, assert_same, sampled, shape_of, whole
from tests.same_tokens.witness import Job, Text, Witness, run

DRAFT = str(BUNDLED / "draft")
PROMPTS = [
    ("Once upon a time there was a little", "warm"),
    ("The king said to the", "cool"),
    ("Question: Tom has 3 apples and buys 4 more. How many apples does he have?\nAnswer:", "greedy"),
    ("The king said to the", "warm_filtered"),
    ("It was a dark and stormy night, and the wolf", "cool_filtered"),
    ("T", "warm_top_p"),
]
QUICK = ["ngram", "chain4", "3,2,1", "truth", "garbage"]
REST = [drafter for drafter in [*CHAINS, *TREES] if drafter not in QUICK]


@pytest.fixture(scope="module")
def engine() -> Callable[..., EngineCore]:
    """Engines by drafter and dtype; the drafts of one model take turns in one engine."""

    @cache
    def built(drafting: str, dtype: Dtype) -> EngineCore:
        config = EngineConfig(draft=drafting, dtype=dtype, kv_tokens=640, max_model_len=160, threads=1)
        engine = build_engine(config)
        assert engine.info.exact, engine.info.exact_reason
        engine.runner = Witness(engine.runner.verifier, engine.drafter)
        return engine

    def chosen(drafter: str, dtype: Dtype = "auto") -> EngineCore:
        kind = drafter if drafter in ("none", "ngram") else "none" if drafter in ("truth", "garbage") else DRAFT
        engine = built(kind, dtype)
        engine.scheduler.shape = shape_of(drafter)
        return engine

    return chosen


def jobs(salt: str) -> list[Job]:
    """Salted, so that a run does not find the pages of another run."""
    tokenizer = Tokenizer.from_file(str(BUNDLED / "target" / "tokenizer.json"))
    return [
        Job(f"{salt}-{index}", tokenizer.encode(text).ids, sampled(name, index, 30), arrives=3 * index, salt=salt)
        for index, (text, name) in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def expected(engine) -> Callable[[str], list[Text]]:
    """The texts, drafting nothing, each request after the other is done."""

    @cache
    def made(dtype: str) -> list[Text]:
        plain = engine("none", dtype)
        return [run(plain, [job])[job.id] for job in jobs("plain")]

    return made


def assert_same_tokens(engine, expected, drafter: str, dtype: str = "auto") -> dict[str, Text]:
    requests = jobs(drafter)
    wanted = dict(zip((job.id for job in requests), expected(dtype), strict=True))
    running = engine(drafter, dtype)
    if drafter in ("truth", "garbage"):
        known = whole(requests, wanted) if drafter == "truth" else None
        running.runner.drafter = RandomTrees(running.info.vocab_size, known=known)
    try:
        texts = run(running, requests)
    finally:
        running.runner.drafter = running.drafter
    assert_same(wanted, texts)
    return texts


@pytest.mark.parametrize("drafter", [*QUICK, *(pytest.param(drafter, marks=pytest.mark.soak) for drafter in REST)])
def test_every_drafter(engine, expected, drafter) -> None:
    assert_same_tokens(engine, expected, drafter)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("drafter", ["4,4,2,2,1", "truth"])
def test_both_precisions(engine, expected, drafter, dtype) -> None:
    assert_same_tokens(engine, expected, drafter, dtype)


def test_again_over_the_pages_of_the_first_time(engine, expected) -> None:
    """The second time the prompt's pages are found in the prefix index."""
    assert_same_tokens(engine, expected, "chain4")
    texts = assert_same_tokens(engine, expected, "chain4")
    assert sum(text.cached_tokens for text in texts.values()) > 0
