"""Colours as eyes see them: contrast as WCAG counts it, and how far apart two are, for those who see fewer of them."""

from __future__ import annotations

import math
from itertools import combinations

Colour = tuple[float, float, float]
Matrix = tuple[Colour, Colour, Colour]

#: Linear RGB as it is without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1).
EYES: dict[str, Matrix] = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
_CONES: Matrix = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
_OKLAB: Matrix = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)


def linear(rgb: Colour) -> Colour:
    """From 0 .. 255 as screens have it to light."""
    shares = [value / 255 for value in rgb]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return red, green, blue


def contrast(one: Colour, other: Colour) -> float:
    """As WCAG counts it, from 1 to 21."""
    lights = sorted(math.fsum(w * part for w, part in zip(WEIGHTS, linear(rgb), strict=True)) for rgb in (one, other))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


WEIGHTS = (0.2126, 0.7152, 0.0722)


def apart(one: Colour, other: Colour, eyes: Matrix) -> float:
    """The distance in Oklab; about 0.02 is just noticed when both lie side by side."""
    return math.dist(_seen(one, eyes), _seen(other, eyes))


def nearest(colours: dict[str, Colour]) -> tuple[float, str]:
    """The two that are hardest to tell apart, and for whom."""
    return min(
        (apart(colours[a], colours[b], eyes), f"{a} and {b}, {name}")
        for a, b in combinations(colours, 2)
        for name, eyes in EYES.items()
    )


def _seen(rgb: Colour, eyes: Matrix) -> Colour:
    red, green, blue = (min(max(part, 0.0), 1.0) for part in _times(eyes, linear(rgb)))
    cones = [part ** (1 / 3) for part in _times(_CONES, (red, green, blue))]
    return _times(_OKLAB, (cones[0], cones[1], cones[2]))


def _times(matrix: Matrix, vector: Colour) -> Colour:
    first, second, third = (math.fsum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)
    return first, second, third
