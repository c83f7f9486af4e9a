"""Whether speculation paid, in a sentence, by the decoding steps of a span of time."""

from __future__ import annotations

import msgspec

from foresay.server.metrics.counters import Counters
from foresay.spec.accept import GAIN

#: Fewer decoding steps say nothing.
FEWEST_STEPS = 20
TOO_FEW, FEW = "Too few steps to tell whether speculation pays.", "there are too few steps"
CHANGED = "the pace of this machine has changed since steps without drafts were timed"
LOW_ACCEPTANCE = 0.3
LARGE_SHARE = 0.4
#: Where fewer of the steps have drafts, whatever makes them slow, it is not these.
RARELY = 0.02


class Verdict(msgspec.Struct, frozen=True):
    """pays: None if unknown. speed_up: over plain decoding. saved_seconds: negative if it costs time.
    sentence: for people. doubt: why the speed-up says nothing; empty if it does."""

    pays: bool | None
    speed_up: float | None
    saved_seconds: float
    sentence: str
    doubt: str = ""


def judged(span: Counters) -> Verdict:
    """The verdict of the decoding steps of a span of time."""
    speed_up = span.speed_up
    saved = 0.0 if speed_up is None else span.spec_decode_plain_seconds - span.decode_seconds
    if not span.drafts:
        return Verdict(None, speed_up, saved, "Nothing was drafted.")
    if 2 * span.unsure_seconds > span.decode_seconds:
        return Verdict(None, speed_up, saved, f"Cannot tell whether speculation pays: {CHANGED}.", CHANGED)
    if span.drafts < RARELY * span.decode_steps:
        return Verdict(None, speed_up, saved, "Hardly anything was drafted.")
    if speed_up is None or span.decode_steps < FEWEST_STEPS:
        return Verdict(None, speed_up, saved, TOO_FEW, FEW)
    if abs(speed_up - 1.0) < span.spread * speed_up:
        known = f"{speed_up:.2f} times the speed of plain decoding, ± {span.spread:.0%}"
        return Verdict(True, speed_up, saved, f"Speculation neither pays nor costs, as far as it is measured: {known}.")
    if speed_up >= GAIN:
        how = f" (measured, ± {span.spread:.0%})" if span.spread else ""
        sentence = f"Speculation pays: {speed_up:.2f} times the speed of plain decoding{how}."
        return Verdict(True, speed_up, saved, sentence)
    if speed_up > 1 / GAIN:
        return Verdict(True, speed_up, saved, "Speculation neither pays nor costs: it is as fast as plain decoding.")
    if not span.evident:
        return Verdict(None, speed_up, saved, TOO_FEW, FEW)
    return Verdict(False, speed_up, saved, f"Speculation is not paying: {_figures(span)}; {_cause(span)}.")


def _figures(span: Counters) -> str:
    step, draft = (1000 * seconds / span.decode_steps for seconds in (span.decode_seconds, span.propose_seconds))
    token, alone = (
        1000 * seconds / span.decode_emitted for seconds in (span.decode_seconds, span.spec_decode_plain_seconds)
    )
    return (
        f"a token takes {token:.2f} ms, and would take {alone:.2f} ms without drafts "
        f"(a step takes {step:.2f} ms, {draft:.2f} ms of them drafting)"
    )


def _cause(span: Counters) -> str:
    """The most likely cause, and which flag changes it."""
    rate = span.acceptance_rate or 0.0
    # With a budget, steps choose how much they draft: --draft-tokens is then only the maximum.
    fewer = "--draft none" if any(span.spec_decode_num_choices.values()) else "fewer --draft-tokens"
    if rate < LOW_ACCEPTANCE:
        return f"only {rate:.0%} of the drafts are accepted: try another --draft, or {fewer}"
    if span.propose_seconds > LARGE_SHARE * span.decode_seconds:
        share = span.propose_seconds / span.decode_seconds
        return f"drafting takes {share:.0%} of the time: try a smaller --draft, or {fewer}"
    rows = span.decode_rows / span.decode_steps
    return f"verifying {rows:.1f} rows at once costs too much here: try {fewer}"
