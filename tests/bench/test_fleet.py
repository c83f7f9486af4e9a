"""The simulation of many replicas, at sizes that can be counted by hand."""

from __future__ import annotations

import pytest

from bench.fleet import CHUNK, PAGE, TOKENS, WAYS, plot, simulate, told, took, turn_of

SYSTEM = list(range(320))
#: Two turns; the second repeats the first one's prompt and adds a page.
TALK = [(SYSTEM, 12), ([*SYSTEM, *range(1000, 1000 + PAGE)], 12)]


def test_a_step_takes_what_was_measured_and_in_between_what_lies_between():
    assert [took(rows) for rows in (1, 4, 6, 64)] == [8.0, 9.0, 9.45, 53.0]


def test_one_turn_alone_reads_in_chunks_and_writes_in_steps():
    (turn,) = simulate("router", 1, [turn_of([(SYSTEM, 12)], 1.0)], 0)
    chunks = len(SYSTEM) // CHUNK
    assert 1e3 * (turn.first - turn.arrived) == pytest.approx(chunks * took(CHUNK))
    assert len(turn.gaps) == 12 / TOKENS
    assert turn.cached == 0


def test_the_second_turn_finds_what_the_first_one_left_where_the_router_sends_it():
    first, second = simulate("router", 4, [turn_of(TALK, 0.0)], 0)
    assert second.cached == len(SYSTEM)
    assert second.arrived > first.last


@pytest.mark.parametrize("way", WAYS)
def test_every_turn_ends_whichever_way_it_goes(way):
    turns = simulate(way, 3, [turn_of(TALK, 0.01 * number) for number in range(20)], 0)
    assert len(turns) == 40
    assert all(turn.arrived <= turn.begun < turn.first <= turn.last for turn in turns)


def test_what_is_told_can_be_drawn():
    turns = simulate("router", 1, [turn_of(TALK, 0.0)], 0)
    drawn = plot([{"replicas": 1, "way": way} | told(turns) for way in WAYS])
    assert drawn.startswith("<svg") and drawn.count("<polyline") == 6
