// What the answers compared so far say, in a sentence. A verdict needs several of them.

import { percent, time } from "./format.js";

const ENOUGH = 3; // answers beside the first one, which finds nothing warm
const EQUAL = 1.03; // within this factor both ways are as fast, as in spec/acceptance.py
const SCATTERED = 3; // answers whose ratios lie farther apart do not tell

const sum = (numbers) => numbers.reduce((all, one) => all + one, 0);

/**
 * The sentence about the last answer, and its kind. times: [with drafts, without] in seconds, of each answer that was
 * written both ways, in order.
 */
export function verdict(times) {
  const [fast, slow] = times.at(-1),
    both = `${time(fast)} with drafts, ${time(slow)} without`;
  if (!(fast > 0 && slow > 0)) return ["Same text.", "good"];
  const counted = times.slice(1).filter((pair) => pair.every((one) => one > 0));
  if (counted.length < ENOUGH) {
    if (fast <= slow) return [`Same text: ${both}, ${percent(1 - fast / slow)} of the time saved.`, "good"];
    return [`Same text: ${both}. One answer says little; compare a few more.`, "good"];
  }
  const ratios = counted.map(([one, other]) => one / other),
    [drafted, plain] = [0, 1].map((way) => sum(counted.map((pair) => pair[way]))),
    so = `Same text: ${both}. The last ${counted.length} answers: ${time(drafted)} with drafts, ${time(plain)} without`;
  if (Math.max(...ratios) > SCATTERED * Math.min(...ratios))
    return [`${so}; they differ too much to tell. Is this machine busy?`, "warn"];
  if (drafted >= EQUAL * plain) return [`${so}: speculation does not pay here.`, "warn"];
  if (EQUAL * drafted <= plain) return [`${so}, ${percent(1 - drafted / plain)} of the time saved.`, "good"];
  return [`${so}: as fast as each other.`, "good"];
}
