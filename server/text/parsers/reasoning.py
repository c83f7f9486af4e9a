"""What a model thinks before it answers, split off in front of any way of writing calls.

::

    <think>reasoning</think>answer        Qwen 3, DeepSeek; the prompt may end with the opening tag already
    [THINK]reasoning[/THINK]answer        Magistral

White space next to the tags belongs to neither. Only the beginning of the output can be reasoning: a tag that is
written later is text.
"""

from __future__ import annotations

from server.text.parsers.calls import Answer
from server.text.parsers.script import Broken, Ended, Reader, Script, text_before

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
