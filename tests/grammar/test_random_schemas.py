"""Structured output on the bundled pair: speculating over trees gives valid answers, and those of plain decoding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from bench.schemas import Schema, schemas
from foresay.server.engine_process.local import Engine
from foresay.server.engine_process.text_stream import Completion
from foresay.server.text.grammars import constraint
from foresay.server.text.grammars.constraint import LlguidanceConstraint

#: Schemas at temperature 1; a quarter of them at 0, where the toy writes the same few words again and again.
COUNT, GREEDY, TOKENS = 64, 50, 40
SETTINGS: dict[str, Any] = {"max_seqs": 8, "max_model_len": 80, "kv_tokens": 8 * 80}


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with Engine(draft="none", **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def trees() -> Iterator[Engine]:
    with Engine(draft_tree="3,2,1,1", **SETTINGS) as engine:
        yield engine


def given() -> list[Schema]:
    return schemas(COUNT, depth=2, room=8)


def answers(engine: Engine, temperature: float, count: int = COUNT) -> list[Completion]:
    """One answer per schema, as many at once as there is room for."""
    streams = [
        engine.stream(
            f"Record number {number}: ",
            structured_outputs={"json": schema},
            max_tokens=TOKENS,
            temperature=temperature,
            seed=number,
        )
        for number, schema in enumerate(given()[:count])
    ]
    return [stream.result() for stream in streams]


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "count"), [(0.0, GREEDY), (1.0, COUNT)])
def test_answers_are_valid_and_those_of_plain_decoding(
    plain: Engine, trees: Engine, temperature: float, count: int, monkeypatch: pytest.MonkeyPatch
):
    found = answers(trees, temperature, count)
    monkeypatch.setattr(LlguidanceConstraint, "forced", lambda constraint, most: [])
    expected = answers(plain, temperature, count)
    assert not any(one.statistics.drafted for one in expected if one.statistics is not None)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.finish_reason for one in found] == [one.finish_reason for one in expected]
    pairs = zip(given()[:count], found, strict=True)
    finished = [(schema, one.text) for schema, one in pairs if one.finish_reason == "stop"]
    for schema, text in finished:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert len(finished) > 0.5 * count
    accepted = sum(one.statistics.accepted for one in found if one.statistics is not None)
    assert accepted > 0.4 * sum(len(one.token_ids) for one in found)


@pytest.mark.slow
def test_masks_that_were_not_made_in_time_change_no_token(
    plain: Engine, trees: Engine, monkeypatch: pytest.MonkeyPatch
):
    expected = answers(plain, 1.0, count=12)
    monkeypatch.setattr(constraint, "MOST_SECONDS", 0.0)
    found = answers(trees, 1.0, count=12)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    # A run ends with the first drafted node, whose mask nobody made.
    assert all(max(one.statistics.per_step_accepted) <= 1 for one in found if one.statistics is not None)
