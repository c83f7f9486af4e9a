"""Scripts as the parser of one answer, and tool calls while they are read.

A tool call is told as soon as its name is known and its arguments begin. From then on it stays a call, whatever
follows; before that, what looked like one can still turn out to be text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from foresay.server.text.parsers.script import Broken, Ended, Reader, Script, string, text_before, text_of, value
from foresay.server.text.parts import Part, ReasoningPart, TextPart, ToolCallPart

#: What different models call the arguments.
ARGUMENTS = ("arguments", "parameters")


class Call:
    """Collects one call and tells of it. certain: called when it is one. known: names that count; None: any."""

    def __init__(
        self,
        index: int,
        id: str,
        tell: Callable[[Part], None],
        certain: Callable[[], None],
        known: frozenset[str] | None = None,
    ) -> None:
        self.begun = False
        self.given = False
        self.name: str | None = None
        self.id = id
        self._index, self._tell, self._certain, self._known = index, tell, certain, known
        self._early: list[str] = []

    def named(self, name: str) -> None:
        """Its name is known. :class:`Broken` for one that cannot be called."""
        if not name or (self._known is not None and name not in self._known):
            raise Broken
        if self.name is None:
            self.name = name
        if self._early:
            self.begin()

    def write(self, text: str) -> None:
        """More of its arguments."""
        self.given = True
        if self.name is None:
            self._early.append(text)
            return
        self.begin()
        if text:
            self._tell(ToolCallPart(index=self._index, arguments=text))

    def begin(self) -> None:
        """There is no way back: it is a call."""
        if not self.begun:
            self.begun = True
            self._certain()
            self._tell(ToolCallPart(index=self._index, id=self.id, name=self.name, arguments="".join(self._early)))

    def close(self) -> None:
        """It is complete. :class:`Broken` if it never said what to call."""
        if self.name is None:
            raise Broken
        if not self.given:
            self.write("{}")


class Answer:
    """What scripts say: text, and calls numbered as they come.

    identify: gives call number i its id. offered: the functions that were, by name, with the schema of their arguments.
    parallel: whether there may be more than one call.
    """

    def __init__(
        self,
        identify: Callable[[int], str],
        offered: Mapping[str, Mapping[str, Any]] | None = None,
        parallel: bool = True,
    ) -> None:
        self.said: list[Part] = []
        self.thinking = False
        self._offered = offered or {}
        self.calls = 0
        self._identify, self._parallel = identify, parallel

    def tell(self, part: Part) -> None:
        """One more part."""
        self.said.append(part)

    def text(self, text: str) -> None:
        """More text."""
        self.said.append(TextPart(text))

    def reasoning(self, text: str) -> None:
        """More of what the model thinks before."""
        self.said.append(ReasoningPart(text))

    @property
    def offered(self) -> frozenset[str]:
        """The names of the functions that were offered."""
        return frozenset(self._offered)

    def parameters_of(self, name: str) -> Mapping[str, Any]:
        """The schemas of a function's parameters."""
        properties = self._offered.get(name, {}).get("properties")
        return properties if isinstance(properties, dict) else {}

    @property
    def full(self) -> bool:
        """Whether there must be no further call."""
        return self.calls > 0 and not self._parallel

    def attempt(
        self, reader: Reader, read: Callable[[Reader, Call], Script[None]], known: frozenset[str] | None = None
    ) -> Script[bool]:
        """Read a call; returns whether there was one. If not, nothing is read. known: names that count; None: any."""
        call = Call(self.calls, self._identify(self.calls), self.tell, reader.forget, known)
        reader.mark()
        try:
            yield from read(reader, call)
        except Broken:
            pass
        except Ended:
            if call.name is not None:
                call.begin()
                raise
        if not call.begun:
            reader.rewind()
            return False
        self.calls += 1
        return True


def json_call(reader: Reader, call: Call, name: str) -> Script[None]:
    """``{"name": ..., "arguments": {...}}``: the keys in any order, other keys passed over. name: the name's key."""
    yield from reader.expect("{")
    following = ","
    while following == ",":
        yield from _entry(reader, call, name)
        following = yield from reader.solid()
    if following != "}":
        reader.unread(following)
        raise Broken
    call.close()


