// The steps of one request, side by side: accepted tokens stacked by depth, the target's own on top; behind them what
// was drafted.

import { scale } from "./axis.js";
import { paint } from "./colours.js";
import { html, svg } from "./elements.js";
import { time } from "./format.js";
import { canvas, put, readable } from "./plot.js";

const HEIGHT = 74,
  TIMES = 26,
  MOST_HOLLOW = 8;

const about = ({ step, drafter, drafted, accepted, tokens, milliseconds }) =>
  `step ${step}: ${accepted} of ${drafted} drafted accepted${drafter ? `, ${drafter}` : ""}, ` +
  `${tokens} ${tokens === 1 ? "token" : "tokens"} in ${time(milliseconds / 1000)}`;

/** Steps are { step, drafter, drafted, accepted, tokens, milliseconds, sources }: whose each accepted token was. */
export class StepStrip {
  constructor(label) {
    Object.assign(this, { steps: [], label });
    this.told = html("p", { class: "told" });
    this.svg = canvas((width) => this._draw((this.width = width)));
    this.element = html("div", { class: "strip" }, this.svg, this.told);
    readable(
      this.svg,
      () => [...this.svg.children],
      (chosen) => this._tell(this.steps[chosen]),
    );
  }

  show(steps) {
    this.steps = steps;
    if (this.width) this._draw(this.width);
  }

  _draw(width) {
    const { steps } = this,
      each = Math.max(2, Math.min(16, width / Math.max(steps.length, 1))),
      most = Math.max(2, ...steps.map((step) => Math.max(step.tokens, Math.min(step.drafted, MOST_HOLLOW) + 1))),
      slowest = Math.max(...steps.map((step) => step.milliseconds), 0.001);
    const y = scale(0, most, HEIGHT, 2),
      late = scale(0, slowest, HEIGHT + TIMES - 2, HEIGHT + 6);
    const block = (index, bottom, top, colour) => {
      const size = { width: each - (each > 4 ? 1 : 0), height: Math.max(bottom - top, 0.5) };
      return paint(svg("rect", { class: "fill", x: index * each, y: top, ...size }), colour);
    };
    const cell = (index, from, to, colour) => block(index, y(from) - 1, y(to), colour);
    const drawn = steps.map(({ drafter, drafted, accepted, tokens, milliseconds, sources = [] }, index) =>
      svg(
        "g",
        { class: "step" },
        drafted > accepted ? cell(index, 0, Math.min(drafted, MOST_HOLLOW), "grid") : null,
        Array.from({ length: Math.min(accepted, tokens) }, (_, depth) =>
          cell(index, depth, depth + 1, sources[depth] ?? drafter),
        ),
        tokens > accepted ? cell(index, accepted, tokens, "none") : null,
        block(index, HEIGHT + TIMES - 2, late(milliseconds), "host"),
      ),
    );
    put(this.svg, width, HEIGHT + TIMES, drawn);
    this._tell();
  }

  _tell(step) {
    const hint = this.steps.length ? `${this.steps.length} steps; below, how long each took` : "";
    this.told.textContent = step ? about(step) : hint;
    this.svg.setAttribute("aria-label", `${this.label}: ${this.told.textContent}`);
  }
}
