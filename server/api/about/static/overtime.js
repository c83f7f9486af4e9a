// The charts on the time axis: panels one above the other that share it, a legend that tells the values, a cursor.

import { html, svg } from "./elements.js";
import { clock, count, number, percent, time } from "./format.js";
import { card, empty, entries, LEFT, marked, Plot, pointing, RIGHT, scale, ticks, TOP } from "./plot.js";

const [BOTTOM, GAP] = [20, 14];
/** Seconds between the marks of the time axis, by what it spans. */
const STEPS = { 60: 15, 180: 60, 600: 120, 3600: 900 };

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
 * are { name, colour, of(bin), text(value) }, lines or stacked columns, drawn `times` as large. The axis goes up to
 * `least` and `level` anyway; at `level` there is a line for plain decoding. */
class TimeChart extends Plot {
  constructor(timeline, panels, about) {
    super(about.title, html("ul.legend"));
    Object.assign(this, { timeline, panels, when: html("span.when") });
    this.element = card({ ...about, beside: this.when }, this.told, this.svg);
    pointing(this.svg, point, ({ offsetX }) => this._momentAt(offsetX), () => this._keys());
    charts.push(this);
  }

  drawn(width) {
    const { from, now } = this.timeline,
      right = width - RIGHT;
    Object.assign(this, this.timeline.bins(right - LEFT), { x: scale(from, now, LEFT, right) });
    let bottom = TOP - GAP;
    const panels = this.panels.map((panel) => this._panel(panel, bottom + GAP, (bottom += GAP + panel.height), right));
    const height = bottom + BOTTOM;
    this.cursor = svg("line", { y1: TOP, y2: bottom });
    const none = !this.bins.length && empty((LEFT + right) / 2, height / 2, "no steps in this time");
    return { height, marks: [this._times(height - 5), panels, none, this.cursor] };
  }

  _times(y) {
    const { now, span } = this.timeline,
      step = STEPS[span];
    const mark = (_, index) => {
      const age = index * step,
        text = step < 60 ? `${age} s` : `${age / 60} min`,
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
      plain && svg("text.level", { colour: "ink", x: right - 4, y: y(level) - 4 }, "plain"),
      svg("text.unit", { colour: "faint", x: LEFT + 4, y: top + 9 }, unit),
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

  /** Tells the bin pointed at; the last one while nobody points. */
  tell() {
    if (!this.cursor) return;
    const { from, now } = this.timeline,
      here = (bin) => bin.at <= moment && moment < bin.at + this.size,
      bin = moment === null ? this.bins.at(-1) : this.bins.find(here);
    this.cursor.setAttribute("visibility", moment !== null && moment >= from ? "visible" : "hidden");
    this.cursor.setAttribute("transform", `translate(${this.x(Math.min(moment, now))})`);
    this.when.textContent = moment === null ? "" : clock(moment);
    const told = this.panels
      .flatMap(({ series }) => series(this.bins))
      .map(({ name, colour, of, text }) => ({ name, colour, value: bin && text(of(bin)) }));
    const values = told.filter(({ value }) => value).map(({ name, value }) => `${name} ${value}`);
    const what = bin ? `${clock(bin.at)}, ${values.join(", ")}` : "nothing at this time";
    this.read = { hint: entries(told), all: `${what}. Arrow keys move in time.` };
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
const panel = (height, unit, of, more) => ({ height, unit, series: Array.isArray(of) ? () => of : of, ...more });
const ratio = (part, whole) => (whole > 0 ? part / whole : NaN);

const plain = { least: 2, level: () => 1 };
const shares = { marks: [0, 0.5, 1], mark: percent, stacked: true };

const rate = series("tok/s", "verify", (bin) => ratio(bin.tokens, bin.busy_seconds), number);
const first = series("first token", "propose", (bin) => ratio(bin.first_token_seconds, bin.first_tokens), time);
const perStep = series("tokens per step", "now", (bin) => ratio(bin.tokens, bin.runs), number);
const nodes = series("drafted per tree", "ink", (bin) => ratio(bin.drafted, bin.drafts), number);
const running = series("running", "now", (bin) => bin.running, count);
const waiting = series("waiting", "propose", (bin) => bin.waiting, count);

/** The speed-up where it is as unsure as asked for; elsewhere there is nothing to tell. */
const speedUp = (name, colour, wanted) => {
  const of = (bin) => (unsure(bin) === wanted ? ratio(bin.plain_seconds, bin.decode_seconds) : null);
  return series(name, colour, of, (value) => (value === null ? "" : number(value)));
};
const unsure = (bin) => 2 * bin.doubted_seconds > bin.decode_seconds;
const [SURE, UNSURE] = [speedUp("speed-up", "now", false), speedUp("unsure", "none", true)];

const phase = (name, colour, ...of) => {
  const seconds = (bin) => of.reduce((sum, one) => sum + (bin.phases[one] ?? 0), 0);
  return series(name, colour, (bin) => ratio(seconds(bin), bin.steps), time);
};
const PHASES = [
  phase("draft", "propose", "propose"),
  phase("verify", "verify", "forward"),
  phase("draw + commit", "draw", "draw", "commit"),
  phase("host", "host", "plan", "mask"),
  phase("delivery", "deliver", "deliver"),
];

/** The share of the steps in which somebody drafted, by name; "": nobody. */
const drafted = (who) => {
  const steps = (bin) => (who ? (bin.drafters[who] ?? 0) : bin.runs - bin.drafts);
  return series(who || "none", who, (bin) => ratio(steps(bin), bin.runs), percent);
};
const whoDrafted = (bins) => [...new Set(bins.flatMap((bin) => Object.keys(bin.drafters)))].sort().concat("");

/** All of them, in the order in which they are read. state: what the feed told last. */
export function overTime(timeline, state) {
  const chart = (id, title, note, panels) => new TimeChart(timeline, panels, { id, title, note });
  const speed =
    "Tokens per second of engine time; how many times as fast as plain decoding, estimated; time to the first token.";
  const passes = "How many tokens of a text one pass of the target writes, plain passes included.";
  const root = { times: 1000, stacked: true, level: () => state.snapshot.live.root_seconds };
  const all = () => state.snapshot.server.kv_tokens / state.snapshot.server.page_size;
  const pages = (name, colour, held) =>
    series(name, colour, (bin) => bin[held] / all(), (share) => percent(share, 1));
  return [
    chart("speed-over-time", "Speed", speed, [
      panel(64, "tok/s", [rate]),
      panel(54, "speed-up", (bins) => (bins.some(unsure) ? [SURE, UNSURE] : [SURE]), plain),
      panel(44, "first token, ms", [first], { times: 1000 }),
    ]),
    chart("tokens-per-step", "Tokens per step", passes, [panel(132, "tokens", [perStep], plain)]),
    chart("time-per-step", "Time per step", "Where the time goes. The dashed line is a step without drafts.", [
      panel(132, "ms", PHASES, root),
    ]),
    chart("choices", "Drafters and trees", "Each drafter's share of the steps, and how many tokens it drafted.", [
      panel(78, "share of steps", (bins) => whoDrafted(bins).map(drafted), shares),
      panel(54, "drafted tokens", [nodes], { least: 2 }),
    ]),
    chart("load", "KV cache and queue", "Pages held by requests, and those that only keep old prompts for reuse.", [
      panel(78, "KV pages", [pages("in use", "verify", "pages"), pages("kept", "before", "kept_pages")], shares),
      panel(54, "requests", [running, waiting], { least: 2 }),
    ]),
  ];
}
