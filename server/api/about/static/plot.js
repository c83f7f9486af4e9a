// What plots share: their card, their legend, being drawn, being read with a pointer or the arrow keys, and axes.

import { html, svg } from "./elements.js";

/** Room around what is drawn, in pixels. */
export const [LEFT, RIGHT, TOP] = [40, 8, 8];

/** A card with a title, the field's term for it, something next to it, a note, and the rest. */
export const card = ({ id, title, term, note, aside }, ...rest) => {
  const head = html("h2", html("span", title, term && html("small", ` ${term}`)), aside);
  return html("section.card.chart", { id, "aria-label": title }, head, html("p.note", note), rest);
};

/** The entries of a legend, { name, colour, value }. */
export const entries = (all) =>
  all.map(({ name, colour, value }) => html("li", html("i.swatch", { colour }), name, value && html("b", ` ${value}`)));

/** Something that is drawn again when its width or its `data` is another one; while there is `nothing` to show, its
 * `element` is hidden. Each kind has `drawn(width)`: its `height`, its `marks`, and what a reader is shown: a sentence
 * of each of its `parts`, which are the marks of class `part`, or while a reader chooses none, `hint` in the element
 * `readout` for those who see it, and `all` for those who hear it. Those in a card have `table()` too: heads, and rows
 * of cells. */
export class Plot {
  get nothing() {
    return false;
  }

  constructor(label, readout, part) {
    Object.assign(this, { label, readout, part });
    this.svg = svg("svg.plot", { tabindex: 0, role: "img", "aria-label": label });
    new ResizeObserver(([{ contentRect }]) => {
      const before = this.width;
      this.width = Math.floor(contentRect.width);
      if (this.width !== before) this.draw();
    }).observe(this.svg);
    if (part) readable(this.svg, `.${part}`, (index) => this.tell(index));
  }

  draw(data = this.data) {
    this.data = data;
    this.element.hidden = this.nothing;
    if (!this.width || this.nothing) return;
    const { height, marks, ...read } = this.drawn(this.width);
    this.read = read;
    this.svg.setAttribute("height", height);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
    this.svg.replaceChildren(svg("g", marks));
    if (this.part) this.svg.querySelectorAll(`.${this.part}`)[this.index]?.classList.add("chosen");
    this.tell(this.index);
    this._tabulate();
  }

  /** The numbers of the plot in a table, for those who open it. */
  get numbers() {
    this.body = html("tbody");
    this.heads = html("tr");
    this.details = html(
      "details.as-table",
      { ontoggle: () => this._tabulate() },
      html("summary", "Show as a table"),
      html("table", html("thead", this.heads), this.body),
    );
    return this.details;
  }

  _tabulate() {
    if (!this.details?.open) return;
    const { heads, rows } = this.table();
    const cells = ([name, ...values]) =>
      html("tr", html("th", { scope: "row" }, name), values.map((one) => html("td", one)));
    this.heads.replaceChildren(...heads.map((head) => html("th", { scope: "col" }, head)));
    this.body.replaceChildren(...rows.map(cells));
  }

  tell(index) {
    this.index = index;
    const { parts = [], hint = [], all } = this.read;
    this.readout.replaceChildren(...[parts[index] ?? hint].flat());
    this.svg.setAttribute("aria-label", `${this.label}: ${parts[index] ?? all}`);
  }
}

/** Lets a reader point within `place`: `at(event)` says where with a pointer, `keys()` by key; null is nowhere. What a
 * finger chose stays chosen when it is lifted, until another place is touched. */
export function pointing(place, go, at, keys) {
  for (const move of ["pointerdown", "pointermove"]) place.addEventListener(move, (event) => go(at(event)));
  place.addEventListener("pointerleave", ({ pointerType }) => pointerType === "mouse" && go(null));
  place.addEventListener("blur", () => go(null));
  place.addEventListener("keydown", (event) => {
    const to = keys();
    if (!(event.key in to)) return;
    go(to[event.key], true);
    event.preventDefault();
  });
}

/** Lets a reader choose one of the elements of `selector` within `place`; `tell(index)` says which, null: none. */
export function readable(place, selector, tell) {
  const parts = () => [...place.querySelectorAll(selector)];
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
    return { ArrowRight: next, ArrowDown: next, ArrowLeft: before, ArrowUp: before, Home: 0, End: last, Escape: null };
  });
}

// -- axes -------------------------------------------------------------------------------------------------------------

/** Maps values from `low` .. `high` to pixels from `start` .. `end`. */
export const scale = (low, high, start, end) => (value) => start + ((value - low) / (high - low || 1)) * (end - start);

/** Round numbers from 0 up to the first that is at least `most`: about `wanted` of them. */
export function ticks(most, wanted = 4) {
  if (!(most > 0)) return [0, 1];
  const power = 10 ** Math.floor(Math.log10(most / wanted)),
    step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= most / wanted - 1e-12) * power,
    length = Math.ceil((most - 1e-9) / step) + 1;
  return Array.from({ length }, (_, index) => Number((index * step).toPrecision(6)));
}

/** Marks of a value axis with their lines, up to `right`. */
export const marked = (marks, y, right, text) =>
  marks.map((mark) => [
    svg("line", { colour: "grid", x1: LEFT, x2: right, y1: y(mark), y2: y(mark) }),
    svg("text.mark", { x: LEFT - 6, y: y(mark) + 3.5 }, text(mark)),
  ]);
