"""What a model's draft costs, whoever has made the machine slower and whatever it has not read."""

from __future__ import annotations

import pytest

from spec.budget import StepCost
from spec.budget.case import Case
from spec.budget.cost import DraftCost
from spec.budget.members import Member, Record
from spec.budget.timing import Timing
from spec.budget.ways import Taken
from spec.sequence import Sequence
from spec.step import Verdict, Work
from spec.trace import StepTrace
from spec.tree import DraftTree
from tests.drafters.test_combined import MODEL, Parrot, sequence


class Reader(Parrot):
    """Says one tree, and has 64 tokens to catch up with beside the last one."""

    def unread(self, sequence: Sequence) -> int:
        return 65


def timing() -> tuple[Timing, Member, Sequence, Case]:
    member, one = Member.model(Reader("model", MODEL), DraftCost(0.1, 0.2, 0.01)), sequence()
    timing = Timing({"model": member}, StepCost([1, 64], [1.0, 2.0]))
    return timing, member, one, Case({"model": Record.of(member, one)})


@pytest.mark.parametrize(("alone", "share"), [(0, 4), (8, 4), (20, 3.2), (32, 2), (500, 2)])
def test_what_must_be_read_is_shared_out_among_the_steps_between_two_passages(alone: int, share: float) -> None:
    clock, member, one, case = timing()
    case.alone = alone
    prices = clock.prices([member], [one], [case])
    assert prices.whole("model", 1, 1) == pytest.approx(0.1 + 0.2 + 0.64)
    assert prices.shared("model", 1, 1) == pytest.approx(0.1 + 0.2 + 0.01 * share)
    weighed = Taken("model", (0,), (1,), 1.5, 1.0 + prices.shared("model", 1, 1))
    assert prices.paid(weighed).seconds == pytest.approx(1.0 + prices.whole("model", 1, 1))
    plain = Taken("", (0,), (0,), 1.0, 1.0)
    assert prices.paid(plain) is plain


def test_where_passages_are_copied_every_other_step_it_is_shared_among_two() -> None:
    clock, member, one, case = timing()
    for _ in range(60):
        clock.stretched(2)
    assert clock.prices([member], [one], [case]).shared("model", 1, 1) == pytest.approx(0.3 + 0.32, rel=0.01)
    for _ in range(60):
        clock.lasted(1)
    assert clock.prices([member], [one], [case]).shared("model", 1, 1) == pytest.approx(0.3 + 0.32, rel=0.02)
    for _ in range(60):
        clock.lasted(40)
    assert clock.prices([member], [one], [case]).shared("model", 1, 1) == pytest.approx(0.3 + 0.02, rel=0.01)


def test_but_over_no_more_than_the_text_has_left() -> None:
    clock, member, one, case = timing()
    case.alone, one.limit = 32, len(one.tokens) + 4
    assert clock.prices([member], [one], [case]).shared("model", 1, 1) == pytest.approx(0.1 + 0.2 + 0.16)


def test_a_model_at_rest_is_cheaper_where_the_machine_has_become_faster() -> None:
    clock, member, one, case = timing()
    verdict = Verdict(Work(one, 0, None), DraftTree.chain([7]), emitted=[9], accepted=0, depths=[])
    seconds = {"forward": 0.5}
    trace = StepTrace(number=1, rows=1, sequences=1, prefill_rows=0, drafted=0, accepted=0, emitted=1, seconds=seconds)
    for _ in range(300):
        clock.saw(trace, [verdict])
    prices = clock.prices([member], [one], [case])
    assert prices.whole("model", 1, 1) == pytest.approx(0.94 * member.cost.slower)
    assert member.cost.slower < 0.75
