// The charts on the time axis: panels one above the other that share it, a legend that tells the values, a cursor.

import { html, svg } from "./elements.js";
import { FIGURES, ratio, say, title } from "./figures.js";
import { clock, count, number, percent, span as spanned, time } from "./format.js";
import { drafterName } from "./models.js";
import { card, entries, LEFT, marked, Plot, pointing, RIGHT, scale, ticks, TOP } from "./plot.js";

const [BOTTOM, GAP] = [20, 20];
/** Seconds between the marks of the time axis, by what it spans. */
const STEPS = { 60: 15, 180: 60, 600: 120, 3600: 900 };

/** About so many rows has a table. */
const ROWS = 20;

const charts = [];
/** The moment that the reader points at in one of the charts, in seconds since 1970; null if nobody points. */
let moment = null;

function point(at) {
  if (at === moment) return;
  moment = at;
  for (const chart of charts) chart.tell();
}

/** A mark of an axis without needless zeros. */
const plainly = (value) => (value >= 1000 ? `${value / 1000}k` : String(Number(value.toPrecision(4))));

/** Panels are { unit, height, series(bins), stacked?, marks?, mark?(mark) -> text, times?, least?, level?() }. Series
 * are { name, colour, of(bin), text(value), live? }, lines or stacked columns, drawn `times` as large. The axis goes up
 * to `least` and `level` anyway; at `level` there is a line for plain decoding. While nobody points, the legend has the
 * figures of the last minute: those that tiles show too are read from where the tiles have them, by `live`. */
class TimeChart extends Plot {
  constructor(timeline, state, panels, about) {
    super(about.title, html("ul.legend"));
    Object.assign(this, { timeline, state, panels, when: html("span.when") });
    this.element = card({ ...about, aside: this.when }, this.readout, this.svg, this.numbers);
    pointing(this.svg, point, ({ offsetX }) => this._momentAt(offsetX), () => this._keys());
    charts.push(this);
  }

  get nothing() {
    return !this.timeline.shown().length;
  }

  /** The newest first, in about twenty rows. */
  table() {
    const { bins } = this.timeline.bins(ROWS, 1),
      series = this.series(bins);
    const row = (bin) => [clock(bin.at), ...series.map((one) => say(one, one.of(bin)))];
    return { heads: ["from", ...series.map(({ name }) => name)], rows: bins.reverse().map(row) };
  }

  series(bins) {
    return this.panels.flatMap(({ series }) => series(bins));
  }

  drawn(width) {
    const { from, now } = this.timeline,
      right = width - RIGHT;
    Object.assign(this, this.timeline.bins(right - LEFT), { x: scale(from, now, LEFT, right) });
    let bottom = 0;
    const panels = this.panels.map((panel) => this._panel(panel, bottom + GAP, (bottom += GAP + panel.height), right));
    const height = bottom + BOTTOM;
    this.cursor = svg("line", { y1: TOP, y2: bottom });
    return { height, marks: [this._times(height - 5), panels, this.cursor] };
  }

  _times(y) {
    const { now, span } = this.timeline,
      step = STEPS[span],
      crowded = this.width < 340;
    const mark = (_, index) => {
      const age = index * step;
      if (crowded && age + step === span) return null; // the oldest one needs the room
      const text = step < 60 ? `${age} s` : `${age / 60} min`,
        anchor = { 0: "end", [span]: "start" }[age] ?? "middle";
      return svg("text", { x: this.x(now - age), y, "text-anchor": anchor }, age ? text : "now");
    };
    return Array.from({ length: span / step + 1 }, mark);
  }

