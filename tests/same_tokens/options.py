"""Requests that between them hold every pair of options, for every drafter."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

from foresay.spec.sampling import SamplingParams
from tests.same_tokens.witness import Job
from tests.spec.grammars import Automaton
from tests.verifier.reading import random_tokens

#: What may be combined: by axis, the choices by name.
AXES: dict[str, dict[str, Any]] = {
    "drafter": dict.fromkeys(
        ("none", "ngram", "suffix tree", "chain4", "4,4,2,2,1", "found chain7", "garbage", "truth")
    ),
    "company": {"alone": {}, "together": {}},
    "sampling": {
        "greedy": {"temperature": 0.0},
        "warm": {"temperature": 1.0},
        "cool": {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
        "min_p": {"temperature": 1.0, "min_p": 0.05},
    },
    "penalties": {
        "off": {},
        "repetition": {"repetition_penalty": 1.4},
        "presence": {"presence_penalty": 1.1},
        "frequency": {"frequency_penalty": -0.6},
        "all": {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.7},
    },
    "bias": {"off": {}, "on": {"logit_bias": {token: (token % 7) - 3.0 for token in range(0, 300, 2)}}},
    "bans": {
        "off": {},
        "bad words": {"bad_words": ((7,), *((a, b) for a in range(60) for b in range(a % 5, 300, 5)))},
        "allowed": {"allowed_token_ids": tuple(range(0, 300, 3))},
    },
    "ends": {"length": {"ignore_eos": True}, "stop": {"stop_token_ids": tuple(range(90, 99)), "min_tokens": 5}},
    "logprobs": {"off": {}, "0": {"logprobs": 0}, "5": {"logprobs": 5}},
    "prompt": {"off": {}, "scored": {"prompt_logprobs": 2}},
    "grammar": {"off": None, "on": None},
    "choices": {"one": 1, "two": 2},
}


def pairwise(rng: random.Random) -> list[dict[str, str]]:
    """Combinations that hold every pair of choices of two axes; each the best of some random ones."""
    left = {
        ((first, one), (second, two))
        for first, second in combinations(AXES, 2)
        for one in AXES[first]
        for two in AXES[second]
    }
    rows: list[dict[str, str]] = []
    while left:
        seed = dict(min(left))
        tries = [{axis: seed.get(axis) or rng.choice(list(AXES[axis])) for axis in AXES} for _ in range(60)]
        rows.append(max(tries, key=lambda row: len(left & _pairs(row))))
        left -= _pairs(rows[-1])
    return rows


def _pairs(row: Mapping[str, str]) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    return set(combinations(row.items(), 2))


ROWS = pairwise(random.Random(3))


@cache
def jobs(vocab_size: int, max_tokens: int) -> dict[str, list[Job]]:
    """The requests of every combination, by name; more than one where it has forks."""
    rng, made = random.Random(1), {}
    for number, row in enumerate(ROWS):
        fields: dict[str, Any] = {"seed": number, "max_tokens": max_tokens}
        for axis in ("sampling", "penalties", "bias", "bans", "ends", "logprobs", "prompt"):
            fields |= AXES[axis][row[axis]]
        # A grammar, a list of tokens and bad words leave something only if the grammar knows of them.
        always = set(fields.get("allowed_token_ids", range(vocab_size))) - {7}
        grammar = Automaton(number, vocab_size, always, 0.0 if row["bans"] != "off" else 0.4)
        prompt = random_tokens(rng, rng.choice((1, 9, 20, 33)), vocab_size)
        first = Job(
            f"{number}-0", prompt, SamplingParams(**fields), grammar=grammar if row["grammar"] == "on" else None
        )
        second = replace(
            first, id=f"{number}-1", params=SamplingParams(**fields | {"seed": 1000 + number}), fork_of=first.id
        )
        made[str(number)] = [first, second][: AXES["choices"][row["choices"]]]
    return made


def of(drafter: str, company: str) -> list[str]:
    """The combinations for a drafter, alone or together."""
    return [str(n) for n, row in enumerate(ROWS) if (row["drafter"], row["company"]) == (drafter, company)]


def arriving(groups: Sequence[Sequence[Job]]) -> list[Job]:
    """One group after the other."""
    return [replace(job, arrives=2 * number) for number, group in enumerate(groups) for job in group]
