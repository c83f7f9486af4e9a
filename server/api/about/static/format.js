// Numbers as people read them. Nothing to tell is a dash.

export const NOTHING = "–";

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);
const places = (value) => (value >= 100 ? 0 : value >= 10 ? 1 : 2);

/** 1,234 */
export const count = (value) => (known(value) ? Math.round(value).toLocaleString("en") : NOTHING);

/** 3.14, 31.4, 314 */
export const number = (value) => (known(value) ? value.toFixed(places(Math.abs(value))) : NOTHING);

/** A share from 0 to 1 as 62 %; `digits` behind the point. */
export const percent = (share, digits = 0) => (known(share) ? `${(100 * share).toFixed(digits)} %` : NOTHING);

/** Seconds as a number and its unit, which may be set in different sizes. */
export function timeParts(seconds) {
  if (!known(seconds)) return [NOTHING, ""];
  if (seconds >= 1) return [number(seconds), "s"];
  const milliseconds = 1000 * seconds;
  return [milliseconds >= 0.1 ? number(milliseconds) : milliseconds.toFixed(3), "ms"];
}

/** Seconds as 12.3 ms */
export const time = (seconds) => timeParts(seconds).join(" ").trim();

/** A long time: 45 s, 3 min, 2 h 5 min, 3 d 4 h */
export function span(seconds) {
  const whole = Math.floor(seconds);
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** The time of day of a moment in seconds since 1970. */
export const clock = (at) => new Date(1000 * at).toLocaleTimeString("en-GB");