  _panel({ unit, height, times = 1, mark = plainly, stacked, least = 0, ...panel }, top, bottom, right) {
    const series = panel.series(this.bins),
      level = panel.level?.() ?? 0,
      reaches = this.bins.map((bin) => reach(series, bin, stacked)),
      most = Math.max(least, level, ...reaches.flat().map(({ to }) => to || 0)),
      marks = panel.marks ?? ticks(times * most, height > 70 ? 4 : 2),
      y = scale(0, marks.at(-1) / times, bottom, top);
    const line = ({ colour }, index) => {
      const d = this._path(reaches.map((bin) => bin[index]), y, stacked);
      return d && svg(stacked ? "path.fill" : "path.line", { d, colour, "stroke-width": 1.8 });
    };
    const plain = level > 0 && this.bins.length > 0;
    return [
      marked(marks, (value) => y(value / times), right, mark),
      series.map(line),
      plain && svg("line.level", { x1: LEFT, x2: right, y1: y(level), y2: y(level) }),
      svg("text.unit", { colour: "faint", x: LEFT, y: top - 6 }, unit),
    ];
  }

  /** Columns, or a line in steps that is broken where there was nothing. */
  _path(reaches, y, stacked) {
    const inset = stacked ? 0.5 : 0;
    let end = null;
    const part = ({ at, from, to }) => {
      const start = Math.max(LEFT, this.x(at)) + inset,
        stop = Math.max(Math.min(this.width - RIGHT, this.x(at + this.size)) - inset, start + 0.8),
        [left, right, low, high] = [start, stop, y(from), y(to)].map((pixels) => pixels.toFixed(1));
      if (stacked) return to > from ? `M${left} ${low}V${high}H${right}V${low}Z` : "";
      if (!Number.isFinite(to)) return "";
      const begin = end === at ? "L" : "M";
      end = at + this.size;
      return `${begin}${left} ${high}H${right}`;
    };
    return reaches.map(part).join("");
  }

  /** Tells the bin pointed at; the last minute while nobody points. */
  tell() {
    if (!this.cursor) return;
    const { from, now } = this.timeline,
      { live } = this.state.snapshot,
      here = (bin) => bin.at <= moment && moment < bin.at + this.size,
      resting = moment === null,
      bin = resting ? this.timeline.minute(live.until) : this.bins.find(here),
      value = (one) => (resting && one.live ? one.live(live) : bin && one.of(bin));
    this.cursor.setAttribute("visibility", moment !== null && moment >= from ? "visible" : "hidden");
    this.cursor.setAttribute("transform", `translate(${this.x(Math.min(moment, now))})`);
    this.when.textContent = resting ? "last minute" : clock(moment);
    const shown = this.series(this.bins).map((one) => ({ ...one, value: say(one, value(one)) }));
    const values = shown.filter(({ value }) => value).map(({ name, value }) => `${name} ${value}`);
    const what = bin ? `${resting ? "last minute" : clock(bin.at)}, ${values.join(", ")}` : "nothing at this time";
    this.read = { hint: entries(shown), all: `${what}. Arrow keys move in time.` };
    super.tell();
  }

  _momentAt(x) {
    const { from, now } = this.timeline,
      at = scale(LEFT, this.width - RIGHT, from, now)(x);
    return at < from || at > now ? null : at;
  }

  _keys() {
    const { from, now } = this.timeline,
      at = moment ?? now,
      within = (moment) => Math.min(Math.max(moment, from), now - 0.5);
    const arrows = { ArrowLeft: within(at - this.size), ArrowRight: within(at + this.size) };
    return { ...arrows, Home: within(from), End: within(now), Escape: null };
  }
}

/** From where to where each series reaches in a bin: upon the ones before where they are stacked. */
function reach(series, bin, stacked) {
  let from = 0;
  return series.map(({ of }) => ({ at: bin.at, from, to: stacked ? (from += of(bin) || 0) : of(bin) }));
}

// -- what is shown ----------------------------------------------------------------------------------------------------

const series = (name, colour, of, text) => ({ name, colour, of, text });
const figured = ({ name, text, bin, live }, colour) => ({ name, colour, of: bin, text, live });
const panel = (height, unit, of, more) => ({ height, unit, series: Array.isArray(of) ? () => of : of, ...more });

const plain = { least: 2, level: () => 1 };
const shares = { marks: [0, 0.5, 1], mark: percent, stacked: true };

