"""Reads a trace file back: engines one after the other, each with its steps and its requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from server.engine.trace.records import VERSION, Begin, Cut, End, Part, Record, Start, Step
from spec.errors import ConfigurationError
from spec.trace import SequenceTrace, depths_of

_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


@dataclass(slots=True)
class Told:
    """One request as the trace tells it. parts: of the steps in which something was drawn. text: tokens of its text;
    None while it ran when the trace ended."""

    begin: Begin
    parts: list[Part] = field(default_factory=list)
    end: End | None = None
    text: int | None = None

    @property
    def emitted(self) -> int:
        """Tokens that its steps emitted."""
        return sum(part.emitted for part in self.parts)

    @property
    def kept(self) -> int:
        """Those of them that are in its text."""
        return self.emitted if self.text is None else min(self.text - self.begin.resumed, self.emitted)

    def counts(self) -> SequenceTrace:
        """The counters that the engine kept of this request, made again."""
        trace = SequenceTrace()
        for part in self.parts:
            trace.record(depths_of(part.parents)[1:], part.accepted, part.emitted)
        trace.cut(self.emitted - self.kept)
        return trace

    def output(self) -> list[int] | None:
        """The token ids of its text; None if the trace holds none."""
        run: list[int] = []
        for part in self.parts:
            if part.draws is None:
                return None
            node = 0
            for _ in range(part.emitted):
                run.append(part.draws[node])
                node = part.drawn[node]
        return run[: self.kept]


@dataclass(slots=True)
class Session:
    """One engine's life. requests: by id, in order of arrival."""

    start: Start
    steps: list[Step] = field(default_factory=list)
    requests: dict[str, Told] = field(default_factory=dict)


@dataclass(slots=True)
class Trace:
    """A whole file. broken: lines that are no records, as a crash or a full disk leaves them."""

    sessions: list[Session] = field(default_factory=list)
    broken: int = 0


def read(path: Path) -> Trace:
    """Read a trace. Raises ConfigurationError for a file that is none, or of another version."""
    trace = Trace()
    try:
        with path.open("rb") as file:
            for line in file:
                _take(trace, line, path)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror})") from error
    if not trace.sessions:
        raise ConfigurationError(f"{path}: is no trace; foresay serve --trace FILE writes one")
    return trace


def _take(trace: Trace, line: bytes, path: Path) -> None:
    try:
        record = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        trace.broken += 1
        return
    if isinstance(record, Start):
        if record.version != VERSION:
            raise ConfigurationError(f"{path}: is a trace of version {record.version}; this Foresay reads {VERSION}")
        trace.sessions.append(Session(record))
    elif trace.sessions:
        _told(trace.sessions[-1], record)


def _told(session: Session, record: Begin | Step | End | Cut) -> None:
    if isinstance(record, Begin):
        session.requests[record.id] = Told(record)
        return
    if isinstance(record, Step):
        session.steps.append(record)
        for part in record.parts:
            if part.parents and part.emitted and part.id in session.requests:
                session.requests[part.id].parts.append(part)
        return
    request = session.requests.get(record.id)
    if request is not None:
        request.end = record if isinstance(record, End) else request.end
        request.text = record.tokens


def drafting(session: Session) -> Iterator[Told]:
    """The requests that did not switch speculation off, and emitted something."""
    return (told for told in session.requests.values() if told.begin.speculate and told.parts)
