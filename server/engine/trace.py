"""The lines of a trace file: JSON objects, each with its kind under ``"is"``; and the reader (docs/trace.md).

::

    start (begin (step ...) end cut?)      requests may overlap; appending to a file gives several starts
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from foresay.spec.errors import ConfigurationError
from foresay.spec.trace import SequenceTrace, depths_of

VERSION = 1


class EngineStart(msgspec.Struct, tag="start", tag_field="is", kw_only=True):
    """An engine started. at: seconds since 1970. engine: its info. text: whether the lines hold token ids.

    cost: rows of a pass of the target and its seconds, as measured at start-up.
    """

    version: int
    foresay: str
    at: float
    text: bool
    engine: dict[str, Any]
    cost: list[tuple[int, float]]


class Begin(msgspec.Struct, tag="begin", tag_field="is", kw_only=True):
    """A request was queued. prompt: number of its tokens; resumed: number of output tokens from a previous engine;
    tokens: all of them. limit: most tokens, including the prompt. speculate: false if the request switched it off.
    aside: a self-check of the server."""

    id: str
    at: float
    prompt: int
    resumed: int = 0
    limit: int
    temperature: float
    speculate: bool = True
    grammar: bool = False
    aside: bool = False
    tokens: list[int] | None = None


class Part(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sequence's part in a step. Lists are by node of its tree, the root first.

    root: the position of the root, counted from the prompt's first token. lead: prefill rows; a step with only those
    has no nodes. parents: of the nodes; the first ``forced`` below the root were forced by a grammar. drawn: which
    child of the node has the token sampled there; -1 if none. chances: the drafter's estimates of acceptance, if any.
    accepted: accepted draft tokens that were emitted; emitted: all emitted tokens. tokens, draws: token ids, if
    requested.
    """

    id: str
    root: int
    parents: list[int]
    drawn: list[int]
    lead: int = 0
    drafter: str = ""
    chances: list[float] = []
    forced: int = 0
    accepted: int = 0
    emitted: int = 0
    tokens: list[int] | None = None
    draws: list[int] | None = None


class DraftChoice(msgspec.Struct, kw_only=True):
    """Why a step drafted what it did: the drafter, whether it was only exploration (``probe``), and all options, the
    chosen one first: drafter, nodes, expected tokens and milliseconds of the step."""

    drafter: str
    probe: bool
    weighed: list[tuple[str, int, float, float]]


class Step(msgspec.Struct, tag="step", tag_field="is", kw_only=True):
    """One step of the engine. at: when it was recorded. ms: milliseconds by phase. rows: computed by the target.

    choice: of the budget, if there is one and the step could draft.
    """

    number: int
    at: float
    ms: dict[str, float]
    rows: int
    running: int
    waiting: int
    pages: int
    parts: list[Part]
    choice: DraftChoice | None = None


class End(msgspec.Struct, tag="end", tag_field="is", kw_only=True):
    """A request has ended. tokens: of its text; tokens emitted beyond that were discarded."""

    id: str
    at: float
    reason: str
    tokens: int
    preemptions: int = 0


class Cut(msgspec.Struct, tag="cut", tag_field="is", kw_only=True):
    """A request that had ended by itself had a stop string in its last step: its text has ``tokens`` tokens."""

    id: str
    tokens: int


Record = EngineStart | Begin | Step | End | Cut


_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


@dataclass(slots=True)
class TracedRequest:
    """One request as recorded in the trace. parts: of the steps in which something was sampled. text: tokens of its
    text; None if it was still running when the trace ended."""

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
        """Emitted tokens that are in its text."""
        return self.emitted if self.text is None else min(self.text - self.begin.resumed, self.emitted)

    def counts(self) -> SequenceTrace:
        """The engine's counters for this request, recomputed."""
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
    """One engine's records. requests: by id, in order of arrival."""

    start: EngineStart
    steps: list[Step] = field(default_factory=list)
    requests: dict[str, TracedRequest] = field(default_factory=dict)


@dataclass(slots=True)
class Trace:
    """A whole file. broken: number of invalid lines, as a crash or a full disk leaves them."""

    sessions: list[Session] = field(default_factory=list)
    broken: int = 0


def read(path: Path) -> Trace:
    """Read a trace. Raises ConfigurationError for a file that is not a trace, or has another version."""
    trace = Trace()
    try:
        with path.open("rb") as file:
            for line in file:
                _take(trace, line, path)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror})") from error
    if not trace.sessions:
        raise ConfigurationError(f"{path}: is not a trace; foresay serve --trace FILE writes one")
    return trace


def _take(trace: Trace, line: bytes, path: Path) -> None:
    try:
        record = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        trace.broken += 1
        return
    if isinstance(record, EngineStart):
        if record.version != VERSION:
            raise ConfigurationError(f"{path}: is a trace of version {record.version}; this Foresay reads {VERSION}")
        trace.sessions.append(Session(record))
    elif trace.sessions:
        _add(trace.sessions[-1], record)


def _add(session: Session, record: Begin | Step | End | Cut) -> None:
    if isinstance(record, Begin):
        session.requests[record.id] = TracedRequest(record)
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


def drafting(session: Session) -> Iterator[TracedRequest]:
    """The requests that did not switch speculation off, and emitted something."""
    return (request for request in session.requests.values() if request.begin.speculate and request.parts)
