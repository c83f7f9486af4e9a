"""The runner: variants take turns, samples are compared, tables are shown; and engines side by side, step by step."""

from __future__ import annotations

from collections.abc import Generator
from itertools import count

import pytest
from msgspec.structs import replace

from bench import __main__ as commands
from bench.drive import RequestFailed, stepped
from bench.experiment import Case, Experiment, Sample, Taken, TextsDiffer, Variant
from foresay.spec.engine import EngineCore
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from tests.spec.harness import Harness
from tests.spec.tables import TableModel

_ids = count()


def at_once(name: str, *speeds: float, text: object = None, seen: list[str] | None = None) -> Variant:
    """A variant that has a speed for each round."""

    def measure(case: Case, turn: int) -> Sample:
        if seen is not None:
            seen.append(name)
        return Sample({"speed": speeds[turn] * case.input} if speeds[turn] else {}, text)

    return Variant(name, measure)


def of(*variants: Variant, rounds: int = 2, **more: object) -> Experiment:
    cases = [Case("slow", "a", 1.0), Case("slow", "b", 2.0), Case("fast", "a", 10.0)]
    return Experiment(
        variants=variants, cases=lambda turn: cases, figure="speed", bases=["plain"], rounds=rounds,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


def test_variants_are_compared_by_group_and_paired_by_case_and_round(capsys: pytest.CaptureFixture[str]) -> None:
    _, groups = of(
        at_once("plain", 1.0, 2.0), at_once("drafts", 3.0, 8.0), more=lambda taken: {"counts": [len(taken)]}
    ).run()
    assert list(groups) == ["slow", "fast"]
    slow = groups["slow"]
    assert slow["plain"]["speed"].median == 2.0 and slow["plain"]["speed"].size == 4
    assert slow["drafts"]["times plain"].ratio == pytest.approx(12**0.5)
    assert "times plain" not in slow["plain"] and slow["drafts"]["counts"] == [4]
    shown = capsys.readouterr().out
    assert "slow" in shown and "3.46 [3.46, 3.46]" in shown


def test_a_figure_that_does_not_hold_has_no_part_in_a_ratio() -> None:
    experiment = of(at_once("plain", 1.0, 0.0), at_once("drafts", 3.0, 8.0))
    groups = experiment.compare(experiment.measure())
    assert groups["fast"]["drafts"]["times plain"].ratio == pytest.approx(3.0)
    none = of(at_once("plain", 0.0), at_once("drafts", 3.0), rounds=1)
    assert "times plain" not in none.compare(none.measure())["fast"]["drafts"]


def test_every_case_has_an_order_of_its_own_and_warm_rounds_do_not_count() -> None:
    seen: list[str] = []
    variants = [at_once(name, *[1.0] * 31, seen=seen) for name in ("one", "other")]
    taken = of(*variants, rounds=30, warm=1).measure()
    assert len(taken) == 2 * 3 * 30 and len(seen) == 2 * 3 * 31
    firsts = seen[::2]
    assert 25 < firsts.count("one") < 65
    assert min(one.round for one in taken) == 0


def test_no_round_is_begun_that_would_end_after_the_time() -> None:
    assert {one.round for one in of(at_once("one", 1.0, 1.0), minutes=0.0).measure()} == {0}


def test_other_texts_are_reported_with_their_position() -> None:
    same, other = at_once("plain", 1.0, text=[5, 6, 7]), at_once("ngram", 1.0, text=[5, 9, 7])
    of(same, at_once("silent", 1.0), rounds=1).measure()
    with pytest.raises(TextsDiffer, match=r"slow, a, round 0: \w+ parts from \w+ at position 1"):
        of(same, other, rounds=1).measure()
    with pytest.raises(TextsDiffer, match="position 3"):
        of(same, at_once("longer", 1.0, text=[5, 6, 7, 8]), rounds=1).measure()


def asked(length: int, forced: list[int] | None = None) -> Request:
    params = SamplingParams(max_tokens=length, seed=1, ignore_eos=True)
    return Request(id=f"turn-{next(_ids)}", prompt=[1, 2], params=params, forced=forced)


def stepwise(
    engines: dict[str, EngineCore], requests: dict[str, list[Request]], progress: list[tuple[str, float]]
) -> list[Taken]:
    """What engines write in turns. progress: which one came how far, step by step."""

    def variant(name: str) -> Variant:
        def measure(case: Case, turn: int) -> Generator[float, None, Sample]:
            steps = stepped(engines[name], *requests[name])
            while True:
                try:
                    reached = next(steps)
                except StopIteration as end:
                    return Sample({"speed": 1.0}, [run.tokens for run in end.value], end.value)
                progress.append((name, reached))
                yield reached

        return Variant(name, measure)

    experiment = Experiment(variants=[variant(n) for n in engines], cases=lambda turn: [Case("", "")], figure="speed")
    return experiment.measure()


def test_the_engine_that_has_come_least_far_goes_next_and_first_tokens_are_not_counted() -> None:
    engines = {name: Harness(TableModel(3)).engine for name in ("one", "other", "third")}
    progress: list[tuple[str, float]] = []
    taken = stepwise(engines, {name: [asked(12), asked(5)] for name in engines}, progress)
    reached = dict.fromkeys(engines, 0.0)
    for name, now in progress:
        assert reached[name] == min(reached.values())
        reached[name] = now
    runs = taken[0].sample.detail
    assert [len(run.tokens) for run in runs] == [12, 5]
    assert {sum(run.decoded for run in one.sample.detail) for one in taken} == {11 + 4}
    assert all(run.decoding > 0 for run in runs)


def test_a_way_that_wrote_another_text_is_reported() -> None:
    engines = {name: Harness(TableModel(3)).engine for name in ("one", "other")}
    with pytest.raises(TextsDiffer):
        stepwise(engines, {"one": [asked(3, [5, 6, 7])], "other": [asked(3, [5, 6, 8])]}, [])


def test_a_record_that_is_not_followed_is_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Harness(TableModel(3)).engine
    add = engine.add
    monkeypatch.setattr(engine, "add", lambda request: add(replace(request, forced=[5, 6, 8])))
    with pytest.raises(RequestFailed, match="not what was recorded"):
        stepwise({"one": engine}, {"one": [asked(3, [5, 6, 7])]}, [])


@pytest.mark.parametrize("name", commands.NAMES)
def test_each_command_says_what_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        commands.main([name, "--help"])
    assert f"usage: python -m bench {name}" in capsys.readouterr().out


def test_an_unknown_name_and_a_bad_option_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["decoed"]) == 2
    assert "budget" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        commands.main(["floor", "--also", "weights=int8"])
    assert "--also weights=int8: give quantize, kv_dtype, activations" in capsys.readouterr().err
