"""What a command shows of loading and of a finished text: on stderr, so that stdout is the answer alone."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

from server.host.stages import Stages
from server.host.torchless import import_tokenizers
from server.host.uncollected import uncollected
from server.settings.config import EngineConfig
from spec.trace import ShadowReport, Statistics

if TYPE_CHECKING:
    from server.host.local import Engine


def loaded(config: EngineConfig) -> Engine:
    """The engine; its stages are shown on a terminal while it loads, and what it warns of is told.

    Called in a process of ours, which runs none of transformers' models: its tokenizers are imported without torch.
    """
    with Stages() as stages:
        stages("importing")
        with uncollected():
            import_tokenizers()
            from server.host.local import Engine
        gc.freeze()
        engine = Engine.from_config(config, stages)
    for warning in engine.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return engine


def dim(line: str) -> str:
    """The line in the terminal's faint style, or as it is where stderr is no terminal."""
    return f"\x1b[2m{line}\x1b[0m" if sys.stderr.isatty() else line


def summary(statistics: Statistics, finish_reason: str, seed: int, exact: bool) -> str:
    """One line about a finished text: how much, how fast, how much of it was drafted."""
    parts = [
        f"{statistics.completion_tokens} tokens ({finish_reason})",
        f"{statistics.decode_tokens_per_second:.1f} tokens/s",
        f"{statistics.tokens_per_step or 0.0:.2f} tokens per step",
    ]
    if statistics.drafted:
        parts.append(f"{statistics.accepted / statistics.drafted:.0%} of {statistics.drafted} drafted accepted")
    parts.append(f"first token {1000 * statistics.time_to_first_token:.0f} ms")
    parts.append(f"seed {seed}")
    parts.append("exact" if exact else "not exact")
    return " | ".join(parts)


def shadow_summary(report: ShadowReport) -> str:
    """One line about what a shadow drafter would have done."""
    steps = f"{report.tokens / report.steps:.2f} tokens per step" if report.steps else "no steps"
    share = f"{report.accepted / report.drafted:.0%} of {report.drafted} drafted accepted" if report.drafted else ""
    return f"with {report.drafter} (shadow): {', '.join(filter(None, (steps, share)))}"
