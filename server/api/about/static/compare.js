// What races say: answers that were written both ways, with drafts and without. How many passes each took is exact; how
// long they took is measured on a machine that others may use, so a verdict on time comes with its doubt.

import { number, time } from "./format.js";

/** Races of one page that a verdict is made of at most. */
export const MOST = 9;
const EQUAL = 1.03; // within this factor both ways are as fast, as in spec/accept.py
const PARTS = 4; // of an answer: shorter ones hide that a busy machine has another pace for seconds at a time
const STUDENT = [Infinity, 12.7, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31]; // 95 % lie within, by degrees of freedom

const sum = (numbers) => numbers.reduce((all, one) => all + one, 0);
const mean = (numbers) => sum(numbers) / numbers.length;

/** The variance of the mean of these numbers. */
function variance(numbers) {
  const middle = mean(numbers);
  return sum(numbers.map((one) => (one - middle) ** 2)) / (numbers.length - 1) / numbers.length;
}

/** The relative variance of the time of passes, from that of its parts; the first two, which begin, are longer. */
function doubt([, , ...passes]) {
  if (passes.length < PARTS) return Infinity;
  const cut = (part) => Math.floor((part * passes.length) / PARTS),
    parts = Array.from({ length: PARTS }, (_, part) => mean(passes.slice(cut(part), cut(part + 1))));
  return variance(parts) / mean(parts) ** 2;
}

/** How many times as fast drafts were in these races, the mean of the ratios of each, with its 95 % interval: [least,
 * mean, most]. A race is { seconds, passes }, both [with drafts, without]: of the whole answer, and of each pass. It
 * counts by its passes: short answers say little, very short ones something only where there are several. */
export function gain(races) {
  const logs = races.map(({ seconds: [drafted, plain] }) => Math.log(plain / drafted)),
    doubts = races.map(({ passes }) => sum(passes.map(doubt))),
    weights = races.map(({ passes }, at) => (Number.isFinite(doubts[at]) ? sum(passes.map((all) => all.length)) : 0)),
    all = sum(weights),
    among = logs.length < 3 ? Infinity : STUDENT[logs.length - 1] * Math.sqrt(variance(logs)),
    inside = sum(weights.map((weight, at) => (weight ? (weight / all) ** 2 * doubts[at] : 0))),
    middle = all ? sum(logs.map((log, at) => (log * weights[at]) / all)) : mean(logs),
    off = all ? STUDENT[PARTS - 1] * Math.sqrt(inside) : among;
  return [middle - off, middle, middle + off].map(Math.exp);
}

/** Which way was faster: "drafts", "plain", "equal", or "" where that cannot be told. */
export function faster(races) {
  const [least, , most] = gain(races);
  if (most < EQUAL && 1 < EQUAL * least) return "equal";
  return least > 1 ? "drafts" : most < 1 ? "plain" : "";
}

const between = ([least, , most]) => `between ${number(least)} and ${number(most)}`;

/** What these races say of time, the last of which is the one that is shown: a sentence, and its kind. */
export function verdict(races) {
  const [drafted, plain] = races.at(-1).seconds,
    times = `${time(drafted)} with drafts, ${time(plain)} without.`,
    over = races.length === 1 ? "That is" : `Over ${races.length} races it is on average`,
    found = gain(races),
    many = `${number(found[1])} times as fast (${between(found)})`,
    open = Number.isFinite(found[2]) ? `${between(found)} times as fast` : "the answers are too short";
  const said = {
    drafts: `${over} ${many}.`,
    plain: `${over} slower: ${many}. Speculation does not pay here.`,
    equal: `${over} as fast either way.`,
    "": `Which is faster cannot be told yet: ${open}. Each further race makes it clearer.`,
  };
  return [`${times} ${said[faster(races)]}`, { plain: "warn", "": "" }[faster(races)] ?? "good"];
}

/** What a race says of passes, which no load changes. passes: with drafts, and without. */
export function headline([drafted, plain]) {
  const passes = `${drafted} ${drafted === 1 ? "pass" : "passes"}`;
  return `${passes} ${drafted === plain ? "both ways" : `instead of ${plain}`}, the same text`;
}

/** Why an estimate of the speed-up is doubtful after these races; "" if they bear it out. */
export function doubted(races, estimate) {
  const said = estimate >= EQUAL ? "drafts" : estimate * EQUAL > 1 ? "equal" : "plain",
    found = gain(races);
  if (!Number.isFinite(found[2]) || faster(races) === said) return "";
  const minute = `all passes of the last minute ${number(estimate)}`;
  return `the races on this page say ${between(found)} times as fast, ${minute}`;
}

/** What to say of two texts that should be the same, with the seed of both; null if they are. */
export function difference(drafted, plain, seed, exact) {
  if (drafted === plain) return null;
  const [ours, theirs] = [[...drafted], [...plain]],
    found = ours.findIndex((character, index) => character !== theirs[index]),
    place = (found < 0 ? ours.length : found) + 1;
  const why = exact ? "This should not happen: please report it." : "This server did not promise to be exact here.";
  return ["The texts differ", `From character ${place} on (seed ${seed}). ${why}`, "bad"];
}
