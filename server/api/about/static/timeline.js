// The history of the server, as the page has it: points in time, binned to the span that is shown.

const SIZES = [1, 2, 5, 10, 20, 30, 60, 120];
export const SPANS = [60, 180, 600, 3600];

/** Gauges: of points together the last one's. All else is counted; rates, which mean nothing then, are not read. */
const GAUGES = ["at", "running", "waiting", "pages", "kept_pages"];

/** Two counts as one: numbers, or lists or objects of them. */
function plus(one, other) {
  if (other === null || typeof other !== "object") return (one ?? 0) + other;
  const sum = Array.isArray(other) ? [...(one ?? [])] : { ...one };
  for (const [key, value] of Object.entries(other)) sum[key] = GAUGES.includes(key) ? value : plus(sum[key], value);
  return sum;
}

/** Everything in these points, as one point. */
export const sum = (points) => points.reduce(plus, { chunk_gaps: [], token_times: [] });

/** Points with one more, which stands for those as late as it; what was before `from` is forgotten. */
const added = (points, point, from) => [...points.filter(({ at }) => from <= at && at < point.at), point];

export class Timeline {
  seconds = [];
  minutes = [];
  now = Date.now() / 1000;
  span = 600;
  chosen = false;

  /** Begin with what the server has kept, again where it has begun anew. */
  begin({ seconds, minutes, now }) {
    Object.assign(this, { seconds, minutes, now });
    this._suit();
  }

  /** Add points the feed brought; a second that is known already is replaced. */
  more(points, now) {
    this.now = now;
    for (const point of points) {
      this.seconds = added(this.seconds, point, now - 620);
      const at = point.at - (point.at % 60),
        known = this.minutes.filter((minute) => minute.at === at);
      this.minutes = added(this.minutes, { ...sum([...known, point]), at, seconds: 60 }, now - 3660);
    }
    this._suit();
  }

  /** Show this many seconds from now on. */
  choose(span) {
    Object.assign(this, { span, chosen: true });
  }

  get from() {
    return this.now - this.span;
  }

  /** The points of the span that is shown. */
  shown() {
    const points = this.span > 600 ? this.minutes : this.seconds;
    return points.filter((point) => point.at + point.seconds > this.from);
  }

  /** Everything in the minute up to the second `until`, as one point; nothing where nothing of it is known. */
  minute(until) {
    const points = this.seconds.filter(({ at }) => until - 60 < at && at <= until);
    return points.length ? { ...sum(points), at: until } : undefined;
  }

  /** The points of the span in bins of at least `least` pixels; bins without a step are left out. */
  bins(width, least = 4) {
    const finest = this.span > 600 ? 60 : 1;
    const size = SIZES.find((one) => one >= finest && (one * width) / this.span >= least) ?? 120;
    const groups = Map.groupBy(this.shown(), ({ at }) => at - (at % size));
    return { size, bins: [...groups].map(([at, points]) => ({ ...sum(points), at })) };
  }

  /** As long as nobody chose one: the shortest span that shows everything there is of the last ten minutes. */
  _suit() {
    const oldest = this.seconds.length ? this.now - this.seconds[0].at : 0;
    if (!this.chosen) this.span = Math.min(SPANS.find((span) => span >= oldest) ?? 600, 600);
  }
}
