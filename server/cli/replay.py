"""``foresay replay``: what lookup drafters would have had accepted in the texts of a recorded trace."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from foresay.server.cli.command import JSON, argument, command
from foresay.server.engine.trace import Session, Trace, TracedRequest, drafting, read
from foresay.spec.errors import ConfigurationError
from foresay.spec.sampling import SamplingParams
from foresay.spec.tree import DraftTree, TreeShape

if TYPE_CHECKING:
    from foresay.spec.protocols import Drafter
    from foresay.spec.sequence import SequenceState

#: Draft lengths of the lookups.
LENGTHS = (2, 4, 8)
#: Approximate prefill tokens per step: drafters are given as many at a time.
_CHUNK = 256


class Row(msgspec.Struct):
    """Counts of one way of drafting, over the steps without prefill."""

    draft: str
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def count(self, drafted: int, accepted: int) -> None:
        """Count one step of one request."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step, including the target's own."""
        return 1 + self.accepted / self.steps if self.steps else 1.0


@command(None, name="replay")
@argument("file", metavar="FILE", help="a trace that foresay serve --trace FILE --trace-text has written")
@JSON
def run(config: None, arguments: Namespace) -> int:
    """Draft again with lookups on a recorded trace.

    foresay replay trace.jsonl
    foresay replay trace.jsonl --json
    """
    if not Path(arguments.file).is_file():
        raise ConfigurationError(f"{arguments.file}: no such file")
    from foresay.server.engine.drafters.registry import LOOKUPS

    trace = read(Path(arguments.file))
    if trace.broken:
        print(f"{arguments.file}: left out {trace.broken} broken lines", file=sys.stderr)
    requests = [request for session in _alike(trace) for request in drafting(session)]
    if not requests:
        raise ConfigurationError(f"{arguments.file}: contains no request that could be drafted for")
    rows = [recorded(requests)]
    rows += [looked_up(name, length, requests) for name in LOOKUPS for length in LENGTHS]
    print(msgspec.json.encode({"rows": rows}).decode() if arguments.json else _shown(rows, len(requests)))
    return 0


def _alike(trace: Trace) -> list[Session]:
    """The sessions with the same models as the last one: figures of different pairs cannot be added up."""
    last = trace.sessions[-1].start.engine
    same = [s for s in trace.sessions if all(s.start.engine.get(k) == last.get(k) for k in ("target", "drafter"))]
    left_out = len(trace.sessions) - len(same)
    if left_out:
        print(f"left out {left_out} of {len(trace.sessions)} runs, which had other models", file=sys.stderr)
    return same


def recorded(requests: Iterable[TracedRequest]) -> Row:
    """The recorded counts."""
    row = Row("recorded")
    for request in requests:
        left = request.kept
        for part in request.parts:
            if not part.lead:
                row.count(len(part.parents) - 1, max(0, min(part.accepted, left)))
            left -= part.emitted
    return row


def looked_up(name: str, length: int, requests: Iterable[TracedRequest]) -> Row:
    """Draft again with one lookup drafter for all requests, except those with a grammar, which prunes drafts and forces
    tokens. Raises ConfigurationError if the trace has no text."""
    from foresay.server.engine.drafters.registry import LOOKUPS

    drafter, row = LOOKUPS[name](), Row(f"{name}:{length}")
    for request in requests:
        if request.begin.grammar:
            continue
        text, prompt = request.output(), request.begin.tokens
        if text is None or prompt is None:
            raise ConfigurationError("the trace holds no tokens to look up; record one with --trace-text")
        sequence = _sequence(request, prompt)
        for _ in range(len(prompt) // _CHUNK):
            drafter.extend(sequence)
        # The step that completes the prefill drafts nothing.
        sequence.tokens.extend(text[: request.parts[0].emitted] if request.parts[0].lead else [])
        _walk(drafter, TreeShape.chain(length), sequence, [*prompt, *text], row)
        sequence.finish_reason = "stop"
        drafter.finished(sequence)
    return row


def _walk(drafter: Drafter, shape: TreeShape, sequence: SequenceState, tokens: list[int], row: Row) -> None:
    """Count the steps to the end of ``tokens``, exactly: at each root the drafter proposes, the text says what is
    accepted, and the next root is one past that."""
    while len(sequence.tokens) < len(tokens):
        levels = shape.limited(sequence.most_levels)
        root = DraftTree.chain([sequence.tokens[-1]])
        tree = drafter.propose([sequence], [levels])[0] if levels.levels else root
        ahead = tokens[len(sequence.tokens) : len(sequence.tokens) + max(tree.depths) + 1]
        accepted = tree.accepted(ahead)
        row.count(len(tree.tokens) - 1, accepted)
        sequence.tokens.extend(ahead[: accepted + 1])


def _sequence(request: TracedRequest, prompt: list[int]) -> SequenceState:
    """The request's state, as far as a lookup drafter needs it."""
    from foresay.kvpaging import PagePool, PageTable
    from foresay.spec.sample import Noise
    from foresay.spec.sequence import SequenceState

    return SequenceState(
        id=request.begin.id,
        tokens=list(prompt),
        prompt_length=len(prompt),
        sampling=SamplingParams(),
        table=PageTable(PagePool(2)),
        noise=Noise(0, 1),
        limit=request.begin.limit,
        stop_ids=frozenset(),
    )


def _shown(rows: list[Row], requests: int) -> str:
    lines = [f"{requests} requests", "", f"{'draft':<12} {'tokens/step':>11} {'drafted/step':>12} {'accepted':>8}"]
    for row in rows:
        accepted = f"{row.accepted / row.drafted:.0%}" if row.drafted else "-"
        drafted = row.drafted / max(row.steps, 1)
        lines.append(f"{row.draft:<12} {row.tokens_per_step:>11.2f} {drafted:>12.1f} {accepted:>8}")
    return "\n".join(lines)
