"""Seeds and the 64-bit mix that everything random is keyed by. Imports no torch."""

from __future__ import annotations

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
