// Scales: round numbers for the marks of an axis, and where a value is drawn.

/** Round numbers from 0 up to the first that is at least `most`: about `wanted` of them. */
export function ticks(most, wanted = 4) {
  if (!(most > 0)) return [0, 1];
  const rough = most / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough - 1e-12) * power;
  const marks = [];
  for (let index = 0; marks.length === 0 || marks.at(-1) < most - 1e-9; index++)
    marks.push(Number((index * step).toPrecision(6)));
  return marks;
}

/** Maps values from `low` .. `high` to pixels from `start` .. `end`. */
export const scale = (low, high, start, end) => (value) => start + ((value - low) / (high - low || 1)) * (end - start);

/** A mark of an axis without needless zeros. */
export const label = (value) => (value >= 1000 ? `${value / 1000}k` : String(Number(value.toPrecision(4))));

/** Marks on a time axis that ends now: seconds ago and what to write there. */
export function ages(span) {
  const step = { 60: 15, 180: 60, 600: 120, 3600: 900 }[span] ?? span / 4;
  const marks = [];
  for (let age = 0; age <= span; age += step) {
    marks.push([age, age === 0 ? "now" : step < 60 ? `${age} s` : `${age / 60} min`]);
  }
  return marks;
}
