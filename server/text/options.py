"""Request options that need checks or conversion, for all routes.

Errors name the client's field.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence, Sized

import msgspec

from foresay.server.schemas.bounds import MOST_BAD_WORDS, MOST_CHOICES, check_count
from foresay.server.schemas.chat import ChatRequest, CompletionRequest
from foresay.server.schemas.shared import GenerationRequest
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Request
from foresay.spec.sampling import derive_seed

#: Most characters of all bad words together: each is tokenized in three ways, on the event loop.
MOST_BAD_CHARACTERS = 8192
MOST_BIASES = 4096
#: Limits on what a response repeats of its prompts, over all choices: logprobs entries (5 MB of JSON), and tokens.
MOST_PROMPT_ENTRIES = 100_000
MOST_REPEATED_TOKENS = 1 << 20
#: Most digits of a token id. Python reads numbers of thousands of digits slowly or not at all.
_LONGEST_ID = 20


def choices(request: GenerationRequest) -> int:
    """The number of choices per prompt."""
    count = 1 if request.n is None else request.n
    if request.best_of not in (None, 1, count):
        raise InvalidRequest(
            "best_of", f" must be n ({count}): every answer that is written is returned, none is chosen"
        )
    return count


def scores_only(request: GenerationRequest) -> bool:
    """Whether nothing is to be generated: ``echo`` with ``max_tokens`` 0, for the logprobs of the prompt."""
    return isinstance(request, CompletionRequest) and bool(request.echo) and request.max_tokens == 0


def logprobs(request: GenerationRequest) -> int | None:
    """How many of the likeliest tokens to report with each token; None if no logprobs are requested."""
    if isinstance(request, ChatRequest):
        if request.logprobs:
            return request.top_logprobs or 0
        if request.top_logprobs:
            raise InvalidRequest("top_logprobs", " is only allowed with logprobs: true")
        return None
    if request.top_logprobs is not None:
        raise InvalidRequest("top_logprobs", " belongs to chat; here logprobs is the number of tokens")
    return request.logprobs if isinstance(request, CompletionRequest) else None


def prompt_logprobs(request: GenerationRequest) -> int | None:
    """How many of the likeliest tokens the engine must report with each token of the prompt, which ``echo`` prepends to
    the text."""
    echoed = logprobs(request) if isinstance(request, CompletionRequest) and request.echo else None
    own = request.prompt_logprobs
    return max((count for count in (own, echoed) if count is not None), default=None)


def check_echoed(request: GenerationRequest, prompts: Sequence[Sized], count: int) -> None:
    """Raise if ``count`` choices per prompt would repeat so much of the prompts that writing it takes long."""
    tokens, listed = count * sum(map(len, prompts)), prompt_logprobs(request)
    each = 0 if listed is None else listed + 1
    if tokens * each > MOST_PROMPT_ENTRIES:
        field = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        repeats = f"{tokens:,} tokens of prompts, over all choices, with {each} entries each are {tokens * each:,}"
        raise InvalidRequest(field, f": {repeats}; at most {MOST_PROMPT_ENTRIES:,} are returned")
    echoes = isinstance(request, CompletionRequest) and bool(request.echo)
    repeated = tokens if echoes or request.return_token_ids else 0
    if repeated > max(MOST_REPEATED_TOKENS, *map(len, prompts)):
        field = "echo" if echoes else "return_token_ids"
        repeats = f"all choices would repeat {repeated:,} tokens of their prompts"
        raise InvalidRequest(field, f": {repeats}; at most {MOST_REPEATED_TOKENS:,} are repeated")


def logit_bias(request: GenerationRequest) -> dict[int, float]:
    """What is added to the logits of tokens. In JSON, keys are strings. Lists: see :func:`bias_list`."""
    check_count(request.logit_bias, MOST_BIASES, "logit_bias")
    biases: dict[int, float] = {}
    given = request.logit_bias if isinstance(request.logit_bias, dict) else {}
    for name, bias in given.items():
        if not (name.isascii() and name.isdigit() and len(name) < _LONGEST_ID):
            raise InvalidRequest("logit_bias", f": keys must be token ids, got {name!r}")
        biases[int(name)] = bias
    return biases


def bias_list(
    given: Sequence[tuple[int | str, float | bool]], tokenizer: Tokenizer
) -> tuple[dict[int, float], list[int]]:
    """llama.cpp's list of biases: those of tokens, and the tokens that never come. A text's is that of its tokens."""
    check_count(
        "".join(name for name, _ in given if isinstance(name, str)), MOST_BAD_CHARACTERS, "logit_bias", "characters"
    )
    biases: dict[int, float] = {}
    never: list[int] = []
    for index, (name, bias) in enumerate(given):
        if bias is True:
            raise InvalidRequest(("logit_bias", index), ": a bias is a number, or false for never")
        for token in tokenizer.encode(name, False) if isinstance(name, str) else [name]:
            if bias is False:
                never.append(token)
            else:
                biases[token] = biases.get(token, 0.0) + bias
    return biases, never


def spelled_words(given: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences of unwanted words: at the beginning of a text, after a space, within a word."""
    check_count(given, MOST_BAD_WORDS, "bad_words", "words")
    check_count("".join(given), MOST_BAD_CHARACTERS, "bad_words", "characters")
    words = [word.lstrip() for word in given]
    if "" in words:
        raise InvalidRequest("bad_words", " must not hold empty words")
    newline = tokenizer.encode("\n", False)
    spelled = [tuple(ids) for word in words for ids in _spelled(word, newline, tokenizer) if ids]
    return tuple(dict.fromkeys(spelled))


def _spelled(word: str, newline: list[int], tokenizer: Tokenizer) -> list[list[int]]:
    """The tokenizations of a word. Tokenizers that prepend a space to every text give the bare word only after other
    text."""
    ways = [tokenizer.encode(word, False), tokenizer.encode(f" {word}", False)]
    behind = tokenizer.encode(f"\n{word}", False)
    return [*ways, behind[len(newline) :]] if behind[: len(newline)] == newline else ways


def truncated(request: GenerationRequest, prompt: list[int], room: int) -> list[int]:
    """The end of the prompt that ``truncate_prompt_tokens`` keeps; -1: as much as ``room`` allows."""
    most = request.truncate_prompt_tokens
    if most is None:
        return prompt
    if most != -1 and most < 1:
        raise InvalidRequest("truncate_prompt_tokens", f" must be -1 or positive, got {most}")
    return prompt[-(max(room, 1) if most == -1 else most) :]


#: Seeds are sent as JSON numbers, and JavaScript reads those beyond 2**53 inexactly.
_INEXACT_BITS = 64 - 53
_DRAWN_BITS = 32


def forked(request: Request, count: int) -> list[Request]:
    """``request`` and its forks, ``count`` in total. Without a seed one is drawn; sent again, it reproduces all of
    them.

    Prompt logprobs are computed once, by the first.
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
    """The seed of choice ``number``; the first one's is the request's own. Sent on its own, it reproduces that
    choice."""
    return derive_seed(seed, number) >> _INEXACT_BITS if number else seed


def check_choices(prompts: int, count: int) -> None:
    """Raise for more choices, over all prompts, than one response may have."""
    if prompts * count > MOST_CHOICES:
        requested = f"{prompts} prompts with n = {count} are {prompts * count} choices"
        raise InvalidRequest("n", f"{requested}; at most {MOST_CHOICES} are allowed")
