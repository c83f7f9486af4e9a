// What plots share: their card, their legend, being drawn, being read with a pointer or the arrow keys, and axes.

import { html, onWidth, paint, svg } from "./elements.js";

/** Room around what is drawn, in pixels. */
export const [LEFT, RIGHT, TOP] = [40, 8, 8];

/** A card with a title, something beside it, a note, and the rest. */
export const card = ({ id, title, note, beside }, ...rest) =>
  html(
    "section",
    { class: "card chart", id, "aria-label": title },
    html("h3", {}, title, beside),
    note ? html("p", { class: "note" }, note) : null,
    rest,
  );

/** Something that is drawn again when its width or what it shows is another one. Each kind has `drawn(width)`, which
 * returns its height and what is on it, and `tell(part)`: what is said of a part by its index, or of all of it. */
export class Plot {
  constructor(label, parts = null, class_ = "plot") {
    Object.assign(this, { label, width: 0 });
    this.svg = svg("svg", { tabindex: 0, role: "img", class: class_ });
    onWidth(this.svg, (width) => {
      this.width = width;
      this.draw();
    });
    const all = () => [...this.svg.querySelectorAll(parts)];
    if (parts) readable(this.svg, all, (part) => this.tell(part));
  }

  show(data) {
    this.data = data;
    this.draw();
  }

  draw() {
    const { svg: place, width } = this;
    if (!width) return;
    const [height, ...drawn] = this.drawn(width);
    place.setAttribute("height", height);
    place.setAttribute("viewBox", `0 0 ${width} ${height}`);
    place.replaceChildren(...drawn.flat(Infinity).filter(Boolean));
    this.tell();
  }

  /** For those who hear it. */
  say(what) {
    this.svg.setAttribute("aria-label", `${this.label}: ${what}`);
  }
}

/** The entries of a legend, { name, colour, value }. */
export const entries = (all) =>
  all.map(({ name, colour, value }) =>
    html("li", {}, paint(html("i", { class: "swatch" }), colour), name, value ? html("b", {}, ` ${value}`) : null),
  );

/** Marks of a value axis with their lines, up to `right`. */
export const marked = (marks, y, right, text) =>
  marks.map((mark) => [
    svg("line", { class: "grid", x1: LEFT, x2: right, y1: y(mark), y2: y(mark) }),
    svg("text", { class: "mark", x: LEFT - 6, y: y(mark) + 3.5 }, text(mark)),
  ]);

/** What stands where nothing is to be drawn. */
export const empty = (x, y, text) => svg("text", { class: "empty", x, y }, text);

/** Lets a reader point within `place`: `at(event)` says where with a pointer, `keys()` by key; null is nowhere. */
export function pointing(place, go, at, keys) {
  place.addEventListener("pointermove", (event) => go(at(event)));
  for (const end of ["pointerleave", "blur"]) place.addEventListener(end, () => go(null));
  place.addEventListener("keydown", (event) => {
    const to = keys();
    if (!(event.key in to)) return;
    go(to[event.key], true);
    event.preventDefault();
  });
}

/** Lets a reader choose one of `parts()`, which are elements within `place`; `tell(index)` says which, null: none. */
export function readable(place, parts, tell) {
  let chosen = null;
  const choose = (index, byKey = false) => {
    const all = parts();
    chosen = index in all ? index : null;
    all.forEach((part, place) => part.classList.toggle("chosen", place === chosen));
    tell(chosen);
    if (byKey) all[chosen]?.scrollIntoView({ block: "nearest" });
  };
  const under = ({ target }) => parts().findIndex((part) => part.contains(target));
  pointing(place, choose, under, () => {
    const last = parts().length - 1,
      next = Math.min((chosen ?? -1) + 1, last),
      before = Math.max((chosen ?? last + 1) - 1, 0);
    const arrows = { ArrowRight: next, ArrowDown: next, ArrowLeft: before, ArrowUp: before };
    return { ...arrows, Home: 0, End: last, Escape: null };
  });
}

// -- axes -------------------------------------------------------------------------------------------------------------

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
