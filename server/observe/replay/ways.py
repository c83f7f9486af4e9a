"""The ways of drafting that a trace can be evaluated for, and what recorded texts and trees say of them.

The draws are recorded at every node, so at the root of a recorded tree any part of that tree can be judged exactly. The
roots themselves would lie elsewhere with other trees; that the recorded ones are like them is assumed. (docs/trace.md
says how far off that was.)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from foresay.kvpaging import PagePool, PageTable
from foresay.server.engine.drafters.registry import LOOKUPS
from foresay.server.engine.trace import Part, Told
from foresay.spec.errors import ConfigurationError
from foresay.spec.names import NONE
from foresay.spec.noise import Noise
from foresay.spec.sampling import SamplingParams
from foresay.spec.sequence import SequenceState
from foresay.spec.trace import depths_of
from foresay.spec.tree import MAX_NODES, TreeShape
from foresay.spec.walk import Walk

RECORDED = "recorded"


@dataclass(frozen=True, slots=True)
class Way:
    """How to draft. text: as it was asked for. source: ``"none"``, ``"recorded"`` or a lookup drafter.

    shape: the tree, None for the recorded one whole; most: drafted nodes kept of it, the likeliest, None for all.
    """

    text: str
    source: str
    shape: TreeShape | None = None
    most: int | None = None


def parse(text: str) -> Way:
    """Read ``none``, ``recorded``, ``recorded:4``, ``recorded:3,2,1``, ``recorded@8``, ``ngram`` or ``suffix:6``.

    Raises ConfigurationError saying what is known, for anything else.
    """
    source = text.partition(":")[0].partition("@")[0]
    rest = text[len(source) :]
    if source == NONE and not rest:
        return Way(text, NONE)
    if source == RECORDED:
        return _recorded(text, rest)
    if source in LOOKUPS and not rest.startswith("@"):
        return Way(text, source, TreeShape.chain(_count(text, rest[1:]) if rest else 4))
    known = ", ".join(f"{name}:4" for name in LOOKUPS)
    raise ConfigurationError(
        f"--draft {text}: expected none, recorded (as it was), recorded:4 (a chain), recorded:3,2,1 (a tree), "
        f"recorded@8 (its 8 likeliest nodes) or {known}"
    )


def _recorded(text: str, rest: str) -> Way:
    if not rest:
        return Way(text, RECORDED)
    if rest.startswith("@"):
        return Way(text, RECORDED, most=_count(text, rest[1:]))
    if "," in rest:
        return Way(text, RECORDED, TreeShape.parse(rest[1:]))
    return Way(text, RECORDED, TreeShape.chain(_count(text, rest[1:])))


def _count(text: str, count: str) -> int:
    if count.isdecimal() and 0 < int(count) < MAX_NODES:
        return int(count)
    raise ConfigurationError(f"--draft {text}: expected a number from 1 to {MAX_NODES - 1}, got {count!r}")


def usual(levels: int, nodes: int, text: bool) -> list[Way]:
    """What is evaluated if nobody says: the recorded trees, as chains of each length, and with fewer nodes; lookups if
    the trace has the text. levels, nodes: the most that was drafted in a step."""
    names = [NONE, RECORDED]
    if nodes > levels:
        names += [f"{RECORDED}@{most}" for most in (2, 4, 8, 16, 32) if most < nodes]
    names += [f"{RECORDED}:{length}" for length in range(1, levels + (nodes > levels))]
    names += [f"{name}:{length}" for name in LOOKUPS for length in (2, 4, 8) if text]
    return [parse(name) for name in names]


# -- what a way would have done, counted -------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    """Counts over the steps that were judged. sizes: steps by (drafted nodes, levels). seconds: spent drafting, where
    that was done again. short: steps whose recorded tree had fewer levels or nodes than were asked for, so that the
    accepted tokens may be too few.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    seconds: float | None = None
    short: int = 0

    @property
    def tokens_per_step(self) -> float:
        """Of one request: the accepted tokens and the target's own."""
        return 1 + self.accepted / self.steps if self.steps else 1.0

    @property
    def drafts(self) -> int:
        """Steps that drafted anything."""
        return sum(times for (drafted, _), times in self.sizes.items() if drafted)

    def count(self, drafted: int, levels: int, accepted: int) -> None:
        """One step."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.sizes[drafted, levels] += 1
        self.accepted_per_depth.extend([0] * (accepted - len(self.accepted_per_depth)))
        for depth in range(accepted):
            self.accepted_per_depth[depth] += 1


def judge_recorded(way: Way, requests: Iterable[Told]) -> Outcome:
    """Judge a way whose source is the recorded trees."""
    outcome = Outcome()
    whole = way.shape is None and way.most is None
    for told in requests:
        left = told.kept
        for part in told.parts:
            # Steps that computed the prompt could not draft; those that measure plain decoding were not to draft.
            if not part.lead and (whole or part.drafter or part.forced):
                _judge(way, part, left, outcome)
            left -= part.emitted
    return outcome


def _judge(way: Way, part: Part, left: int, outcome: Outcome) -> None:
    depths = depths_of(part.parents)
    kept = _kept(way, part, depths)
    path = _path(part, kept)
    accepted = max(0, min(path, part.emitted, left))
    levels = max((depths[node] for node in kept), default=0)
    outcome.count(len(kept), levels, accepted)
    outcome.short += _is_short(way, len(kept), levels)


def _kept(way: Way, part: Part, depths: list[int]) -> set[int]:
    """The drafted nodes that the way would have had, as far as they are recorded. What a grammar forced is free."""
    nodes = range(1, len(part.parents))
    if way.shape is None and way.most is None:
        return set(nodes)
    chances = part.chances or [0.0] * len(part.parents)
    best = sorted(nodes, key=lambda node: (-chances[node], node))
    if way.most is not None:
        # A node is no likelier than its parent, and comes behind it: so the parent is among them too.
        return {*range(1, part.forced + 1), *best[: way.most]}
    assert way.shape is not None
    return _shaped(way.shape.widths, part, depths, best)


def _shaped(widths: tuple[int, ...], part: Part, depths: list[int], best: list[int]) -> set[int]:
    """The likeliest nodes of each depth below kept ones, so many as the depth may have."""
    kept = set(range(1, part.forced + 1))
    for level, width in enumerate(widths, start=1):
        room = width - sum(depths[node] == level for node in kept)
        below = (n for n in best if depths[n] == level and n not in kept and (level == 1 or part.parents[n] in kept))
        kept |= {node for node, _ in zip(below, range(max(room, 0)), strict=False)}
    return kept


def _path(part: Part, kept: set[int]) -> int:
    """How far the draws go inside the kept nodes."""
    node, length = part.drawn[0], 0
    while node in kept:
        node, length = part.drawn[node], length + 1
    return length


def _is_short(way: Way, nodes: int, levels: int) -> bool:
    if way.most is not None:
        return nodes < way.most
    return way.shape is not None and (levels < way.shape.levels or nodes < way.shape.nodes - 1)


#: Tokens of a prompt that the engine reads in a step, about: a drafter is shown as many at a time.
_CHUNK = 256


def judge_lookups(way: Way, requests: Iterable[Told]) -> Outcome:
    """Draft again, with one drafter for all requests but those with a grammar, which prunes what is drafted and forces
    more. Raises ConfigurationError if the trace has no text."""
    assert way.shape is not None, "a lookup drafter is told how far ahead to draft"
    drafter, outcome, seconds = LOOKUPS[way.source](), Outcome(), 0.0
    for told in requests:
        if told.begin.grammar:
            continue
        text, prompt = told.output(), told.begin.tokens
        if text is None or prompt is None:
            raise ConfigurationError(
                f"--draft {way.text}: the trace holds no tokens to look up; record one with --trace-text"
            )
        walk = Walk(drafter, way.shape, _sequence(told, prompt))
        for _ in range(len(prompt) // _CHUNK):
            walk.read()
        # The step that computes the prompt drafts nothing, whoever drafts.
        walk.begin(text[: told.parts[0].emitted] if told.parts[0].lead else [])
        begun = time.perf_counter()
        walk.follow([*prompt, *text], over=True)
        seconds += time.perf_counter() - begun
        walk.close()
        for drafted, accepted in zip(walk.trace.per_step_drafted, walk.trace.per_step_accepted, strict=True):
            outcome.count(drafted, drafted, accepted)
    outcome.seconds = seconds
    return outcome


def _sequence(told: Told, prompt: list[int]) -> SequenceState:
    """The request as far as a lookup drafter looks at it."""
    return SequenceState(
        id=told.begin.id,
        tokens=prompt,
        prompt_length=len(prompt),
        sampling=SamplingParams(),
        table=PageTable(PagePool(2)),
        noise=Noise(0, 1),
        limit=told.begin.limit,
        stop_ids=frozenset(),
    )