def _entry(reader: Reader, call: Call, name: str) -> Script[None]:
    key = yield from string(reader)
    yield from reader.expect(":")
    if key == name:
        call.named((yield from string(reader)))
    elif key in ARGUMENTS and not call.given:
        yield from arguments(reader, call)
    else:
        yield from value(reader, _ignored)


def arguments(reader: Reader, call: Call) -> Script[None]:
    """An object, told as it comes; or one written inside a string; or null, which is none."""
    first = yield from reader.ahead()
    if first == "{":
        yield from value(reader, call.write)
        return
    raw: list[str] = []
    try:
        yield from value(reader, raw.append)
    except Ended:
        call.write("".join(raw))
        raise
    text = "".join(raw)
    if first == '"':
        call.write(text_of(text) or text)
    elif text != "null":
        raise Broken


def _ignored(text: str) -> None:
    """A value nobody needs."""


# -- reasoning, split off in front -------------------------------------------------------------------------------------
# White space next to the tags belongs to neither. Only the beginning of the output can be reasoning: a tag that is
# written later is text.


def reasoning(reader: Reader, answer: Answer, tags: tuple[str, str], opened: bool) -> Script[None]:
    """Read the reasoning, if there is any. tags: that open and close it. opened: whether the prompt has opened it."""
    if not opened and not (yield from _opens(reader, tags[0])):
        return
    answer.thinking = True
    yield from text_before(reader, answer.reasoning, tags[1:], trim=True)
    answer.thinking = False
    reader.unread((yield from reader.solid()))


def opened_by(prompt: str, tags: tuple[str, str], continues: bool) -> bool:
    """Whether ``prompt`` ends inside reasoning. continues: the answer goes on with the prompt's last message."""
    if continues:
        return prompt.rfind(tags[0]) > prompt.rfind(tags[1])
    return prompt.rstrip().endswith(tags[0])


def _opens(reader: Reader, tag: str) -> Script[bool]:
    reader.mark()
    try:
        yield from reader.expect(tag)
    except (Broken, Ended):
        reader.rewind()
        return False
    reader.forget()
    return True


# -- the parser of one answer ------------------------------------------------------------------------------------------

#: A way of writing answers.
Format = Callable[[Reader, Answer], Script[None]]


class ScriptParser:
    """An :class:`~foresay.server.text.parts.OutputParser` that reads reasoning, if ``tags`` are given, and then
    ``form``.

    markers: the tags that are single special tokens, by id. opened: whether the prompt has opened the reasoning.
    """

    def __init__(
        self,
        answer: Answer,
        form: Format,
        markers: Mapping[int, str] | None = None,
        tags: tuple[str, str] | None = None,
        opened: bool = False,
    ) -> None:
        self.complete = False
        self._answer, self._tags = answer, dict(markers or {})
        answer.thinking = opened
        self._script = _whole(answer, form, tags, opened)
        next(self._script)

    @property
    def markers(self) -> frozenset[int]:
        """The tokens that are told by id."""
        return frozenset(self._tags)

    @property
    def thinking(self) -> bool:
        """Whether the output so far ends in the middle of reasoning."""
        return self._answer.thinking

    def feed(self, text: str) -> list[Part]:
        """More text."""
        return self._sent(text)

    def marker(self, token: int) -> list[Part]:
        """A marker between the text so far and what follows."""
        return self._sent([self._tags[token]])

    def flush(self) -> list[Part]:
        """The output is over."""
        return self._sent([""])

    def _sent(self, atoms: Iterable[str]) -> list[Part]:
        for atom in atoms:
            if not self.complete:
                self._send(atom)
        said, self._answer.said = self._answer.said, []
        return said

    def _send(self, atom: str) -> None:
        try:
            self._script.send(atom)
        except (StopIteration, Ended):
            self.complete = True


def _whole(answer: Answer, form: Format, tags: tuple[str, str] | None, opened: bool) -> Script[None]:
    reader = Reader()
    if tags is not None:
        yield from reasoning(reader, answer, tags, opened)
    yield from form(reader, answer)
