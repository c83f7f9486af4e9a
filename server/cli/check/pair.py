"""The whole check of a pair, from settings to a report, with the very functions that build an engine.

::

    target ── files, tokenizer ──┐
    draft ─── files, vocabulary ─┼── context ── memory ── probe, if asked for
    head ──── files, layers ─────┘

All but the probe read only configurations, tokenizers and the headers of weight files. A hub id is downloaded first, as
it would be to serve it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from server.cli.check.draft import look_at_draft
from server.cli.check.limits import look_at_context, look_at_memory
from server.cli.check.summary import advice
from server.cli.check.target import look_at_target, recommended
from server.engine.checks.report import Measured, Notes, Report
from server.settings.config import EngineConfig
from server.settings.resolved import choose_draft
from spec.names import NONE

if TYPE_CHECKING:
    from server.cli.check.probe import Probed


def check(config: EngineConfig, probe_seconds: float | None = None) -> Report:
    """Everything that is known of the pair. probe_seconds: load it and measure so long, unless it cannot work."""
    notes = Notes()
    advised = _look(notes, config)
    probed = _probe(notes, config, probe_seconds) if probe_seconds is not None and not notes.failed() else None
    last = _verdict(notes) if probed is None or notes.failed() else f"{_verdict(notes)} {probed[1]}"
    return Report(
        target=config.target,
        draft=config.draft,
        works=not notes.failed(),
        verdict=last,
        findings=notes.findings,
        probe=[] if probed is None else probed[0],
        recommended=advised,
    )


def _look(notes: Notes, config: EngineConfig) -> str:
    """Note everything; returns what to draft with instead, if that is known."""
    target = look_at_target(notes, config)
    draft = look_at_draft(notes, config, target)
    if target is None:
        return recommended(config.target)
    models = draft is not None and not all(drafter.looks for drafter in draft.drafters)
    drafts_well = models and not notes.doubted("draft", "vocabulary")
    length = look_at_context(notes, config, target, draft)
    if length is not None:
        look_at_memory(notes, config, target, draft, length)
    return "" if drafts_well else recommended(config.target, target)


def _probe(notes: Notes, config: EngineConfig, seconds: float) -> tuple[list[Measured], str] | None:
    """What was measured, and what it means; None if there is nothing to measure, or it could not be."""
    from server.cli.check.probe import probe
    from server.cli.check.summary import measured

    choice = choose_draft(config)
    if choice.value == NONE:
        notes.ok("probe", "there is nobody to measure")
        return None
    smaller = _with_int8_drafts(config, choice.value)
    share = seconds if smaller is None else seconds / 2
    found = notes.attempt("probe", "run it again; if it fails again, report it", lambda: probe(config, share))
    if found is None:
        return None
    numbers = [measured(temperature, texts) for temperature, texts in found.texts.items()]
    if smaller is not None:
        _note_quantised(notes, numbers, notes.attempt("probe", _LEAVE, lambda: probe(smaller, seconds / 2)))
    for doubt in found.info.drafter_doubts:
        notes.warn("probe", doubt, "see whether the acceptance below is worth it")
    _note_texts(notes, numbers, found.info.exact, found.info.exact_reason)
    return numbers, advice(numbers, len(found.info.draft_shape))


_LEAVE = "leave --draft-quantize out"


def _with_int8_drafts(config: EngineConfig, draft: str) -> EngineConfig | None:
    """The same with a draft model of int8; None where no model of floats drafts, or that is so already."""
    from server.engine.drafters.draft_model import DraftModel
    from server.engine.drafters.registry import drafts

    models = [one for one in drafts(config, draft) if isinstance(one, DraftModel)]
    if config.draft_quantize is not None or not models or models[0].model.quantization is not None:
        return None
    return msgspec.structs.replace(config, draft_quantize="int8")


def _note_quantised(notes: Notes, floats: list[Measured], found: Probed | None) -> None:
    """What int8 of the draft model does to acceptance and speed."""
    from server.cli.check.summary import gains, measured

    if found is None:
        return
    numbers = [measured(temperature, texts) for temperature, texts in found.texts.items()]
    text = "; ".join(
        f"{after.tokens_per_step:.2f} tokens per step instead of {before.tokens_per_step:.2f} and {after.speedup:.2f}x "
        f"instead of {before.speedup:.2f}x at temperature {after.temperature:g}"
        for before, after in zip(floats, numbers, strict=True)
    )
    text, facts = f"with --draft-quantize int8: {text}", {"quantised": numbers}
    if gains(floats, numbers):
        notes.warn("probe", text, "use --draft-quantize int8: it is faster on this machine", **facts)
    else:
        notes.ok("probe", text, **facts)


def _note_texts(notes: Notes, numbers: list[Measured], exact: bool, reason: str) -> None:
    """Whether drafting changed a text, which it must not where the engine is exact."""
    runs = sum(one.runs for one in numbers)
    if all(one.same_tokens for one in numbers):
        notes.ok("texts", f"{_counted(runs, 'text')}, the same with the drafter and without ({reason})", runs=runs)
    elif exact:
        notes.fail(
            "texts", "the drafter changed a text, which must not be", "report it, with what foresay version prints"
        )
    else:
        notes.warn("texts", f"the drafter changed a text: {reason}", "another --dtype may be exact on this machine")


def _verdict(notes: Notes) -> str:
    counts = {status: sum(finding.status == status for finding in notes.findings) for status in ("fail", "warn")}
    if counts["fail"]:
        return f"This pair cannot work: {_counted(counts['fail'], 'fault')}."
    doubts = f", with {_counted(counts['warn'], 'warning')}" if counts["warn"] else ""
    return f"This pair can work{doubts}."


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
