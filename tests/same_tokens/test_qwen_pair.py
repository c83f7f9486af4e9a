"""The same tokens from a real pair: Qwen2.5-Coder 1.5B and 0.5B in Q4_K_M, one vocabulary of 150,000 tokens.

The small one drafts, earlier text does, and both do. The pair is there where ``python -m bench fetch`` was run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foresay.server.engine.build import build_engine
from foresay.server.engine.device import LoadContext
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import target_directory
from foresay.server.text.tokenizer import Tokenizer
from foresay.verifier.model.decoder import Packed
from tests.same_tokens.runs import assert_same, sampled
from tests.same_tokens.witness import Job, Text, Witness, run
from tests.server import known_costs

#: Tokens of each answer.
WRITTEN = 16
QUESTIONS = [
    ("greedy", "Write a Python function that reverses the words of a sentence."),
    ("warm", "Repeat this line three times: for item in items: print(item)"),
    ("greedy", "Repeat this list in reverse: red, green, blue, yellow, black, white."),
    ("warm", "What does git rebase do?"),
]


def jobs(target: Path) -> list[Job]:
    """Requests that arrive one by one."""
    tokenizer = Tokenizer.load(target_directory(EngineConfig(target=str(target))))
    return [
        Job(
            f"r{number}",
            tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"),
            sampled(name, number, WRITTEN),
            arrives=2 * number,
        )
        for number, (name, text) in enumerate(QUESTIONS)
    ]


def texts(target: Path, draft: str) -> dict[str, Text]:
    config = EngineConfig(target=str(target), draft=draft, draft_tokens=4, kv_tokens=1024, max_model_len=256, threads=1)
    engine = build_engine(config)
    assert engine.info.exact, engine.info.exact_reason
    engine.runner = Witness(engine.runner.verifier, engine.drafter)
    return run(engine, jobs(target))


def pack_once(patch: pytest.MonkeyPatch) -> None:
    """Engines share their weights, which none of them changes: packing 1.5B takes longer than all of the answers."""
    packed, made = LoadContext.packed, dict[str, Packed]()

    def once(self: LoadContext, role: str, *given: Any) -> Packed:
        if role not in made:
            made[role] = packed(self, role, *given)
        return made[role]

    patch.setattr(LoadContext, "packed", once)


@pytest.mark.soak
def test_whoever_drafts(qwen_pair, monkeypatch) -> None:
    pack_once(monkeypatch)
    known_costs.give(monkeypatch)
    target, draft = qwen_pair
    plain = texts(target, "none")
    for drafter in (f"draft_model:{draft}", "suffix", f"draft_model:{draft},suffix"):
        found = texts(target, drafter)
        assert_same(plain, found)
        drafted = [text.statistics.accepted for text in found.values() if text.statistics is not None]
        assert sum(drafted) > 0, drafter
