"""The rotary embedding as config.json describes it.

transformers 4 writes ``rope_theta`` and ``rope_scaling`` (with ``type``, later ``rope_type``), transformers 5 only
``rope_parameters``, which includes the base. A scaling whose frequencies depend on the current length (dynamic NTK) is
refused: a cached key would have to change while the sequence grows. LongRoPE has two lists of them, one of which is
chosen once, by the longest text that the engine supports.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from foresay.verifier.model.fields import LARGEST_FLOAT, Fields
from foresay.verifier.model.portable_math import ln

SCALINGS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation: every inverse frequency divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths stretched by ``factor``, short ones kept, a ramp between.

    original_positions: context length before the extension; the two limits are fractions of it.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: a ramp over the dimensions from kept to stretched frequencies, and scaled cos and sin.

    beta_fast, beta_slow: turns within ``original_positions`` at the two ends of the ramp.
    attention_factor: the scale of cos and sin; None derives it from ``factor`` and the two mscales.
    truncate: the ends of the ramp are rounded to whole dimensions.
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def mscale_of(self, share: float) -> float:
        """The factor by which attention's temperature is kept in a longer context, ``share`` of it."""
        return 0.1 * share * ln(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """Every inverse frequency divided by its own factor: the form of Llama 3's scaling in GGUF files."""

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LongScaling:
    """LongRoPE: every inverse frequency divided by its own factor, ``short`` for texts of up to
    ``original_positions``, else ``long``; cos and sin are scaled by ``attention_factor``."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_positions: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Ministral 3: the query at position p is multiplied by ``1 + beta * ln(1 + floor(p / original_positions))``."""

    beta: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Gemma 4: of a head that is rotated as a whole, only the first ``share`` of the pairs turn, with the frequencies
    that they have among all pairs, divided by ``factor``."""

    share: float
    factor: float = 1.0


Scaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors | LongScaling | ProportionalScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base ``theta``, and how its frequencies are scaled to a longer context (None: not). share: of a
    head's numbers that are rotated, from the first. interleaved: pairs that are rotated are adjacent in a head; else
    they are half of the rotated part apart."""

    theta: float
    parameters: Scaling | None = None
    share: float = 1.0
    interleaved: bool = False

    def rotated(self, head_dim: int) -> int:
        """How many numbers of a head are rotated."""
        return int(head_dim * self.share)


def read_rope(config: Fields, partial: bool = False, interleaved: bool = False) -> RopeConfig:
    """The rotary embedding of a config.json; raises ConfigError for an unsupported kind. partial: whether only a part
    of a head may be rotated. interleaved: see :class:`RopeConfig`."""
    old, new = config.section("rope_scaling"), config.section("rope_parameters")
    scaling = old or new or Fields({}, config.where)
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise scaling.error("a rotary embedding per layer type is not supported")
    parameters = _parameters(config, scaling)
    whole = isinstance(parameters, ProportionalScaling)
    share = 1.0 if whole else _first_number("partial_rotary_factor", scaling, config) or 1.0
    if share > 1.0 or (share < 1.0 and not partial):
        raise config.error("partial_rotary_factor other than 1 is not supported for this architecture")
    theta = _first_number("rope_theta", scaling, config, new) or 10_000.0
    if theta <= 1.0:
        raise scaling.error(f"rope_theta must be above 1, got {theta:g}")
    return RopeConfig(theta, parameters, share, interleaved)


def _parameters(config: Fields, scaling: Fields) -> Scaling | None:
    match scaling.get("rope_type") or scaling.get("type") or "default":
        case "default":
            return None
        case "linear":
            return LinearScaling(scaling.number("factor"))
        case "llama3":
            return _llama3(config, scaling)
        case "factors":
            return FrequencyFactors(_factors(scaling, "factors"))
        case "yarn":
            return _yarn(config, scaling)
        case "longrope" | "su":
            return _long(config, scaling)
        case "proportional":
            return _proportional(scaling)
        case other:
            raise scaling.error(f"RoPE scaling {other!r} is not supported; supported: {', '.join(SCALINGS)}")


def _llama3(config: Fields, scaling: Fields) -> Llama3Scaling:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high:
        raise scaling.error(f"low_freq_factor {low} must be below high_freq_factor {high}")
    return Llama3Scaling(scaling.number("factor"), low, high, _original_positions(config, scaling))


def _proportional(scaling: Fields) -> ProportionalScaling:
    share = scaling.number("partial_rotary_factor", 1.0)
    if share > 1.0:
        raise scaling.error(f"partial_rotary_factor {share:g} must be at most 1")
    return ProportionalScaling(share, scaling.number("factor", 1.0))


def _factors(scaling: Fields, key: str) -> tuple[float, ...]:
    found = scaling.get(key)
    if not isinstance(found, list) or not all(
        type(each) in (int, float) and 0 < each < LARGEST_FLOAT for each in found
    ):
        raise scaling.error(f"{key} must be a list of positive numbers")
    return tuple(map(float, found))


def _long(config: Fields, scaling: Fields) -> LongScaling:
    original, positions = _original_positions(config, scaling), config.integer("max_position_embeddings")
    factor = scaling.optional_number("factor") or positions / original
    scale = scaling.optional_number("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1.0 or original == 1 else math.sqrt(1 + ln(factor) / ln(original))
    return LongScaling(_factors(scaling, "short_factor"), _factors(scaling, "long_factor"), original, scale)


def _yarn(config: Fields, scaling: Fields) -> YarnScaling:
    original = _original_positions(config, scaling)
    return YarnScaling(
        factor=scaling.optional_number("factor") or config.integer("max_position_embeddings") / original,
        original_positions=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        attention_factor=scaling.optional_number("attention_factor"),
        mscale=_mscale(scaling, "mscale"),
        mscale_all_dim=_mscale(scaling, "mscale_all_dim"),
        truncate=scaling.flag("truncate", True),
    )


def _mscale(scaling: Fields, key: str) -> float | None:
    """Zero counts as absent, as in transformers."""
    value = scaling.get(key)
    return None if type(value) in (int, float) and value == 0 else scaling.optional_number(key)


def _original_positions(config: Fields, scaling: Fields) -> int:
    key = "original_max_position_embeddings"
    source = config if config.get(key) is not None else scaling
    return source.integer(key, config.integer("max_position_embeddings"))


def _first_number(key: str, *sources: Fields | None) -> float | None:
    values = (source.optional_number(key) for source in sources if source is not None)
    return next((value for value in values if value is not None), None)
