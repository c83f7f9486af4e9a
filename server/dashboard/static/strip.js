// The steps of one request, side by side: accepted tokens stacked by depth, the target's own on top; behind them what
// was drafted.

import { scale } from "./axis.js";
import { colourOf } from "./colours.js";
import { html, onWidth, svg } from "./elements.js";
import { time } from "./format.js";

const HEIGHT = 74,
  TIMES = 26,
  MOST_HOLLOW = 8;

const about = (step) =>
  `step ${step.step}: ${step.accepted} of ${step.drafted} drafted accepted, ` +
  `${step.tokens} ${step.tokens === 1 ? "token" : "tokens"} in ${time(step.milliseconds / 1000)}`;

/** Steps are { step, drafter, drafted, accepted, tokens, milliseconds }. */
export class StepStrip {
  constructor(label) {
    Object.assign(this, { steps: [], width: 0, label, chosen: null });
    this.told = html("p", { class: "told" });
    this.svg = svg("svg", { class: "plot strip", role: "img", tabindex: 0, height: HEIGHT + TIMES });
    this.element = html("div", { class: "strip" }, this.svg, this.told);
    this.svg.addEventListener("pointermove", (event) => this._choose(Math.floor(event.offsetX / this.each)));
    this.svg.addEventListener("pointerleave", () => this._choose(null));
    this.svg.addEventListener("keydown", (event) => this._key(event));
    onWidth(this.svg, (width) => {
      this.width = width;
      this.draw();
    });
  }

  show(steps) {
    this.steps = steps;
    this.draw();
  }

  get each() {
    return Math.max(2, Math.min(16, this.width / Math.max(this.steps.length, 1)));
  }

  draw() {
    if (!this.width) return;
    const { steps, each } = this,
      gap = each > 4 ? 1 : 0;
    const most = Math.max(2, ...steps.map((step) => Math.max(step.tokens, Math.min(step.drafted, MOST_HOLLOW) + 1)));
    const slowest = Math.max(...steps.map((step) => step.milliseconds), 0.001);
    const y = scale(0, most, HEIGHT, 2),
      late = scale(0, slowest, HEIGHT + TIMES - 2, HEIGHT + 6);
    const cell = (index, from, to, name) =>
      svg("rect", {
        class: name,
        x: (index * each).toFixed(1),
        width: (each - gap).toFixed(1),
        y: y(to).toFixed(1),
        height: Math.max(y(from) - y(to) - 1, 0.5).toFixed(1),
      });
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT + TIMES}`);
    this.svg.replaceChildren(
      ...steps.map((step, index) =>
        svg(
          "g",
          { class: "step" },
          step.drafted > step.accepted ? cell(index, 0, Math.min(step.drafted, MOST_HOLLOW), "hollow") : null,
          Array.from({ length: Math.min(step.accepted, step.tokens) }, (_, depth) =>
            cell(index, depth, depth + 1, `fill c-${colourOf(step.drafter)} d${Math.min(depth + 1, 6)}`),
          ),
          step.tokens > step.accepted ? cell(index, step.accepted, step.tokens, "fill own") : null,
          svg("rect", {
            class: "fill c-host",
            x: (index * each).toFixed(1),
            width: (each - gap).toFixed(1),
            y: late(step.milliseconds).toFixed(1),
            height: (HEIGHT + TIMES - 2 - late(step.milliseconds)).toFixed(1),
          }),
        ),
      ),
    );
    this._tell();
  }

  _choose(index) {
    this.chosen = index === null || index < 0 || index >= this.steps.length ? null : index;
    this._tell();
  }

  _tell() {
    const step = this.chosen === null ? null : this.steps[this.chosen];
    [...this.svg.children].forEach((one, place) => one.classList.toggle("chosen", place === this.chosen));
    const hint = this.steps.length ? `${this.steps.length} steps; below, how long each took` : "";
    this.told.textContent = step ? about(step) : hint;
    this.svg.setAttribute("aria-label", `${this.label}: ${step ? about(step) : hint}`);
  }

  _key(event) {
    const to = { ArrowRight: (this.chosen ?? -1) + 1, ArrowLeft: (this.chosen ?? this.steps.length) - 1 }[event.key];
    if (to === undefined) return;
    this._choose(Math.min(Math.max(to, 0), this.steps.length - 1));
    event.preventDefault();
  }
}
