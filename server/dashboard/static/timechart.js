// A chart over the time axis: panels one above the other that share it, a legend that tells the values, a cursor.
//
// A panel has { unit, height, top(bins), marks?, text?(mark), base?, level?() -> { at, text },
// lines?(bin) -> [{ key, at }], stack?(bin) -> [{ key, size }] }.
// The keys are those of the legend: { key, name, colour, value(bin) }.

import { ages, label, scale, ticks } from "./axis.js";
import { onPointing, point, pointedAt } from "./cursor.js";
import { html, onWidth, svg } from "./elements.js";
import { clock } from "./format.js";

const LEFT = 40,
  RIGHT = 8,
  TOP = 8,
  BOTTOM = 20,
  GAP = 14;

export class TimeChart {
  constructor(timeline, { id, title, note, panels, legend }) {
    Object.assign(this, { timeline, panels, legend, width: 0, bins: [], size: 1 });
    this.values = new Map(legend.map((entry) => [entry.key, html("b")]));
    this.when = html("span", { class: "when" });
    this.svg = svg("svg", { tabindex: 0, role: "img", class: "plot" });
    this.element = html(
      "section",
      { class: "card chart", id, "aria-label": title },
      html("h3", {}, title, this.when),
      html("p", { class: "note" }, note),
      html(
        "ul",
        { class: "legend" },
        legend.map((entry) =>
          html(
            "li",
            {},
            html("i", { class: `swatch ${entry.dashed ? "dashed" : ""} c-${entry.colour}` }),
            entry.name,
            " ",
            this.values.get(entry.key),
          ),
        ),
      ),
      this.svg,
    );
    this.svg.addEventListener("pointermove", (event) => this._pointAt(event.offsetX));
    this.svg.addEventListener("pointerleave", () => point(null));
    this.svg.addEventListener("blur", () => point(null));
    this.svg.addEventListener("keydown", (event) => this._key(event));
    this.title = title;
    onWidth(this.svg, (width) => {
      this.width = width;
      this.draw();
    });
    onPointing(() => this._drawCursor());
  }

  get height() {
    return TOP + BOTTOM + this.panels.reduce((sum, panel) => sum + panel.height, 0) + GAP * (this.panels.length - 1);
  }

  draw() {
    if (!this.width) return;
    const { timeline, width, height } = this;
    const inner = width - LEFT - RIGHT;
    ({ bins: this.bins, size: this.size } = timeline.bins(inner));
    this.x = scale(timeline.from, timeline.now, LEFT, width - RIGHT);
    this.svg.setAttribute("height", height);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const parts = [this._times(height)];
    let top = TOP;
    for (const panel of this.panels) {
      parts.push(this._panel(panel, top, top + panel.height));
      top += panel.height + GAP;
    }
    if (!this.bins.length)
      parts.push(svg("text", { x: LEFT + inner / 2, y: height / 2, class: "empty" }, "no steps in this time"));
    this.line = svg("line", { class: "cursor", y1: TOP, y2: height - BOTTOM });
    this.svg.replaceChildren(...parts, this.line);
    this._drawCursor();
  }

  _times(height) {
    const { now } = this.timeline;
    const marks = ages(this.timeline.span);
    return svg(
      "g",
      { class: "axis" },
      marks.map(([age, text], index) =>
        svg(
          "text",
          {
            x: this.x(now - age),
            y: height - 5,
            "text-anchor": index === 0 ? "end" : index === marks.length - 1 ? "start" : "middle",
          },
          text,
        ),
      ),
    );
  }

