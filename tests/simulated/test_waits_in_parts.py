"""How often the host waits for the simulated device in a step that runs in parts: once, for its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from foresay.drafters.ngram import NgramDrafter
from foresay.server.engine.calibrate import filled
from foresay.spec.sequence import SequenceState
from foresay.spec.tree import DraftTree, TreeShape
from tests.same_tokens.captured import captured_engine, run_freely
from tests.same_tokens.models import Pair
from tests.same_tokens.runs import assert_same, jobs_of, replace_params
from tests.simulated.device import DEVICE, simulated
from tests.spec.grammars import Automaton
from tests.verifier.reading import load_decoder


class Bushes(NgramDrafter):
    """Drafts trees of any tokens."""

    def propose(self, sequences: Sequence[SequenceState], shapes: Sequence[TreeShape]) -> list[DraftTree]:
        return [filled(one.tokens[-1], shape, self.name) for one, shape in zip(sequences, shapes, strict=True)]


@pytest.fixture(scope="module")
def elsewhere(pair):
    made = pair("llama3", layers=2)
    with simulated():
        target = load_decoder(made.directory, torch.float32, DEVICE)
    return made, Pair(made.directory, made.draft_directory, target, made.draft)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {3: 2.0}, "bad_words": ((5,), (7, 9))},
        {"min_tokens": 8, "ignore_eos": False, "stop_token_ids": (4, 5, 6)},
        {"grammar": True},
    ],
    ids=["plain", "edits", "early", "grammar"],
)
def test_a_step_in_parts_waits_once(elsewhere, options: dict[str, Any]) -> None:
    """With what requests change of their logits too: that is sent there, and no logit comes to the host."""
    made, moved = elsewhere
    grammar = Automaton(1, made.vocab_size, forcing=0.2) if "grammar" in options else None
    fields = {name: value for name, value in options.items() if name != "grammar"}
    jobs = [
        replace(job, params=replace_params(job.params, **fields), grammar=grammar)
        for job in jobs_of(made.vocab_size, (9, 17), 12)
    ]
    shape = TreeShape.parse("3,2")
    wanted = run_freely(captured_engine(made, lambda pool: None, shape, graphs=False), jobs)
    with simulated() as machine:
        engine = captured_engine(moved, lambda pool: Bushes(), shape, graphs=False)
        step, waits = engine.step, list[int]()

        def counted() -> Any:
            before, deltas = machine.reads, step()
            waits.append(machine.reads - before)
            return deltas

        engine.step = counted  # type: ignore[method-assign]
        texts = run_freely(engine, jobs)
    assert_same(wanted, texts)
    assert max(waits) == 1
    assert sum(text.statistics.drafted for text in texts.values() if text.statistics) > 3
