// Bars: acceptance by depth, and histograms. Each bar tells its value when pointed at or reached with the arrow keys.

import { scale, ticks } from "./axis.js";
import { html, onWidth, svg } from "./elements.js";

const LEFT = 40,
  RIGHT = 8,
  TOP = 8,
  BOTTOM = 34,
  HEIGHT = 178;

/** bars: [{ label, told, parts: [{ size, colour }] }]; sizes from 0 up, marks: of the value axis, foot: under the bars,
 * lines: [{ at, name, value }], in bars from the left. */
export class BarChart {
  constructor({ id, title, note, legend = [], empty, foot }) {
    Object.assign(this, { empty, foot, title, width: 0, data: { bars: [] }, chosen: null });
    this.told = html("span", { class: "when" });
    this.svg = svg("svg", { tabindex: 0, role: "img", class: "plot", height: HEIGHT });
    this.element = html(
      "section",
      { class: "card chart", id, "aria-label": title },
      html("h3", {}, title),
      html("p", { class: "note" }, note),
      html(
        "ul",
        { class: "legend" },
        legend.map(({ name, colour }) => html("li", {}, html("i", { class: `swatch c-${colour}` }), name)),
        html("li", {}, this.told),
      ),
      this.svg,
    );
    this.svg.addEventListener("pointermove", (event) => this._choose(Math.floor(this._place(event.offsetX))));
    this.svg.addEventListener("pointerleave", () => this._choose(null));
    this.svg.addEventListener("blur", () => this._choose(null));
    this.svg.addEventListener("keydown", (event) => this._key(event));
    onWidth(this.svg, (width) => {
      this.width = width;
      this.draw();
    });
  }

  show(data) {
    this.data = data;
    this.draw();
  }

  draw() {
    const { width } = this,
      { bars, lines = [] } = this.data;
    if (!width) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const bottom = HEIGHT - BOTTOM,
      middle = (LEFT + width - RIGHT) / 2;
    if (!bars.length) {
      this.svg.replaceChildren(
        svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: bottom, y2: bottom }),
        svg("text", { class: "empty", x: middle, y: HEIGHT / 2 }, this.empty),
      );
      this._tell();
      return;
    }
    const highest = Math.max(...bars.flatMap((bar) => bar.parts.map((part) => part.size)));
    const marks = this.data.marks ?? ticks(highest, 4),
      y = scale(0, marks.at(-1), bottom, TOP);
    const slot = (width - LEFT - RIGHT) / bars.length;
    this.svg.replaceChildren(
      ...marks.map((mark) =>
        svg(
          "g",
          {},
          svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(mark), y2: y(mark) }),
          svg("text", { class: "mark", x: LEFT - 6, y: y(mark) + 3.5 }, this.data.text(mark)),
        ),
      ),
      ...bars.map((bar, index) => this._bar(bar, index, LEFT + index * slot, slot, y)),
      ...lines.map((line, row) => this._line(line, LEFT + line.at * slot, row, bottom)),
      svg("text", { class: "foot", x: middle, y: HEIGHT - 4 }, this.foot),
    );
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
    const labelled = index % Math.ceil(34 / slot) === 0;
    return svg(
      "g",
      { class: index === this.chosen ? "bar chosen" : "bar" },
      svg("rect", { class: "hit", x: left, width: slot, y: TOP, height: y(0) - TOP }),
      bar.parts.map((part, place) =>
        svg("rect", {
          class: `fill c-${part.colour}`,
          x: (first + place * each + 0.5).toFixed(1),
          width: Math.max(each - 1, 0.8).toFixed(1),
          y: y(part.size).toFixed(1),
          height: (y(0) - y(part.size)).toFixed(1),
          rx: Math.min(2, each / 4),
        }),
      ),
      labelled ? svg("text", { class: "below", x: left + slot / 2, y: y(0) + 13 }, bar.label) : null,
    );
  }

  _place(x) {
    const place = ((x - LEFT) / (this.width - LEFT - RIGHT)) * this.data.bars.length;
    return place < 0 || place >= this.data.bars.length ? NaN : place;
  }

  _choose(index) {
    const chosen = Number.isInteger(index) ? index : null;
    if (chosen === this.chosen) return;
    this.chosen = chosen;
    [...this.svg.querySelectorAll(".bar")].forEach((bar, place) => bar.classList.toggle("chosen", place === chosen));
    this._tell();
  }

  _tell() {
    const bar = this.chosen === null ? null : this.data.bars[this.chosen];
    const figures = (this.data.lines ?? []).map(({ name, value }) => html("span", {}, name, " ", html("b", {}, value)));
    this.told.replaceChildren(...(bar ? [bar.told] : figures));
    const all = [...(this.data.lines ?? []), ...this.data.bars]
      .map((one) => one.told ?? `${one.name} ${one.value}`)
      .join("; ");
    this.svg.setAttribute("aria-label", `${this.title}: ${bar ? bar.told : all || this.empty}`);
  }

  _key(event) {
    const last = this.data.bars.length - 1,
      from = this.chosen;
    const to = { ArrowLeft: (from ?? last + 1) - 1, ArrowRight: (from ?? -1) + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") this._choose(null);
    else if (to === undefined) return;
    else this._choose(Math.min(Math.max(to, 0), last));
    event.preventDefault();
  }
}
