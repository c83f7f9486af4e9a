// Bars: acceptance by depth, and histograms. Each tells its value when pointed at or reached with the arrow keys.

import { scale, ticks } from "./axis.js";
import { paint } from "./colours.js";
import { html, svg } from "./elements.js";
import { canvas, card, entries, marked, put, readable } from "./plot.js";

const LEFT = 40,
  RIGHT = 8,
  TOP = 8,
  BOTTOM = 34,
  HEIGHT = 178;

/** bars: [{ label, told, parts: [{ size, colour }] }]; sizes from 0 up, marks: of the value axis, foot: under the bars,
 * lines: [{ at, name, value }], in bars from the left; apart: pixels that a label needs. */
export class BarChart {
  constructor({ id, title, note, legend = [], empty, foot }) {
    Object.assign(this, { empty, foot, title, width: 0, data: { bars: [] } });
    this.told = html("li", { class: "when" });
    this.svg = canvas((width) => this._draw((this.width = width)));
    this.element = card({ id, title, note }, html("ul", { class: "legend" }, entries(legend), this.told), this.svg);
    readable(
      this.svg,
      () => [...this.svg.querySelectorAll(".bar")],
      (chosen) => this._tell(this.data.bars[chosen]),
    );
  }

  show(data) {
    this.data = data;
    if (this.width) this._draw(this.width);
  }

  _draw(width) {
    const { bars, lines = [], text } = this.data,
      right = width - RIGHT,
      bottom = HEIGHT - BOTTOM,
      middle = (LEFT + right) / 2;
    const marks = this.data.marks ?? ticks(Math.max(...bars.flatMap((bar) => bar.parts.map((part) => part.size))), 4),
      y = scale(0, marks.at(-1), bottom, TOP),
      slot = (right - LEFT) / bars.length;
    const drawn = bars.length
      ? [
          marked(marks, y, LEFT, right, text),
          bars.map((bar, index) => this._bar(bar, index, LEFT + index * slot, slot, y)),
          lines.map((line, row) => this._line(line, LEFT + line.at * slot, row, bottom)),
          svg("text", { class: "foot", x: middle, y: HEIGHT - 4 }, this.foot),
        ]
      : svg("text", { class: "empty", x: middle, y: HEIGHT / 2 }, this.empty);
    put(this.svg, width, HEIGHT, drawn);
    this._tell();
  }

  /** A line across the bars, its name beside it: left of the first one, right of the others if there is room. */
  _line({ name }, x, row, bottom) {
    const after = row > 0 && x + 30 < this.width;
    const text = { class: after ? "level-text after" : "level-text", x: x + (after ? 4 : -4), y: TOP + 9 };
    return svg("g", {}, svg("line", { class: "level", x1: x, x2: x, y1: TOP, y2: bottom }), svg("text", text, name));
  }

  _bar(bar, index, left, slot, y) {
    const room = Math.min(slot * 0.78, 64),
      each = room / bar.parts.length,
      first = left + (slot - room) / 2;
    const part = ({ size, colour }, place) => {
      const [x, width] = [first + place * each + 0.5, Math.max(each - 1, 0.8)];
      return paint(svg("rect", { class: "fill", x, width, y: y(size), height: y(0) - y(size) }), colour);
    };
    return svg(
      "g",
      { class: "bar" },
      svg("rect", { class: "hit", x: left, width: slot, y: TOP, height: y(0) - TOP }),
      bar.parts.map(part),
      index % Math.ceil((this.data.apart ?? 34) / slot)
        ? null
        : svg("text", { class: "below", x: left + slot / 2, y: y(0) + 13 }, bar.label),
    );
  }

  _tell(bar) {
    const { bars, lines = [] } = this.data;
    const figures = lines.map(({ name, value }) => html("span", {}, `${name} `, html("b", {}, value)));
    this.told.replaceChildren(...(bar ? [bar.told] : figures));
    const all = [...lines.map(({ name, value }) => `${name} ${value}`), ...bars.map((one) => one.told)].join("; ");
    this.svg.setAttribute("aria-label", `${this.title}: ${bar?.told ?? (all || this.empty)}`);
  }
}
