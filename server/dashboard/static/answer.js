// One answer in the playground: its coloured text, its steps, and its numbers.

import { ColouredText, key } from "./coloured.js";
import { html } from "./elements.js";
import { count, number, percent, time } from "./format.js";
import { StepStrip } from "./strip.js";

const total = (ms) => Object.values(ms).reduce((sum, one) => sum + one, 0);

export class Answer {
  constructor(title) {
    this.began = performance.now();
    this.steps = new Map();
    this.text = new ColouredText(`${title}: text coloured by origin`);
    this.strip = new StepStrip(`${title}: steps`);
    this.numbers = html("dl", { class: "numbers-said" });
    this.key = html("div");
    this.element = html(
      "article",
      { class: "answer", "data-state": "running", "aria-label": title },
      html("h3", {}, title),
      this.numbers,
      this.text.element,
      this.strip.element,
      this.key,
    );
    this._waiting = false;
  }

  /** What a delta brought. Without provenance its text has no colour. */
  add(tokens, steps, text) {
    const said = tokens.map((token) => ({
      ...token,
      text: token.text + (token.reasoning ?? ""),
      forced: token.origin === "grammar",
    }));
    this.text.add(said.length ? said : [{ text, drafter: "", depth: 0 }]);
    for (const step of steps) {
      this.steps.set(step.step, { ...step, drafter: step.drafter ?? "", tokens: 0, milliseconds: total(step.ms) });
    }
    for (const token of tokens) {
      const step = this.steps.get(token.step);
      if (step) step.tokens += 1;
    }
    if (this._waiting) return; // once a frame is enough, however fast tokens come
    this._waiting = true;
    requestAnimationFrame(() => {
      this._waiting = false;
      this._draw();
    });
  }

  /** The response is over: its own numbers replace what was counted here. */
  end(response) {
    this._draw();
    const { metrics, usage } = response,
      drafting = metrics?.speculative_decoding;
    this.element.dataset.state = "done";
    this._say([
      ["tokens", count(usage?.output_tokens)],
      ["first token", time(metrics && metrics.time_to_first_token_ms / 1000)],
      ["tok/s", number(metrics?.tokens_per_second)],
      ["per step", number(drafting?.num_spec_steps ? drafting.mean_acceptance_length : 1)],
      ["accepted", drafting?.num_draft_tokens ? percent(drafting.draft_acceptance_rate) : "–"],
    ]);
    this.element.dataset.tokens = usage?.output_tokens ?? 0;
    this.element.dataset.drafted = drafting?.num_draft_tokens ?? 0;
    this.element.dataset.accepted = drafting?.num_accepted_draft_tokens ?? 0;
  }

  _draw() {
    const steps = [...this.steps.values()];
    this.strip.show(steps);
    const names = [...new Set(steps.map((step) => step.drafter).filter(Boolean))];
    this.key.replaceChildren(
      key(
        names,
        steps.some((step) => step.forced > 0),
      ),
    );
    if (this.element.dataset.state === "done") return;
    const tokens = steps.reduce((sum, step) => sum + step.tokens, 0);
    const drafted = steps.reduce((sum, step) => sum + step.drafted, 0),
      accepted = steps.reduce((sum, step) => sum + step.accepted, 0);
    this._say([
      ["tokens", count(tokens)],
      ["running", time((performance.now() - this.began) / 1000)],
      ["per step", number(steps.length ? tokens / steps.length : NaN)],
      ["accepted", drafted ? percent(accepted / drafted) : "–"],
    ]);
  }

  _say(entries) {
    this.numbers.replaceChildren(
      ...entries.map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value))),
    );
  }
}
