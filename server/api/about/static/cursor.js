// The moment that the reader points at, shared by all charts on the time axis.

const listeners = new Set();
let moment = null;

/** Seconds since 1970, or null if nobody points anywhere. */
export const pointedAt = () => moment;

/** Be told whenever it changes. */
export const onPointing = (listener) => listeners.add(listener);

export function point(at) {
  if (at === moment) return;
  moment = at;
  for (const listener of listeners) listener();
}
