"""What the page's colours mean can be seen by every eye: computed, in both themes."""

from __future__ import annotations

import re

import pytest

from foresay.server.api.about.routes import STATIC
from foresay.spec.names import DRAFTERS, NONE
from tests.dashboard.seeing import Colour, contrast, nearest

THEMES = ("light", "dark")


def themed(theme: str) -> dict[str, Colour]:
    """The variables of a theme that are colours."""
    blocks = (STATIC / "theme.css").read_text("utf-8").split(":root")
    found: dict[str, Colour] = {}
    for block in blocks if theme == "dark" else blocks[:2]:
        for name, digits in re.findall(r"--([\w-]+): #([0-9a-f]{6});", block):
            red, green, blue = bytes.fromhex(digits)
            found[name] = float(red), float(green), float(blue)
    return found


@pytest.mark.parametrize("theme", THEMES)
def test_every_drafter_has_a_colour_that_every_eye_distinguishes(theme: str) -> None:
    colours = themed(theme)
    drafters = {name: colours[name] for name in (*DRAFTERS, NONE)}
    distance, which = nearest(drafters)
    assert distance > 0.085, which
    for name, colour in drafters.items():
        assert contrast(colour, colours["card"]) >= 2.9 if name == NONE else 3.0, name
