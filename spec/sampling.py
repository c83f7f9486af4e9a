"""What a request asks of sampling: :class:`SamplingParams`, checked once, immutable after."""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from foresay.spec.errors import InvalidRequest

#: Seeds are taken modulo 2**64, so any integer a client sends is a valid one.
SEED_RANGE = 1 << 64
#: The largest bias of a token, and the likeliest tokens beside each chosen one that may be asked for.
_LARGEST_BIAS = 100.0
MOST_LOGPROBS = 20
#: Below this, logits divided by the temperature leave the range of float32. Only the most likely token is left anyway.
_COLDEST = 1e-30


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled and when to stop.

    The sample applies, in this order: logit bias, repetition penalty, frequency and presence penalties, bans (bad
    words, tokens not allowed, stop tokens below ``min_tokens``, the grammar), temperature, top-k, top-p, min-p.
    Temperature 0 takes the most likely token. ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 switch those filters off.

    repetition_penalty: counts prompt and output; presence_penalty and frequency_penalty count the output alone.
    bad_words: token sequences that shall not come about. logprobs, prompt_logprobs: how many of the likeliest tokens
    are reported beside each token; None reports nothing. They speak of the model's own distribution.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether each sample is the most likely token."""
        return self.temperature < _COLDEST

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p takes tokens out of the distribution."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise :class:`InvalidRequest` naming the first field that is out of range."""
        for field, good, wanted in self._rules():
            if not good:
                raise InvalidRequest(field, f" must be {wanted}, got {getattr(self, field)}")
        for field, tokens in self._tokens_named():
            check_tokens(field, tokens, vocab_size)

    def _tokens_named(self) -> tuple[tuple[str, Collection[int]], ...]:
        """The fields that name tokens, with the tokens they name."""
        return (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias),
            ("bad_words", tuple(token for words in self.bad_words for token in words)),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        )

    def _rules(self) -> tuple[tuple[str, bool, str], ...]:
        temperature_good = math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0
        biases_good = all(-_LARGEST_BIAS <= bias <= _LARGEST_BIAS for bias in self.logit_bias.values())
        most = self.max_tokens if self.max_tokens is not None else self.min_tokens
        return (
            ("temperature", temperature_good, "between 0 and 100"),
            ("top_k", self.top_k >= -1, "-1 or 0 (off) or a positive number"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= most, "between 0 and max_tokens"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100.0, "between 0.01 and 100"),
            ("logit_bias", biases_good, f"numbers between -{_LARGEST_BIAS:g} and {_LARGEST_BIAS:g}"),
            ("bad_words", all(self.bad_words), "sequences of at least one token"),
            ("allowed_token_ids", self.allowed_token_ids != (), "at least one token"),
            ("logprobs", _countable(self.logprobs), f"between 0 and {MOST_LOGPROBS}"),
            ("prompt_logprobs", _countable(self.prompt_logprobs), f"between 0 and {MOST_LOGPROBS}"),
        )


def check_tokens(field: str, tokens: Collection[int], vocab_size: int | None = None) -> None:
    """Raise :class:`InvalidRequest` naming the field if it holds what is no token of a model."""
    for token in (min(tokens), max(tokens)) if tokens else ():
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            raise InvalidRequest(field, f" holds {token}, which is not a token of the model")


def _countable(count: int | None) -> bool:
    """Whether so many likeliest tokens may be reported."""
    return count is None or 0 <= count <= MOST_LOGPROBS
