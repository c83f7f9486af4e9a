"""The parser of one answer, driven by a script, and tool calls while they are read.

A tool call is emitted as soon as its name is known and its arguments begin. From then on it stays a call, whatever
follows; before that, it may still turn out to be text. Wherever it ends, its arguments are the JSON of an object.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from typing import Any

from foresay.server.text.parsers.script import Broken, OutputOver, Reader, Script, object_of, string, text_of, value
from foresay.server.text.parts import Part, ReasoningPart, TextPart, ToolCallPart

#: Models' names for the arguments.
ARGUMENTS = ("arguments", "parameters")


class Call:
    """Collects and emits one call. certain: called once it is certainly a call. known: accepted names; None: any."""

    def __init__(
        self,
        index: int,
        id: str,
        emit: Callable[[Part], None],
        certain: Callable[[], None],
        known: Container[str] | None = None,
    ) -> None:
        self.begun = False
        self.given = False
        self.name: str | None = None
        self.id = id
        self._index, self._emit, self._certain, self._known = index, emit, certain, known
        self._early: list[str] = []

    def named(self, name: str) -> None:
        """Set its name. Raises :class:`Broken` for one that cannot be called."""
        if not name or (self._known is not None and name not in self._known):
            raise Broken
        if self.name is None:
            self.name = name
        if self._early:
            self.begin()

    def write(self, text: str) -> None:
        """Add to its arguments."""
        self.given = True
        if self.name is None:
            self._early.append(text)
            return
        self.begin()
        if text:
            self._emit(ToolCallPart(index=self._index, arguments=text))

    def begin(self) -> None:
        """From now on it is certainly a call."""
        if not self.begun:
            self.begun = True
            self._certain()
            self._emit(ToolCallPart(index=self._index, id=self.id, name=self.name, arguments="".join(self._early)))

    def close(self) -> None:
        """The call is complete. Raises :class:`Broken` if it has no name."""
        if self.name is None:
            raise Broken
        if not self.given:
            self.write("{}")


class ParsedAnswer:
    """The output of a script: text, reasoning, and calls numbered in order.

    identify: gives call number i its id. offered: the offered functions by name, with the schemas of their arguments.
    parallel: whether there may be more than one call. free: whether calls of offered functions may lack tags.
    """

    def __init__(
        self,
        identify: Callable[[int], str],
        offered: Mapping[str, Mapping[str, Any]] | None = None,
        parallel: bool = True,
        free: bool = True,
    ) -> None:
        self.emitted: list[Part] = []
        self.free = free
        self.thinking = self.heading = False
        self.offered = offered or {}
        self.calls = 0
        self._identify, self._parallel = identify, parallel
        self._written: set[type[Part]] = set()
        self._apart: set[type[Part]] = set()

    def text(self, text: str) -> None:
        """More text."""
        self._add(TextPart, text)

    def reasoning(self, text: str) -> None:
        """Emit reasoning."""
        self._add(ReasoningPart, text)

    def apart(self) -> None:
        """What follows of the text, and of the reasoning, stands behind an empty line."""
        self._apart = set(self._written)

    def _add(self, kind: type[TextPart | ReasoningPart], text: str) -> None:
        self.emitted.append(kind("\n\n" + text if kind in self._apart else text))
        self._apart.discard(kind)
        self._written.add(kind)

    def parameters_of(self, name: str) -> Mapping[str, Any]:
        """The schemas of a function's parameters."""
        properties = self.offered.get(name, {}).get("properties")
        return properties if isinstance(properties, dict) else {}

    @property
    def full(self) -> bool:
        """Whether no further call is allowed."""
        return self.calls > 0 and not self._parallel

    def attempt(
        self, reader: Reader, read: Callable[[Reader, Call], Script[None]], known: Container[str] | None = None
    ) -> Script[bool]:
        """Read a call; returns whether there was one. If not, nothing is consumed. known: accepted names; None: any."""
        call = Call(self.calls, self._identify(self.calls), self.emitted.append, reader.forget, known)
        reader.mark()
        try:
            yield from read(reader, call)
        except Broken:
            pass
        except OutputOver:
            if call.name is not None:
                call.close()
                raise
        if not call.begun:
            reader.rewind()
            return False
        self.calls += 1
        return True

    def alone(self, reader: Reader, read: Callable[[Reader, Call], Script[None]]) -> Script[None]:
        """Read a call with which the output ends. If there is more of it, or less, nothing is consumed."""
        made: list[Part] = []
        call = Call(self.calls, self._identify(self.calls), made.append, lambda: None, self.offered)
        reader.mark(math.inf)
        whole = False
        try:
            yield from read(reader, call)
            whole = True
            yield from reader.ahead()
        except Broken:
            pass
        except OutputOver:
            if whole:
                self.emitted += made
                raise
        reader.rewind()


