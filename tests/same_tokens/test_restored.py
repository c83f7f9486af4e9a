"""However the beginning of a text came to be there, a drafter drafts as on a fresh engine: the same tokens in as many
steps, and nothing is computed twice that is there for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from foresay.drafters.hidden_states import WaitingFeatures
from foresay.drafters.self_draft import SelfDrafter
from foresay.spec.engine import EngineCore
from foresay.spec.request import Progress
from foresay.spec.tree import DraftTree, TreeShape
from tests.combinations import alternating
from tests.same_tokens.heads import HYBRID, NAMES, Whisper, drafter_of, target_of
from tests.same_tokens.models import MakeDrafter, Pair, engine_of
from tests.same_tokens.runs import assert_same, plain, sampled
from tests.same_tokens.test_on_disk import kept
from tests.same_tokens.witness import Job, Text, run

SHAPE, SIZE = TreeShape.chain(3), 8
IDS = ["first", "second", "third", "plain"]


class Sure(Whisper):
    """Whatever was drafted becomes the truth: each step in which the drafter drafts emits all of its levels."""

    def _told(self, sequence, tree: DraftTree) -> DraftTree:
        coming = self.known[sequence.id][len(sequence.tokens) :]
        drafted = tree.tokens[1:]
        return DraftTree.chain([tree.tokens[0], *coming[: len(drafted)], *drafted[len(coming) :]], tree.drafter)


class Case:
    """A drafter of a target, the text that it drafts, and where engines keep their pages."""

    def __init__(self, pair: Callable[..., Pair], name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.pair = target_of(pair, name)
        self.job, self.texts = text_of(self.pair)
        self.known = dict.fromkeys([*IDS, "beside"], self.job.prompt + self.texts["first"].tokens)

    def engine(self, drafts: str | None = None, folder: str = "", tokens: int = 1024) -> EngineCore:
        """A new one on the folder, or one in it. drafts: who drafts, "" for nobody; None: this case's drafter."""
        make: MakeDrafter = lambda pool: None  # noqa: E731
        if name := self.name if drafts is None else drafts:
            making: Any = drafter_of(self.pair, name, "chain")
            make = lambda pool: Sure(making(pool), self.known)  # noqa: E731
        made = engine_of(self.pair.target, make, SHAPE, page_size=SIZE, prefix=True, tokens=tokens)
        return kept(made, self.folder / folder)

    def is_drafted(self, text: Text, more: int = 0) -> bool:
        """Whether it took as many steps as on a fresh engine, or one more, besides so many more."""
        if self.name not in FRESH:
            FRESH[self.name] = steps(self.run(self.engine(folder="fresh"), "first"))
        return steps(text) <= FRESH[self.name] + 1 + more

    def run(self, engine: EngineCore, id: str, speculate: bool = True) -> Text:
        """The text, which is as it is without drafts."""
        found = run(engine, [replace(self.job, id=id, speculate=speculate)])
        assert_same({id: self.texts["first"]}, found)
        if speculate and isinstance(engine.drafter, Sure) and isinstance(copy := engine.drafter.inner, SelfDrafter):
            assert bool(copy._rounds) == (copy.before is not None), "whoever drafts for the copy does"
        return found[id]


@cache
def text_of(pair: Pair) -> tuple[Job, Mapping[str, Text]]:
    """A prompt of six pages and a half, and what follows."""
    job = Job("first", [7 * position % 290 + 3 for position in range(52)], sampled("warm", 1, 30))
    return job, plain(pair.target, [job])


def steps(text: Text) -> int:
    assert text.statistics is not None
    return text.statistics.steps


def idle(engine: EngineCore) -> None:
    while engine.keep_one():
        pass


def in_memory(case: Case) -> EngineCore:
    engine = case.engine()
    case.run(engine, "first")
    return engine


def on_disk(case: Case) -> EngineCore:
    idle(in_memory(case))
    return case.engine()


def plain_request(case: Case) -> EngineCore:
    engine = case.engine()
    case.run(engine, "first", speculate=False)
    return engine


