"""The same tokens and logprobs with every kind of head under every option, grammars and forks too."""

from __future__ import annotations

from functools import cache

import pytest

from tests.combinations import alternating
from tests.same_tokens import options
from tests.same_tokens.heads import KINDS, SHAPES, head_of, whispered
from tests.same_tokens.models import Pair, engine_of
from tests.same_tokens.runs import assert_same, plain, whole
from tests.same_tokens.witness import Job, Text, run

TOKENS = 24


@cache
def half(pair: Pair, first: int) -> tuple[list[Job], dict[str, Text]]:
    """Every other combination, in one batch, and the texts that each comes to alone."""
    jobs = options.arriving(list(options.jobs(pair.vocab_size, TOKENS).values())[first::2])
    return jobs, plain(pair.target, jobs)


@pytest.mark.parametrize(("kind", "shape"), alternating(KINDS, ["chain", "dynamic"]))
def test_every_option(pair, kind, shape) -> None:
    """The combinations that the options' own tests give the other drafters, all of them in one batch."""
    models = pair("llama2")
    jobs, wanted = half(models, 0 if shape == "chain" else 1)
    drafter = whispered(head_of(models, kind, shape), whole(jobs, wanted))
    texts = run(engine_of(models.target, drafter, SHAPES[shape], max_seqs=4, chunk=11), jobs)
    assert_same(wanted, texts)
    assert sum(text.statistics.accepted for text in texts.values() if text.statistics) > 0
    assert any(job.fork_of for job in jobs)
    assert any(text.statistics.forced for text in texts.values() if text.statistics)
