"""``foresay check``: whether a target and its drafters can be loaded, by the same functions that build an engine, up to
where they would read a weight.

Configurations, tokenizers and the headers of weight files are read. A hub id is downloaded first, as for serving it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from foresay.server.catalog.catalog import find_target, parameters_of
from foresay.server.engine import handover
from foresay.server.engine.build import Chosen, choose
from foresay.server.engine.parameters import bits_of, in_words, model_bytes
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import short_name
from foresay.server.settings.units import aligned, bytes_in_words, count_in_words, counted
from foresay.server.text.tokenizer import SamplingDefaults, Tokenizer
from foresay.spec.errors import ForesayError
from foresay.spec.names import NONE
from foresay.verifier.model import weight_cache
from foresay.verifier.model.checkpoint import Checkpoint
from foresay.verifier.model.config import ModelConfig, unused_parameters
from foresay.verifier.model.weights import check as check_headers


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report. rows: what would run, by name. memory: its bytes by part, and tokens. fault: why it cannot be,
    and what to change; empty if it can. recommended: drafts known to suit the target, if none was requested or the
    requested one does not fit."""

    target: str
    draft: str
    works: bool
    rows: dict[str, str] = {}
    memory: dict[str, Any] = {}
    warnings: list[str] = []
    fault: str = ""
    recommended: str = ""

    def __str__(self) -> str:
        """For people, line by line."""
        verdict = "This pair can work." if self.works else f"This pair cannot work: {self.fault}"
        title = f"{self.target} with --draft {self.draft}"
        return "\n".join(
            [title, *aligned([*self.rows.items()]), *self.warnings, verdict, *filter(None, [self.recommended])]
        )


def check(config: EngineConfig) -> CheckReport:
    """Check the pair."""
    warnings: list[str] = []
    try:
        chosen = choose(config, lambda phase, share=None: warnings.append(phase) if "warning" in phase else None, {})
        loading = chosen.loading
        check_headers(Checkpoint.open(loading.target), loading.model)
        for drafter in chosen.named:
            drafter.check_files(loading.model, loading.dtype)
        Tokenizer.load(loading.target)
        SamplingDefaults.read(loading.target)
    except ForesayError as error:
        fault, advice = " ".join(str(error).split()), recommended(config.target)
        return CheckReport(target=config.target, draft=config.draft, works=False, fault=fault, recommended=advice)
    return CheckReport(
        target=config.target,
        draft=config.draft,
        works=True,
        rows=_rows(chosen),
        memory=_memory(chosen),
        warnings=warnings,
        recommended=recommended(config.target) if all(one.looks for one in chosen.named) else "",
    )


def _rows(chosen: Chosen) -> dict[str, str]:
    """What would run, in words."""
    loading, plan = chosen.loading, chosen.memory
    config, model, device, free = loading.config, loading.model, loading.device, loading.device.free
    types = f"{loading.dtype} ({chosen.dtype.reason}), bits: {bits_of(loading.dtype, device.is_gpu)}"
    there = f"{bytes_in_words(plan.machine)}{f' of {device}' if device.is_gpu else ''}"
    left = "" if free is None else f", {bytes_in_words(free)} of them free now"
    rows = {
        "target": f"{described(model, loading.dtype, chosen.activations.value)}, {types}",
        "draft": ", ".join(map(short_name, chosen.draft.value.split(","))) if chosen.named else NONE,
        "context": f"{loading.length:,} tokens (the target's limit is {model.max_positions:,})",
        "memory": f"{bytes_in_words(plan.total)} of {there}{left}: {plan.described}",
        "disk": f"KV of prompts and answers is kept: {handover.room(config, device)[1]}",
    }
    rows["draft"] += f" ({chosen.draft.reason}{''.join(one.remark for one in chosen.named)})"
    packed, most = model_bytes(model, loading.dtype, True), weight_cache.MOST_BYTES
    if not device.is_gpu and config.weight_cache and packed >= weight_cache.LEAST_BYTES:
        kept = f"kept in {weight_cache.folder()}: later starts map them"
        if packed > most:
            kept = f"more than is kept ({bytes_in_words(most)}): each start reads and packs them"
        rows["packed"] = f"the target's packed weights, {bytes_in_words(packed)}, are {kept}"
    return rows


def _memory(chosen: Chosen) -> dict[str, Any]:
    """The memory plan for scripts."""
    plan = chosen.memory
    tokens = {"kv_cache": plan.kv_bytes, "kv_tokens": plan.tokens, "kv_token_bytes": plan.token_bytes}
    machine = {"machine": plan.machine, "free": chosen.loading.device.free, "host": plan.host}
    return {"weights": dict(plan.weights), **plan.overhead, **tokens, "total": plan.total, **machine}


def described(model: ModelConfig, dtype: str, activations: str) -> str:
    """A model's shape for people. dtype, activations: the engine's."""
    count = f"{count_in_words(parameters_of(model))} weights"
    if idle := unused_parameters(model):
        count += f", of which a token reads {count_in_words(parameters_of(model) - idle)}"
    kind, family = in_words(model, dtype, activations), model.architecture.removesuffix("ForCausalLM")
    return f"{family}, {counted(model.num_layers, 'layer')} of {model.hidden_size}, {count}{kind and f' in {kind}'}"


def recommended(name: str) -> str:
    """Drafts for the target in a sentence; empty if none is known."""
    if name == "bundled":
        return "The bundled target's own draft model comes with it: --draft draft_model, or leave --draft out."
    known = find_target(name)
    if known is None or not known.drafts:
        return ""
    drafts = ", ".join(
        f"--draft {draft.setting} ({count_in_words(draft.parameters)} weights)" for draft in known.drafts
    )
    return f"Known to draft for {known.id}: {drafts}; foresay pull fetches them."
