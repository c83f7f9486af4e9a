// Bars, and how things are spread, which they show: acceptance by depth, gaps between chunks, time per token.

import { html, svg } from "./elements.js";
import { FIGURES, title } from "./figures.js";
import { count, percent, time } from "./format.js";
import { card, entries, LEFT, marked, Plot, RIGHT, scale, ticks } from "./plot.js";
import { sum } from "./timeline.js";

const [BOTTOM, HEIGHT, HEAD] = [34, 188, 18];
/** Pixels that a character of a label needs. */
const APART = 8.5;

const share = (mark) => `${Number((100 * mark).toPrecision(2))} %`;

/** Shows shares: bars are { label, text, sizes }, a size in each colour of `legend`, which says what it means; lines
 * are { at, name, value }, in bars from the left. The axis goes up to `least` anyway; `foot` is under the
 * bars. `table` is what its table says of the data. */
class BarChart extends Plot {
  constructor({ legend, foot, table, least = 0, ...about }) {
    super(about.title, html("li.when"), "bar");
    Object.assign(this, { colours: Object.keys(legend), foot, least, data: { bars: [], lines: [] } });
    this.table = () => table(this.data);
    const named = Object.entries(legend).filter(([, name]) => name);
    const meanings = entries(named.map(([colour, name]) => ({ colour, name })));
    this.element = card(about, html("ul.legend", meanings, this.readout), this.svg, this.numbers);
  }

  get nothing() {
    return !this.data.bars.length;
  }

  drawn(width) {
    const { bars, lines } = this.data,
      right = width - RIGHT,
      middle = (LEFT + right) / 2;
    const marks = ticks(Math.max(this.least, ...bars.flatMap(({ sizes }) => sizes))),
      y = scale(0, marks.at(-1), HEIGHT - BOTTOM, HEAD),
      slot = (right - LEFT) / bars.length,
      every = Math.ceil((APART * Math.max(...bars.map(({ label }) => label.length))) / slot),
      parts = bars.map(({ text }) => text);
    return {
      height: HEIGHT,
      marks: [
        marked(marks, y, right, share),
        bars.map((bar, index) => this._bar(bar, LEFT + index * slot, slot, y, index % every === 0)),
        lines.map(({ name, at }, row) => this._line(name, LEFT + at * slot, row, y(0))),
        svg("text.foot", { x: middle, y: HEIGHT - 4 }, this.foot),
      ],
      parts,
      hint: lines.map(({ name, value }) => html("span", `${name} within `, html("b", value))),
      all: [...lines.map(({ name, value }) => `${name} within ${value}`), ...parts].join("; "),
    };
  }

  _bar({ label, sizes }, left, slot, y, labelled) {
    const room = Math.min(slot * 0.78, 64),
      each = room / sizes.length,
      first = left + (slot - room) / 2 + 0.5,
      width = Math.max(each - 1, 0.8);
    const bar = (size, at) => {
      const place = { x: first + at * each, width, y: y(size), height: y(0) - y(size) };
      return svg("rect.fill", { colour: this.colours[at], ...place });
    };
    const hit = svg("rect.hit", { x: left, width: slot, y: HEAD, height: y(0) - HEAD });
    const below = labelled && svg("text.below", { x: left + slot / 2, y: y(0) + 13 }, label);
    return svg("g.bar", hit, sizes.map(bar), below);
  }

  /** A line across the bars, its name next to it: left of the first one, right of the others if there is room. */
  _line(name, x, row, bottom) {
    const after = row > 0 && x + 30 < this.width;
    return [
      svg("line.level", { x1: x, x2: x, y1: HEAD, y2: bottom }),
      svg(after ? "text.level.after" : "text.level", { colour: "ink", x: x + (after ? 4 : -4), y: HEAD - 6 }, name),
    ];
  }
}

/** Depths that are shown each; the last one stands for all deeper ones too. */
export const DEEPEST = 9;
export const depthName = (depth) => (depth < DEEPEST ? String(depth) : `${DEEPEST}+`);

