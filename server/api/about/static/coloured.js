// An answer: text coloured by who wrote each token, and the steps that made it.

import { html, svg } from "./elements.js";
import { time } from "./format.js";
import { Plot, readable, scale } from "./plot.js";

const DEEPEST = 4;

const source = ({ drafter, forced }) => (forced ? "grammar" : drafter);
const shade = (tag, colour, depth, text) => html(`${tag}.t.d${Math.min(depth, DEEPEST)}`, { colour }, text);

function about({ text, drafter, depth, forced, step }) {
  const drafted = depth ? `drafted by ${drafter}, accepted at depth ${depth}` : "the model's own";
  const which = step === undefined ? "" : `, step ${step}`;
  return `${JSON.stringify(text)}: ${forced ? "forced by the grammar" : drafted}${which}`;
}

/** Text in the colours of drafters, the deeper the stronger, or in none where the model wrote it itself. As colour
 * alone tells nothing to some, a token has as many lines below it as it lies deep, up to four. Tokens are { text,
 * drafter, depth, forced, step? }; one is described when pointed at or reached by arrow keys. */
export class ColouredText {
  constructor(label) {
    this.tokens = [];
    this.readout = html("p.readout");
    this.place = html("div.coloured", { tabindex: 0, role: "group", "aria-label": label });
    this.element = html("div", this.place, this.readout);
    readable(this.place, "span", (index) => {
      this.readout.textContent = index === null ? "" : about(this.tokens[index]);
    });
  }

  add(tokens) {
    const visible = tokens.filter(({ text }) => text);
    const span = (token) =>
      token.depth ? shade("span", source(token), token.depth, token.text) : html("span.t.own", token.text);
    this.tokens.push(...visible);
    this.place.append(...visible.map(span));
  }
}

/** What the colours mean, for the drafters of these tokens. */
export function key(tokens) {
  const shades = (name) => [1, 2, 3, 4].map((depth) => shade("i", name, depth, depth < DEEPEST ? depth : `${depth}+`));
  const drafters = [...new Set(tokens.filter(({ depth }) => depth).map(source))];
  return html(
    "ul.legend",
    html("li", html("i.swatch.own"), "the model's own"),
    drafters.map((name) => html("li", html("span.shades", shades(name)), `${name}, by depth`)),
  );
}

// -- steps ------------------------------------------------------------------------------------------------------------

const [HEIGHT, TIMES, MOST_HOLLOW] = [74, 26, 8];

const aboutStep = ({ step, drafter, drafted, accepted, tokens, milliseconds }) =>
  `step ${step}: ${accepted} of ${drafted} drafted accepted${drafter ? `, ${drafter}` : ""}, ` +
  `${tokens} ${tokens === 1 ? "token" : "tokens"} in ${time(milliseconds / 1000)}`;

/** Steps side by side: accepted tokens stacked by depth, the model's own on top; behind them what was drafted. Shows
 * [{ step, drafter, drafted, accepted, tokens, milliseconds, sources }]: whose each accepted token was. */
export class StepStrip extends Plot {
  constructor(label) {
    super(label, html("p.readout"), "step");
    this.data = [];
    this.element = html("div.strip", this.svg, this.readout);
  }

  drawn(width) {
    const { data } = this,
      each = Math.max(2, Math.min(16, width / Math.max(data.length, 1))),
      tallest = data.map((step) => Math.max(step.tokens, Math.min(step.drafted, MOST_HOLLOW) + 1)),
      y = scale(0, Math.max(2, ...tallest), HEIGHT, 2),
      foot = HEIGHT + TIMES - 2,
      late = scale(0, Math.max(0.001, ...data.map((step) => step.milliseconds)), foot, HEIGHT + 6);
    const block = (index, bottom, top, colour) => {
      const size = { width: each - (each > 4 ? 1 : 0), height: Math.max(bottom - top, 0.5) };
      return svg("rect.fill", { colour, x: index * each, y: top, ...size });
    };
    const step = ({ drafter, drafted, accepted, tokens, milliseconds, sources = [] }, index) => {
      const cell = (from, to, colour) => block(index, y(from) - 1, y(to), colour);
      return svg(
        "g.step",
        drafted > accepted && cell(0, Math.min(drafted, MOST_HOLLOW), "grid"),
        Array.from({ length: Math.min(accepted, tokens) }, (_, at) => cell(at, at + 1, sources[at] ?? drafter)),
        tokens > accepted && cell(accepted, tokens, "none"),
        block(index, foot, late(milliseconds), "host"),
      );
    };
    const hint = data.length ? `${data.length} passes; how long each took is below` : "";
    return { height: HEIGHT + TIMES, marks: data.map(step), parts: data.map(aboutStep), hint, all: hint };
  }
}
