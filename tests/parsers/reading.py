"""Reading a whole output with a parser, cut into any pieces."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from foresay.server.catalog.formats import FORMATS, ToolFormat
from foresay.server.text.parsers.chat_format import output
from foresay.server.text.parsers.script import ParsedAnswer, ScriptParser
from foresay.server.text.parts import Part, ReasoningPart, TextPart, ToolCallPart, joined

THINK = ("<think>", "</think>")
TYPES = {"city": "string", "days": "integer", "exact": "boolean", "list": "array", "more": ["string", "object"]}
SCHEMA = {"type": "object", "properties": {key: {"type": kind} for key, kind in TYPES.items()}}
OFFERED = {"get_weather": SCHEMA, "add": {}, "f": {}}


def read(
    family: str,
    text: str,
    cuts: Sequence[int] = (),
    tags: tuple[str, str] | None = None,
    opened: bool = False,
    parallel: bool = True,
    special: Mapping[int, str] | None = None,
    offered: Mapping[str, Any] = OFFERED,
) -> list[Part]:
    """The parts of ``text``, fed in pieces that end at ``cuts``. special: tags that arrive as marker tokens."""
    script = partial(output, FORMATS.get(family, ToolFormat()), tags, opened)
    return joined([part for piece in pieces(script, text, cuts, special, offered, parallel) for part in piece])


def pieces(
    script: Any,
    text: str,
    cuts: Sequence[int] = (),
    special: Mapping[int, str] | None = None,
    offered: Mapping[str, Any] = OFFERED,
    parallel: bool = True,
) -> list[list[Part]]:
    """What each piece of the text adds, and last what its end does."""
    answer = ParsedAnswer(lambda index: f"id{index}", dict(offered), parallel)
    parser = ScriptParser(answer, script, special)
    return [*(_fed(parser, piece, dict(special or {})) for piece in _pieces(text, cuts)), parser.flush()]


#: The tags of a format on channels, which come as tokens.
CHANNELS = dict(enumerate(FORMATS["harmony"].control))


def marked(text: str) -> str:
    """The text with a private character for each tag of a format on channels."""
    for number, tag in CHANNELS.items():
        text = text.replace(tag, chr(0xE000 + number))
    return text


def _pieces(text: str, cuts: Sequence[int]) -> list[str]:
    ends = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[begin:end] for begin, end in itertools.pairwise(ends)]


def _fed(parser: ScriptParser, text: str, special: dict[int, str]) -> list[Part]:
    """Feed text in which private characters stand for markers: U+E000 + id."""
    parts: list[Part] = []
    for marked, run in itertools.groupby(text, key=lambda character: ord(character) - 0xE000 in special):
        if marked:
            parts += [part for one in run for part in parser.marker(ord(one) - 0xE000)]
        else:
            parts += parser.feed("".join(run))
    return parts


def parts_of(outline: Sequence[str | tuple[str, ...]]) -> list[Part]:
    """Texts, and calls as name, arguments and the id if the output has one."""
    parts, index = list[Part](), 0
    for one in outline:
        if isinstance(one, str):
            parts.append(TextPart(one))
        else:
            name, arguments, id = (*one, f"id{index}")[:3]
            parts.append(ToolCallPart(index=index, id=id, name=name, arguments=arguments))
            index += 1
    return parts


def text_of(parts: Sequence[Part]) -> str:
    """All text."""
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def thought_of(parts: Sequence[Part]) -> str:
    """All reasoning."""
    return "".join(part.text for part in parts if isinstance(part, ReasoningPart))


def calls_of(parts: Sequence[Part]) -> list[tuple[str | None, str]]:
    """Name and arguments of each call."""
    return [(part.name, part.arguments) for part in parts if isinstance(part, ToolCallPart)]