def plain_request_on_disk(case: Case) -> EngineCore:
    idle(plain_request(case))
    return case.engine()


def run_without_drafts(case: Case) -> EngineCore:
    before = case.engine("")
    case.run(before, "first")
    idle(before)
    return case.engine()


def anothers_run(case: Case) -> EngineCore:
    before = case.engine("recurrent self" if case.name in HYBRID else "draft_model" if "self" in case.name else "self")
    case.run(before, "first")
    idle(before)
    return case.engine()


def reloaded(case: Case) -> EngineCore:
    """An engine went on with the text that one without drafts began, and has stopped since."""
    before, after = case.engine(""), case.engine()
    before.add(replace(case.job, id="first").request())
    while len(committed := [token for delta in before.step() for token in delta.tokens]) < 1:
        pass
    idle(before)
    request = replace(case.job, id="first").request()
    request.progress = Progress(committed=committed, arrived=0.0)
    after.add(request)
    while after.has_work:
        after.step()
    idle(after)
    return case.engine()


WAYS = {
    way.__name__: way
    for way in (in_memory, on_disk, plain_request, plain_request_on_disk, run_without_drafts, anothers_run, reloaded)
}
#: By drafter, the steps of the text on a fresh engine.
FRESH: dict[str, int] = {}
QUICK = ("in_memory", "run_without_drafts")
#: Tokens of the whole pages of the prompt.
WHOLE = 48


@pytest.fixture
def case(pair, request, tmp_path) -> Case:
    return Case(pair, request.param, tmp_path)


CASES = [*NAMES, *HYBRID[1:]]
cases = pytest.mark.parametrize("case", CASES, indirect=True)


@pytest.mark.parametrize(
    ("case", "way"),
    [*((case, way) for case in CASES for way in QUICK), *alternating(CASES, [way for way in WAYS if way not in QUICK])],
    indirect=["case"],
)
def test_it_drafts_as_on_a_fresh_engine(case: Case, way: str) -> None:
    engine = WAYS[way](case)
    found = case.run(engine, "second")
    assert case.is_drafted(found)
    if way != "run_without_drafts":
        assert found.cached_tokens >= WHOLE or way == "anothers_run"
        return
    again = case.run(engine, "third")
    idle(engine)
    restarted = case.run(case.engine(), "third")
    assert case.is_drafted(again) and case.is_drafted(restarted)
    assert min(again.cached_tokens, restarted.cached_tokens) >= WHOLE, "nothing is computed again twice"


@cases
def test_requests_that_do_not_speculate_reuse_all_pages(case: Case) -> None:
    """Also when some of them were completed meanwhile: one more page of the text is read by a drafted one."""
    engine = run_without_drafts(case)
    assert case.run(engine, "plain", speculate=False).cached_tokens >= WHOLE


@cases
def test_preemption(case: Case) -> None:
    """Two texts in pages for one and a half; one more step for each time that a text had to begin again."""
    engine = case.engine(tokens=19 * SIZE)
    jobs = [replace(case.job, id=id, salt=id) for id in ("first", "second")]
    found = run(engine, jobs)
    assert_same({job.id: case.texts["first"] for job in jobs}, found)
    preempted = [text.statistics.ending.preemptions for text in found.values() if text.statistics]
    assert sum(preempted) > 0
    assert all(case.is_drafted(text, count) for text, count in zip(found.values(), preempted, strict=True))


@pytest.mark.parametrize("case", ["eagle3"], indirect=True)
def test_a_step_reports_a_drafter_that_could_not_draft(case: Case) -> None:
    engine = case.engine()
    engine.add(replace(case.job, id="first").request())
    for _ in range(3):
        engine.step()
    (sequence,), features = engine.scheduler.running, engine.pool.find_store(WaitingFeatures)
    assert features is not None
    features.hidden_states.marks[sequence.table.pages[0]] = 0
    sequence.table.full.clear()
    engine.step()
    assert engine.trace is not None and not engine.trace.drafted
    assert engine.trace.unable == "eagle3 cannot draft: the target's hidden states of 60 tokens are missing."
    assert not sequence.unable
