"""Scripts as the parser of one answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from server.text.parsers.calls import Answer
from server.text.parsers.script import Broken, Ended, Reader, Script, text_before
from server.text.parts import Part

# -- thinking, split off in front --------------------------------------------------------------------------------------
# ::
#
#     <think>reasoning</think>answer        Qwen 3, DeepSeek; the prompt may end with the opening tag already
#     [THINK]reasoning[/THINK]answer        Magistral
#
# White space next to the tags belongs to neither. Only the beginning of the output can be reasoning: a tag that is
# written later is text.


#: The tags that models think between.
TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def reasoning(reader: Reader, answer: Answer, tags: tuple[str, str], opened: bool) -> Script[None]:
    """Read the reasoning, if there is any. tags: that open and close it. opened: whether the prompt has opened it."""
    if not opened and not (yield from _opens(reader, tags[0])):
        return
    answer.thinking = True
    yield from text_before(reader, answer.reasoning, tags[1], trim=True)
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
