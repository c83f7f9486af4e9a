"""What the measured numbers mean for a person: one sentence on the gain, and if there is none, what to change."""

from __future__ import annotations

from collections.abc import Sequence

from server.engine.checks.report import Measured

#: Speed-ups of single texts that lie farther apart than this do not tell; a quiet machine stays far below.
_SCATTERED = 3.0
#: A gain below this is none: texts differ by as much.
_GAIN = 1.03
#: Below this many tokens per step the drafter is hardly ever right.
_SELDOM_RIGHT = 1.4
#: Above this share of a step the drafter itself is what costs.
_COSTLY = 0.35


def advice(measured: Sequence[Measured], levels: int) -> str:
    """levels: how deep each step drafts."""
    speeds = [one.speedup for one in measured]
    each = " and ".join(f"{one.speedup:.2f}x at temperature {one.temperature:g}" for one in measured)
    if any(one.spread[1] > _SCATTERED * one.spread[0] for one in measured):
        low, high = min(one.spread[0] for one in measured), max(one.spread[1] for one in measured)
        return (
            f"How much it gains cannot be told ({each}), for single texts lie between {low:.2f}x and {high:.2f}x: "
            "something else keeps this machine busy; run this again when it is quiet."
        )
    if min(speeds) >= _GAIN:
        return f"On this machine this pair writes faster than the target alone: {each}."
    if max(speeds) < _GAIN:
        slow = "slower than" if max(speeds) < 1 / _GAIN else "no faster than"
        return f"On this machine this pair is {slow} the target alone ({each}): {_change(measured, levels)}."
    better = max(measured, key=lambda one: one.speedup).temperature
    return f"On this machine this pair gains at temperature {better:g} alone ({each}): {_change(measured, levels)}."


def _change(measured: Sequence[Measured], levels: int) -> str:
    """The likeliest cause, and what to do about it."""
    per_step = min(one.tokens_per_step for one in measured)
    share = max(one.propose_share for one in measured)
    fewer = f", or draft less (--draft-tokens {max(1, levels // 2)})" if levels > 1 else ""
    if per_step < _SELDOM_RIGHT:
        return (
            f"a step writes only {per_step:.2f} tokens, so the drafter is seldom right; use one made for this target, "
            "or --draft none"
        )
    if share > _COSTLY:
        return f"drafting takes {share:.0%} of the time; use a smaller drafter{fewer}, or --draft none"
    return f"checking the drafts costs more than they save; use --draft none{fewer}"
