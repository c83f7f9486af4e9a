// The charts on the time axis.

import { count, number, percent, time } from "./format.js";
import { TimeChart } from "./timechart.js";

/** What is drawn in a colour and told in the legend: a value of each bin, and how it is written. */
const series = (name, colour, of, text) => ({ name, colour, of, text });
/** Panels have their height, unit and series, which may depend on the bins, and what else timechart.js knows. */
const panel = (height, unit, of, more) => ({ height, unit, series: Array.isArray(of) ? () => of : of, ...more });
const ratio = (part, whole) => (whole > 0 ? part / whole : NaN);

const plain = { least: 2, level: () => 1 };
const shares = { marks: [0, 0.5, 1], mark: percent, stacked: true };

// -- speed ----------------------------------------------------------------------------------------------------------

const rate = series("tok/s", "verify", (bin) => ratio(bin.tokens, bin.busy_seconds), number);
const first = series("first token", "propose", (bin) => ratio(bin.first_token_seconds, bin.first_tokens), time);
const unsure = (bin) => 2 * bin.doubted_seconds > bin.decode_seconds;
/** The speed-up where it is as unsure as asked for; elsewhere there is nothing to tell. */
const speedUp = (name, colour, wanted) => {
  const of = (bin) => (unsure(bin) === wanted ? ratio(bin.plain_seconds, bin.decode_seconds) : null);
  return series(name, colour, of, (value) => (value === null ? "" : number(value)));
};
const [SURE, UNSURE] = [speedUp("speed-up", "now", false), speedUp("unsure", "none", true)];

// -- steps ----------------------------------------------------------------------------------------------------------

const perStep = series("tokens per step", "now", (bin) => ratio(bin.tokens, bin.runs), number);
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

// -- drafts and load ------------------------------------------------------------------------------------------------

/** The share of the steps in which somebody drafted, by name; "": nobody. */
const drafted = (who) => {
  const steps = (bin) => (who ? (bin.drafters[who] ?? 0) : bin.runs - bin.drafts);
  return series(who || "none", who, (bin) => ratio(steps(bin), bin.runs), percent);
};
const whoDrafted = (bins) => [...new Set(bins.flatMap((bin) => Object.keys(bin.drafters)))].sort().concat("");
const nodes = series("drafted per tree", "ink", (bin) => ratio(bin.drafted, bin.drafts), number);
const running = series("running", "now", (bin) => bin.running, count);
const waiting = series("waiting", "propose", (bin) => bin.waiting, count);

/** All of them, in the order in which they are read. state: what the feed told last. */
export function overTime(timeline, state) {
  const root = () => state.snapshot.live.root_seconds;
  const all = () => state.snapshot.server.kv_tokens / state.snapshot.server.page_size;
  const pages = (name, colour, held) =>
    series(name, colour, (bin) => bin[held] / all(), (share) => percent(share, 1));
  const chart = (id, title, note, ...panels) => new TimeChart(timeline, { id, title, note, panels });
  return [
    chart(
      "speed-over-time",
      "Speed",
      "Tokens over the time that the engine stepped; how many times plain decoding's, estimated; first tokens.",
      panel(64, "tok/s", [rate]),
      panel(54, "speed-up", (bins) => (bins.some(unsure) ? [SURE, UNSURE] : [SURE]), plain),
      panel(44, "first token, ms", [first], { times: 1000 }),
    ),
    chart(
      "tokens-per-step",
      "Tokens per step",
      "What one pass of the target writes of a text, whoever drafted, plain passes included.",
      panel(132, "tokens", [perStep], plain),
    ),
    chart(
      "time-per-step",
      "Time per step",
      "Where it goes. The dashed line is a step that drafts nothing.",
      panel(132, "ms", PHASES, { times: 1000, stacked: true, level: root }),
    ),
    chart(
      "choices",
      "Drafters and trees",
      "Who drafted, as a share of the steps of requests, and how many tokens.",
      panel(78, "share of steps", (bins) => whoDrafted(bins).map(drafted), shares),
      panel(54, "drafted tokens", [nodes], { least: 2 }),
    ),
    chart(
      "load",
      "KV cache and queue",
      "Pages held by requests, and those that only keep old prompts findable.",
      panel(78, "KV pages", [pages("in use", "verify", "pages"), pages("kept", "before", "kept_pages")], shares),
      panel(54, "requests", [running, waiting], { least: 2 }),
    ),
  ];
}
