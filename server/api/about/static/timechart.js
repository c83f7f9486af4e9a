// A chart over the time axis: panels one above the other that share it, a legend that tells the values, a cursor.
//
// A panel has { unit, height, top(bins), marks?, text?(mark), level?() -> { at, text }, lines?(bin) -> { key: value },
// stack?(bin) -> { key: size } }. legend(bins) names the keys: [{ key?, name, colour, value?(bin) }].

import { ages, label, scale, ticks } from "./axis.js";
import { paint } from "./colours.js";
import { onPointing, point, pointedAt } from "./cursor.js";
import { html, svg } from "./elements.js";
import { clock } from "./format.js";
import { canvas, card, entries, marked, put } from "./plot.js";

const LEFT = 40,
  RIGHT = 8,
  TOP = 8,
  BOTTOM = 20,
  GAP = 14;

export class TimeChart {
  constructor(timeline, { panels, legend, ...named }) {
    Object.assign(this, { timeline, panels, legend, title: named.title, width: 0, bins: [], size: 1 });
    this.when = html("span", { class: "when" });
    this.names = html("ul", { class: "legend" });
    this.svg = canvas((width) => {
      this.width = width;
      this.draw();
    });
    this.element = card({ ...named, beside: this.when }, this.names, this.svg);
    this.svg.addEventListener("pointermove", ({ offsetX }) => this._pointAt(offsetX));
    for (const end of ["pointerleave", "blur"]) this.svg.addEventListener(end, () => point(null));
    this.svg.addEventListener("keydown", (event) => this._key(event));
    onPointing(() => this._tell());
  }

  draw() {
    if (!this.width) return;
    const { timeline, width } = this;
    ({ bins: this.bins, size: this.size } = timeline.bins(width - LEFT - RIGHT));
    this.x = scale(timeline.from, timeline.now, LEFT, width - RIGHT);
    this.keys = new Map(this.legend(this.bins).map((entry) => [entry.key, entry.colour]));
    let bottom = TOP - GAP;
    const panels = this.panels.map((panel) => this._panel(panel, bottom + GAP, (bottom += GAP + panel.height)));
    const height = bottom + BOTTOM,
      middle = (LEFT + width - RIGHT) / 2;
    this.line = svg("line", { class: "cursor", y1: TOP, y2: bottom });
    const empty = this.bins.length
      ? null
      : svg("text", { x: middle, y: height / 2, class: "empty" }, "no steps in this time");
    put(this.svg, width, height, this._times(height - 5), panels, empty, this.line);
    this._tell();
  }

  _times(y) {
    const { now, span } = this.timeline;
    const anchor = (age) => ({ 0: "end", [span]: "start" })[age] ?? "middle";
    return ages(span).map(([age, text]) => svg("text", { x: this.x(now - age), y, "text-anchor": anchor(age) }, text));
  }

  _panel(panel, top, bottom) {
    const { bins } = this,
      marks = panel.marks ?? ticks(panel.top(bins), panel.height > 70 ? 4 : 2),
      y = scale(0, marks.at(-1), bottom, top);
    const level = panel.level?.() ?? {};
    return [
      marked(marks, y, LEFT, this.width - RIGHT, panel.text ?? label),
      panel.stack ? this._stack(panel, y) : this._lines(panel, y),
      bins.length && level.at > 0 && level.at <= marks.at(-1) ? this._level(level, y) : null,
      svg("text", { class: "unit", x: LEFT + 4, y: top + 9 }, panel.unit),
    ];
  }

  /** Columns of stacked parts. */
  _stack(panel, y) {
    const paths = new Map();
    for (const bin of this.bins) {
      const [left, right] = this._edges(bin, 0.5);
      let below = 0;
      for (const [key, size] of Object.entries(panel.stack(bin))) {
        if (!(size > 0)) continue;
        const path = `M${left} ${y(below).toFixed(1)}V${y(below + size).toFixed(1)}H${right}V${y(below).toFixed(1)}Z`;
        paths.set(key, (paths.get(key) ?? "") + path);
        below += size;
      }
    }
    return this._painted(paths, "fill");
  }

  /** Lines in steps, broken where there was nothing. */
  _lines(panel, y) {
    const paths = new Map(),
      ends = new Map();
    for (const bin of this.bins) {
      const [left, right] = this._edges(bin, 0);
      for (const [key, value] of Object.entries(panel.lines(bin))) {
        if (!Number.isFinite(value)) continue;
        const begin = ends.get(key) === bin.at ? "L" : "M";
        paths.set(key, `${paths.get(key) ?? ""}${begin}${left} ${y(value).toFixed(1)}H${right}`);
        ends.set(key, bin.at + this.size);
      }
    }
    return this._painted(paths, "line");
  }

  _painted(paths, kind) {
    return [...paths].map(([key, d]) => paint(svg("path", { d, class: kind }), this.keys.get(key) ?? "none"));
  }

  _level({ at, text }, y) {
    return [
      svg("line", { class: "level", x1: LEFT, x2: this.width - RIGHT, y1: y(at), y2: y(at) }),
      svg("text", { class: "level-text", x: this.width - RIGHT - 4, y: y(at) - 4 }, text),
    ];
  }

  _edges(bin, inset) {
    const left = Math.max(LEFT, this.x(bin.at)),
      right = Math.min(this.width - RIGHT, this.x(bin.at + this.size));
    return [(left + inset).toFixed(1), Math.max(right - inset, left + inset + 0.8).toFixed(1)];
  }

  // -- the cursor ---------------------------------------------------------------------------------------------------

  /** Tells the bin pointed at; the last one while nobody points. */
  _tell() {
    if (!this.line) return;
    const at = pointedAt(),
      shown = at !== null && at >= this.timeline.from;
    const bin = at === null ? this.bins.at(-1) : this.bins.find((one) => one.at <= at && at < one.at + this.size);
    this.line.classList.toggle("shown", shown);
    if (shown) for (const name of ["x1", "x2"]) this.line.setAttribute(name, this.x(Math.min(at, this.timeline.now)));
    this.when.textContent = at === null ? "" : clock(at);
    const told = this.legend(this.bins).map((entry) => ({ ...entry, value: bin ? entry.value?.(bin) : "" }));
    this.names.replaceChildren(...entries(told));
    const values = told.filter(({ value }) => value).map(({ name, value }) => `${name} ${value}`);
    const what = bin ? `${clock(bin.at)}, ${values.join(", ")}` : "nothing at this time";
    this.svg.setAttribute("aria-label", `${this.title}: ${what}. Arrow keys move in time.`);
  }

  _pointAt(x) {
    const share = (x - LEFT) / (this.width - LEFT - RIGHT);
    point(share < 0 || share > 1 ? null : this.timeline.from + share * this.timeline.span);
  }

  _key(event) {
    const { timeline, size } = this,
      at = pointedAt() ?? timeline.now;
    const to = { ArrowLeft: at - size, ArrowRight: at + size, Home: timeline.from, End: timeline.now, Escape: null };
    if (!(event.key in to)) return;
    const moment = to[event.key];
    point(moment === null ? null : Math.min(Math.max(moment, timeline.from), timeline.now - 0.5));
    event.preventDefault();
  }
}
