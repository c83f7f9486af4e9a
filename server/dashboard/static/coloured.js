// Text coloured by who said each token: a drafter, the deeper the stronger, or the target itself.

import { colourOf } from "./colours.js";
import { html } from "./elements.js";

const DEEPEST = 6;

function who({ drafter, depth, forced }) {
  if (forced) return "forced by the grammar";
  return depth ? `drafted by ${drafter}, accepted at depth ${depth}` : "the target's own";
}

const classOf = ({ drafter, depth, forced }) =>
  forced ? "t c-grammar d2" : depth ? `t c-${colourOf(drafter)} d${Math.min(depth, DEEPEST)}` : "t own";

/** Tokens are { text, drafter, depth, forced, step? }. One is told about when pointed at or reached by arrow keys. */
export class ColouredText {
  constructor(label) {
    this.tokens = [];
    this.chosen = -1;
    this.told = html("p", { class: "told" });
    this.place = html("div", { class: "coloured", tabindex: 0, role: "group", "aria-label": label });
    this.place.addEventListener("pointerover", (event) => this._choose([...this.place.children].indexOf(event.target)));
    this.place.addEventListener("pointerleave", () => this._choose(-1));
    this.place.addEventListener("keydown", (event) => this._key(event));
    this.place.addEventListener("blur", () => this._choose(-1));
    this.element = html("div", {}, this.place, this.told);
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  clear() {
    this.tokens = [];
    this.place.replaceChildren();
    this._choose(-1);
  }

  add(tokens) {
    const said = tokens.filter((token) => token.text);
    this.tokens.push(...said);
    this.place.append(...said.map((token) => html("span", { class: classOf(token) }, token.text)));
    const below = this.place.scrollHeight - this.place.clientHeight;
    if (below > 0) this.place.scrollTop = below;
  }

  _choose(index) {
    this.place.children[this.chosen]?.classList.remove("chosen");
    this.chosen = index;
    const token = this.tokens[index],
      span = this.place.children[index];
    span?.classList.add("chosen");
    const step = token?.step === undefined ? "" : `, step ${token.step}`;
    this.told.textContent = token ? `${JSON.stringify(token.text)}: ${who(token)}${step}` : "";
  }

  _key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") this._choose(-1);
    else if (!step || !this.tokens.length) return;
    else this._choose((this.chosen + step + this.tokens.length) % this.tokens.length);
    this.place.children[this.chosen]?.scrollIntoView({ block: "nearest" });
    event.preventDefault();
  }
}

/** What the colours mean, for the drafters that are there. */
export function key(drafters, forced = false) {
  const shades = (name) =>
    html(
      "span",
      { class: "shades", "aria-hidden": "true" },
      [1, 2, 3, 4].map((depth) => html("i", { class: `t c-${colourOf(name)} d${depth}` })),
    );
  return html(
    "ul",
    { class: "legend" },
    html("li", {}, html("i", { class: "swatch own" }), "the target's own"),
    drafters.map((name) => html("li", {}, shades(name), `${name}, deeper is stronger`)),
    forced ? html("li", {}, html("i", { class: "swatch c-grammar" }), "grammar") : null,
  );
}
