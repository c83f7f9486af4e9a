// A chart over the time axis: panels one above the other that share it, a legend that tells the values, a cursor.
//
// A panel has { unit, height, series(bins), stacked?, marks?, mark?(mark) -> text, times?, least?, level?() }. Series
// are { name, colour, of(bin), text(value) }, lines or stacked columns, drawn `times` as large. The axis goes up to
// `least` and `level` anyway; at `level` there is a line for plain decoding.

import { html, paint, svg } from "./elements.js";
import { clock } from "./format.js";
import { ages, card, empty, entries, label, LEFT, marked, Plot, pointing, RIGHT, scale, ticks, TOP } from "./plot.js";

const BOTTOM = 20,
  GAP = 14;

const charts = [];
/** The moment that the reader points at in one of the charts, in seconds since 1970; null if nobody points. */
let moment = null;

function point(at) {
  if (at === moment) return;
  moment = at;
  for (const chart of charts) chart.tell();
}

export class TimeChart extends Plot {
  constructor(timeline, { panels, ...about }) {
    super(about.title);
    Object.assign(this, { timeline, panels, bins: [], size: 1 });
    this.when = html("span", { class: "when" });
    this.names = html("ul", { class: "legend" });
    this.element = card({ ...about, beside: this.when }, this.names, this.svg);
    pointing(this.svg, point, ({ offsetX }) => this._momentAt(offsetX), () => this._keys());
    charts.push(this);
  }

  drawn(width) {
    const { timeline } = this,
      right = width - RIGHT;
    Object.assign(this, timeline.bins(right - LEFT), { x: scale(timeline.from, timeline.now, LEFT, right) });
    let bottom = TOP - GAP;
    const panels = this.panels.map((panel) => this._panel(panel, bottom + GAP, (bottom += GAP + panel.height), right));
    const height = bottom + BOTTOM;
    this.line = svg("line", { class: "cursor", y1: TOP, y2: bottom });
    const none = this.bins.length ? null : empty((LEFT + right) / 2, height / 2, "no steps in this time");
    return [height, this._times(height - 5), panels, none, this.line];
  }

  _times(y) {
    const { now, span } = this.timeline;
    const anchor = (age) => ({ 0: "end", [span]: "start" })[age] ?? "middle";
    return ages(span).map(([age, text]) => svg("text", { x: this.x(now - age), y, "text-anchor": anchor(age) }, text));
  }

  _panel(panel, top, bottom, right) {
    const { bins } = this,
      series = panel.series(bins),
      level = panel.level?.() ?? 0,
      times = panel.times ?? 1,
      marks = panel.marks ?? ticks(times * this._top(panel, series, level), panel.height > 70 ? 4 : 2),
      marksAt = scale(0, marks.at(-1), bottom, top),
      y = (value) => marksAt(times * value);
    return [
      marked(marks, marksAt, right, panel.mark ?? label),
      panel.stacked ? this._columns(series, y) : series.map((one) => this._line(one, y)),
      bins.length && level > 0 && times * level <= marks.at(-1)
        ? [
            svg("line", { class: "level", x1: LEFT, x2: right, y1: y(level), y2: y(level) }),
            svg("text", { class: "level-text", x: right - 4, y: y(level) - 4 }, "plain"),
          ]
        : null,
      svg("text", { class: "unit", x: LEFT + 4, y: top + 9 }, panel.unit),
    ];
  }

  _top({ stacked, least = 0 }, series, level) {
    const values = this.bins.map((bin) => series.map(({ of }) => of(bin) || 0));
    const tops = stacked ? values.map((parts) => parts.reduce((sum, part) => sum + part)) : values.flat();
    return Math.max(least, level, ...tops);
  }

  _columns(series, y) {
    const below = new Map();
    return series.map(({ colour, of }) => {
      const column = (bin) => {
        const [left, right] = this._edges(bin, 0.5),
          from = below.get(bin) ?? 0,
          to = from + (of(bin) || 0);
        below.set(bin, to);
        return to > from ? `M${left} ${y(from).toFixed(1)}V${y(to).toFixed(1)}H${right}V${y(from).toFixed(1)}Z` : "";
      };
      return this._path(column, "fill", colour);
    });
  }

  /** A line in steps, broken where there was nothing. */
  _line({ colour, of }, y) {
    let end = null;
    const step = (bin) => {
      const value = of(bin);
      if (!Number.isFinite(value)) return "";
      const [left, right] = this._edges(bin, 0),
        begin = end === bin.at ? "L" : "M";
      end = bin.at + this.size;
      return `${begin}${left} ${y(value).toFixed(1)}H${right}`;
    };
    return this._path(step, "line", colour);
  }

  _path(part, class_, colour) {
    const d = this.bins.map(part).join("");
    return d ? paint(svg("path", { d, class: class_ }), colour) : null;
  }

  _edges(bin, inset) {
    const left = Math.max(LEFT, this.x(bin.at)),
      right = Math.min(this.width - RIGHT, this.x(bin.at + this.size));
    return [(left + inset).toFixed(1), Math.max(right - inset, left + inset + 0.8).toFixed(1)];
  }

  // -- the cursor ---------------------------------------------------------------------------------------------------

  /** Tells the bin pointed at; the last one while nobody points. */
  tell() {
    if (!this.line) return;
    const shown = moment !== null && moment >= this.timeline.from,
      here = (bin) => bin.at <= moment && moment < bin.at + this.size,
      bin = moment === null ? this.bins.at(-1) : this.bins.find(here);
    this.line.classList.toggle("shown", shown);
    const x = this.x(Math.min(moment, this.timeline.now));
    if (shown) for (const end of ["x1", "x2"]) this.line.setAttribute(end, x);
    this.when.textContent = moment === null ? "" : clock(moment);
    const told = this.panels
      .flatMap(({ series }) => series(this.bins))
      .map(({ name, colour, of, text }) => ({ name, colour, value: bin ? text(of(bin)) : "" }));
    this.names.replaceChildren(...entries(told));
    const values = told.filter(({ value }) => value).map(({ name, value }) => `${name} ${value}`);
    const what = bin ? `${clock(bin.at)}, ${values.join(", ")}` : "nothing at this time";
    this.say(`${what}. Arrow keys move in time.`);
  }

  _momentAt(x) {
    const share = (x - LEFT) / (this.width - LEFT - RIGHT);
    return share < 0 || share > 1 ? null : this.timeline.from + share * this.timeline.span;
  }

  _keys() {
    const { from, now } = this.timeline,
      at = moment ?? now,
      within = (moment) => Math.min(Math.max(moment, from), now - 0.5);
    const arrows = { ArrowLeft: within(at - this.size), ArrowRight: within(at + this.size) };
    return { ...arrows, Home: within(from), End: within(now), Escape: null };
  }
}
