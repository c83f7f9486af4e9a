// Bars: acceptance by depth, and histograms. Each tells its value when pointed at or reached with the arrow keys.

import { html, paint, svg } from "./elements.js";
import { card, empty, entries, LEFT, marked, Plot, RIGHT, scale, ticks, TOP } from "./plot.js";

const BOTTOM = 34,
  HEIGHT = 178;

/** bars: [{ label, told, parts: [{ size, colour }] }]; sizes from 0 up, marks: of the value axis, foot: under the bars,
 * lines: [{ at, name, value }], in bars from the left; apart: pixels that a label needs. */
export class BarChart extends Plot {
  constructor({ legend = [], empty, foot, ...about }) {
    super(about.title, ".bar");
    Object.assign(this, { empty, foot, data: { bars: [] } });
    this.told = html("li", { class: "when" });
    this.element = card(about, html("ul", { class: "legend" }, entries(legend), this.told), this.svg);
  }

  drawn(width) {
    const { bars, lines = [], text, ...given } = this.data,
      right = width - RIGHT,
      middle = (LEFT + right) / 2;
    if (!bars.length) return [HEIGHT, empty(middle, HEIGHT / 2, this.empty)];
    const marks = given.marks ?? ticks(Math.max(...bars.flatMap((bar) => bar.parts.map((part) => part.size)))),
      y = scale(0, marks.at(-1), HEIGHT - BOTTOM, TOP),
      slot = (right - LEFT) / bars.length,
      every = Math.ceil((given.apart ?? 34) / slot);
    return [
      HEIGHT,
      marked(marks, y, right, text),
      bars.map((bar, index) => this._bar(bar, LEFT + index * slot, slot, y, index % every === 0)),
      lines.map(({ name, at }, row) => this._line(name, LEFT + at * slot, row, y(0))),
      svg("text", { class: "foot", x: middle, y: HEIGHT - 4 }, this.foot),
    ];
  }

  /** A line across the bars, its name beside it: left of the first one, right of the others if there is room. */
  _line(name, x, row, bottom) {
    const after = row > 0 && x + 30 < this.width;
    const text = { class: after ? "level-text after" : "level-text", x: x + (after ? 4 : -4), y: TOP + 9 };
    return svg("g", {}, svg("line", { class: "level", x1: x, x2: x, y1: TOP, y2: bottom }), svg("text", text, name));
  }

  _bar({ label, parts }, left, slot, y, labelled) {
    const room = Math.min(slot * 0.78, 64),
      each = room / parts.length,
      first = left + (slot - room) / 2 + 0.5,
      width = Math.max(each - 1, 0.8);
    const part = ({ size, colour }, place) =>
      paint(svg("rect", { class: "fill", x: first + place * each, width, y: y(size), height: y(0) - y(size) }), colour);
    const hit = svg("rect", { class: "hit", x: left, width: slot, y: TOP, height: y(0) - TOP });
    const below = labelled ? svg("text", { class: "below", x: left + slot / 2, y: y(0) + 13 }, label) : null;
    return svg("g", { class: "bar" }, hit, parts.map(part), below);
  }

  tell(part) {
    const { bars, lines = [] } = this.data,
      told = bars[part]?.told;
    const figures = lines.map(({ name, value }) => html("span", {}, `${name} `, html("b", {}, value)));
    this.told.replaceChildren(...(told ? [told] : figures));
    const all = [...lines.map(({ name, value }) => `${name} ${value}`), ...bars.map((bar) => bar.told)].join("; ");
    this.say(told ?? (all || this.empty));
  }
}
