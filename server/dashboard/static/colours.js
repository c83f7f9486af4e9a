// Which colour a drafter has: the same everywhere on the page.

const KNOWN = { draft_model: 0, ngram: 1, medusa: 2, eagle: 3, eagle3: 3, suffix: 4 };
const given = new Map();

/** The class suffix of a drafter's colour (`c-drafter-0`); of the empty name, nobody's. */
export function colourOf(drafter) {
  if (!drafter) return "nobody";
  if (drafter === "grammar") return "grammar";
  if (drafter in KNOWN) return `drafter-${KNOWN[drafter]}`;
  if (!given.has(drafter)) given.set(drafter, given.size % 5);
  return `drafter-${given.get(drafter)}`;
}
