"""The whole check of a pair, from settings to a report, with the same functions that build an engine.

::

    target ── files, tokenizer ──┐
    draft ─── files, vocabulary ─┼── context ── memory
    head ──── files, layers ─────┘

It reads only configurations, tokenizers and the headers of weight files. A hub id is downloaded first, as for serving
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from foresay.server.catalog.catalog import KnownDraft, find_target
from foresay.server.engine import handover
from foresay.server.engine.build import draft_shape, fitting
from foresay.server.engine.checks import Finding, Notes, Target, described, facts, look_at_files
from foresay.server.engine.checks import named as for_people
from foresay.server.engine.device import find_device
from foresay.server.engine.drafters.entry import Entry
from foresay.server.engine.drafters.registry import find, settled
from foresay.server.engine.numbers import bits_of, choose_activations, choose_dtype, with_kv
from foresay.server.engine.parameters import model_bytes, quantized
from foresay.server.engine.vocabulary import vocabulary
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import Resolved, choose_draft, max_model_len, named_in, target_directory
from foresay.server.settings.units import bytes_in_words, count_in_words, counted
from foresay.server.text.tokenizer import SamplingDefaults, Tokenizer
from foresay.spec.names import NONE
from foresay.verifier.model import kept_weights
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.families import FAMILIES


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report. works: nothing failed. recommended: a draft known to suit the target, if none was requested or
    the requested one does not fit."""

    target: str
    draft: str
    works: bool
    verdict: str
    findings: list[Finding]
    recommended: str = ""

    def __str__(self) -> str:
        """For people: one line per finding, and one for its fix."""
        width = max(len(finding.subject) for finding in self.findings)
        lines = [f"{self.target} with --draft {self.draft}"]
        for finding in self.findings:
            lines.append(f"{finding.status:<4}  {finding.subject:<{width}}  {finding.text}")
            if finding.fix:
                lines.append(f"      {'':<{width}}  fix: {finding.fix}")
        return "\n".join([*lines, *filter(None, [self.verdict, self.recommended])])


_SUPPORTED = ", ".join(family.models for family in FAMILIES.values())


def look_at_target(notes: Notes, config: EngineConfig) -> Target | None:
    """Note findings about the target; None if its configuration cannot be read."""
    name = f"give the directory that holds {config.target}, or the hub id (OWNER/NAME) of a model you may download"
    directory = notes.attempt("target", name, lambda: target_directory(config))
    if directory is None:
        return None
    _look_at_texts(notes, directory)
    other = f"take a model of a supported family ({_SUPPORTED}) with its own config.json"
    model = notes.attempt("target", other, lambda: _model(config, directory))
    if model is None:
        return None
    device = notes.attempt("device", "leave --device out", lambda: find_device(config))
    if device is None:
        return None
    fix = "leave --activations out"
    activations = notes.attempt("target", fix, lambda: choose_activations(config, model, device))
    if activations is None:
        return None
    dtype = notes.attempt("target", "leave --bits out", lambda: choose_dtype(config, model, device))
    if dtype is None:
        return None
    if notes.attempt("target", "leave --kv-dtype out", lambda: with_kv(config, model, dtype.value)) is None:
        return None
    bits = bits_of(dtype.value, device.is_gpu)
    look_at_files(notes, "target", directory, model, dtype.value)
    if not notes.failed("target"):
        notes.ok(
            "target",
            f"{described(model, dtype.value, activations.value)}, {dtype.value} ({dtype.reason}), bits: {bits}",
            **facts(model),
            dtype=dtype.value,
            activations=activations.value,
            bits=bits,
        )
    return Target(config.target, directory, model, dtype, activations, device)


def _model(config: EngineConfig, directory: Path) -> ModelConfig:
    return quantized(ModelConfig.from_directory(directory), config.quantize, "--quantize")


def _look_at_texts(notes: Notes, directory: Path) -> None:
    """Check what the server reads besides the model: tokenizer and recommended settings."""
    fetch = f"put the tokenizer.json and tokenizer_config.json of the model's source into {directory}"
    notes.attempt("tokenizer", fetch, lambda: vocabulary(directory))
    if not notes.failed("tokenizer"):
        notes.attempt("tokenizer", fetch, lambda: Tokenizer.load(directory))
    settings = "fetch generation_config.json again, or remove it"
    notes.attempt("target", settings, lambda: SamplingDefaults.read(directory))


# -- the catalog's recommendations -------------------------------------------------------------------------------------


def recommended(name: str) -> str:
    """Drafts for the target in a sentence; empty if none is known."""
    if name == "bundled":
        return "The bundled target's own draft model comes with it: --draft draft_model, or leave --draft out."
    known = find_target(name)
    if known is None or not known.drafts:
        return ""
    return f"Known to draft for {known.id}: {_listed(known.drafts)}; foresay pull fetches them."


def _listed(drafts: Sequence[KnownDraft]) -> str:
    return ", ".join(f"--draft {draft.setting} ({count_in_words(draft.parameters)} weights)" for draft in drafts)


@dataclass(frozen=True, slots=True)
class Draft:
    """The drafters. positions: the longest text that all of them were made for; None if unknown."""

    drafters: Sequence[Entry]
    positions: int | None = None


_WHICH = (
    "name a directory with config.json and weights, or a hub id; "
    "medusa:PATH, eagle3:PATH, peagle:PATH, dflash:PATH and dspark:PATH are only for heads"
)


