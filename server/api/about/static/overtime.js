// The charts on the time axis.

import { count, number, percent, time } from "./format.js";
import { TimeChart } from "./timechart.js";

const PHASES = [
  { key: "propose", name: "draft", of: ["propose"] },
  { key: "verify", name: "verify", of: ["forward"] },
  { key: "draw", name: "draw + commit", of: ["draw", "commit"] },
  { key: "host", name: "host", of: ["plan", "mask"] },
  { key: "deliver", name: "delivery", of: ["deliver"] },
];

const ratio = (part, whole) => (whole > 0 ? part / whole : NaN);
const most = (bins, value) => bins.reduce((sofar, bin) => Math.max(sofar, value(bin) || 0), 0);
const shares = { top: () => 1, marks: [0, 0.5, 1], text: percent };

const rate = (bin) => ratio(bin.tokens, bin.busy_seconds);
const speedUp = (bin) => ratio(bin.plain_seconds, bin.decode_seconds);
const unsure = (bin) => 2 * bin.doubted_seconds > bin.decode_seconds;
const firstToken = (bin) => ratio(bin.first_token_seconds, bin.first_tokens);
const perStep = (bin) => ratio(bin.tokens, bin.runs);
const nodes = (bin) => ratio(bin.drafted, bin.drafts);
const ofPhase = (bin, { of }) =>
  ratio(
    of.reduce((sum, name) => sum + (bin.phases[name] ?? 0), 0),
    bin.steps,
  );
const ofStep = (bin) => PHASES.reduce((sum, phase) => sum + ofPhase(bin, phase), 0);
const drafted = (bin, name) => ratio(name ? (bin.drafters[name] ?? 0) : bin.runs - bin.drafts, bin.runs);

const speed = () => ({
  id: "speed-over-time",
  title: "Speed",
  note: "Tokens over the time that the engine stepped; how many times plain decoding's, estimated; first tokens.",
  panels: [
    { height: 64, unit: "tok/s", top: (bins) => most(bins, rate), lines: (bin) => ({ rate: rate(bin) }) },
    {
      height: 54,
      unit: "speed-up",
      top: (bins) => Math.max(2, most(bins, speedUp)),
      lines: (bin) => ({ [unsure(bin) ? "unsure" : "speed-up"]: speedUp(bin) }),
      level: () => ({ at: 1, text: "plain" }),
    },
    {
      height: 44,
      unit: "first token, ms",
      top: (bins) => 1000 * most(bins, firstToken),
      lines: (bin) => ({ first: 1000 * firstToken(bin) }),
    },
  ],
  legend: (bins) => [
    { key: "rate", name: "tok/s", colour: "verify", value: (bin) => number(rate(bin)) },
    { key: "speed-up", name: "speed-up", colour: "now", value: (bin) => (unsure(bin) ? "" : number(speedUp(bin))) },
    ...(bins.some(unsure)
      ? [{ key: "unsure", name: "unsure", colour: "none", value: (bin) => (unsure(bin) ? number(speedUp(bin)) : "") }]
      : []),
    { key: "first", name: "first token", colour: "propose", value: (bin) => time(firstToken(bin)) },
  ],
});

const tokensPerStep = () => ({
  id: "tokens-per-step",
  title: "Tokens per step",
  note: "What one pass of the target writes of a text, whoever drafted, plain passes included.",
  panels: [
    {
      height: 132,
      unit: "tokens",
      top: (bins) => Math.max(2, most(bins, perStep)),
      lines: (bin) => ({ tokens: perStep(bin) }),
      level: () => ({ at: 1, text: "plain" }),
    },
  ],
  legend: () => [{ key: "tokens", name: "tokens per step", colour: "now", value: (bin) => number(perStep(bin)) }],
});

const timePerStep = (state) => ({
  id: "time-per-step",
  title: "Time per step",
  note: "Where it goes. The dashed line is a step that drafts nothing.",
  panels: [
    {
      height: 132,
      unit: "ms",
      top: (bins) => 1000 * Math.max(most(bins, ofStep), state.snapshot.live.root_seconds),
      stack: (bin) => Object.fromEntries(PHASES.map((phase) => [phase.key, 1000 * ofPhase(bin, phase)])),
      level: () => ({ at: 1000 * state.snapshot.live.root_seconds, text: "plain" }),
    },
  ],
  legend: () => PHASES.map((phase) => ({ ...phase, colour: phase.key, value: (bin) => time(ofPhase(bin, phase)) })),
});

/** Who drafted in these bins, by name; nobody last. */
const who = (bins) => [...new Set(bins.flatMap((bin) => Object.keys(bin.drafters)))].sort().concat("");

const choices = () => ({
  id: "choices",
  title: "Drafters and trees",
  note: "Who drafted, as a share of the steps of requests, and how many tokens.",
  panels: [
    {
      height: 78,
      unit: "share of steps",
      ...shares,
      stack: (bin) => Object.fromEntries(who([bin]).map((name) => [name, drafted(bin, name)])),
    },
    {
      height: 54,
      unit: "drafted tokens",
      top: (bins) => Math.max(2, most(bins, nodes)),
      lines: (bin) => ({ nodes: nodes(bin) }),
    },
  ],
  legend: (bins) => [
    ...who(bins).map((name) => ({
      key: name,
      name: name || "none",
      colour: name,
      value: (bin) => percent(drafted(bin, name)),
    })),
    { key: "nodes", name: "drafted per tree", colour: "ink", value: (bin) => number(nodes(bin)) },
  ],
});

const load = (state) => {
  const all = () => state.snapshot.server.kv_tokens / state.snapshot.server.page_size;
  const queued = (bin) => Math.max(bin.running, bin.waiting);
  return {
    id: "load",
    title: "KV cache and queue",
    note: "Pages held by requests, and those that only keep old prompts findable.",
    panels: [
      {
        height: 78,
        unit: "KV pages",
        ...shares,
        stack: (bin) => ({ pages: bin.pages / all(), kept: bin.kept_pages / all() }),
      },
      {
        height: 54,
        unit: "requests",
        top: (bins) => Math.max(2, most(bins, queued)),
        lines: ({ running, waiting }) => ({ running, waiting }),
      },
    ],
    legend: () => [
      { key: "pages", name: "in use", colour: "verify", value: (bin) => percent(bin.pages / all(), 1) },
      { key: "kept", name: "kept", colour: "before", value: (bin) => percent(bin.kept_pages / all(), 1) },
      { key: "running", name: "running", colour: "now", value: (bin) => count(bin.running) },
      { key: "waiting", name: "waiting", colour: "propose", value: (bin) => count(bin.waiting) },
    ],
  };
};

/** All of them, in the order in which they are read. state: what the feed told last. */
export const overTime = (timeline, state) =>
  [speed, tokensPerStep, timePerStep, choices, load].map((about) => new TimeChart(timeline, about(state)));
