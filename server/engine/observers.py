"""Observers of an engine that settings enable: the trace and the draft history.

Trace lines are written to the file about once a second: on a local disk that takes microseconds. A file system that
blocks writers (a network file system, say) delays the next step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

import foresay
from foresay.server.engine.history import HistoryWriter
from foresay.server.engine.trace import VERSION, Begin, Cut, DraftChoice, End, EngineStart, Part, Record, Step
from foresay.server.settings.config import EngineConfig
from foresay.spec.budget import CostModel
from foresay.spec.engine import Engine
from foresay.spec.errors import ConfigurationError
from foresay.spec.observer import Observer
from foresay.spec.request import EngineInfo
from foresay.spec.sequence import SequenceState
from foresay.spec.step import VerifyResult
from foresay.spec.trace import StepTrace

#: Lines are buffered for at most this long, or until they fill this many bytes.
FLUSH_SECONDS = 1.0
BUFFER_BYTES = 1 << 16
log = logging.getLogger("foresay.engine")


def opened(path: str) -> BinaryIO:
    """Open a file to append to; a new one is readable only by its owner. Raises ConfigurationError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(Path(path).expanduser(), flags, 0o600)
    except OSError as error:
        raise ConfigurationError(f"--trace {path}: cannot be written ({error.strerror})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)  # a slow reader of a pipe would stall the engine
        raise ConfigurationError(f"--trace {path}: is not a file that can be appended to")
    file = os.fdopen(descriptor, "ab", buffering=BUFFER_BYTES)
    if _ends_in_half_a_line(path):
        file.write(b"\n")
    return file


def _ends_in_half_a_line(path: str) -> bool:
    """Whether the last writer was killed, or the disk was full."""
    with Path(path).expanduser().open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class Lines:
    """Appends lines. After a write error it stops, with a warning in the log."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: BinaryIO | None = opened(path)
        self._flushed = time.monotonic()

    def append(self, line: bytes) -> None:
        """Write a line; it reaches the file within a second if more follow, else with the next :meth:`flush`."""
        if self._file is None:
            return
        try:
            self._file.write(line + b"\n")
        except OSError as error:
            self._give_up(error)
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the buffer to the file."""
        self._flushed = time.monotonic()
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Flush and close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, error: OSError) -> None:
        log.warning("the trace ends here: %s cannot be written any more (%s)", self._path, error.strerror)
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # closing tries to write the rest again
                file.close()


class TraceWriter(Observer):
    """Appends a line for each event. text: whether token ids are included; without them the trace does not reveal any
    text.
    """

    def __init__(self, lines: Lines, text: bool) -> None:
        self._lines, self._text = lines, text
        self._encoder = msgspec.json.Encoder()

    def started(self, info: EngineInfo, cost: CostModel) -> None:
        """An engine is ready. cost: what its passes take."""
        self._write(
            EngineStart(
                version=VERSION,
                foresay=foresay.__version__,
                at=time.time(),
                text=self._text,
                engine=msgspec.to_builtins(info),
                cost=[(rows, round(seconds, 7)) for rows, seconds in cost.points],
            )
        )
        self._lines.flush()

    def begun(self, sequence: SequenceState) -> None:
        """A request was queued."""
        self._write(
            Begin(
                id=sequence.id,
                at=time.time(),
                prompt=sequence.prompt_length,
                resumed=sequence.resumed_at,
                limit=sequence.limit,
                temperature=sequence.sampling.temperature,
                speculate=sequence.speculate,
                grammar=sequence.constraint is not None,
                aside=sequence.aside,
                tokens=list(sequence.tokens) if self._text else None,
            )
        )

    def stepped(self, trace: StepTrace, results: Sequence[VerifyResult]) -> None:
        """A step is over."""
        self._write(
            Step(
                number=trace.number,
                at=time.time(),
                ms={phase: round(1000 * seconds, 4) for phase, seconds in trace.seconds.items()},
                rows=trace.rows,
                running=trace.running,
                waiting=trace.waiting,
                pages=trace.pages,
                parts=[self._part(result) for result in results],
                choice=_choice(results),
            )
        )

    def ended(self, sequence: SequenceState) -> None:
        """A request is over."""
        self._write(
            End(
                id=sequence.id,
                at=time.time(),
                reason=sequence.finish_reason or "",
                tokens=sequence.output_length,
                preemptions=sequence.trace.preemptions,
            )
        )
        self._lines.flush()

    def cut(self, id: str, at_token: int) -> None:
        """The text of a request that is over is shorter than what it emitted."""
        self._write(Cut(id=id, tokens=at_token))
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()

    def _part(self, result: VerifyResult) -> Part:
        sequence, tree, drawn = result.scheduled.sequence, result.tree, list(result.sampled)
        root = len(sequence.tokens) - len(result.emitted) - 1
        if tree is None:
            return Part(id=sequence.id, root=root, lead=result.scheduled.prefill, parents=[], drawn=[])
        tokens, parents = tree.tokens, tree.parents
        children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
        return Part(
            id=sequence.id,
            root=root,
            lead=result.scheduled.prefill,
            drafter=tree.drafter,
            parents=parents,
            drawn=[children.get(edge, -1) for edge in enumerate(drawn)],
            chances=[round(chance, 4) for chance in tree.chances] if len(tree.chances) == len(tokens) else [],
            forced=result.forced,
            accepted=result.accepted,
            emitted=len(result.emitted),
            tokens=tokens if self._text else None,
            draws=drawn if self._text else None,
        )

    def _write(self, record: Record) -> None:
        self._lines.append(self._encoder.encode(record))


def _choice(results: Sequence[VerifyResult]) -> DraftChoice | None:
    """The budget's choice, which is the same for all sequences of a step."""
    for result in results:
        if (why := result.scheduled.plan.why) is not None:
            weighed = [(one.drafter, one.nodes, round(one.tokens, 3), round(one.ms, 3)) for one in why.weighed]
            return DraftChoice(drafter=why.choice, probe=why.probe, weighed=weighed)
    return None


@dataclass(slots=True)
class EngineObservers:
    """The observers of one engine."""

    trace: TraceWriter | None = None
    history: HistoryWriter | None = None

    @classmethod
    def of(cls, config: EngineConfig) -> EngineObservers:
        """Make those that the settings enable. Raises ConfigurationError for a trace that cannot be written."""
        trace = None if config.trace is None else TraceWriter(Lines(config.trace), config.trace_text)
        history = None if config.draft_history is None else HistoryWriter(config.draft_history)
        return cls(trace, history)

    @property
    def observers(self) -> list[Observer]:
        """The enabled observers."""
        return [observer for observer in (self.trace, self.history) if observer is not None]

    def started(self, engine: Engine) -> None:
        """The engine is ready."""
        if self.trace is not None:
            self.trace.started(engine.info, engine.scheduler.cost)
        if self.history is not None:
            self.history.started(engine)

    def close(self) -> None:
        if self.trace is not None:
            self.trace.close()
        if self.history is not None:
            self.history.close()
