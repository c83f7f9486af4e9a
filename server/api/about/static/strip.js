// The steps of one request, side by side: accepted tokens stacked by depth, the target's own on top; behind them what
// was drafted.

import { html, paint, svg } from "./elements.js";
import { time } from "./format.js";
import { Plot, scale } from "./plot.js";

const HEIGHT = 74,
  TIMES = 26,
  MOST_HOLLOW = 8;

const about = ({ step, drafter, drafted, accepted, tokens, milliseconds }) =>
  `step ${step}: ${accepted} of ${drafted} drafted accepted${drafter ? `, ${drafter}` : ""}, ` +
  `${tokens} ${tokens === 1 ? "token" : "tokens"} in ${time(milliseconds / 1000)}`;

/** Shows [{ step, drafter, drafted, accepted, tokens, milliseconds, sources }]: whose each accepted token was. */
export class StepStrip extends Plot {
  constructor(label) {
    super(label, ".step");
    this.data = [];
    this.told = html("p", { class: "told" });
    this.element = html("div", { class: "strip" }, this.svg, this.told);
  }

  drawn(width) {
    const each = Math.max(2, Math.min(16, width / Math.max(this.data.length, 1))),
      tallest = this.data.map((step) => Math.max(step.tokens, Math.min(step.drafted, MOST_HOLLOW) + 1)),
      slowest = this.data.map((step) => step.milliseconds),
      foot = HEIGHT + TIMES - 2;
    const y = scale(0, Math.max(2, ...tallest), HEIGHT, 2),
      late = scale(0, Math.max(0.001, ...slowest), foot, HEIGHT + 6);
    const block = (index, bottom, top, colour) => {
      const size = { width: each - (each > 4 ? 1 : 0), height: Math.max(bottom - top, 0.5) };
      return paint(svg("rect", { class: "fill", x: index * each, y: top, ...size }), colour);
    };
    const step = ({ drafter, drafted, accepted, tokens, milliseconds, sources = [] }, index) => {
      const cell = (from, to, colour) => block(index, y(from) - 1, y(to), colour);
      return svg(
        "g",
        { class: "step" },
        drafted > accepted ? cell(0, Math.min(drafted, MOST_HOLLOW), "grid") : null,
        Array.from({ length: Math.min(accepted, tokens) }, (_, at) => cell(at, at + 1, sources[at] ?? drafter)),
        tokens > accepted ? cell(accepted, tokens, "none") : null,
        block(index, foot, late(milliseconds), "host"),
      );
    };
    return [HEIGHT + TIMES, this.data.map(step)];
  }

  tell(part) {
    const hint = this.data.length ? `${this.data.length} steps; below, how long each took` : "";
    this.told.textContent = this.data[part] ? about(this.data[part]) : hint;
    this.say(this.told.textContent);
  }
}
