"""Whoever watches an engine because the settings say so: the trace, the shadow, the draft history."""

from __future__ import annotations

from dataclasses import dataclass

from drafters.shadow import Shadow
from server.engine.drafters.registry import lookup
from server.engine.history import HistoryWriter
from server.engine.trace.lines import Lines
from server.engine.trace.writer import TraceWriter
from server.settings.config import EngineConfig
from spec.engine import Engine
from spec.observer import Observer

#: How far ahead a shadow drafts where --draft-tokens is 0 and the setting does not say.
_TOKENS = 4


@dataclass(slots=True)
class EngineObservers:
    """What one engine is watched by."""

    trace: TraceWriter | None = None
    shadow: Shadow | None = None
    history: HistoryWriter | None = None

    @classmethod
    def of(cls, config: EngineConfig) -> EngineObservers:
        """As the settings say. Raises ConfigurationError for a trace that cannot be written, or an unknown shadow."""
        shadow = None
        if config.shadow is not None:
            shadow = Shadow(*lookup(config.shadow, "--shadow", config.draft_tokens or _TOKENS))
        trace = None if config.trace is None else TraceWriter(Lines(config.trace), config.trace_text)
        history = None if config.draft_history is None else HistoryWriter(config.draft_history)
        return cls(trace, shadow, history)

    @property
    def observers(self) -> list[Observer]:
        """Those that there are."""
        return [observer for observer in (self.trace, self.shadow, self.history) if observer is not None]

    def started(self, engine: Engine) -> None:
        """The engine is ready."""
        if self.trace is not None:
            self.trace.started(engine.info, engine.scheduler.cost)
        if self.history is not None:
            self.history.started(engine)

    def close(self) -> None:
        """The engine is gone."""
        if self.trace is not None:
            self.trace.close()
        if self.history is not None:
            self.history.close()
