// The figures of the page: each has one name, the field's term for it, one way to be written and one explanation,
// wherever it stands. `live` reads it of the last minute, `bin` of a span of time, `request` of one request.

import { number, percent, time } from "./format.js";

export const ratio = (part, whole) => (whole > 0 ? part / whole : NaN);

export const FIGURES = {
  speedUp: {
    name: "times as fast",
    term: "speed-up",
    text: (value) => `${number(value)}×`,
    live: (live) => live.speed_up,
    bin: (bin) => ratio(bin.plain_seconds, bin.decode_seconds),
  },
  throughput: {
    name: "speed, all requests",
    term: "throughput",
    text: (value) => `${number(value)} tokens/s`,
    live: (live) => live.tokens_per_second,
    bin: (bin) => ratio(bin.tokens, bin.busy_seconds),
    why:
      "How many tokens the model wrote per second while it was at work, for all requests together. A token is a word " +
      "or a part of one. Reading prompts counts as work; pauses between requests do not.",
  },
  rate: {
    name: "tokens per second",
    term: "decode rate",
    text: number,
    request: (request) => request.tokens_per_second,
  },
  perPass: {
    name: "tokens per pass",
    term: "tokens per step",
    text: number,
    live: (live) => live.tokens_per_step,
    bin: (bin) => ratio(bin.tokens, bin.runs),
    request: (request) => request.tokens_per_step,
    why:
      "How many tokens one pass of the model adds to a text. Without drafts it is 1. A small, quick drafter guesses " +
      "the next tokens; the model checks all of them in one pass and keeps those that it would have written itself.",
  },
  right: {
    name: "drafts right",
    term: "acceptance rate",
    text: (value) => percent(value),
    live: (live) => live.acceptance_rate,
    request: (request) => request.acceptance_rate,
    why:
      "The share of the drafted tokens that the model would have written too and so kept. The others are thrown " +
      "away; they never change the text.",
  },
  first: {
    name: "first token after",
    term: "time to first token",
    text: time,
    live: (live) => live.time_to_first_token.mean,
    bin: (bin) => ratio(bin.first_token_seconds, bin.first_tokens),
    request: (request) => request.time_to_first_token,
    why: "How long a request took to the first token of its answer, on average: waiting, and reading the prompt.",
  },
  perToken: {
    name: "time per token",
    term: "time per output token",
    text: time,
    live: (live) => live.time_per_token.mean,
    why: "How long each further token took, on average: the time between two pieces of text, shared by their tokens.",
  },
  gap: {
    name: "wait between pieces",
    term: "inter-chunk latency",
    text: time,
    live: (live) => live.chunk_gap.mean,
    why:
      "How long a reader waited for more text, on average. One piece holds all the tokens that a pass added, so this " +
      "is longer than the time per token where drafts are right.",
  },
};

/** A value of a figure as it is written; nothing where it is not known. */
export const say = ({ text }, value) => (Number.isFinite(value ?? NaN) ? text(value) : "");

/** The name with a capital, as it stands alone. */
export const title = ({ name }) => name[0].toUpperCase() + name.slice(1);
