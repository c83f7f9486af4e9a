// What races say: answers that were written both ways, with drafts and without. A verdict takes several of them.

import { percent, time } from "./format.js";

/** Races that a verdict takes, not counting the first pair of answers, which finds nothing warm. */
export const ENOUGH = 3;
const EQUAL = 1.03; // within this factor both ways are as fast, as in spec/acceptance.py
const SCATTERED = 3; // races whose ratios lie farther apart do not tell
export const BUSY = 0.25; // share of its time that an engine waits for a core on a machine that is busy, as in the log

const sum = (numbers) => numbers.reduce((all, one) => all + one, 0);

/** Which of two times is clearly the shorter one: 0, 1, or neither. */
export function winner([drafted, plain]) {
  if (EQUAL * drafted <= plain) return 0;
  return EQUAL * plain <= drafted ? 1 : null;
}

/**
 * What the races say: a headline, a sentence and its kind. times: [with drafts, without] in seconds, of each answer
 * that was written both ways, in order; the first one is left out. crowded: the share of its time in which the engine
 * waited for a core.
 */
export function verdict(times, crowded = 0) {
  const counted = times.slice(1),
    ratios = counted.map(([drafted, plain]) => drafted / plain),
    both = [0, 1].map((way) => sum(counted.map((pair) => pair[way]))),
    took = `${time(both[0])} with drafts, ${time(both[1])} without`;
  if (counted.length < ENOUGH) {
    const races = counted.length === 1 ? "One race" : `${counted.length} races`;
    return [`${races}, same text`, `${took}. That says little yet: a verdict takes ${ENOUGH} races.`, ""];
  }
  const waited = crowded < BUSY ? "" : ` The engine spent ${percent(crowded)} of its time waiting for a core.`,
    all = `Same text in all ${counted.length} races: ${took}.${waited}`,
    busy = "Cannot tell: this machine is busy";
  if (waited && Math.abs(both[0] - both[1]) < crowded * sum(both)) return [busy, all, "warn"]; // it may be all of that
  if (Math.max(...ratios) > SCATTERED * Math.min(...ratios))
    return [busy, `${all} They differ too much from each other. Try again when it is quiet.`, "warn"];
  const first = winner(both);
  if (first === null) return ["As fast as each other", all, "good"];
  if (first === 1) return ["Speculation does not pay here", all, "warn"];
  return [`${percent(1 - both[0] / both[1])} of the time saved`, all, "good"];
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
