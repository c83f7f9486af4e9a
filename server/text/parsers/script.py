"""Parsers written as straight-line generators that read one character at a time, and emit into an answer.

A script cannot see how the output was cut into pieces, so its result depends only on the whole. It reads atoms: single
characters, and marker tokens as whole tags (``[TOOL_CALLS]``). A tool call is emitted as soon as its name is known and
its arguments begin. From then on it stays a call, whatever follows; before that, it may still turn out to be text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Generator, Iterable, Mapping
from typing import Any, TypeVar

from foresay.server.text.parts import Part, ReasoningPart, TextPart, ToolCallPart

T = TypeVar("T")

#: A generator that receives atoms and returns a T.
Script = Generator[None, str, T]

#: What looks like a call but names no function within this many characters is text.
LONGEST_PRELUDE = 2000


class OutputOver(Exception):
    """The output has ended."""


class Broken(Exception):
    """The input is not what the script expects; the unexpected atom is unread."""


class Reader:
    """A script's input, with backtracking. text: all of it, if that is known."""

    def __init__(self, text: str | None = None) -> None:
        self._again = list(reversed(text or ""))
        self._tape: list[str] = []  # what was read since the first of the marks
        self._marks: list[int] = []
        self._longest: float = LONGEST_PRELUDE
        self._over = text is not None

    def read(self) -> Script[str]:
        """The next atom. Raises :class:`OutputOver` if there is none."""
        atom = self._again.pop() if self._again else "" if self._over else (yield)
        if not atom:
            self._over = True
            raise OutputOver
        if self._marks:
            if len(self._tape) >= self._longest:
                self._again.append(atom)
                raise Broken
            self._tape.append(atom)
        return atom

    def char(self, tag: str = "") -> Script[str]:
        """The next atom, which must be a character or ``tag``."""
        atom = yield from self.read()
        if len(atom) > 1 and atom != tag:
            self.unread(atom)
            raise Broken
        return atom

    def solid(self) -> Script[str]:
        """The next atom after white space."""
        while True:
            atom = yield from self.read()
            if not atom.isspace():
                return atom

    def white(self) -> Script[str]:
        """The white space that follows."""
        white = ""
        while (atom := (yield from self.read())).isspace():
            white += atom
        self.unread(atom)
        return white

    def ahead(self) -> Script[str]:
        """The next atom after white space, left unread."""
        atom = yield from self.solid()
        self.unread(atom)
        return atom

    def one_of(self, tags: tuple[str, ...]) -> Script[str]:
        """Which of ``tags`` follows, as characters or as one marker, possibly after white space."""
        read = [(yield from self.solid())]
        while (tag := "".join(read)) not in tags:
            if not any(one.startswith(tag) for one in tags):
                self.unread(*read)
                raise Broken
            read.append((yield from self.read()))
        return tag

    def expect(self, tag: str) -> Script[None]:
        """Read ``tag``, which must follow, possibly after white space."""
        yield from self.one_of((tag,))

    def unread(self, *atoms: str) -> None:
        """Put these back, to be read again."""
        self._again.extend(reversed(atoms))
        if self._marks:
            del self._tape[len(self._tape) - len(atoms) :]

    def mark(self, longest: float = LONGEST_PRELUDE) -> None:
        """Remember what is read from here on. longest: how much of it may be read, if this is the only mark."""
        if not self._marks:
            self._longest = longest
        self._marks.append(len(self._tape))

    def forget(self) -> None:
        """Drop the last mark."""
        self._marks.pop()
        if not self._marks:
            self._tape.clear()

    def rewind(self) -> None:
        """Back to the last mark, which is dropped."""
        self.unread(*self._tape[self._marks[-1] :])
        self.forget()

    def whole(self, script: Script[T]) -> Script[T]:
        """The result of ``script``; where it raises, nothing is consumed."""
        self.mark()
        try:
            result = yield from script
        except (Broken, OutputOver):
            self.rewind()
            raise
        self.forget()
        return result

    def seen(self, script: Script[T], over: T) -> Script[T | None]:
        """The result of ``script``, consuming nothing; None if it breaks off. over: the result if the output ends."""
        self.mark(math.inf)
        try:
            return (yield from script)
        except Broken:
            return None
        except OutputOver:
            return over
        finally:
            self.rewind()

    def passed_over(self, tag: str, unless: tuple[type[Exception], ...] = (Broken,)) -> Script[bool]:
        """Skip white space and ``tag``, if that follows. unless: errors that mean that it does not."""
        try:
            yield from self.whole(self.expect(tag))
        except unless:
            return False
        return True


def text_before(reader: Reader, emit: Callable[[str], None], tags: tuple[str, ...], trim: bool = False) -> Script[str]:
    """Emit the text up to one of ``tags``; returns the tag and the white space before it, which is not emitted.

    Holds back white space and what could be a tag. trim: leave out white space at the beginning too.
    """
    held = ""
    try:
        while True:
            atom = yield from reader.read()
            if atom in tags:
                _emit(emit, held.rstrip())
                return held[len(held.rstrip()) :] + atom
            if trim and not held and atom.isspace():
                continue
            held += atom
            if held.endswith(tags):
                return held
            ends = (at for at in range(len(held)) for tag in tags if tag.startswith(held[at:].lstrip()))
            begin = next(ends, len(held))
            trim = trim and begin == 0
            _emit(emit, held[:begin])
            held = held[begin:]
    except OutputOver:
        _emit(emit, held)
        raise


def _emit(emit: Callable[[str], None], text: str) -> None:
    if text:
        emit(text)


# -- what is emitted ---------------------------------------------------------------------------------------------------


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
