// The history of the server, as the page has it: points in time, binned to the span that is shown.

const KEPT = 620;
const SIZES = [1, 2, 5, 10, 20, 30, 60, 120];
const COUNTED = ["steps", "tokens", "runs", "drafts", "drafted", "busy_seconds", "decode_seconds", "plain_seconds"];
COUNTED.push("doubted_seconds", "first_tokens", "first_token_seconds");
COUNTED.push("phases", "drafters", "chunk_gaps", "token_times");
const GAUGES = ["running", "waiting", "pages", "kept_pages"];
export const SPANS = [60, 180, 600, 3600];

/** Two counts as one: numbers, or lists or objects of them. */
function plus(one, other) {
  if (typeof other !== "object") return (one ?? 0) + other;
  const sum = Array.isArray(other) ? [...(one ?? [])] : { ...one };
  for (const [key, value] of Object.entries(other)) sum[key] = plus(sum[key], value);
  return sum;
}

/** Everything counted in these points, as one point. */
export function sum(points) {
  const total = { chunk_gaps: [], token_times: [] };
  for (const point of points) {
    for (const name of COUNTED) total[name] = plus(total[name], point[name]);
    for (const name of GAUGES) total[name] = point[name];
  }
  return total;
}

export class Timeline {
  constructor() {
    this.seconds = [];
    this.minutes = [];
    this.now = Date.now() / 1000;
    this.span = 600;
    this.chosen = false;
  }

  /** Begin with what the server has kept, again where it has begun anew. */
  begin(history) {
    [this.seconds, this.minutes, this.now] = [history.seconds, history.minutes, history.now];
    this._suit();
  }

  /** Add points the feed brought; a second that is known already is replaced. */
  more(points, now) {
    this.now = now;
    for (const point of points) {
      while (this.seconds.length && this.seconds.at(-1).at >= point.at) this.seconds.pop();
      this.seconds.push(point);
      this._addMinute(point);
    }
    while (this.seconds.length && this.seconds[0].at < now - KEPT) this.seconds.shift();
    this._suit();
  }

  /** Show this many seconds from now on. */
  choose(span) {
    [this.span, this.chosen] = [span, true];
  }

  get from() {
    return this.now - this.span;
  }

  /** The points of the span that is shown. */
  shown() {
    const points = this.span > 600 ? this.minutes : this.seconds;
    return points.filter((point) => point.at + point.seconds > this.from);
  }

  /** The points of the span in bins of at least `least` pixels; bins without a step are left out. */
  bins(width, least = 4) {
    const finest = this.span > 600 ? 60 : 1;
    const size = SIZES.find((one) => one >= finest && (one * width) / this.span >= least) ?? 120;
    const groups = new Map();
    for (const point of this.shown()) {
      const at = point.at - (point.at % size);
      if (!groups.has(at)) groups.set(at, []);
      groups.get(at).push(point);
    }
    return { size, bins: [...groups].map(([at, points]) => ({ at, ...sum(points) })) };
  }

  /** As long as nobody chose one: the shortest span that shows everything there is of the last ten minutes. */
  _suit() {
    if (this.chosen) return;
    const oldest = this.seconds.length ? this.now - this.seconds[0].at : 0;
    this.span = SPANS.find((span) => span >= oldest) ?? 600;
    this.span = Math.min(this.span, 600);
  }

  _addMinute(point) {
    const at = point.at - (point.at % 60);
    const last = this.minutes.at(-1);
    if (last?.at === at) this.minutes[this.minutes.length - 1] = { at, seconds: 60, ...sum([last, point]) };
    else this.minutes.push({ ...point, at, seconds: 60 });
    while (this.minutes.length && this.minutes[0].at < this.now - 3660) this.minutes.shift();
  }
}
