"""Drafters of a user's own, good and faulty, change nothing of a text, and a faulty one is reported once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from foresay.drafters.combined import members_of
from foresay.drafters.custom import CustomDrafter
from foresay.server.engine.build import build_engine
from foresay.spec.engine import EngineCore
from tests.same_tokens.runs import assert_same, jobs_of, plain
from tests.same_tokens.test_directories import config, directories, directory, expected, witnessed
from tests.same_tokens.witness import Text, run

__all__ = ["directories", "directory", "expected"]

NAMES = ["Good", "Quiet", "Random", "Raising", "Rubbish", "Lying", "Meddling", "Reading"]
FAULTY = {"Raising", "Rubbish", "Reading"}
JOBS = jobs_of(300, (9, 70, 33, 1, 20, 40), 20)


@pytest.fixture
def built(directory) -> Callable[..., EngineCore]:
    def made(draft: str, **changes: object) -> EngineCore:
        where = draft.replace("draft_model", str(directory / "draft"))
        return witnessed(build_engine(config(directory / "target", where, **changes)))

    return made


def one(name: str) -> str:
    return f"tests.same_tokens.customs:{name}"


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "foresay.drafters"]


@pytest.mark.parametrize("changes", [{}, {"draft_tokens": 4}, {"draft_tree": "3,2,1"}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_alone(built, expected, caplog, name, changes) -> None:
    engine = built(one(name), **changes)
    assert engine.info.exact, engine.info.exact_reason
    assert engine.info.drafters == (name.lower(),)
    jobs = [replace(job, arrives=2 * index) for index, job in enumerate(JOBS)]
    with caplog.at_level(logging.WARNING):
        assert_same(expected, run(engine, jobs))
        assert_same(expected, run(engine, JOBS))
    warnings = warned(caplog)
    assert len(warnings) in ((1, 2) if name in FAULTY else (0,)), "at first, and when it is switched off"
    assert all(text.startswith(f"{name.lower()} failed in ") for text in warnings)


@pytest.mark.parametrize("name", NAMES)
def test_in_a_batch_with_others(built, expected, name) -> None:
    engine = built(f"draft_model,{one(name)},suffix")
    assert engine.info.drafters == ("draft_model", name.lower(), "suffix")
    assert_same(expected, run(engine, JOBS))


def test_all_of_them_with_little_room(built, expected) -> None:
    """Sequences are preempted, and come again."""
    engine = built(",".join(map(one, NAMES)), kv_tokens=256, page_size=8)
    assert_same(expected, run(engine, JOBS))


def test_a_good_one_is_accepted_under_its_name(built) -> None:
    engine = built(one("Good"), draft_tokens=3)
    prompts = [[5, 6, 7, 8] * 5, [9, 10] * 9]
    jobs = [
        replace(job, prompt=prompt) for job, prompt in zip(jobs_of(300, (4, 4), 24, ["greedy"]), prompts, strict=True)
    ]
    texts = run(engine, jobs)
    assert_same(plain(engine.runner.verifier.decoder, jobs), texts)
    assert sum(accepted(text) for text in texts.values()) > 0
    assert members_of(engine.drafter).keys() == {"good"}
    assert isinstance(members_of(engine.drafter)["good"], CustomDrafter)


def accepted(text: Text) -> int:
    assert text.statistics is not None
    return sum(text.statistics.accepted_per_depth)
