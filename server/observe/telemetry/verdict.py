"""Does speculation pay? Estimated from what was counted: time saved, and where it goes if none is."""

from __future__ import annotations

import msgspec

from server.observe.telemetry.window import Window

#: Fewer decoding steps say nothing.
FEWEST_STEPS = 20
#: An estimate this close to plain decoding is as good as equal.
MARGIN = 0.02
LOW_ACCEPTANCE = 0.3
LARGE_SHARE = 0.4


class Verdict(msgspec.Struct, frozen=True):
    """pays: None if that is not known. speed_up: over plain decoding. saved_seconds: below zero if it costs time.
    sentence: for people."""

    pays: bool | None
    speed_up: float | None
    saved_seconds: float
    sentence: str


def judged(window: Window) -> Verdict:
    """What the decoding steps of a window say."""
    speed_up = window.speed_up
    saved = 0.0 if speed_up is None else window.plain_seconds - window.decode_seconds
    if not window.drafts:
        return Verdict(None, speed_up, saved, "Nothing was drafted.")
    if window.doubt:
        return Verdict(None, speed_up, saved, f"Unsure whether speculation pays: {window.doubt}.")
    if speed_up is None or window.decode_steps < FEWEST_STEPS:
        return Verdict(None, speed_up, saved, "Too few steps to tell whether speculation pays.")
    if speed_up > 1 + MARGIN:
        return Verdict(True, speed_up, saved, f"Speculation pays: {speed_up:.2f} times the speed of plain decoding.")
    if speed_up >= 1 - MARGIN:
        return Verdict(True, speed_up, saved, "Speculation neither pays nor costs: it is as fast as plain decoding.")
    return Verdict(False, speed_up, saved, f"Speculation is not paying: {_figures(window)}; {_cause(window)}")


def _figures(window: Window) -> str:
    step, draft = (1000 * seconds / window.decode_steps for seconds in (window.decode_seconds, window.propose_seconds))
    token, alone = (1000 * seconds / window.decode_emitted for seconds in (window.decode_seconds, window.plain_seconds))
    return (
        f"a token takes {token:.2f} ms, and would take {alone:.2f} ms without drafts "
        f"(a step takes {step:.2f} ms, {draft:.2f} ms of them drafting)"
    )


def _cause(window: Window) -> str:
    """What stands out, and which flag changes it."""
    rate = window.acceptance_rate or 0.0
    if rate < LOW_ACCEPTANCE:
        return f"only {rate:.0%} of the drafts are accepted: try another --draft, or fewer --draft-tokens"
    if window.propose_seconds > LARGE_SHARE * window.decode_seconds:
        share = window.propose_seconds / window.decode_seconds
        return f"drafting takes {share:.0%} of the time: try a smaller --draft, or fewer --draft-tokens"
    rows = window.decode_rows / window.decode_steps
    return f"verifying {rows:.1f} rows at once costs too much here: try fewer --draft-tokens"
