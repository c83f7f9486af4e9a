"""The prompt in front of the answer, as ``echo`` asks for it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from server.schemas.completions import CompletionRequest
from server.text.tokenizer import Tokenizer


class Echo(msgspec.Struct, frozen=True):
    """text: the prompt's. offsets: where each of its tokens begins in there."""

    text: str
    offsets: list[int]


def echoed(body: CompletionRequest, prompt: str | list[int], tokens: list[int], tokenizer: Tokenizer) -> Echo:
    """The echo of a prompt that became ``tokens``: as it was given, if it is text and was not truncated."""
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        return Echo(prompt, _offsets(tokens, frozenset(), len(prompt), tokenizer))
    skip = body.skip_special_tokens is not False
    text = tokenizer.decode(tokens, skip_special_tokens=skip)
    return Echo(text, _offsets(tokens, tokenizer.special_ids if skip else frozenset(), len(text), tokenizer))


def _offsets(tokens: Sequence[int], hidden: frozenset[int], length: int, tokenizer: Tokenizer) -> list[int]:
    """For each token, the characters of the text that are whole before it."""
    decoder, starts, so_far = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
    for token in tokens:
        starts.append(so_far)
        if token not in hidden:
            so_far += len(decoder.decode(tokenizer.token_bytes(token)))
    # What the tokenizer itself put in front (a begin token, a space) takes no room in the text.
    surplus = so_far + len(decoder.decode(b"", True)) - length
    return [min(max(start - surplus, 0), length) for start in starts]
