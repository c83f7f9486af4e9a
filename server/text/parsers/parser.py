"""Scripts as the parser of one answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from server.text.parsers.calls import Answer
from server.text.parsers.reasoning import reasoning
from server.text.parsers.script import Ended, Reader, Script
from server.text.parts import Part

#: A way of writing answers.
Format = Callable[[Reader, Answer], Script[None]]


class ScriptParser:
    """An :class:`~server.text.parts.OutputParser` that reads reasoning, if ``tags`` are given, and then ``form``.

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
