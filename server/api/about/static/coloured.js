// An answer: text coloured by who wrote each token, and the steps that made it.

import { html, svg } from "./elements.js";
import { time } from "./format.js";
import { FENCE } from "./markdown.js";
import { drafterName } from "./models.js";
import { entries, Plot, readable, scale } from "./plot.js";

const DEEPEST = 4;

const source = ({ drafter, forced }) => (forced ? "grammar" : drafter);
const shade = (tag, colour, depth, text) => html(`${tag}.t.d${Math.min(depth, DEEPEST)}`, { colour }, text);

function about({ text, drafter, depth, forced, step }) {
  const drafted = depth ? `drafted by ${drafterName(drafter)}, accepted at depth ${depth}` : "the model's own";
  const which = step === undefined ? "" : `, step ${step}`;
  return `${JSON.stringify(text)}: ${forced ? "forced by the grammar" : drafted}${which}`;
}

/** Text in the colours of drafters, the deeper the stronger, or in none where the model wrote it itself. As colour
 * alone tells nothing to some, a token has as many lines below it as it lies deep, up to four. Fenced code looks so.
 * Tokens are { text, drafter, depth, forced, step? }; one is described when pointed at or reached by arrow keys. */
export class ColouredText {
  constructor(label) {
    this.tokens = [];
    this.fences = new Fences();
    this.readout = html("p.readout");
    this.place = html("div.coloured", { tabindex: 0, role: "group", "aria-label": label });
    this.element = html("div", this.place, this.readout);
    readable(this.place, "span", (index) => {
      this.readout.textContent = index === null ? "" : about(this.tokens[index]);
    });
  }

  add(tokens) {
    const visible = tokens.filter(({ text }) => text);
    const span = ({ text, depth, ...token }) => {
      const tag = this.fences.hold(text) ? "span.fenced" : "span";
      return depth ? shade(tag, source(token), depth, text) : html(`${tag}.t.own`, text);
    };
    this.tokens.push(...visible);
    this.place.append(...visible.map(span));
  }
}

/** The fences of code in a text that comes in pieces. */
class Fences {
  open = null; // the mark of the fence that is open
  line = "";

  /** Goes on with a piece: whether some of it is code, or a fence. */
  hold(piece) {
    const inside = this.open !== null,
      lines = (this.line + piece).split("\n");
    this.line = lines.pop();
    for (const line of lines)
      if (this.open === null) this.open = FENCE.exec(line)?.[2] ?? null;
      else if (line.trim() === this.open) this.open = null;
    return inside || this.open !== null || FENCE.test(this.line);
  }
}

/** What the colours mean, for the drafters of these tokens. */
export function key(tokens) {
  const shades = (name) => [1, 2, 3, 4].map((depth) => shade("i", name, depth, depth < DEEPEST ? depth : `${depth}+`));
  const drafters = [...new Set(tokens.filter(({ depth }) => depth).map(source))];
  return html(
    "ul.legend",
    entries([{ name: "the model's own, plain in the text", colour: "none" }]),
    drafters.map((name) => html("li", html("span.shades", shades(name)), `${drafterName(name)}, by depth`)),
  );
}

// -- steps ------------------------------------------------------------------------------------------------------------

const [HEIGHT, TIMES, MOST_HOLLOW] = [74, 26, 8];

const aboutStep = ({ step, drafter, drafted, accepted, tokens, milliseconds }) =>
  `step ${step}: ${accepted} of ${drafted} drafted accepted${drafter ? `, ${drafterName(drafter)}` : ""}, ` +
  `${tokens} ${tokens === 1 ? "token" : "tokens"} in ${time(milliseconds / 1000)}`;

/** What strips on one scale have at most: passes, tokens or drafted ones of a pass, and its milliseconds. */
function mostOf(strips) {
  const steps = strips.flatMap(({ data }) => data),
    tallest = steps.map((step) => Math.max(step.tokens, Math.min(step.drafted, MOST_HOLLOW) + 1));
  const passes = Math.max(1, ...strips.map(({ data }) => data.length));
  return [passes, Math.max(2, ...tallest), Math.max(0.001, ...steps.map((step) => step.milliseconds))];
}

/** Steps side by side: accepted tokens stacked by depth, the model's own on top; behind them what was drafted. Shows
 * [{ step, drafter, drafted, accepted, tokens, milliseconds, sources }]: whose each accepted token was. All `strips`
 * that are to be compared have one scale. */
export class StepStrip extends Plot {
  constructor(label, strips = []) {
    super(label, html("p.readout"), "step");
    Object.assign(this, { data: [], strips });
    strips.push(this);
    this.element = html("div.strip", this.svg, this.readout);
  }

  /** Draws this one, and those that another scale has become theirs. */
  draw(data = this.data) {
    this.data = data;
    const most = mostOf(this.strips);
    for (const strip of this.strips) {
      if (strip !== this && String(strip.most) === String(most)) continue;
      strip.most = most;
      super.draw.call(strip);
    }
  }

  drawn(width) {
    const { data, most } = this,
      each = Math.min(16, width / most[0]),
      y = scale(0, most[1], HEIGHT, 2),
      foot = HEIGHT + TIMES - 2,
      late = scale(0, most[2], foot, HEIGHT + 6);
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
    const passes = `${data.length} ${data.length === 1 ? "pass" : "passes"}`,
      same = this.strips.length > 1 ? "; both on one scale" : "",
      hint = data.length ? `${passes}: the tokens of each, and its time below${same}` : "";
    return { height: HEIGHT + TIMES, marks: data.map(step), parts: data.map(aboutStep), hint, all: hint };
  }
}
