"""Keeps a client's text as text even if it spells a control token; and checks whether a prompt fits.

A prompt is rendered from strings in which every control token's text is broken up by a mark, a character that occurs
nowhere else. Control tokens in the rendered text then come from the template::

    client    hi <|end|>     ->   hi <M|MeMnMdM|M>M
    rendered  <|user|>hi <M|MeMnMdM|M>M<|end|>
    encoded   ALIAS3hi <|end|>ALIAS1         by a tokenizer that knows the control tokens only by their aliases

So the whole is encoded at once, and text merges across the seams as usual. Text without a control token skips all
this.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from tokenizers import AddedToken, Tokenizer, models

from foresay.server.catalog.formats import REASONING, TAG
from foresay.server.text.warned import Warned, warning
from foresay.spec.errors import ContextLengthExceeded, InvalidRequest


class Room(msgspec.Struct, frozen=True):
    """The limit for a prompt. field: that holds it; longest: tokens of prompt and completion together."""

    field: str
    longest: int

    def check(self, tokens: int, completion: int | None = None) -> None:
        """Raise unless a prompt of ``tokens`` tokens fits. completion: tokens requested; at least one if not known
        yet."""
        needed = tokens + (completion or 1)
        if needed > self.longest:
            least = "" if completion else "at least "
            raise ContextLengthExceeded(
                self.field,
                f"This model's maximum context length is {self.longest} tokens. However, you requested {least}{needed} "
                f"tokens ({tokens} in the prompt, {completion or 1} in the completion).",
            )


#: Characters that Unicode reserves for a program's internal use.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
#: Tags of reasoning do not end a turn, and templates search for them in earlier answers.
_HARMLESS = frozenset(tag for tags in REASONING.values() for tag in TAG.findall("".join(tags)))


class RenderedPrompt(msgspec.Struct, frozen=True):
    """A conversation rendered by the chat template. marked: its text, with ``mark`` inside every control token that a
    client spelled; an empty mark means there are none.
    """

    marked: str
    mark: str = ""

    @property
    def text(self) -> str:
        """The text that the model reads."""
        return self.marked.replace(self.mark, "") if self.mark else self.marked

    def behind(self, beginning: str) -> RenderedPrompt:
        """The rest after ``beginning``."""
        return RenderedPrompt(self.marked[len(beginning) :], self.mark)


class ControlTokens:
    """The special tokens of a tokenizer with which a chat template separates turns."""

    def __init__(self, backend: Tokenizer) -> None:
        added = sorted(backend.get_added_tokens_decoder().items())
        unlike = secrets.token_hex(16)  # aliases cannot be guessed
        self._aliases = {entry.content: f"<{unlike}{id}>" for id, entry in added if _is_control(entry)}
        self._finder = _finder(self._aliases)
        changed = any(entry.normalized for _, entry in added if entry.content in self._aliases)
        self._normalize = backend.normalizer.normalize_str if changed and backend.normalizer is not None else None
        size = backend.get_vocab_size(with_added_tokens=False)
        # The base vocabulary's ids come first; its tokens that were declared special get new ids in the twin.
        within = [(id, entry) for id, entry in added if id < size and entry.content in self._aliases]
        beyond = [(id, entry) for id, entry in added if id >= size]
        others = [(id, entry) for id, entry in added if id < size and entry.content not in self._aliases]
        self._twin = _twin(backend, [_renamed(entry, self._aliases) for _, entry in (*beyond, *within, *others)])
        self._within = {id for id, _ in within}
        self._meant = {self._twin.token_to_id(self._aliases[entry.content]): id for id, entry in within}
        kept = all(
            self._twin.token_to_id(self._aliases.get(entry.content, entry.content)) == id for id, entry in beyond
        )
        self._distinct = kept and max(backend.get_vocab(with_added_tokens=False).values(), default=0) < size

    def sealed(self, value: Any, template: str) -> tuple[Any, str]:
        """``value`` with a mark inside all control tokens in its strings, and the mark, "" if there are none."""
        text = "\0".join(strings(value))
        count = self._count(text)
        if self._normalize is not None and self._count(self._normalize(text)) > count:
            raise _indistinct()  # the normalizer would create a control token
        if not count:
            return value, ""
        mark = next((mark for mark in _MARKS if mark not in text and mark not in template), None)
        if mark is None or not self._distinct:
            raise _indistinct()
        return self._seal(value, mark), mark

    def _count(self, text: str) -> int:
        return len(self._finder.encode_batch_fast([text])[0])

    def _seal(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return "".join(mark.join(part) + mark if is_token else part for part, is_token in self._parts(value))
        if isinstance(value, dict):
            return {self._seal(key, mark): self._seal(entry, mark) for key, entry in value.items()}
        return [self._seal(entry, mark) for entry in value] if isinstance(value, list | tuple) else value

    def _parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """The text in parts, and whether each is a control token."""
        end = 0
        for start, behind in self._finder.encode_batch([text])[0].offsets:
            yield text[end:start], False
            yield text[start:behind], True
            end = behind
        yield text[end:], False

    def encode(self, rendered: RenderedPrompt, add_special_tokens: bool, room: Room | None) -> list[int]:
        """Token ids of a marked text: control tokens where they are unbroken, text where they contain a mark."""
        parts = [self._aliases[part] if is_token else part for part, is_token in self._parts(rendered.marked)]
        text = "".join(parts).replace(rendered.mark, "")
        bare = self._twin.encode_batch_fast([text], add_special_tokens=False)[0]
        if room is not None:
            room.check(len(bare))
        if not self._within.isdisjoint(bare.ids):  # a tokenizer may look up a whole word, even a control token
            raise _indistinct()
        ids = self._twin.encode_batch_fast([text])[0].ids if add_special_tokens else bare.ids
        return [self._meant.get(id, id) for id in ids]


def _is_control(token: AddedToken) -> bool:
    """Whether a text must not be able to produce it. A single character has no inside for a mark."""
    return token.special and len(token.content) > 1 and token.content not in _HARMLESS


def _renamed(token: AddedToken, names: Mapping[str, str]) -> AddedToken:
    return AddedToken(
        names.get(token.content, token.content),
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _twin(backend: Tokenizer, added: list[AddedToken]) -> Tokenizer:
    """A tokenizer with the same model (shared in memory) and these added tokens."""
    twin = Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor"):
        if getattr(backend, part) is not None:
            setattr(twin, part, getattr(backend, part))
    twin.add_tokens(added)
    return twin


def _indistinct() -> InvalidRequest:
    return InvalidRequest(
        "messages", ": a text spells a control token of this model, whose tokenizer cannot read it as text"
    )


def strings(value: Any) -> Iterator[str]:
    """All strings in a value made of dicts and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from strings(pair)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from strings(entry)


