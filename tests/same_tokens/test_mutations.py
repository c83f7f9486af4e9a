"""The comparison of this suite sees small breaches of the argument of docs/same-tokens.md.

Under a mutation both runs, the plain one and the drafting one, are made anew, as they would be if it were in the code.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.same_tokens import mutations
from tests.same_tokens.models import Pair
from tests.same_tokens.runs import LARGEST, SAMPLINGS, SELF, drafting, plain, replace_params, whole
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
    ("name", "drafter"),
    [
        ("llama2", "truth"),
        ("llama2", "4,4,2,2,1"),
        ("qwen3", "truth"),
        ("qwen3", LARGEST),
        ("wide1536", "truth"),
        ("half1536", "truth"),
    ],
)
def test_without_a_mutation_nothing_is_seen(pair, name, drafter) -> None:
    assert compare(pair(name), drafter) == []


@pytest.mark.parametrize("name", ["llama2", "wide1536", "half1536"])
def test_products_that_add_up_by_the_number_of_rows_are_seen(pair, monkeypatch, name) -> None:
    models = pair(name)
    mutations.sums_by_rows(monkeypatch)
    assert compare(models, "truth")


@pytest.mark.parametrize("how", ["int8", "int4", "fp8"])
def test_quantized_products_that_add_up_by_the_number_of_rows_are_seen(pair, monkeypatch, how) -> None:
    models = pair("wide1536").quantized(how)
    assert compare(models, "truth") == []
    mutations.quantized_sums_by_rows(monkeypatch)
    assert compare(models, "truth")


@pytest.mark.parametrize("how", ["int8 rounded", "int4 rounded"])
def test_rounded_products_that_are_scaled_by_the_number_of_rows_are_seen(pair, monkeypatch, how) -> None:
    models = pair("wide1536").quantized(how)
    assert compare(models, "truth") == []
    mutations.rounded_sums_by_rows(monkeypatch)
    assert compare(models, "truth")


@pytest.mark.parametrize("mutation", [mutations.scales_by_batch, mutations.scales_left_behind])
@pytest.mark.parametrize("kv", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_scales_that_are_not_those_of_the_row_are_seen(pair, monkeypatch, kv, mutation) -> None:
    models = replace(pair("llama2"), kv=kv)
    assert compare(models, "truth") == []
    mutation(monkeypatch)
    assert compare(models, "truth")


@pytest.mark.parametrize("mutation", [mutations.weights_by_slot, mutations.values_by_slot])
@pytest.mark.parametrize("drafter", ["truth", "4,4,2,2,1"])
@pytest.mark.parametrize("name", ["llama2", "qwen3", "wide1536"])
def test_attention_in_another_order_is_seen(pair, monkeypatch, name, drafter, mutation) -> None:
    models = pair(name)
    mutation(monkeypatch)
    assert compare(models, drafter)


@pytest.mark.parametrize("drafter", ["truth", "chain4"])
def test_a_recording_that_bakes_in_a_length_is_seen(pair, monkeypatch, drafter) -> None:
    models = pair("llama2")
    mutations.lengths_baked_in(monkeypatch)
    assert compare(models, drafter)


@pytest.mark.parametrize("drafter", ["truth", "chain4"])
@pytest.mark.parametrize("sampling", ["warm", "cool", "warm_filtered"])
def test_reused_noise_is_seen(pair, monkeypatch, sampling, drafter) -> None:
    mutations.reused_noise(monkeypatch)
    found = compare(pair("llama2"), drafter, sampling=sampling)
    assert found
    assert "expected" in found[0]


@pytest.mark.parametrize("drafter", SELF)
@pytest.mark.parametrize("mutation", [mutations.drafts_over_the_text, mutations.drafts_before_the_root])
def test_a_copy_that_writes_over_the_targets_rows_is_seen(pair, monkeypatch, mutation, drafter) -> None:
    models = pair("llama2")
    assert compare(models, drafter) == []
    mutation(monkeypatch)
    assert compare(models, drafter)


def test_rows_left_in_their_tree_slots_are_seen(pair, monkeypatch) -> None:
    """Poisoned or somebody else's: the logits are no numbers, or other ones."""
    mutations.no_compaction(monkeypatch)
    assert compare(pair("llama2"), "truth")


@pytest.mark.parametrize("drafter", ["truth", "chain4"])
@pytest.mark.parametrize(
    ("mutation", "fields"),
    [
        (mutations.penalties_of_the_root, {"frequency_penalty": 1.5, "repetition_penalty": 1.3}),
        (mutations.masks_of_the_root, {}),
        (mutations.logprobs_of_the_next_row, {"logprobs": 2}),
    ],
)
def test_options_that_stay_at_the_root_are_seen(pair, monkeypatch, mutation, fields, drafter) -> None:
    models = pair("llama2")
    params = replace_params(SAMPLINGS["warm"], seed=7, max_tokens=60, ignore_eos=True, **fields)
    grammar = Automaton(1, models.vocab_size, forcing=0.2) if mutation is mutations.masks_of_the_root else None
    prompt = random_tokens(random.Random(1), 23, models.vocab_size)
    jobs = [Job("one", prompt, params, grammar=grammar)]

    def found() -> list[str]:
        expected = plain(models.target, jobs)
        return differences(expected, run(drafting(models, drafter, whole(jobs, expected)), jobs))

    assert found() == []
    mutation(monkeypatch)
    assert found()
