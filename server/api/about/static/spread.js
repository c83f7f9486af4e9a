// How things are spread: acceptance by depth, gaps between chunks, time per token.

import { BarChart } from "./bars.js";
import { count, percent, time } from "./format.js";
import { sum } from "./timeline.js";

/** Depths that are shown each; the last one stands for all deeper ones too. */
export const DEEPEST = 9;
export const depthName = (depth) => (depth < DEEPEST ? String(depth) : `${DEEPEST}+`);

function depths({ accepted_by_depth: now, accepted_by_depth_hour: hour }) {
  const length = Math.min(Math.max(now.cumulative.length, hour.cumulative.length), DEEPEST);
  const bars = Array.from({ length }, (_, index) => ({
    label: depthName(index + 1),
    told:
      `depth ${depthName(index + 1)}: cumulative ${percent(now.cumulative[index])}, ` +
      `conditional ${percent(now.conditional[index])}; in the last hour ${percent(hour.cumulative[index])}, ` +
      percent(hour.conditional[index]),
    parts: [
      { size: now.cumulative[index] ?? 0, colour: "now" },
      { size: hour.cumulative[index] ?? 0, colour: "before" },
      { size: now.conditional[index] ?? 0, colour: "given" },
    ],
  }));
  return { bars, marks: [0, 0.25, 0.5, 0.75, 1], text: percent, apart: 18 };
}

/** Where in the bars a share of all values is reached, and the value there. */
function quantile(counts, bounds, share) {
  const wanted = share * counts.reduce((all, one) => all + one, 0);
  let below = 0;
  for (let index = 0; index < counts.length; index++) {
    if (counts[index] && below + counts[index] >= wanted) {
      const low = index ? bounds[index - 1] : 0,
        high = bounds[Math.min(index, bounds.length - 1)];
      const into = (wanted - below) / counts[index];
      return { place: index + into, value: low + (high - low) * into };
    }
    below += counts[index];
  }
  return null;
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
  const lines = [
    [0.5, "p50"],
    [0.99, "p99"],
  ].map(([share, name]) => {
    const { place, value } = quantile(counts, bounds, share);
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
  const gaps = new BarChart({
    id: "chunk-gaps",
    title: "Time between chunks",
    note: "What a reader waits for more text.",
    empty: "no chunks in this time",
    foot: "ms, up to",
  });
  const tokens = new BarChart({
    id: "token-times",
    title: "Time per token",
    note: "The same, shared by a chunk's tokens.",
    empty: "no tokens in this time",
    foot: "ms, up to",
  });
  const draw = () => {
    depth.show(depths(state.snapshot));
    const shown = sum(timeline.shown());
    gaps.show(histogram(shown.chunk_gaps, state.bounds));
    tokens.show(histogram(shown.token_times, state.bounds));
  };
  return { elements: [depth.element, gaps.element, tokens.element], draw };
}