function depths({ accepted_by_depth: now, accepted_by_depth_hour: hour }) {
  const length = Math.min(Math.max(now.cumulative.length, hour.cumulative.length), DEEPEST);
  const bars = Array.from({ length }, (_, index) => {
    const shares = [now.cumulative, hour.cumulative, now.conditional, hour.conditional].map((all) => all[index]),
      [all, before, given, givenBefore] = shares.map((one) => percent(one)),
      label = depthName(index + 1),
      text =
        `token ${label}: right in ${all} of the drafts, ${given} of those right before it; ` +
        `in the last hour ${before}, ${givenBefore}`;
    return { label, text, cells: [all, given, before, givenBefore], sizes: shares.slice(0, 2).map((one) => one ?? 0) };
  });
  return { bars, lines: [] };
}

/** Where in the bars a share of all values is reached, and the value there; `edges` are those of the bars. */
function quantile(counts, edges, wanted) {
  let below = 0;
  const index = counts.findIndex((count) => (below += count) >= wanted && count),
    [low, high] = edges.slice(index),
    into = 1 - (below - wanted) / counts[index];
  return { place: index + into, value: Number.isFinite(high) ? low + (high - low) * into : low };
}

function histogram(counts, bounds) {
  const first = counts.findIndex((one) => one > 0),
    last = counts.findLastIndex((one) => one > 0),
    all = counts.reduce((sofar, one) => sofar + one, 0),
    edges = [0, ...bounds, Infinity];
  if (first < 0) return { bars: [], lines: [] };
  const from = Math.max(0, Math.min(first - 1, bounds.length - 6)),
    to = Math.min(counts.length - 1, Math.max(last + 1, from + 6));
  const bars = counts.slice(from, to + 1).map((times, place) => {
    const [low, high] = edges.slice(from + place),
      within = high < Infinity ? `${low ? time(low) : "0"} to ${time(high)}` : `above ${time(low)}`,
      label = high < Infinity ? String(Number((1000 * high).toPrecision(3))) : "∞";
    const cells = [count(times), percent(times / all, 1)];
    return { label, within, cells, text: `${within}: ${cells[0]} (${cells[1]})`, sizes: [times / all] };
  });
  const lines = Object.entries({ half: 0.5, "99 %": 0.99 }).map(([name, share]) => {
    const { place, value } = quantile(counts, edges, share * all);
    return { at: place - from, name, value: time(value) };
  });
  return { bars, lines };
}

const DEPTH_HEADS = ["token of the draft", "right", "right if the one before was", "right, hour", "if before, hour"];

/** The charts, and what redraws them. */
export function spread(timeline, state) {
  const depth = new BarChart({
    id: "by-depth",
    title: "How far drafts were right",
    term: "accepted by depth",
    note: "The share of all drafts that were right up to their first, second, third token and so on.",
    legend: { now: "last minute", before: "last hour" },
    foot: "token of the draft (depth)",
    least: 1,
    table: ({ bars }) => ({ heads: DEPTH_HEADS, rows: bars.map(({ label, cells }) => [label, ...cells]) }),
  });
  const times = {
    foot: "ms, up to",
    legend: { verify: null },
    table({ bars, lines }) {
      const middle = lines.map(({ name, value }) => [`${name} within`, value, ""]);
      const rows = bars.map(({ within, cells }) => [within, ...cells]);
      return { heads: ["time", "how many", "share"], rows: [...rows, ...middle] };
    },
  };
  const timesOf = (id, figure, note) =>
    new BarChart({ id, title: title(figure), term: figure.term, note, ...times });
  const waited = "How often a reader waited how long for more text, in the time shown.";
  const gaps = timesOf("chunk-gaps", FIGURES.gap, waited),
    tokens = timesOf("token-times", FIGURES.perToken, "The same, shared by the tokens of a piece.");
  const draw = () => {
    const { chunk_gaps, token_times } = sum(timeline.shown());
    depth.draw(depths(state.snapshot));
    gaps.draw(histogram(chunk_gaps, state.bounds));
    tokens.draw(histogram(token_times, state.bounds));
  };
  return { elements: [depth.element, gaps.element, tokens.element], draw };
}
