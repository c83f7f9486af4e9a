"""The longest text, and the memory: what was asked for beside what there is."""

from __future__ import annotations

from server.cli.check.draft import Draft
from server.engine.build import max_model_len
from server.engine.checks.report import Notes, Target
from server.engine.plan import plan
from server.settings.amounts import in_words
from server.settings.config import EngineConfig


def look_at_context(notes: Notes, config: EngineConfig, target: Target, draft: Draft | None) -> int | None:
    """Note how long a text may be; returns that, None where more is asked for than the target holds."""
    length = notes.attempt("context", "lower --max-model-len", lambda: max_model_len(config, target.model))
    if length is None:
        return None
    most, made = target.model.max_positions, None if draft is None else draft.positions
    numbers = {"tokens": length, "target": most, "draft": made}
    if made is not None and made < length:
        notes.warn(
            "context",
            f"the drafter was made for texts of up to {made:,} tokens and the server takes {length:,}: "
            "behind that its guesses will seldom be right",
            f"--max-model-len {made} keeps texts within it; longer ones come out right as well, only slower",
            **numbers,
        )
    else:
        drafter = "" if made is None else f", the drafter's is {made:,}"
        notes.ok("context", f"{length:,} tokens (the target's limit is {most:,}{drafter})", **numbers)
    return length


def look_at_memory(notes: Notes, config: EngineConfig, target: Target, draft: Draft | None, length: int) -> None:
    """Note what weights and KV cache take of the device's memory. Without a drafter, what the target takes alone."""
    drafters = () if draft is None or notes.failed("draft") else draft.drafters
    smaller = "lower --max-model-len, --kv-tokens or --max-seqs, or name a smaller model"
    found = notes.attempt(
        "memory",
        smaller,
        lambda: plan(config, length, target.dtype.value, target.model, drafters, target.device),
    )
    if found is None:
        return
    free = target.device.free
    where = f" of {target.device}" if target.device.is_gpu else ""
    there = f"{in_words(found.machine)}{where}" + ("" if free is None else f", {in_words(free)} of them free now")
    text = f"{in_words(found.total)} of {there}: {found.described}"
    facts = {
        "weights": dict(found.weights),
        **found.beside,
        "kv_cache": found.kv_bytes,
        "kv_tokens": found.tokens,
        "kv_token_bytes": found.token_bytes,
        "total": found.total,
        "machine": found.machine,
        "free": free,
    }
    if free is not None and found.total > free:
        fix = "stop what else takes memory on this machine, or lower --kv-tokens"
        notes.warn("memory", f"needs more than is free now: {text}", fix, **facts)
    else:
        notes.ok("memory", text, **facts)
