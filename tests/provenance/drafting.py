"""A scripted engine that drafts trees of every shape, and what is reported of its answers' provenance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.request import Origin, Request
from tests.server.scripted import END, SECONDS, ScriptedEngine

Json = dict[str, Any]


class Drafting(ScriptedEngine):
    """Says its tokens in runs of random length, from random trees in which a grammar may have forced something."""

    def __init__(self, tokens: Sequence[int], seed: int = 0, longest: int = 6, pause: float = 0.0) -> None:
        super().__init__(tokens, run=longest, pause=pause)
        self._random = random.Random(seed)

    def run_length(self, request: Request, emitted: int) -> int:
        return self._random.randint(1, self.run) if emitted else 1

    def origin(self, emitted: int, run: list[int]) -> Origin:
        self.steps += 1
        if not emitted:
            return Origin(self.steps, "", [-1], 0, [], SECONDS)
        ends_drafted = run[-1] == END and self._random.random() < 0.5
        accepted = len(run) - (not ends_drafted)
        forced = self._random.choice([0, 0, 1, 3])
        parents, path = [*range(-1, forced)], [*range(1, min(forced, accepted) + 1)]
        while len(path) < accepted or self._random.random() < 0.6:
            if len(path) < accepted and self._random.random() < 0.5:
                parents.append(path[-1] if path else 0)
                path.append(len(parents) - 1)
            else:
                parents.append(self._random.randrange(len(parents)))
        return Origin(self.steps, "script" if len(parents) - 1 > forced else "", parents, forced, path, SECONDS)


def joined(provenances: Sequence[Json]) -> Json:
    """What the chunks of a stream hold together."""
    return {kind: [one for record in provenances for one in record[kind]] for kind in ("steps", "tokens")}


def check(record: Json, tokens: Sequence[int] | None, text: str, metrics: Json, field: str = "text") -> None:
    """Hold the provenance of one choice against its tokens, its text and (of a lone choice) its metrics.

    field: the tokens' texts that make up ``text``.
    """
    assert tokens is None or [token["id"] for token in record["tokens"]] == list(tokens)
    assert "".join(token.get(field, "") for token in record["tokens"]) == text
    check_steps(record)
    check_counts([record], metrics)


def check_steps(record: Json) -> None:
    """Tokens fit their steps: accepted ones from depth 1 on, then at most one of the target's own."""
    numbers = [step["step"] for step in record["steps"]]
    assert numbers == sorted(set(numbers))
    for step in record["steps"]:
        tokens = [token for token in record["tokens"] if token["step"] == step["step"]]
        own = [token for token in tokens if token["origin"] == "target"]
        assert own in ([], tokens[-1:])
        assert [token["depth"] for token in tokens] == [*range(1, step["accepted"] + 1), *(0 for _ in own)]
        assert step["nodes"] == step["drafted"] + 1
        assert step["accepted"] + len(own) == len(tokens) and step["discarded"] >= 0
        for token in tokens:
            forced = 0 < token["depth"] <= step["forced"]
            assert token["origin"] == ("target" if not token["depth"] else "grammar" if forced else "draft")
            # Of a tree that several drafted, each token is of one of them.
            drafters = step["drafter"].split("+") if token["origin"] == "draft" else [None]
            assert token.get("drafter") in drafters
        assert set(step["ms"]) and all(value >= 0 for value in step["ms"].values())
    assert {token["step"] for token in record["tokens"]} <= set(numbers)


def check_counts(record: Sequence[Json], metrics: Json) -> None:
    """The sums over all choices are those of the answer's metrics (with the details of each step)."""
    drafting = metrics["speculative_decoding"]
    steps = [step for one in record for step in one["steps"] if step["drafted"]]
    tokens = [token for one in record for token in one["tokens"]]
    assert [step["drafted"] for step in steps] == drafting["per_step_drafted"]
    assert [step["accepted"] for step in steps] == drafting["per_step_accepted"]
    assert sum(step["drafted"] for step in steps) == drafting["num_draft_tokens"]
    assert sum(step["accepted"] for step in steps) == drafting["num_accepted_draft_tokens"]
    assert sum(token["origin"] != "target" for token in tokens) == drafting["num_accepted_draft_tokens"]


def bare(record: Json) -> Json:
    """Without what differs from run to run: the numbers of the steps."""
    return {kind: [{**one, "step": None} for one in record[kind]] for kind in record}


def ids_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a script that writes ``text`` and ends."""
    return [*tokenizer.encode(text, False), END]
