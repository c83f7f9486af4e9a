"""The lines of a trace file: JSON objects, each with its kind under ``"is"``. docs/trace.md describes them.

::

    start (begin (step ...) end cut?)      several requests at once; a file that is appended to has several starts
"""

from __future__ import annotations

from typing import Any

import msgspec

VERSION = 1


class Start(msgspec.Struct, tag="start", tag_field="is", kw_only=True):
    """An engine began. at: seconds since 1970. engine: what runs. text: whether the lines hold token ids.

    cost: rows of a pass of the target and its seconds, as measured at start-up.
    """

    version: int
    foresay: str
    at: float
    text: bool
    engine: dict[str, Any]
    cost: list[tuple[int, float]]


class Begin(msgspec.Struct, tag="begin", tag_field="is", kw_only=True):
    """A request was queued. prompt: its tokens, counted; resumed: the output that an engine before wrote, counted;
    tokens: all of them. limit: tokens that it may reach, with the prompt. speculate: false if the request switched it
    off. aside: the server asks for itself, to check an answer."""

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

    root: the position of the root, counted from the prompt's first token. lead: rows of the prompt that were computed;
    a step that only does that has no nodes. parents: of the nodes; the first ``forced`` below the root were forced by a
    grammar. drawn: which child of the node has the token that was drawn there; -1 if none has. chances: to be accepted,
    as the drafter saw them, if it said. accepted: drafted tokens that went out; emitted: all that went out. tokens,
    draws: token ids, if they were asked for.
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


class Choice(msgspec.Struct, kw_only=True):
    """Why a step drafted what it did: who does, whether only to be seen (``probe``), and all that was weighed, the
    choice first: drafter, nodes, tokens expected of the step, milliseconds expected of it."""

    drafter: str
    probe: bool
    weighed: list[tuple[str, int, float, float]]


class Step(msgspec.Struct, tag="step", tag_field="is", kw_only=True):
    """One step of the engine. at: when it was written down. ms: milliseconds by phase. rows: computed by the target.

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
    choice: Choice | None = None


class End(msgspec.Struct, tag="end", tag_field="is", kw_only=True):
    """A request is over. tokens: of its text; what its steps emitted beyond that was discarded."""

    id: str
    at: float
    reason: str
    tokens: int
    preemptions: int = 0


class Cut(msgspec.Struct, tag="cut", tag_field="is", kw_only=True):
    """A request that was over by itself had a stop string in its last run: its text has so many tokens."""

    id: str
    tokens: int


Record = Start | Begin | Step | End | Cut
