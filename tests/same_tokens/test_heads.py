"""The same tokens and logprobs with every kind of head and shape of tree, in any company, under every option."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from foresay.drafters.levels import TreeDrafter
from foresay.spec.engine import EngineCore
from foresay.spec.tree import TreeShape
from tests.combinations import alternating, pairwise
from tests.same_tokens.heads import KINDS, SHAPES, Whisper, head_of, target_of, whispered
from tests.same_tokens.models import Pair, engine_of
from tests.same_tokens.runs import assert_same, jobs_of, plain, whole
from tests.same_tokens.situations import accepted_per_step, assert_same_in
from tests.same_tokens.witness import Text, run


def engine_with(pair: Pair, kind: str, shape: str, texts: dict[str, list[int]], **options: int | bool) -> EngineCore:
    drafter = whispered(head_of(pair, kind, shape), texts)
    return engine_of(pair.target, drafter, SHAPES[shape], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "shape", "situation"), pairwise(KINDS, list(SHAPES), ["alone", "in a batch", "preempted", "back"])
)
def test_in_every_situation(pair, kind, shape, situation) -> None:
    """Drafts go on from what pages of before know."""
    models = target_of(pair, kind)
    _, texts = assert_same_in(situation, models, partial(engine_with, models, kind, shape))
    assert (0.4 if situation in ("alone", "back") else 0.05) < accepted_per_step(texts) < 3.0


@pytest.mark.parametrize(("kind", "shape"), alternating(KINDS, ["chain", "tree"]))
def test_every_option(pair, kind, shape) -> None:
    """Half of the combinations each: drafts go on from what they let through."""
    test_in_every_situation(pair, kind, shape, "with options" if shape == "chain" else "with other options")


@pytest.mark.parametrize("kind", KINDS)
def test_bf16(pair, kind) -> None:
    models = target_of(pair, kind, "smollm", torch.bfloat16)
    assert_same_in("alone", models, partial(engine_with, models, kind, "tree"), max_seqs=4)


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


def test_a_whisper_is_no_draft(pair) -> None:
    """The wrapped drafter really drafts: the trees are its own."""
    models = pair("llama2")
    jobs = jobs_of(models.vocab_size, (20,), 30, ["warm"])
    engine = engine_with(models, "eagle3", "tree", whole(jobs, plain(models.target, jobs)))
    run(engine, jobs)
    assert isinstance(engine.drafter, Whisper)
    assert engine.drafter.drafted >= 9 * 8
