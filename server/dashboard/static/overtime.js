// The charts on the time axis.

import { html } from "./elements.js";
import { count, number, percent, time } from "./format.js";
import { TimeChart } from "./timechart.js";
import { colourOf } from "./colours.js";

const PHASES = [
  { key: "propose", name: "draft", colour: "propose", of: ["propose"] },
  { key: "verify", name: "verify", colour: "verify", of: ["forward"] },
  { key: "draw", name: "draw + commit", colour: "draw", of: ["draw", "commit"] },
  { key: "host", name: "host", colour: "host", of: ["plan", "mask"] },
  { key: "deliver", name: "delivery", colour: "deliver", of: ["deliver"] },
];

const ratio = (part, whole) => (whole > 0 ? part / whole : NaN);
const most = (bins, value) => bins.reduce((sofar, bin) => Math.max(sofar, value(bin) || 0), 0);
const perStep = (bin, phase) =>
  ratio(
    phase.of.reduce((sum, name) => sum + (bin.phases[name] ?? 0), 0),
    bin.steps,
  );
const ofStep = (bin) => PHASES.reduce((sum, phase) => sum + perStep(bin, phase), 0);
const perRun = (bin) => ratio(bin.tokens, bin.runs);

function tokensPerStep(timeline) {
  return new TimeChart(timeline, {
    id: "tokens-per-step",
    title: "Tokens per step",
    note: "What a request gains from one pass of the target.",
    panels: [
      {
        height: 132,
        unit: "tokens",
        top: (bins) => Math.max(2, most(bins, perRun)),
        base: 1,
        lines: (bin) => [{ key: "tokens", at: perRun(bin) }],
        level: () => ({ at: 1, text: "plain" }),
      },
    ],
    legend: [{ key: "tokens", name: "tokens per step", colour: "now", value: (bin) => number(perRun(bin)) }],
  });
}

function timePerStep(timeline, state) {
  const root = () => state.snapshot?.live.root_seconds ?? 0;
  return new TimeChart(timeline, {
    id: "time-per-step",
    title: "Time per step",
    note: "Where it goes. The dashed line is a step that drafts nothing.",
    panels: [
      {
        height: 132,
        unit: "ms",
        top: (bins) => 1000 * Math.max(most(bins, ofStep), root()),
        stack: (bin) => PHASES.map((phase) => ({ key: phase.key, size: 1000 * perStep(bin, phase) })),
        level: () => ({ at: 1000 * root(), text: "plain" }),
      },
    ],
    legend: PHASES.map((phase) => ({ ...phase, value: (bin) => time(perStep(bin, phase)) })),
  });
}

function choices(timeline) {
  const chart = new TimeChart(timeline, {
    id: "choices",
    title: "Drafters and trees",
    note: "Who drafted, as a share of the steps of requests, and how many tokens.",
    panels: [
      {
        height: 78,
        unit: "share of steps",
        top: () => 1,
        marks: () => [0, 0.5, 1],
        text: (mark) => `${100 * mark} %`,
        stack: (bin) => chart.names.map((name) => ({ key: name, size: ratio(shareOf(bin, name), bin.runs) })),
      },
      {
        height: 54,
        unit: "drafted tokens",
        top: (bins) => Math.max(2, most(bins, nodes)),
        lines: (bin) => [{ key: "nodes", at: nodes(bin) }],
      },
    ],
    legend: [{ key: "nodes", name: "drafted per tree", colour: "ink", value: (bin) => number(nodes(bin)) }],
  });
  chart.names = [];
  const draw = chart.draw.bind(chart);
  chart.draw = () => {
    nameDrafters(chart);
    draw();
  };
  return chart;
}

const nodes = (bin) => ratio(bin.drafted, bin.drafts);
const shareOf = (bin, name) => (name === "" ? bin.runs - bin.drafts : (bin.drafters[name] ?? 0));

/** The legend names the drafters that were seen. */
function nameDrafters(chart) {
  const seen = new Set(chart.timeline.shown().flatMap((point) => Object.keys(point.drafters)));
  const names = [...seen].sort().concat("");
  if (names.join() === chart.names.join()) return;
  chart.names = names;
  const entries = names.map((name) => ({
    key: name,
    name: name || "nobody",
    colour: colourOf(name),
    value: (bin) => percent(ratio(shareOf(bin, name), bin.runs)),
  }));
  chart.legend = [...entries, chart.legend.at(-1)];
  for (const entry of entries) chart.values.set(entry.key, html("b"));
  chart.element
    .querySelector(".legend")
    .replaceChildren(
      ...chart.legend.map((entry) =>
        html("li", {}, html("i", { class: `swatch c-${entry.colour}` }), entry.name, " ", chart.values.get(entry.key)),
      ),
    );
}

function load(timeline, state) {
  const all = () => {
    const server = state.snapshot?.server;
    return server?.page_size ? server.kv_tokens / server.page_size : NaN;
  };
  return new TimeChart(timeline, {
    id: "load",
    title: "KV cache and queue",
    note: "Pages held by requests, and those that only keep old prompts findable.",
    panels: [
      {
        height: 78,
        unit: "KV pages",
        top: () => 1,
        marks: () => [0, 0.5, 1],
        text: (mark) => `${100 * mark} %`,
        stack: (bin) => [
          { key: "pages", size: bin.pages / all() },
          { key: "kept", size: bin.kept_pages / all() },
        ],
      },
      {
        height: 54,
        unit: "requests",
        top: (bins) =>
          Math.max(
            2,
            most(bins, (bin) => Math.max(bin.running, bin.waiting)),
          ),
        lines: (bin) => [
          { key: "running", at: bin.running },
          { key: "waiting", at: bin.waiting },
        ],
      },
    ],
    legend: [
      { key: "pages", name: "in use", colour: "verify", value: (bin) => percent(bin.pages / all(), 1) },
      { key: "kept", name: "kept", colour: "before", value: (bin) => percent(bin.kept_pages / all(), 1) },
      { key: "running", name: "running", colour: "now", value: (bin) => count(bin.running) },
      { key: "waiting", name: "waiting", colour: "propose", value: (bin) => count(bin.waiting) },
    ],
  });
}

/** All of them, in the order in which they are read. state: what the feed told last. */
export const overTime = (timeline, state) => [
  tokensPerStep(timeline),
  timePerStep(timeline, state),
  choices(timeline),
  load(timeline, state),
];
