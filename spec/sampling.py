"""What a request asks of sampling: :class:`SamplingParams`, checked once, immutable after."""

from __future__ import annotations

import math

import msgspec

from spec.errors import InvalidRequest

#: Seeds are taken modulo 2**64, so any integer a client sends is a valid one.
SEED_RANGE = 1 << 64
#: Below this, logits divided by the temperature leave the range of float32. Only the most likely token is left anyway.
_COLDEST = 1e-30


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn and when to stop.

    The draw applies, in this order: suppression of stop tokens below ``min_tokens``, temperature, top-k, top-p, min-p.
    Temperature 0 takes the most likely token. ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 switch those filters off.
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
        """Whether each draw is the most likely token."""
        return self.temperature < _COLDEST

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p takes tokens out of the distribution."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise :class:`InvalidRequest` naming the first field that is out of range."""
        for field, good, wanted in self._rules():
            if not good:
                raise InvalidRequest(field, f"{field} must be {wanted}, got {getattr(self, field)}")
        for token in self.stop_token_ids:
            if token < 0 or (vocab_size is not None and token >= vocab_size):
                raise InvalidRequest("stop_token_ids", f"stop_token_ids holds {token}, which is no token of the model")

    def _rules(self) -> tuple[tuple[str, bool, str], ...]:
        temperature_good = math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0
        most = self.max_tokens if self.max_tokens is not None else self.min_tokens
        return (
            ("temperature", temperature_good, "between 0 and 100"),
            ("top_k", self.top_k >= -1, "-1 or 0 (off) or a positive number"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= most, "between 0 and max_tokens"),
        )
