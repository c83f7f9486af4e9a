// One answer in the playground: its clock, its text as Markdown or coloured by token, its passes and its numbers.

import { ColouredText, key, StepStrip } from "./coloured.js";
import { html } from "./elements.js";
import { FIGURES, say } from "./figures.js";
import { count, time } from "./format.js";
import { Markdown } from "./markdown.js";

const total = (ms) => Object.values(ms).reduce((sum, one) => sum + one, 0);
const many = (value, one, more) => [html("b", count(value)), ` ${value === 1 ? one : more}`];

/** Seconds that a response took, as its reader sees them: to its first token, and from there to its last. */
export const secondsOf = ({ metrics }) => (metrics.time_to_first_token_ms + metrics.generation_time_ms) / 1000;

/** The figures of a response as those of a request in the list of the dashboard. */
const RESPONSE_FIGURES = [FIGURES.rate, FIGURES.first, FIGURES.perPass, FIGURES.right];
const figuresOf = ({ speculative_decoding: drafting, ...metrics }) => ({
  ...metrics,
  time_to_first_token: metrics.time_to_first_token_ms / 1000,
  acceptance_rate: drafting?.num_draft_tokens ? drafting.draft_acceptance_rate : null,
});

export const textOf = (response) =>
  response.output
    .flatMap((item) => item.content ?? [])
    .map((part) => part.text)
    .join("");

/** A button that shows tokens, coloured, or the text as the model means it; changed(coloured) learns the choice. */
export function tokensButton(answers, coloured, changed) {
  const button = html("button.quiet", { type: "button" }, "Show tokens");
  const show = (chosen) => {
    for (const answer of answers) answer.coloured = chosen;
    button.setAttribute("aria-pressed", chosen);
  };
  button.addEventListener("click", () => {
    const chosen = button.getAttribute("aria-pressed") === "false";
    show(chosen);
    changed?.(chosen);
  });
  show(coloured);
  return button;
}

export class Answer {
  /** strips: of the answers that it is compared with. */
  constructor(title, strips) {
    this.title = title;
    this.steps = new Map();
    this.written = this.thought = "";
    this.text = new ColouredText(`${title}: text coloured by origin`);
    this.markdown = new Markdown();
    this.thinking = html("p.thought", { hidden: true });
    this.strip = new StepStrip(`${title}: passes`, strips);
    this.clock = html("b.clock");
    this.counts = html("p.counts");
    this.numbers = html("dl.figures");
    this.key = html("div");
    this.element = html(
      "article.answer",
      { "data-state": "running", "aria-label": title },
      html("h3", title, " ", this.clock),
      this.counts,
      html("div.formatted", this.thinking, this.markdown.element),
      html("div.tokens", this.text.element, this.strip.element, this.key),
      this.numbers,
    );
    this._draw();
  }

  /** Whether tokens are shown, coloured, in the place of what the model means by its Markdown. */
  set coloured(coloured) {
    this.element.classList.toggle("by-token", coloured);
    this._draw();
  }

  /** What a delta brought. Without provenance its text has no colour. */
  add({ tokens, steps, text = "", thought = "" }) {
    const shown = tokens.map((token) => ({
      ...token,
      text: token.text + (token.reasoning ?? ""),
      forced: token.origin === "grammar",
    }));
    this.written += text;
    this.thought += thought;
    this.text.add(shown.length ? shown : [{ text: text + thought, drafter: "", depth: 0 }]);
    for (const step of steps) {
      const more = { drafter: step.drafter ?? "", tokens: 0, sources: [], milliseconds: total(step.ms) };
      this.steps.set(step.step, { ...step, ...more });
    }
    for (const token of shown) {
      const step = this.steps.get(token.step);
      if (!step) continue;
      step.tokens += 1;
      if (token.depth) step.sources.push(token.forced ? "grammar" : token.drafter);
    }
    this.changed = true;
  }

  /** The time that has gone by is now this. Once a frame is enough, however fast tokens come. */
  tick(seconds) {
    this.clock.textContent = time(seconds);
    if (this.changed) this._draw();
  }

  /** How much of it is there: a share, in a race. */
  advance(share) {
    this.element.style.setProperty("--done", `${100 * share}%`);
  }

  /** The response is over: its own numbers replace what was counted here. */
  end(response) {
    const { metrics, usage } = response,
      drafting = metrics?.speculative_decoding;
    this.tokens = usage?.output_tokens;
    this.stop();
    if (metrics) this.clock.textContent = time(secondsOf(response));
    const found = metrics ? RESPONSE_FIGURES.map((one) => [one.name, say(one, one.request(figuresOf(metrics)))]) : [],
      known = found.filter(([, value]) => value);
    this.numbers.replaceChildren(...known.map(([name, value]) => html("div", html("dt", name), html("dd", value))));
    this.element.dataset.tokens = usage?.output_tokens ?? 0;
    this.element.dataset.drafted = drafting?.num_draft_tokens ?? 0;
    this.element.dataset.accepted = drafting?.num_accepted_draft_tokens ?? 0;
  }

  /** Nothing more will come. */
  stop() {
    this.element.dataset.state = "done";
    this._draw();
  }

  _draw() {
    const steps = [...this.steps.values()];
    this.changed = false;
    if (this.element.classList.contains("by-token")) {
      this.strip.draw(steps);
      this.key.replaceChildren(key(this.text.tokens));
    } else {
      this.markdown.show(this.written);
      this.thinking.textContent = this.thought;
      this.thinking.hidden = !this.thought;
    }
    this._count(this.tokens ?? steps.reduce((all, step) => all + step.tokens, 0));
  }

  _count(tokens) {
    this.counts.replaceChildren(...many(tokens, "token", "tokens"), ", ", ...many(this.steps.size, "pass", "passes"));
  }
}
