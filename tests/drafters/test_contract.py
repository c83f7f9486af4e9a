"""Every drafter with a state of its own, held to what all owe (tests/drafters/contract.py), in every situation: its
trees are valid and within their budget, allowed, and those of a new drafter that has read the text at once; and the
tokens are those of plain decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from foresay.drafters.levels import TreeDrafter
from foresay.kvpaging import PagePool
from foresay.spec.constrain import Ahead
from foresay.spec.engine import EngineCore
from foresay.spec.price import Price
from foresay.spec.protocols import Drafter, FeatureReader
from foresay.spec.tree import TreeShape
from tests.combinations import alternating, pairwise
from tests.drafters.contract import Fresh, Held, Resting
from tests.same_tokens.heads import HYBRID, KINDS, NAMES, SHAPES, Whisper, drafter_of, head_of, target_of
from tests.same_tokens.models import Pair, engine_of
from tests.same_tokens.proposers import RandomTrees
from tests.same_tokens.runs import assert_same, jobs_of, plain
from tests.same_tokens.situations import accepted_per_step, assert_same_in
from tests.same_tokens.witness import Text, run

#: What levels and rows are worth to a tree: about half of these drafts stop by that.
FADED = Price(0.1, (0.06 * np.arange(33.0)).tolist())
FORMS = SHAPES | {"fading": replace(TreeShape.parse("4,4,2,2,1"), price=FADED)}
EVERYBODY = [*NAMES, *HYBRID[1:]]
SITUATIONS = ["alone", "in a batch", "preempted", "back", "crowded", "forked"]


def held_engine(
    pair: Pair,
    name: str,
    shape: str,
    texts: Mapping[str, list[int]],
    rests: bool = False,
    lawful: bool = True,
    **options: Any,
) -> EngineCore:
    """Each tree is held to what is owed, and then the truth is whispered into those of heads, for paths of every
    length: they keep nothing of what they drafted."""
    make, known = drafter_of(pair, name, shape), texts if name in (*KINDS, "mtp") else {id: [] for id in texts}

    def made(pool: PagePool) -> Drafter:
        inner: Any = make(pool)
        held = Held(inner, Fresh(pair, make, pool.page_size), lawful)
        if isinstance(inner, FeatureReader):
            held.observe = inner.observe  # type: ignore[attr-defined]
        return Resting(held, known, RandomTrees(pair.vocab_size, known=texts)) if rests else Whisper(held, known)

    return engine_of(pair.target, made, FORMS[shape], kv=pair.kv, **options)


def assert_held(pair: Pair, name: str, shape: str, situation: str, **more: Any) -> None:
    engine, texts = assert_same_in(situation, pair, partial(held_engine, pair, name, shape), **more)
    assert isinstance(engine.drafter, Whisper) and isinstance(held := engine.drafter.inner, Held)
    assert held.compared > 2
    assert 0.05 < accepted_per_step(texts) < 6.0


@pytest.mark.parametrize(("name", "shape", "situation"), pairwise(EVERYBODY, ["chain", "tree", "fading"], SITUATIONS))
def test_it_drafts_what_follows_from_the_text(pair, name, shape, situation) -> None:
    assert_held(target_of(pair, name), name, shape, situation, found=9)


@pytest.mark.parametrize(("name", "situation"), alternating(EVERYBODY, ["in a batch", "back"]))
def test_one_that_rested_has_caught_up(pair, name, situation) -> None:
    assert_held(target_of(pair, name), name, "tree", situation, found=9, rests=True)


@pytest.mark.parametrize(("name", "shape"), alternating(EVERYBODY, ["chain", "tree"]))
def test_nothing_is_drafted_that_a_request_rules_out(pair, monkeypatch, name, shape) -> None:
    """Half of the options each. Where the grammar is not followed drafts are cut, and what it forces is added."""
    follows = partial(Ahead, seconds=60.0) if name != "draft_model" else lambda *_: None  # this grammar is slow
    monkeypatch.setattr("foresay.drafters.levels.Ahead", follows)
    situation = "with options" if shape == "chain" else "with other options"
    assert_held(target_of(pair, name), name, shape, situation, lawful=name != "draft_model")


@pytest.mark.parametrize(("name", "kept"), alternating(EVERYBODY, ["bf16", "int8", "fp8"]))
def test_in_16_bits_and_over_keys_of_8(pair, name, kept) -> None:
    kv = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kept)
    models = replace(target_of(pair, name, "smollm" if kv is None else "llama2", torch.bfloat16), kv=kv)
    assert_held(models, name, "tree", "alone", max_seqs=4)


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "dflash"])
def test_noise_is_shared_with_the_draw(pair, monkeypatch, kind) -> None:
    """Even a head that knows nothing is hit at temperature 1, since the noise decides much of the sample."""
    models = pair("llama2")
    jobs = jobs_of(models.vocab_size, (20, 21, 22, 23), 60, ["warm"])
    engine = engine_of(models.target, head_of(models, kind, "tree"), TreeShape.parse("8,8"))
    texts = run(engine, jobs)
    assert_same(expected_warm(models), texts)
    add_noise_of_its_own(monkeypatch)
    alone = run(engine_of(models.target, head_of(models, kind, "tree"), TreeShape.parse("8,8")), jobs)
    assert accepted_per_step(texts) > 2 * accepted_per_step(alone)


def add_noise_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drafters add the noise of a seed of their own."""

    joined = TreeDrafter._joined
    monkeypatch.setattr(TreeDrafter, "_joined", lambda self, *args: replace(joined(self, *args), seed=12345))


@cache
def expected_warm(pair: Pair) -> dict[str, Text]:
    return plain(pair.target, jobs_of(pair.vocab_size, (20, 21, 22, 23), 60, ["warm"]))
