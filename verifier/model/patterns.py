"""Patterns of module names in a checkpoint's config.json: they say what ``re.match`` says, in time that is bounded.

Anybody may have written a checkpoint, and with some patterns ``re`` never ends (``([a-z_.]+)+!``). Here a pattern is an
automaton, and all states that a name's beginning leads to are followed at once, one step for each character. What no
automaton can do (references to groups, lookbehind, flags) is refused by name, and so is lookahead that does not come
first. Imports no torch.

::

    re:.*mlp.gate$       ┌any┐
                         0 ──┴─ m ─ l ─ p ─ any ─ g ─ a ─ t ─ e ─ (end of the name) ─> goal
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

#: Characters that all patterns of a list may have together, and what a pattern of so many may become.
MOST_CHARACTERS, _STATES_BESIDE, _STATES_EACH = 8000, 64, 4
_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\\\]])*\]|\(\?(?:P<\w+>|P=|<?[=!]|[:>#])?|[*+?]\??|\{(?:\d*,\d*|\d+)\}\??|.", re.DOTALL
)
_GROUP = re.compile(r"\(|\(\?:|\(\?P<\w+>")
_QUANTIFIER = re.compile(r"([*+?])\??|\{(\d*)(,?)(\d*)\}\??")
#: What is compared with one character: a set, a class, or a character itself (any, if it is a dot).
_ONE = re.compile(r"\[.+\]|\\[dDwWsS\W_]|[^\\()|*+?]", re.DOTALL)
_ANCHORS = frozenset({"^", "$", r"\A", r"\Z"})

#: Whether the character at a place of a name is right, or the place.
Test = Callable[[str, int], object]
#: Adds to the automaton what leads on from a state; returns where it leads to.
Part = Callable[[int], int]


class Pattern:
    """One pattern. Raises ValueError, which says what is wrong with it, for one that is none or is not supported."""

    def __init__(self, text: str) -> None:
        self._tokens, self._place, self._depth, self._first = [*_TOKEN.findall(text), ""], 0, 0, True
        self._most = _STATES_BESIDE + _STATES_EACH * len(text)
        self._steps: list[list[tuple[Test, int]]] = []
        self._free: list[list[tuple[Test | None, int]]] = []
        self._known: dict[tuple[frozenset[int], str, bool], frozenset[int]] = {}
        try:
            re.compile(text)
            self._start = self._state()
            self._goal = self._choice()(self._start)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"is no pattern ({error})") from None

    def matches(self, name: str) -> bool:
        """Whether it matches a beginning of the name."""
        return self._leads(self._start, self._goal, name)

    # -- following -----------------------------------------------------------------------------------------------

    def _leads(self, start: int, goal: int, name: str) -> bool:
        """Whether a beginning of the name leads from one state to the other."""
        now, at = self._spread((start,), name, 0), 0
        while now and goal not in now and at < len(name):
            now, at = self._step(now, name, at), at + 1
        return goal in now

    def _step(self, states: frozenset[int], name: str, at: int) -> frozenset[int]:
        """The states after the character at this place."""
        key = states, name[at], at + 1 == len(name)
        found = self._known.get(key)
        if found is None:
            ends = [to for state in states for test, to in self._steps[state] if test(name, at)]
            found = self._known[key] = self._spread(ends, name, at + 1)
        return found

    def _spread(self, states: Iterable[int], name: str, at: int) -> frozenset[int]:
        """These states, and those that they lead to without a character."""
        waiting = list(states)
        found = set(waiting)
        while waiting:
            for test, to in self._free[waiting.pop()]:
                if to not in found and (test is None or test(name, at)):
                    found.add(to)
                    waiting.append(to)
        return frozenset(found)

    # -- reading -------------------------------------------------------------------------------------------------

    def _state(self) -> int:
        if len(self._steps) >= self._most:
            raise ValueError("repeats too much")
        self._steps.append([])
        self._free.append([])
        return len(self._steps) - 1

    def _choice(self) -> Part:
        """Sequences of which one is taken: up to the end, or the bracket that closes."""
        parts = [self._sequence()]
        while self._tokens[self._place] == "|":
            self._place += 1
            parts.append(self._sequence())

        def choice(state: int) -> int:
            end = self._state()
            for part in parts:
                self._free[part(state)].append((None, end))
            return end

        return choice

    def _sequence(self) -> Part:
        parts = []
        while self._tokens[self._place] not in ("", "|", ")"):
            parts.append(self._repeated(self._item()))

        def sequence(state: int) -> int:
            for part in parts:
                state = part(state)
            return state

        return sequence

    def _repeated(self, item: Part) -> Part:
        """The item as often as the quantifier after it says; whether more or fewer are tried first does not matter."""
        found = _QUANTIFIER.fullmatch(self._tokens[self._place])
        if found is None:
            return item
        self._place += 1
        least, most = _often(found)

        def repeated(state: int) -> int:
            for _ in range(least):
                state = item(state)
            end = self._state()
            self._free[state].append((None, end))
            if most is None:
                self._free[item(end)].append((None, end))
            for _ in range((most or 0) - least):
                state = item(state)
                self._free[state].append((None, end))
            return end

        return repeated

    def _item(self) -> Part:
        """A group, an anchor, a character."""
        token = self._tokens[self._place]
        self._place += 1
        if token in _ANCHORS:
            return self._edge(self._free, re.compile(token).match)
        ahead = token in ("(?=", "(?!") and self._first and not self._depth
        self._first = self._first and ahead
        if ahead:
            return self._lookahead(token == "(?=")
        if _GROUP.fullmatch(token):
            return self._closed()
        if not _ONE.fullmatch(token):
            raise ValueError(f"has {token}, which is not supported there")
        return self._edge(self._steps, re.compile(token).match)

    def _closed(self) -> Part:
        """What is between brackets."""
        self._depth += 1
        inside = self._choice()
        self._depth -= 1
        self._place += 1
        return inside

    def _lookahead(self, wanted: bool) -> Part:
        inside, start = self._closed(), self._state()
        goal, self._first = inside(start), True
        return self._edge(self._free, lambda name, at: self._leads(start, goal, name) is wanted)

    def _edge(self, edges: list[list[tuple[Test, int]]] | list[list[tuple[Test | None, int]]], test: Test) -> Part:
        """On to another state if the test says so: with a character or without."""

        def edge(state: int) -> int:
            end = self._state()
            edges[state].append((test, end))
            return end

        return edge


def _often(found: re.Match[str]) -> tuple[int, int | None]:
    """How often at least and at most, by a quantifier."""
    sign, least, comma, most = found.groups()
    if sign is not None:
        return int(sign == "+"), 1 if sign == "?" else None
    return int(least or 0), int(most) if most else None if comma else int(least)


@lru_cache(maxsize=1024)
def pattern(text: str) -> Pattern:
    """The pattern, made once."""
    return Pattern(text)
