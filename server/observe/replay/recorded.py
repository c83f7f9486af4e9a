"""Recorded trees cut down: what a smaller tree would have had accepted at the same roots.

The draws are recorded at every node, so at the root of a recorded tree any part of that tree can be judged exactly. The
roots themselves would lie elsewhere with other trees; that the recorded ones are like them is assumed. (docs/trace.md
says how far off that was.)
"""

from __future__ import annotations

from collections.abc import Iterable

from server.engine.trace.reader import Told
from server.engine.trace.records import Part
from server.observe.replay.ways import Outcome, Way
from spec.trace import depths_of


def judge(way: Way, requests: Iterable[Told]) -> Outcome:
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