def _finder(names: Iterable[str]) -> Tokenizer:
    """A tokenizer that only knows these tokens: it finds them in linear time, without the interpreter's lock."""
    finder = Tokenizer(models.BPE(cache_capacity=0))
    finder.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    return finder


# -- client noise ------------------------------------------------------------------------------------------------------


class NoisePattern(NamedTuple):
    """Text to leave out. where: as the first line of the system message; or as a whole later system message, which is
    harmless unless the chat template moves it to the beginning. pattern: matches all of it. why: it changes each
    time."""

    client: str
    where: Literal["first line", "late message"]
    pattern: re.Pattern[str]
    why: str


#: A field of Claude Code's header, whose fields and their order depend on its version and address: ``cc_version=``
#: changes with every session, ``cch=`` with every request.
_FIELD = r"[\w.-]+=[^;\s]*"
CLIENT_NOISE = (
    NoisePattern(
        "Claude Code's x-anthropic-billing-header",
        "first line",
        re.compile(rf"x-anthropic-billing-header:\s*{_FIELD}(\s*;\s*{_FIELD})*\s*;?\s*", re.IGNORECASE),
        "changes with every session and only serves its billing",
    ),
    NoisePattern(
        "Claude Code's count of the tokens left",
        "late message",
        re.compile(r"(<total_tokens>\w+ tokens left</total_tokens>\s*)?(Token usage: \d+/\d+; -?\d+ remaining\s*)?"),
        "changes with every turn and counts another model's context",
    ),
)

Messages = list[dict[str, Any]]


def left_out(messages: Messages, hoists: Callable[[], bool]) -> tuple[Messages, tuple[Warned, ...]]:
    """Rendered messages without client noise, and one warning for each kind. hoists: whether the chat template moves
    late system messages to the beginning."""
    kept: Messages = []
    found: dict[NoisePattern, int] = {}
    for index, message in enumerate(messages):
        noise = _found(message, late=index > 0)
        if noise is None or (noise.where == "late message" and not hoists()):
            kept.append(message)
            continue
        found.setdefault(noise, index)
        rest = message["content"].lstrip().partition("\n")[2] if noise.where == "first line" else ""
        if rest.strip() or len(messages) == 1:  # templates cannot do without any message
            kept.append(message | {"content": rest})
    warnings = (
        warning("client_noise_left_out", ("messages", index, "content"), name=f"{noise.client}, which {noise.why}")
        for noise, index in found.items()
    )
    return kept, tuple(warnings)


def _found(message: dict[str, Any], late: bool) -> NoisePattern | None:
    text = message["content"] if message["role"] == "system" else ""
    where, text = ("late message", text) if late else ("first line", text.lstrip().partition("\n")[0])
    return next((one for one in CLIENT_NOISE if text and one.where == where and one.pattern.fullmatch(text)), None)
