"""A request's sampling parameters, :class:`SamplingParams`, checked once and immutable; and how its seed is mixed.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
from msgspec import Meta

from foresay.spec.errors import InvalidRequest

#: Seeds are taken modulo 2**64, so any integer a client sends is a valid one.
SEED_RANGE = 1 << 64
#: The largest bias of a token.
_LARGEST_BIAS = 100.0
#: Below this, logits divided by the temperature overflow float32. Only the most likely token is left anyway.
_COLDEST = 1e-30

# Ranges, defined once for the requests of every API, the settings and the documents. wanted: the range in words, where
# it is not described by its numbers.
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopK = Annotated[int, Meta(ge=-1, extra={"wanted": "-1 or 0 (off) or a positive number"})]
TopP = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
#: Presence and frequency penalties.
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]
Positive = Annotated[int, Meta(ge=1)]
MinTokens = Annotated[int, Meta(ge=0, extra={"wanted": "between 0 and max_tokens"})]
#: How many of the likeliest tokens are reported with each token.
Logprobs = Annotated[int, Meta(ge=0, le=20)]


def wanted(meta: Meta) -> str:
    """The range in words."""
    if meta.extra is not None and "wanted" in meta.extra:
        return str(meta.extra["wanted"])
    if meta.gt is not None:
        return f"above {meta.gt}" + ("" if meta.le is None else f" and at most {meta.le}")
    return f"at least {meta.ge}" if meta.le is None else f"between {meta.ge} and {meta.le}"


def within(meta: Meta, value: float) -> bool:
    """Whether a number is in this range; NaN never is."""
    return (
        (meta.ge is None or value >= meta.ge)
        and (meta.gt is None or value > meta.gt)
        and (meta.le is None or value <= meta.le)
    )


def ranges_of(kind: Any) -> Iterator[Meta]:
    """The ranges of a type, including those of its alternatives."""
    for part in (kind, *get_args(kind)):
        yield from (meta for meta in getattr(part, "__metadata__", ()) if isinstance(meta, Meta))


def check_range(field: str, value: float, kind: Any) -> None:
    """Raise :class:`InvalidRequest`, which names the field, if the number is not in the ranges of ``kind``."""
    for meta in ranges_of(kind):
        if not within(meta, value):
            raise InvalidRequest(field, f" must be {wanted(meta)}, got {value}")


#: Ways of sampling that differ in how often drafts are accepted.
KINDS = 3


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled and when to stop.

    The sample applies, in this order: logit bias, repetition penalty, frequency and presence penalties, bans (bad
    words, tokens not allowed, stop tokens below ``min_tokens``, the grammar), temperature, top-k, top-p, min-p.
    Temperature 0 takes the most likely token. ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 switch those filters off.

    repetition_penalty: counts prompt and output; presence_penalty and frequency_penalty count only the output.
    bad_words: token sequences that must not be generated. logprobs, prompt_logprobs: how many of the likeliest tokens
    are reported with each token; None reports nothing. They are of the model's own distribution.
    """

    temperature: Temperature = 1.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    seed: int | None = None
    max_tokens: Positive | None = None
    min_tokens: MinTokens = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None

    @property
    def greedy(self) -> bool:
        """Whether each sample is the most likely token."""
        return self.temperature < _COLDEST

    @property
    def kind(self) -> int:
        """Which of :data:`KINDS` ways of sampling this is: greedy, at a low temperature, or at a high one."""
        return 0 if self.greedy else 1 if self.temperature <= 0.75 else 2

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise :class:`InvalidRequest`, which names the first field that is out of range."""
        for field, kind in _ranged().items():
            value = getattr(self, field)
            if value is not None:
                check_range(field, value, kind)
        for field, good, right in self._rules():
            if not good:
                raise InvalidRequest(field, f" must be {right}, got {getattr(self, field)}")
        for field, tokens in self._tokens_named():
            check_tokens(field, tokens, vocab_size)

    def _tokens_named(self) -> tuple[tuple[str, Collection[int]], ...]:
        """The fields that hold tokens, with their tokens."""
        return (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias),
            ("bad_words", tuple(token for words in self.bad_words for token in words)),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        )

    def _rules(self) -> tuple[tuple[str, bool, str], ...]:
        """The rules that are not the range of one number."""
        biases_good = all(-_LARGEST_BIAS <= bias <= _LARGEST_BIAS for bias in self.logit_bias.values())
        fits = self.max_tokens is None or self.min_tokens <= self.max_tokens
        return (
            ("min_tokens", fits, "between 0 and max_tokens"),
            ("logit_bias", biases_good, f"numbers between -{_LARGEST_BIAS:g} and {_LARGEST_BIAS:g}"),
            ("bad_words", all(self.bad_words), "sequences of at least one token"),
            ("allowed_token_ids", self.allowed_token_ids != (), "at least one token"),
        )


@cache
def _ranged() -> dict[str, Any]:
    """The fields that have a range, with their types."""
    hints = get_type_hints(SamplingParams, include_extras=True)
    return {field: kind for field, kind in hints.items() if any(ranges_of(kind))}


def check_tokens(field: str, tokens: Collection[int], vocab_size: int | None = None) -> None:
    """Raise :class:`InvalidRequest`, which names the field, if it holds a number that is not a token of the model."""
    for token in (min(tokens), max(tokens)) if tokens else ():
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            raise InvalidRequest(field, f" holds {token}, which is not a token of the model")


_MASK64 = (1 << 64) - 1


def mix64(value: int) -> int:
    """A bijective 64-bit mix (the finaliser of SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def derive_seed(seed: int, index: int) -> int:
    """The seed of choice ``index`` of a request; choice 0 has the request's own."""
    return mix64(mix64(seed & _MASK64) ^ (index + 1)) if index else seed & _MASK64
