"""Exponentials, logarithms and powers with the same bits on every machine (docs/same-tokens.md#portable-bits): the last
digit of a math library's depends on its version and on the processor. Does not import torch.
"""

from __future__ import annotations

from decimal import Context, Decimal

#: They are computed in decimal, in software, and rounded to a float at the end.
_DECIMAL = Context(prec=30, traps=[])


def exp(x: float) -> float:
    """e to the power of any number."""
    return float(Decimal(x).exp(_DECIMAL))


def ln(x: float) -> float:
    """The natural logarithm of a positive number."""
    return float(Decimal(x).ln(_DECIMAL))


def power(base: float, exponent: float) -> float:
    """A positive number to any power."""
    return float(_DECIMAL.multiply(Decimal(base).ln(_DECIMAL), Decimal(exponent)).exp(_DECIMAL))
