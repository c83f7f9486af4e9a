"""The comparison of this suite sees small breaches of the argument of docs/same-tokens.md.

Under a mutation both runs, the plain one and the drafting one, are made anew, as they would be if it were in the code.
"""

from __future__ import annotations

import random

import pytest

from tests.same_tokens import mutations
from tests.same_tokens.models import Pair
from tests.same_tokens.runs import SAMPLINGS, drafting, plain, replace_params, whole
from tests.same_tokens.witness import Job, differences, run
from tests.spec.grammars import Automaton
from tests.verifier.reading import random_tokens


def compare(pair: Pair, drafter: str, *, sampling: str = "warm", prompt: int = 23, tokens: int = 60) -> list[str]:
    """The suite's comparison: one request, plain and with a drafter."""
    params = replace_params(SAMPLINGS[sampling], seed=7, max_tokens=tokens, ignore_eos=True)
    jobs = [Job("one", random_tokens(random.Random(1), prompt, pair.vocab_size), params)]
    expected = plain(pair.target, jobs, kv=pair.kv)
    return differences(expected, run(drafting(pair, drafter, whole(jobs, expected)), jobs))


@pytest.mark.parametrize(
    "mutation",
    [None, mutations.sums_by_rows, mutations.weights_by_slot, mutations.values_by_slot, mutations.no_compaction],
)
@pytest.mark.parametrize("name", ["llama2", "half1536"])
def test_other_sums_and_other_rows_are_seen(pair, monkeypatch, name, mutation) -> None:
    models = pair(name)
    if mutation is not None:
        mutation(monkeypatch)
    assert bool(compare(models, "truth")) == (mutation is not None)


@pytest.mark.parametrize("sampling", ["warm", "warm_filtered"])
def test_reused_noise_is_seen(pair, monkeypatch, sampling) -> None:
    mutations.reused_noise(monkeypatch)
    assert "expected" in compare(pair("llama2"), "chain4", sampling=sampling)[0]


@pytest.mark.parametrize("mutation", [mutations.penalties_of_the_root, mutations.masks_of_the_root])
def test_options_that_stay_at_the_root_are_seen(pair, monkeypatch, mutation) -> None:
    models = pair("llama2")
    fields = {"frequency_penalty": 1.5} if mutation is mutations.penalties_of_the_root else {}
    params = replace_params(SAMPLINGS["warm"], seed=7, max_tokens=60, ignore_eos=True, **fields)
    grammar = None if fields else Automaton(1, models.vocab_size, forcing=0.2)
    jobs = [Job("one", random_tokens(random.Random(1), 23, models.vocab_size), params, grammar=grammar)]
    expected = plain(models.target, jobs)
    mutation(monkeypatch)
    assert differences(expected, run(drafting(models, "truth", whole(jobs, expected)), jobs))