def look_at_draft(notes: Notes, config: EngineConfig, target: Target | None) -> Draft | None:
    """Note findings about the drafters; None if one cannot be found, or there is no target to check it with."""
    choice = notes.attempt("draft", "see foresay check --help", lambda: choose_draft(config))
    if choice is None:
        return None
    counts = 'give numbers of nodes per level, such as "3,2,1", that add up to at most 63'
    shape = notes.attempt("drafting", counts, lambda: draft_shape(config, choice))
    parts = named_in(choice.value)
    found = [notes.attempt("draft", _WHICH, partial(find, part)) for part in parts if part != NONE]
    there = [drafter for drafter in found if drafter is not None]
    if len(there) < len(found):
        return None
    drafters = notes.attempt("draft", _WHICH, lambda: settled(there, config, choice.value))
    if drafters is None or target is None:
        return None
    if not drafters:
        notes.ok("draft", f"{NONE}: plain decoding", kind=NONE)
    reason = choice.reason if len(drafters) == 1 else "asked for"
    positions = [one.look_at(notes, target, for_people(Resolved(one.option, reason)), shape) for one in drafters]
    return Draft(drafters, min((longest for longest in positions if longest is not None), default=None))


def look_at_context(notes: Notes, config: EngineConfig, target: Target, draft: Draft | None) -> int | None:
    """Note and return the context length; None if more is requested than the target supports."""
    length = notes.attempt("context", "lower --max-model-len", lambda: max_model_len(config, target.model))
    if length is None:
        return None
    most, made = target.model.max_positions, None if draft is None else draft.positions
    numbers = {"tokens": length, "target": most, "draft": made}
    if made is not None and made < length:
        notes.warn(
            "context",
            f"the drafter was made for texts of up to {made:,} tokens and the server takes {length:,}: "
            "beyond that its guesses will seldom be right",
            f"--max-model-len {made} keeps texts within it; longer ones are correct too, only slower",
            **numbers,
        )
    else:
        drafter = "" if made is None else f", the drafter's is {made:,}"
        notes.ok("context", f"{length:,} tokens (the target's limit is {most:,}{drafter})", **numbers)
    return length


def look_at_memory(notes: Notes, config: EngineConfig, target: Target, draft: Draft | None, length: int) -> None:
    """Note the memory of weights and KV cache on the device; of the target alone if there is no drafter."""
    drafters = () if draft is None or notes.failed("draft") else draft.drafters
    config = with_kv(config, target.model, target.dtype.value)
    smaller = "lower --max-model-len, --kv-tokens or --max-seqs, or name a smaller model"
    found = notes.attempt(
        "memory",
        smaller,
        lambda: fitting(config, length, target.dtype.value, target.model, list(drafters), target.device)[0],
    )
    if found is None:
        return
    free = target.device.free
    where = f" of {target.device}" if target.device.is_gpu else ""
    there = f"{bytes_in_words(found.machine)}{where}" + (
        "" if free is None else f", {bytes_in_words(free)} of them free now"
    )
    text = f"{bytes_in_words(found.total)} of {there}: {found.described}"
    facts = {
        "weights": dict(found.weights),
        **found.overhead,
        "kv_cache": found.kv_bytes,
        "kv_tokens": found.tokens,
        "kv_token_bytes": found.token_bytes,
        "total": found.total,
        "machine": found.machine,
        "free": free,
        "host": found.host,
    }
    if free is not None and found.total > free:
        fix = "stop what else takes memory on this machine, or lower --kv-tokens"
        notes.warn("memory", f"needs more than is free now: {text}", fix, **facts)
    else:
        notes.ok("memory", text, **facts)


def check(config: EngineConfig) -> CheckReport:
    """Check the pair."""
    notes = Notes()
    advised = _look(notes, config)
    return CheckReport(
        target=config.target,
        draft=config.draft,
        works=not notes.failed(),
        verdict=_verdict(notes),
        findings=notes.findings,
        recommended=advised,
    )


def _look(notes: Notes, config: EngineConfig) -> str:
    """Note all findings; returns recommended drafts, if known."""
    target = look_at_target(notes, config)
    draft = look_at_draft(notes, config, target)
    if target is None:
        return recommended(config.target)
    models = draft is not None and not all(drafter.looks for drafter in draft.drafters)
    drafts_well = models and not notes.doubted("draft", "vocabulary")
    length = look_at_context(notes, config, target, draft)
    if length is not None:
        look_at_memory(notes, config, target, draft, length)
        look_at_disk(notes, config, target)
    return "" if drafts_well else recommended(config.target)


def look_at_disk(notes: Notes, config: EngineConfig, target: Target) -> None:
    """Note what is kept on disk, and where."""
    size, note = handover.room(config, target.device)
    notes.ok("disk", f"KV of prompts and answers is kept: {note}", kv_disk=size)
    packed, most = model_bytes(target.model, target.dtype.value, True), kept_weights.MOST_BYTES
    if target.device.is_gpu or not config.weight_cache or packed < kept_weights.LEAST_BYTES:
        return
    stored = f"kept in {kept_weights.folder()}: later starts map them"
    if packed > most:
        stored = f"more than is kept ({bytes_in_words(most)}): each start reads and packs them"
    notes.ok("disk", f"the target's packed weights, {bytes_in_words(packed)}, are {stored}", packed_weights=packed)


def _verdict(notes: Notes) -> str:
    counts = {status: sum(finding.status == status for finding in notes.findings) for status in ("fail", "warn")}
    if counts["fail"]:
        return f"This pair cannot work: {counted(counts['fail'], 'fault')}."
    doubts = f", with {counted(counts['warn'], 'warning')}" if counts["warn"] else ""
    return f"This pair can work{doubts}."
