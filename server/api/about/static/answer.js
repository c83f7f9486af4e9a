// One answer in the playground: its clock, its coloured text, its steps, and its numbers.

import { ColouredText, key, StepStrip } from "./coloured.js";
import { html } from "./elements.js";
import { count, number, percent, time } from "./format.js";

const total = (ms) => Object.values(ms).reduce((sum, one) => sum + one, 0);

export class Answer {
  constructor(title) {
    this.began = performance.now();
    this.steps = new Map();
    this.text = new ColouredText(`${title}: text coloured by origin`);
    this.strip = new StepStrip(`${title}: steps`);
    this.clock = html("b", { class: "clock", title: "since it was asked for" });
    this.numbers = html("dl", { class: "numbers-said" });
    this.key = html("div");
    this.element = html(
      "article",
      { class: "answer", "data-state": "running", "aria-label": title },
      html("h3", {}, title, " ", this.clock),
      this.numbers,
      this.text.element,
      this.strip.element,
      this.key,
    );
    this._tick();
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
      const more = { drafter: step.drafter ?? "", tokens: 0, sources: [], milliseconds: total(step.ms) };
      this.steps.set(step.step, { ...step, ...more });
    }
    for (const token of said) {
      const step = this.steps.get(token.step);
      if (!step) continue;
      step.tokens += 1;
      if (token.depth) step.sources.push(token.forced ? "grammar" : token.drafter);
    }
    this.changed = true;
  }

  /** The response is over: its own numbers replace what was counted here. */
  end(response) {
    const { metrics, usage } = response,
      drafting = metrics?.speculative_decoding;
    this.stop();
    this._say([
      ["tokens", count(usage?.output_tokens)],
      ["first token", time(metrics && metrics.time_to_first_token_ms / 1000)],
      ["tok/s", number(metrics?.tokens_per_second)],
      ["tokens per step", number(metrics?.tokens_per_step)],
      ["accepted", drafting?.num_draft_tokens ? percent(drafting.draft_acceptance_rate) : "–"],
    ]);
    this.element.dataset.tokens = usage?.output_tokens ?? 0;
    this.element.dataset.drafted = drafting?.num_draft_tokens ?? 0;
    this.element.dataset.accepted = drafting?.num_accepted_draft_tokens ?? 0;
  }

  /** Nothing more will come. */
  stop() {
    if (this.element.dataset.state === "done") return;
    this.element.dataset.state = "done";
    this._draw();
  }

  /** Once a frame is enough, however fast tokens come. */
  _tick() {
    if (this.element.dataset.state === "done") return;
    if (this.changed) this._draw();
    this.changed = false;
    this.clock.textContent = time((performance.now() - this.began) / 1000);
    requestAnimationFrame(() => this._tick());
  }

  _draw() {
    const steps = [...this.steps.values()],
      sum = (name) => steps.reduce((all, step) => all + step[name], 0);
    this.strip.draw(steps);
    this.key.replaceChildren(key(this.text.tokens));
    this.clock.textContent = time((performance.now() - this.began) / 1000);
    this._say([
      ["tokens", count(sum("tokens"))],
      ["tokens per step", number(steps.length ? sum("tokens") / steps.length : NaN)],
      ["accepted", sum("drafted") ? percent(sum("accepted") / sum("drafted")) : "–"],
    ]);
  }

  _say(entries) {
    this.numbers.replaceChildren(
      ...entries.map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value))),
    );
  }
}