  _panel(panel, top, bottom) {
    const marks = panel.marks?.(this.bins) ?? ticks(panel.top(this.bins), panel.height > 70 ? 4 : 2);
    const y = scale(0, marks.at(-1), bottom, top);
    const grid = marks.map((mark) => [
      svg("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y(mark), y2: y(mark) }),
      svg("text", { class: "mark", x: LEFT - 6, y: y(mark) + 3.5 }, panel.text?.(mark) ?? label(mark)),
    ]);
    const unit = svg("text", { class: "unit", x: LEFT + 4, y: top + 9 }, panel.unit);
    return svg(
      "g",
      {},
      grid,
      panel.stack ? this._stack(panel, y) : null,
      panel.lines ? this._lines(panel, y) : null,
      panel.level && this.bins.length ? this._level(panel.level(), y, marks.at(-1)) : null,
      unit,
    );
  }

  /** Columns of stacked parts. */
  _stack(panel, y) {
    const paths = new Map();
    for (const bin of this.bins) {
      const [left, right] = this._edges(bin, 0.5);
      let below = 0;
      for (const { key, size } of panel.stack(bin)) {
        if (!(size > 0)) continue;
        const path = `M${left} ${y(below).toFixed(1)}V${y(below + size).toFixed(1)}H${right}V${y(below).toFixed(1)}Z`;
        paths.set(key, (paths.get(key) ?? "") + path);
        below += size;
      }
    }
    return [...paths].map(([key, d]) => svg("path", { d, class: `fill c-${this._colour(key)}` }));
  }

  /** A line in steps, broken where there was nothing; filled down to the panel's base, if it has one. */
  _lines(panel, y) {
    const paths = new Map(),
      areas = new Map();
    let last = null;
    for (const bin of this.bins) {
      const [left, right] = this._edges(bin, 0);
      const follows = last !== null && bin.at === last;
      for (const { key, at } of panel.lines(bin)) {
        if (!Number.isFinite(at)) continue;
        const path = paths.get(key);
        paths.set(key, `${path ?? ""}${path && follows ? "L" : "M"}${left} ${y(at).toFixed(1)}H${right}`);
        if (panel.base === undefined) continue;
        areas.set(
          key,
          `${areas.get(key) ?? ""}M${left} ${y(panel.base)}V${y(at).toFixed(1)}H${right}V${y(panel.base)}Z`,
        );
      }
      last = bin.at + this.size;
    }
    return [
      ...[...areas].map(([key, d]) => svg("path", { d, class: `area c-${this._colour(key)}` })),
      ...[...paths].map(([key, d]) => svg("path", { d, class: `line c-${this._colour(key)}` })),
    ];
  }

  _level({ at, text }, y, most) {
    if (!(at > 0 && at <= most)) return null;
    return [
      svg("line", { class: "level", x1: LEFT, x2: this.width - RIGHT, y1: y(at), y2: y(at) }),
      svg("text", { class: "level-text after", x: LEFT + 4, y: y(at) - 4 }, text),
    ];
  }

  _edges(bin, inset) {
    const left = Math.max(LEFT, this.x(bin.at)),
      right = Math.min(this.width - RIGHT, this.x(bin.at + this.size));
    return [(left + inset).toFixed(1), Math.max(right - inset, left + inset + 0.8).toFixed(1)];
  }

  _colour(key) {
    return this.legend.find((entry) => entry.key === key)?.colour ?? "nobody";
  }

  // -- the cursor ---------------------------------------------------------------------------------------------------

  /** The bin pointed at; the last one while nobody points. */
  _current() {
    const at = pointedAt();
    if (at === null) return this.bins.at(-1) ?? null;
    return this.bins.find((bin) => bin.at <= at && at < bin.at + this.size) ?? null;
  }

  _drawCursor() {
    if (!this.line) return;
    const at = pointedAt(),
      bin = this._current();
    const shown = at !== null && at >= this.timeline.from;
    this.line.classList.toggle("shown", shown);
    if (shown) for (const name of ["x1", "x2"]) this.line.setAttribute(name, this.x(Math.min(at, this.timeline.now)));
    this.when.textContent = at === null ? "" : clock(at);
    for (const entry of this.legend) this.values.get(entry.key).textContent = bin ? entry.value(bin) : "";
    this.svg.setAttribute(
      "aria-label",
      `${this.title}: ` +
        (bin
          ? `${clock(bin.at)}, ${this.legend.map((entry) => `${entry.name} ${entry.value(bin)}`).join(", ")}`
          : "nothing at this time") +
        ". Arrow keys move in time.",
    );
  }

  _pointAt(x) {
    const { timeline, width } = this;
    const share = (x - LEFT) / (width - LEFT - RIGHT);
    point(share < 0 || share > 1 ? null : timeline.from + share * timeline.span);
  }

  _key(event) {
    const { timeline, size } = this;
    const at = pointedAt() ?? timeline.now;
    const to = { ArrowLeft: at - size, ArrowRight: at + size, Home: timeline.from, End: timeline.now - 0.5 }[event.key];
    if (event.key === "Escape") point(null);
    else if (to === undefined) return;
    else point(Math.min(Math.max(to, timeline.from), timeline.now - 0.5));
    event.preventDefault();
  }
}
