"""Several choices for one prompt: requests that share its KV and differ in their seeds."""

from __future__ import annotations

import secrets

import msgspec

from server.text.options import MOST_CHOICES
from spec.errors import InvalidRequest
from spec.request import Request
from spec.seeds import derive_seed

#: Seeds go out as JSON numbers, and JavaScript reads those beyond 2**53 inexactly.
_INEXACT_BITS = 64 - 53
_DRAWN_BITS = 32


def forked(request: Request, count: int) -> list[Request]:
    """``request`` and its forks, ``count`` together. If it has no seed, one is drawn: sent again it gives all of them.

    The prompt is scored once, by the first.
    """
    if count == 1:
        return [request]
    seed = secrets.randbits(_DRAWN_BITS) if request.params.seed is None else request.params.seed
    leader = msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, seed=seed))
    return [leader, *(_fork(leader, choice_seed(seed, number), number) for number in range(1, count))]


def _fork(leader: Request, seed: int, number: int) -> Request:
    params = msgspec.structs.replace(leader.params, seed=seed, prompt_logprobs=None)
    return msgspec.structs.replace(leader, id=f"{leader.id}.{number}", params=params, fork_of=leader.id)


def choice_seed(seed: int, number: int) -> int:
    """The seed of choice ``number``; the first one's is the request's own. Sent by itself it repeats that choice."""
    return derive_seed(seed, number) >> _INEXACT_BITS if number else seed


def check_choices(prompts: int, count: int) -> None:
    """Raise for more choices, over all prompts, than one answer may have."""
    if prompts * count > MOST_CHOICES:
        asked = f"{prompts} prompts with n = {count} are {prompts * count} choices"
        raise InvalidRequest("n", f"{asked}; at most {MOST_CHOICES} are allowed")
