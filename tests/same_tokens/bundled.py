"""Requests of real text for the bundled target, and what engines write for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from tokenizers import Tokenizer

from foresay.server.engine.build import build_engine
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import BUNDLED
from foresay.spec.engine import EngineCore
from tests.same_tokens.runs import sampled
from tests.same_tokens.witness import Job, Text, Witness, run

PROMPTS = [
    ("Once upon a time there was a little", "warm"),
    ("The king said to the", "cool"),
    ("Question: Tom has 3 apples and buys 4 more. How many apples does he have?\nAnswer:", "greedy"),
    ("The king said to the", "warm_filtered"),
    ("It was a dark and stormy night, and the wolf", "cool_filtered"),
    ("T", "warm_top_p"),
]


def jobs() -> list[Job]:
    tokenizer = Tokenizer.from_file(str(BUNDLED / "target" / "tokenizer.json"))
    return [
        Job(str(index), tokenizer.encode(text).ids, sampled(name, index, 40), arrives=3 * index)
        for index, (text, name) in enumerate(PROMPTS)
    ]


def texts_of(draft: str, said: Mapping[str, str], engine: EngineCore | None = None, **settings: Any) -> dict[str, Text]:
    """What such an engine writes, or this one. said: what its info is to say."""
    config = EngineConfig(draft=draft, kv_tokens=640, max_model_len=160, threads=1)
    engine = engine or build_engine(msgspec.structs.replace(config, **settings))
    assert engine.info.exact, engine.info.exact_reason
    assert all(value in getattr(engine.info, name) for name, value in said.items())
    engine.runner = Witness(engine.runner.verifier, engine.drafter)
    return run(engine, jobs())
