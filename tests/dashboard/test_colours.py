"""What the page's colours mean can be seen: by whom they are drafters', by tints how deep; computed, in both themes."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from foresay.server.api.about.dashboard import assets
from foresay.spec.names import DRAFTERS, NONE
from tests.dashboard.browsing import needs_chromium
from tests.dashboard.seeing import Colour, contrast, nearest
from tests.dashboard.showing import shown
from tests.server.scripted import END, ScriptedEngine

THEMES = ("light", "dark")
#: Shows tokens of each drafter at depths 0 to 5, and reads what is painted: the ground, and the text on it.
TINTS = """async (drafters) => {
  const { ColouredText } = await import("/dashboard/static/coloured.js");
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const painted = (...colours) => {
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const card = document.querySelector(".card"), found = {};
  for (const drafter of drafters) {
    const text = new ColouredText(drafter), depths = [0, 1, 2, 3, 4, 5];
    text.add(depths.map((depth) => ({ text: "word", drafter, depth })));
    card.append(text.element);
    found[drafter] = [...text.place.children].map((span) => {
      const { backgroundColor, color, backgroundSize } = getComputedStyle(span);
      const ground = painted(getComputedStyle(card).backgroundColor, backgroundColor);
      return { ground, text: painted(color), lines: backgroundSize, high: span.getBoundingClientRect().height };
    });
    text.element.remove();
  }
  return found;
}"""


def themed(theme: str) -> dict[str, Colour]:
    """The variables of a theme that are colours."""
    blocks = assets()["theme.css"].body.decode().split(":root")
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


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("theme", THEMES)
async def test_tints_of_neighbouring_depths_differ_and_what_stands_on_them_can_be_read(tokenizer, theme) -> None:
    async with shown(ScriptedEngine([END]), tokenizer, color_scheme=theme) as (_, visit):
        found = await visit.page.evaluate(TINTS, [*DRAFTERS, "somebody_else"])
        assert visit.complaints == []
    assert set(found) == {*DRAFTERS, "somebody_else"}
    for drafter, tokens in found.items():
        for depth, (one, deeper) in enumerate(pairwise(tokens[:5])):
            assert contrast(one["ground"], deeper["ground"]) >= 1.5, (drafter, depth, one, deeper)
        for depth, token in enumerate(tokens):
            assert contrast(token["ground"], token["text"]) >= 4.5, (drafter, depth, token)
        lines = [token["lines"] for token in tokens]
        assert len(set(lines[1:5])) == 4, "how deep is told by lines too"
        assert lines[4] == lines[5]
        assert tokens[5]["ground"] == tokens[4]["ground"]


@needs_chromium
@pytest.mark.slow
async def test_a_combination_is_striped_in_the_colours_of_its_members(tokenizer) -> None:
    async with shown(ScriptedEngine([END]), tokenizer) as (_, visit):
        swatch, fill, stripes = await visit.page.evaluate(
            """async () => {
              const { html, svg } = await import("/dashboard/static/elements.js");
              const swatch = html("i.swatch", { colour: "suffix+draft_model" }),
                fill = svg("rect.fill", { colour: "suffix+draft_model" });
              document.querySelector(".card").append(swatch);
              const pattern = document.getElementById("mix-suffix-draft_model");
              const colours = [...pattern.children].map((part) => getComputedStyle(part).fill);
              return [getComputedStyle(swatch).backgroundImage, fill.style.fill, colours];
            }"""
        )
    colours = themed("light")
    suffix, model = (f"rgb({', '.join(f'{part:.0f}' for part in colours[name])})" for name in ("suffix", "draft_model"))
    assert swatch.startswith("repeating-linear-gradient(135deg")
    assert swatch.index(suffix) < swatch.index(model)
    assert fill == 'url("#mix-suffix-draft_model")'
    assert stripes == [suffix, model]