def json_call(reader: Reader, call: Call, name: str, names: Collection[str] = ()) -> Script[None]:
    """``{"name": ..., "arguments": {...}}``: the keys in any order, other keys ignored. name: the name's key. names: if
    given, it has both keys and no others, and one of these names."""
    yield from reader.expect("{")
    following = ","
    while following == ",":
        yield from _entry(reader, call, name, names)
        following = yield from reader.solid()
    if following != "}" or (names and not call.given):
        reader.unread(following)
        raise Broken
    call.close()


def _entry(reader: Reader, call: Call, name: str, names: Collection[str]) -> Script[None]:
    key = yield from _one_of((name, *ARGUMENTS) if names else (), reader)
    yield from reader.expect(":")
    if key == name:
        call.named((yield from _one_of(names, reader)))
    elif key in ARGUMENTS and not call.given:
        yield from arguments(reader, call)
    else:
        yield from value(reader, lambda _: None)


def _one_of(texts: Collection[str], reader: Reader) -> Script[str]:
    """A string; if there are ``texts``, one of them."""
    if not texts:
        return (yield from string(reader))
    return (yield from reader.one_of(tuple(f'"{text}"' for text in texts)))[1:-1]


def arguments(reader: Reader, call: Call, mark: str = "") -> Script[None]:
    """Arguments: an object, streamed; or an object inside a string; or null for none. mark: see :func:`value`."""
    first = yield from reader.ahead()
    if first in ("{", mark and "("):
        yield from value(reader, call.write, mark)
        return
    raw: list[str] = []
    over = False
    try:
        yield from value(reader, raw.append)
    except OutputOver:
        over = True
    text = "".join(raw)
    if first == '"' and text != '""':
        call.write(object_of(text_of(text) or ""))
    elif text not in ('""', "null") and not over:
        raise Broken
    if over:
        raise OutputOver


class ScriptParser:
    """An :class:`~foresay.server.text.parts.OutputParser` that runs a script, which emits into ``answer``.

    markers: the tags that are single special tokens, by id.
    """

    def __init__(
        self,
        answer: ParsedAnswer,
        script: Callable[[Reader, ParsedAnswer], Script[None]],
        markers: Mapping[int, str] | None = None,
    ) -> None:
        self.complete = False
        self._answer, self._tags = answer, dict(markers or {})
        self._script = script(Reader(), answer)
        next(self._script)

    @property
    def markers(self) -> frozenset[int]:
        return frozenset(self._tags)

    @property
    def thinking(self) -> bool:
        return self._answer.thinking

    @property
    def heading(self) -> bool:
        return self._answer.heading

    def feed(self, text: str) -> list[Part]:
        return self._sent(text)

    def marker(self, token: int) -> list[Part]:
        return self._sent([self._tags[token]])

    def flush(self) -> list[Part]:
        return self._sent([""])

    def _sent(self, atoms: Iterable[str]) -> list[Part]:
        try:
            for atom in atoms:
                self._script.send(atom)
        except (StopIteration, OutputOver):
            self.complete = True
        emitted = self._answer.emitted[:]
        self._answer.emitted.clear()
        return emitted
