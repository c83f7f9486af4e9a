// The playground: a prompt, how to answer it, and the answer coloured as it arrives; or two answers to compare.

import { Answer } from "./answer.js";
import { html } from "./elements.js";
import { percent, time } from "./format.js";
import { Session } from "./session.js";

const MODES = [
  ["on", "Speculate"],
  ["off", "Plain"],
  ["compare", "Compare"],
];
const NUMBERS = [
  ["max_output_tokens", "Tokens", { value: 120, min: 1, step: 1 }],
  ["temperature", "Temperature", { placeholder: "1", min: 0, max: 2, step: 0.1 }],
  ["top_p", "Top p", { placeholder: "1", min: 0, max: 1, step: 0.05 }],
  ["seed", "Seed", { placeholder: "any", step: 1 }],
];

export class Playground {
  constructor(place, finished) {
    this.session = new Session();
    this.finished = finished;
    this.answers = html("div", { class: "answers" });
    this.outcome = html("p", { class: "outcome", role: "status" });
    this.prompt = html(
      "textarea",
      { id: "prompt", rows: 3, spellcheck: "false", required: true },
      "Tell me a story about a fox and an owl.",
    );
    this.run = html("button", { class: "main", type: "submit" }, "Run");
    this.stop = html(
      "button",
      { class: "quiet", type: "button", onclick: () => this._cancel(), disabled: true },
      "Stop",
    );
    this.numbers = new Map(
      NUMBERS.map(([name, , limits]) => [name, html("input", { type: "number", name, ...limits })]),
    );
    this.form = html(
      "form",
      {
        onsubmit: (event) => {
          event.preventDefault();
          this._submit();
        },
      },
      html("label", { for: "prompt", class: "hidden" }, "Prompt"),
      this.prompt,
      html(
        "div",
        { class: "numbers" },
        NUMBERS.map(([name, label]) => html("label", {}, label, this.numbers.get(name))),
      ),
      html(
        "fieldset",
        { class: "choice modes" },
        html("legend", { class: "hidden" }, "Speculation"),
        MODES.map(([value, label], index) =>
          html(
            "label",
            {},
            html("input", { type: "radio", name: "mode", value, checked: index === 0 }),
            html("span", {}, label),
          ),
        ),
      ),
      html("div", { class: "buttons" }, this.run, this.stop, html("span", { class: "hint" }, "Ctrl + Enter runs")),
    );
    place.append(html("h2", { id: "playground-title" }, "Playground"), this.form, this.outcome, this.answers);
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
  }

  get mode() {
    return new FormData(this.form).get("mode");
  }

  _fields() {
    const given = [...this.numbers]
      .filter(([, input]) => input.value !== "")
      .map(([name, input]) => [name, Number(input.value)]);
    return { input: this.prompt.value, ...Object.fromEntries(given) };
  }

  _cancel() {
    this.cancelled = true;
    this.session.cancel();
  }

  async _submit() {
    if (this.run.disabled) return;
    this._busy(true);
    this.answers.replaceChildren();
    try {
      await (this.mode === "compare" ? this._compare() : this._single(this.mode === "off"));
    } catch (error) {
      this._say(`Nothing came of it: ${error.message}`, "bad");
    }
    this._busy(false);
    this.finished();
  }

  async _single(off) {
    const response = await this._answer(off, this._fields());
    this._say(response.status === "cancelled" ? "Stopped." : "", "");
  }

  /** Both ways with one seed. Plain decoding comes second, so that it gains if the prompt's KV is there already. */
  async _compare() {
    const fields = { ...this._fields() };
    fields.seed ??= Math.floor(Math.random() * 2 ** 31);
    const first = await this._answer(false, fields);
    if (this.cancelled) return this._say("Stopped.", "");
    const second = await this._answer(true, fields);
    if (this.cancelled) return this._say("Stopped.", "");
    this._judge(first, second, fields.seed);
  }

  _judge(first, second, seed) {
    const [drafted, plain] = [first, second].map(textOf);
    if (drafted !== plain) {
      const [ours, theirs] = [[...drafted], [...plain]];
      const found = ours.findIndex((character, index) => character !== theirs[index]),
        place = found < 0 ? ours.length : found;
      const why =
        first.metrics?.exact === false
          ? "This server said it would not be exact here."
          : "It should not be: please report it.";
      return this._say(`The texts differ from character ${place + 1} on (seed ${seed}). ${why}`, "bad");
    }
    const [fast, slow] = [first, second].map((response) => response.metrics.generation_time_ms / 1000);
    const share = 1 - fast / slow,
      times = `${time(fast)} instead of ${time(slow)}`;
    if (!(slow > 0)) this._say("Same text.", "good");
    else if (share >= 0) this._say(`Same text, in ${times}: ${percent(share)} of the time saved.`, "good");
    else this._say(`Same text, but in ${times}: speculation does not pay here.`, "warn");
  }

  async _answer(off, fields) {
    const answer = new Answer(off ? "Plain decoding" : "With speculation");
    this.answers.append(answer.element);
    const asked = off ? { ...fields, speculation: { off: true } } : fields;
    const response = await this.session.run(asked, (tokens, steps, text) => answer.add(tokens, steps, text));
    answer.end(response);
    return response;
  }

  _busy(busy) {
    if (busy) [this.cancelled, this.outcome.textContent] = [false, ""];
    [this.run.disabled, this.stop.disabled] = [busy, !busy];
    this.form.dataset.busy = busy;
  }

  _say(text, kind) {
    this.outcome.className = `outcome ${kind}`;
    this.outcome.textContent = text;
  }
}

const textOf = (response) =>
  response.output
    .flatMap((item) => item.content ?? [])
    .map((part) => part.text)
    .join("");
