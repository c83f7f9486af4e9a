"""Sessions as coding agents have them: what is asked in each turn, and what is made of the answers."""

from __future__ import annotations

import random

from bench.agents import BEFORE, FIRST, FOUND, OURS, RESTARTS, TURNS, YESTERDAY, session, summary
from bench.experiment import Case, Sample, Taken

IDS = random.Random(1).choices(range(40_000), k=40_000)


def test_turns_go_on_from_those_before() -> None:
    cases = {case.name: case.input for case in session(IDS, [7] * 4, 4000, 0)}
    assert list(cases) == [YESTERDAY, *TURNS] and len(TURNS) == 20 and set(RESTARTS) < set(cases)
    assert cases["A1"][:4004] == cases["B1"][:4004] == cases[YESTERDAY][:4004] == [7] * 4 + IDS[:4000]
    for before, after in (("A1", "A2"), ("A4", "A5'"), ("A5'", "A6"), ("B1", "B2"), ("A8", "A9"), ("A9", "A10")):
        assert cases[after][: len(cases[before])] == cases[before]
    assert cases["A5"][len(cases["A4"])] != cases["A5'"][len(cases["A4"])]
    assert len(max(cases.values(), key=len)) < 8192 - 16
    assert [case.input for case in session(IDS, [7], 400, 1)] != [case.input for case in session(IDS, [7], 400, 0)]


def test_what_a_session_waited() -> None:
    seconds = {BEFORE: 2.0, OURS: 0.5}
    taken = [
        Taken(name, Case("turns", turn), number, Sample({FIRST: each * (1 + number), FOUND: 64.0}))
        for turn in (YESTERDAY, *TURNS)
        for name, each in seconds.items()
        for number in range(3)
    ]
    found = summary(taken)
    assert found["turns"]["A1"][OURS] == {FIRST: 1.0, FOUND: 64.0}
    assert found["waited_s"] == {BEFORE: 4.0 * len(TURNS), OURS: 1.0 * len(TURNS)}
