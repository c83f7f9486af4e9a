// The charts on the time axis.

import { count, number, percent, time } from "./format.js";
import { TimeChart } from "./timechart.js";

/** What is drawn in a colour and told in the legend: a value of each bin, and how it is written. */
const series = (name, colour, of, text) => ({ name, colour, of, text });
const ratio = (part, whole) => (whole > 0 ? part / whole : NaN);

const shares = { marks: [0, 0.5, 1], mark: percent, stacked: true };
const plain = () => 1;

const rate = series("tok/s", "verify", (bin) => ratio(bin.tokens, bin.busy_seconds), number);
const firstToken = (bin) => ratio(bin.first_token_seconds, bin.first_tokens);
const unsure = (bin) => 2 * bin.doubted_seconds > bin.decode_seconds;
/** The speed-up where it is as sure as wanted; where it is not there is nothing to tell. */
const speedUp = (name, colour, wanted) => {
  const of = (bin) => (unsure(bin) === wanted ? ratio(bin.plain_seconds, bin.decode_seconds) : null);
  return series(name, colour, of, (value) => (value === null ? "" : number(value)));
};
const SURE = speedUp("speed-up", "now", false);
const UNSURE = speedUp("unsure", "none", true);

const SPEED = {
  id: "speed-over-time",
  title: "Speed",
  note: "Tokens over the time that the engine stepped; how many times plain decoding's, estimated; first tokens.",
  panels: [
    { height: 64, unit: "tok/s", series: () => [rate] },
    {
      height: 54,
      unit: "speed-up",
      least: 2,
      level: plain,
      series: (bins) => (bins.some(unsure) ? [SURE, UNSURE] : [SURE]),
    },
    {
      height: 44,
      unit: "first token, ms",
      times: 1000,
      series: () => [series("first token", "propose", firstToken, time)],
    },
  ],
};

const perStep = series("tokens per step", "now", (bin) => ratio(bin.tokens, bin.runs), number);

const TOKENS_PER_STEP = {
  id: "tokens-per-step",
  title: "Tokens per step",
  note: "What one pass of the target writes of a text, whoever drafted, plain passes included.",
  panels: [{ height: 132, unit: "tokens", least: 2, level: plain, series: () => [perStep] }],
};

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

const timePerStep = (state) => ({
  id: "time-per-step",
  title: "Time per step",
  note: "Where it goes. The dashed line is a step that drafts nothing.",
  panels: [
    {
      height: 132,
      unit: "ms",
      times: 1000,
      stacked: true,
      level: () => state.snapshot.live.root_seconds,
      series: () => PHASES,
    },
  ],
});

/** The share of the steps in which somebody drafted, by name; "": nobody. */
const drafted = (who) => {
  const steps = (bin) => (who ? (bin.drafters[who] ?? 0) : bin.runs - bin.drafts);
  return series(who || "none", who, (bin) => ratio(steps(bin), bin.runs), percent);
};
const whoDrafted = (bins) => [...new Set(bins.flatMap((bin) => Object.keys(bin.drafters)))].sort().concat("");
const nodes = series("drafted per tree", "ink", (bin) => ratio(bin.drafted, bin.drafts), number);

const CHOICES = {
  id: "choices",
  title: "Drafters and trees",
  note: "Who drafted, as a share of the steps of requests, and how many tokens.",
  panels: [
    { height: 78, unit: "share of steps", ...shares, series: (bins) => whoDrafted(bins).map(drafted) },
    { height: 54, unit: "drafted tokens", least: 2, series: () => [nodes] },
  ],
};

const QUEUE = [
  series("running", "now", (bin) => bin.running, count),
  series("waiting", "propose", (bin) => bin.waiting, count),
];

const load = (state) => {
  const pages = (name, colour, held) => {
    const all = () => state.snapshot.server.kv_tokens / state.snapshot.server.page_size;
    return series(name, colour, (bin) => bin[held] / all(), (share) => percent(share, 1));
  };
  const kept = [pages("in use", "verify", "pages"), pages("kept", "before", "kept_pages")];
  return {
    id: "load",
    title: "KV cache and queue",
    note: "Pages held by requests, and those that only keep old prompts findable.",
    panels: [
      { height: 78, unit: "KV pages", ...shares, series: () => kept },
      { height: 54, unit: "requests", least: 2, series: () => QUEUE },
    ],
  };
};

/** All of them, in the order in which they are read. state: what the feed told last. */
export const overTime = (timeline, state) =>
  [SPEED, TOKENS_PER_STEP, timePerStep(state), CHOICES, load(state)].map((about) => new TimeChart(timeline, about));
