"""Groups of a row's numbers that are rounded with one scale. Does not import torch."""

from __future__ import annotations

from math import gcd

#: Numbers of a group.
GROUP = 32
#: The least size of a group that is not zero: below it 127 / size overflows.
LEAST = 2.0**-100


def piece_of(group: int) -> int:
    """Numbers whose products are summed at once. group: numbers of a row of weights that share a scale."""
    return gcd(group, GROUP)
