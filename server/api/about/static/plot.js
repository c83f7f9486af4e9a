// What plots share: their card, their legend, and being read part by part, with a pointer or the arrow keys.

import { paint } from "./colours.js";
import { html, onWidth, svg } from "./elements.js";

/** A card with a title, something beside it, a note, and the rest. */
export const card = ({ id, title, note, beside }, ...rest) =>
  html(
    "section",
    { class: "card chart", id, "aria-label": title },
    html("h3", {}, title, beside),
    note ? html("p", { class: "note" }, note) : null,
    rest,
  );

/** Something to draw on; `draw(width)` is called whenever its width is another one. */
export function canvas(draw, class_ = "plot") {
  const place = svg("svg", { tabindex: 0, role: "img", class: class_ });
  onWidth(place, draw);
  return place;
}

/** Gives a canvas its size, in pixels, and what is on it. */
export function put(place, width, height, ...parts) {
  place.setAttribute("height", height);
  place.setAttribute("viewBox", `0 0 ${width} ${height}`);
  place.replaceChildren(...parts.flat(Infinity).filter(Boolean));
}

/** The entries of a legend, { name, colour, value }. */
export const entries = (all) =>
  all.map(({ name, colour, value }) =>
    html("li", {}, paint(html("i", { class: "swatch" }), colour), name, value ? html("b", {}, ` ${value}`) : null),
  );

/** Marks of a value axis with their lines, from `left` to `right`. */
export const marked = (marks, y, left, right, text) =>
  marks.map((mark) => [
    svg("line", { class: "grid", x1: left, x2: right, y1: y(mark), y2: y(mark) }),
    svg("text", { class: "mark", x: left - 6, y: y(mark) + 3.5 }, text(mark)),
  ]);

/** Lets a reader choose one of `parts()`, which are elements within `place`; `tell(index)` says which, null: none. */
export function readable(place, parts, tell) {
  let chosen = null;
  const choose = (index) => {
    const all = parts();
    chosen = index in all ? index : null;
    all.forEach((part, place) => part.classList.toggle("chosen", place === chosen));
    tell(chosen);
  };
  place.addEventListener("pointermove", ({ target }) => choose(parts().findIndex((part) => part.contains(target))));
  for (const end of ["pointerleave", "blur"]) place.addEventListener(end, () => choose(null));
  place.addEventListener("keydown", (event) => {
    const last = parts().length - 1,
      next = Math.min((chosen ?? -1) + 1, last),
      before = Math.max((chosen ?? last + 1) - 1, 0);
    const to = {
      ArrowRight: next,
      ArrowDown: next,
      ArrowLeft: before,
      ArrowUp: before,
      Home: 0,
      End: last,
      Escape: null,
    };
    if (!(event.key in to)) return;
    choose(to[event.key]);
    parts()[chosen]?.scrollIntoView({ block: "nearest" });
    event.preventDefault();
  });
}
