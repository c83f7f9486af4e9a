"""Engines side by side, step by step."""

from __future__ import annotations

from itertools import count

import pytest
from msgspec.structs import replace

from bench.drive import RequestFailed
from bench.turns import Lane, in_turns
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from tests.spec.house import House
from tests.spec.tables import TableModel

_ids = count()


def asked(length: int, forced: list[int] | None = None) -> Request:
    params = SamplingParams(max_tokens=length, seed=1, ignore_eos=True)
    return Request(id=f"turn-{next(_ids)}", prompt=[1, 2], params=params, forced=forced)


def test_who_has_come_least_far_goes_next_and_first_tokens_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    behind: list[int] = []
    progress: dict[int, int] = {}
    step = Lane.step

    def watched(lane: Lane) -> None:
        behind.append(lane.progress - (min(progress.values()) if len(progress) == 3 else 0))
        step(lane)
        progress[id(lane)] = lane.progress

    monkeypatch.setattr(Lane, "step", watched)
    engines = {name: House(TableModel(3)).engine for name in ("one", "other", "third")}
    lanes = in_turns(engines, {name: [asked(12), asked(5)] for name in engines}, seed=0)
    assert max(behind) == 0
    assert [len(text) for text in lanes["one"].written] == [12, 5]
    assert {lane.tokens for lane in lanes.values()} == {11 + 4}
    assert all(lane.seconds > 0 for lane in lanes.values())


def test_a_way_that_wrote_another_text_is_told() -> None:
    engines = {name: House(TableModel(3)).engine for name in ("one", "other")}
    records = {"one": [asked(3, [5, 6, 7])], "other": [asked(3, [5, 6, 8])]}
    with pytest.raises(RequestFailed, match="one, other did not write the same text"):
        in_turns(engines, records, seed=0)


def test_a_record_that_all_left_alike_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = {name: House(TableModel(3)).engine for name in ("one", "other")}
    wanted = {name: [asked(3, [5, 6, 7])] for name in engines}
    for engine in engines.values():
        add = engine.add
        monkeypatch.setattr(engine, "add", lambda request, add=add: add(replace(request, forced=[5, 6, 8])))
    with pytest.raises(RequestFailed, match="one did not follow what was recorded"):
        in_turns(engines, wanted, seed=0)
