"""Filling in the middle: prompts for which a model writes what is between two texts."""

from __future__ import annotations

from collections.abc import Sequence

from foresay.server.api.common import validation
from foresay.server.host.service import Service
from foresay.server.schemas.chat import CompletionRequest
from foresay.server.text.prompt import Room
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.errors import InvalidRequest

#: Models' tokens before the prefix, before the suffix, and before the text between them.
_INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)


async def completion_prompts(service: Service, body: CompletionRequest) -> Sequence[str | list[int]]:
    """The prompts of a completion; with a ``suffix``, as token ids."""
    given = validation.prompts(body)
    if not body.suffix:
        return given
    for field in ("echo", "truncate_prompt_tokens"):
        if getattr(body, field):
            raise InvalidRequest(field, " and suffix cannot be combined")
    return await infilled(service, given, body.suffix, "suffix", body.add_special_tokens is not False)


async def infilled(
    service: Service, before: Sequence[str | list[int]], after: str, field: str, special: bool
) -> list[list[int]]:
    """For each text or list of tokens in ``before`` the prompt to fill in what is between it and ``after``: the
    tokenizer's own beginning (if ``special``), then both texts, in which a control token's name is text.

    field: of the request, which errors name.
    """
    tokenizer = service.opened()[0].tokenizer
    prefix, hole, end = _tokens(tokenizer, field)
    room = Room(field, service.opened()[1].max_model_len)
    begun = await service.encode("", special)
    behind = [hole, *await service.encode(tokenizer.as_text(after), False, room=room), end]
    texts = [
        await service.encode(tokenizer.as_text(one), False, room=room) if isinstance(one, str) else one
        for one in before
    ]
    return [[*begun, prefix, *text, *behind] for text in texts]


def _tokens(tokenizer: Tokenizer, field: str) -> list[int]:
    """The ids of the three tokens. Raises :class:`InvalidRequest` if the tokenizer has none."""
    for names in _INFILL:
        ids = [id for name in names if (id := tokenizer.added_id(name)) is not None]
        if len(ids) == len(names):
            return ids
    raise InvalidRequest(field, ": this model has no tokens for infilling")