const rate = figured(FIGURES.throughput, "verify");
const first = figured(FIGURES.first, "propose");
const perPass = figured(FIGURES.perPass, "now");
const nodes = series("tokens drafted at a time", "ink", (bin) => ratio(bin.drafted, bin.drafts), number);
const running = series("running", "now", (bin) => bin.running, count);
const waiting = series("waiting", "propose", (bin) => bin.waiting, count);

const speedUp = figured(FIGURES.speedUp, "now");

const phase = (name, colour, ...of) => {
  const seconds = (bin) => of.reduce((sum, one) => sum + (bin.phases[one] ?? 0), 0);
  return series(name, colour, (bin) => ratio(seconds(bin), bin.steps), time);
};
const PHASES = [
  phase("drafting", "propose", "propose"),
  phase("model pass", "verify", "forward"),
  phase("choosing", "draw", "draw", "commit"),
  phase("preparing", "host", "plan", "mask"),
  phase("delivery", "deliver", "deliver"),
];

/** The share of the passes in which somebody drafted, by name; "": nobody. */
const drafted = (who) => {
  const steps = (bin) => (who ? (bin.drafters[who] ?? 0) : bin.runs - bin.drafts);
  return series(drafterName(who) || "nobody", who, (bin) => ratio(steps(bin), bin.runs), (share) => percent(share));
};
const whoDrafted = (bins) => [...new Set(bins.flatMap((bin) => Object.keys(bin.drafters)))].sort().concat("");

/** Says what is left out, since there is nothing of it. */
function leftOut(timeline, state) {
  const element = html("p.note.left-out");
  const draw = () => {
    const { accepted_by_depth: now, accepted_by_depth_hour: hour } = state.snapshot,
      nothing = !timeline.shown().length && `Nothing ran in the last ${spanned(timeline.span).replace(" 0 min", "")}.`,
      undrafted = !now.drafts && !hour.drafts && "Nothing was drafted yet, so there are no charts of drafts.";
    element.textContent = [nothing, undrafted].filter(Boolean).join(" ");
    element.hidden = !element.textContent;
  };
  return { element, draw };
}

/** All of them, in the order in which they are read. state: the last event of the feed. */
export function overTime(timeline, state) {
  const chart = (id, title, term, note, panels) => new TimeChart(timeline, state, panels, { id, title, term, note });
  const speed = "How fast answers are written, how many times as fast as without drafts (dashed), how soon they begin.";
  const passes = "How many tokens one pass of the model adds to a text. Without drafts it is one: the dashed line.";
  const step = "What the time of one pass goes to. The dashed line is a pass without drafts.";
  const choices = "Which drafter guessed, in what share of the passes, and how many tokens it guessed at a time.";
  const load = "Memory held by running requests, memory that only keeps old prompts for reuse, and who waits.";
  const root = { times: 1000, stacked: true, level: () => state.snapshot.live.root_seconds };
  const all = () => state.snapshot.server.kv_tokens / state.snapshot.server.page_size;
  const pages = (name, colour, held) =>
    series(name, colour, (bin) => Math.min(1, bin[held] / all()), (share) => percent(share, 1));
  return [
    leftOut(timeline, state),
    chart("speed-over-time", "Speed", "throughput, speed-up, time to first token", speed, [
      panel(64, "tokens per second", [rate]),
      panel(54, "times as fast", [speedUp], plain),
      panel(44, "first token after, ms", [first], { times: 1000 }),
    ]),
    chart("tokens-per-step", title(FIGURES.perPass), FIGURES.perPass.term, passes, [
      panel(132, "tokens", [perPass], plain),
    ]),
    chart("time-per-step", "Time per pass", "step", step, [panel(132, "ms", PHASES, root)]),
    chart("choices", "Who drafted", "drafters", choices, [
      panel(78, "share of passes", (bins) => whoDrafted(bins).map(drafted), shares),
      panel(54, "tokens at a time", [nodes], { least: 2 }),
    ]),
    chart("load", "Memory and queue", "KV cache", load, [
      panel(78, "memory", [pages("in use", "verify", "pages"), pages("kept", "before", "kept_pages")], shares),
      panel(54, "requests", [running, waiting], { least: 2 }),
    ]),
  ];
}
