// How things are spread: acceptance by depth, gaps between chunks, time per token.

import { BarChart } from "./bars.js";
import { count, percent, time } from "./format.js";
import { sum } from "./timeline.js";

/** Depths that are shown each; the last one stands for all deeper ones too. */
export const DEEPEST = 9;
export const depthName = (depth) => (depth < DEEPEST ? String(depth) : `${DEEPEST}+`);

function depths({ accepted_by_depth: now, accepted_by_depth_hour: hour }) {
  const length = Math.min(Math.max(now.cumulative.length, hour.cumulative.length), DEEPEST);
  const told = ({ cumulative, conditional }, index) => [percent(cumulative[index]), percent(conditional[index])];
  const bars = Array.from({ length }, (_, index) => {
    const [[all, given], [before, givenBefore], name] = [told(now, index), told(hour, index), depthName(index + 1)];
    return {
      label: name,
      told: `depth ${name}: cumulative ${all}, conditional ${given}; in the last hour ${before}, ${givenBefore}`,
      parts: [
        { size: now.cumulative[index] ?? 0, colour: "now" },
        { size: hour.cumulative[index] ?? 0, colour: "before" },
        { size: now.conditional[index] ?? 0, colour: "given" },
      ],
    };
  });
  return { bars, marks: [0, 0.25, 0.5, 0.75, 1], text: percent, apart: 18 };
}

/** Where in the bars a share of all values is reached, and the value there. */
function quantile(counts, bounds, wanted) {
  let below = 0;
  const index = counts.findIndex((count) => (below += count) >= wanted && count);
  const low = index ? bounds[index - 1] : 0,
    high = bounds[Math.min(index, bounds.length - 1)],
    into = 1 - (below - wanted) / counts[index];
  return { place: index + into, value: low + (high - low) * into };
}

const within = (bounds, index) =>
  index === bounds.length
    ? `above ${time(bounds.at(-1))}`
    : `${index ? time(bounds[index - 1]) : "0"} to ${time(bounds[index])}`;

function histogram(counts, bounds) {
  const first = counts.findIndex((one) => one > 0),
    last = counts.findLastIndex((one) => one > 0);
  if (first < 0) return { bars: [], text: String };
  const from = Math.max(0, Math.min(first - 1, bounds.length - 6)),
    to = Math.min(counts.length - 1, Math.max(last + 1, from + 6));
  const all = counts.reduce((sofar, one) => sofar + one, 0);
  const bars = counts.slice(from, to + 1).map((times, place) => ({
    label: from + place < bounds.length ? String(Number((1000 * bounds[from + place]).toPrecision(3))) : "∞",
    told: `${within(bounds, from + place)}: ${count(times)} (${percent(times / all, 1)})`,
    parts: [{ size: times / all, colour: "verify" }],
  }));
  const lines = Object.entries({ p50: 0.5, p99: 0.99 }).map(([name, share]) => {
    const { place, value } = quantile(counts, bounds, share * all);
    return { at: place - from, name, value: time(value) };
  });
  return { bars, lines, text: (mark) => `${Number((100 * mark).toPrecision(2))} %` };
}

/** The charts, and what redraws them. */
export function spread(timeline, state) {
  const depth = new BarChart({
    id: "by-depth",
    title: "Accepted by depth",
    note: "Cumulative: of all drafts, accepted at least so far. Conditional: of those accepted at the depth before.",
    legend: [
      { name: "cumulative, last minute", colour: "now" },
      { name: "last hour", colour: "before" },
      { name: "conditional, last minute", colour: "given" },
    ],
    empty: "nothing drafted yet",
    foot: "depth",
  });
  const histogramOf = (id, title, note, empty) => new BarChart({ id, title, note, empty, foot: "ms, up to" });
  const gaps = histogramOf(
    "chunk-gaps",
    "Time between chunks",
    "What a reader waits for more text.",
    "no chunks in this time",
  );
  const tokens = histogramOf(
    "token-times",
    "Time per token",
    "The same, shared by a chunk's tokens.",
    "no tokens in this time",
  );
  const draw = () => {
    depth.show(depths(state.snapshot));
    const shown = sum(timeline.shown());
    gaps.show(histogram(shown.chunk_gaps, state.bounds));
    tokens.show(histogram(shown.token_times, state.bounds));
  };
  return { elements: [depth.element, gaps.element, tokens.element], draw };
}
