// Text coloured by who said each token: a drafter, the deeper the stronger, or the target itself. As colour alone tells
// nothing to some, a token has as many lines below it as it lies deep, up to four.

import { html, paint } from "./elements.js";
import { readable } from "./plot.js";

const DEEPEST = 4;

function who({ drafter, depth, forced }) {
  if (forced) return "forced by the grammar";
  return depth ? `drafted by ${drafter}, accepted at depth ${depth}` : "the target's own";
}

const shade = (element, drafter, depth) => {
  element.className = `t d${Math.min(depth, DEEPEST)}`;
  return paint(element, drafter);
};
const spanOf = ({ text, drafter, depth, forced }) =>
  depth ? shade(html("span", {}, text), forced ? "grammar" : drafter, depth) : html("span", { class: "t own" }, text);

/** Tokens are { text, drafter, depth, forced, step? }. One is told about when pointed at or reached by arrow keys. */
export class ColouredText {
  constructor(label) {
    this.tokens = [];
    this.told = html("p", { class: "told" });
    this.place = html("div", { class: "coloured", tabindex: 0, role: "group", "aria-label": label });
    this.element = html("div", {}, this.place, this.told);
    readable(
      this.place,
      () => [...this.place.children],
      (chosen) => this._tell(this.tokens[chosen]),
    );
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  add(tokens) {
    const said = tokens.filter((token) => token.text);
    this.tokens.push(...said);
    this.place.append(...said.map(spanOf));
    this.place.scrollTop = this.place.scrollHeight;
  }

  _tell(token) {
    const step = token?.step === undefined ? "" : `, step ${token.step}`;
    this.told.textContent = token ? `${JSON.stringify(token.text)}: ${who(token)}${step}` : "";
  }
}

/** What the colours mean, for the drafters of these tokens. */
export function key(tokens) {
  const drafters = new Set(tokens.filter(({ depth }) => depth).map((one) => (one.forced ? "grammar" : one.drafter)));
  const shades = (name) =>
    html(
      "span",
      { class: "shades" },
      [1, 2, 3, 4].map((depth) => shade(html("i", {}, depth < DEEPEST ? depth : `${depth}+`), name, depth)),
    );
  return html(
    "ul",
    { class: "legend" },
    html("li", {}, html("i", { class: "swatch own" }), "the target's own"),
    [...drafters].map((name) => html("li", {}, shades(name), `${name}, by depth`)),
  );
}
