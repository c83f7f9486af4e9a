// The playground: a conversation, how to go on with it, and the answers coloured as they arrive; or two to compare.

import { Answer } from "./answer.js";
import { verdict } from "./compare.js";
import { html } from "./elements.js";
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
const BEGINNING = "Tell me a story about a fox and an owl.";

export class Playground {
  constructor(place, finished) {
    this.session = new Session();
    this.finished = finished;
    this.said = [];
    this.times = []; // of the answers compared so far, with drafts and without
    this.turns = html("div", { class: "turns" });
    this.outcome = html("p", { class: "outcome", role: "status" });
    this.prompt = html("textarea", { id: "prompt", rows: 3, spellcheck: "false", required: true }, BEGINNING);
    this.system = html("textarea", { name: "system", rows: 2, spellcheck: "false", placeholder: "none" });
    this.method = html("select", { name: "method" });
    this.run = html("button", { class: "main", type: "submit" }, "Run");
    this.stop = html("button", { class: "quiet", type: "button", disabled: true }, "Stop");
    this.anew = html("button", { class: "quiet anew", type: "button", disabled: true }, "New conversation");
    this.numbers = new Map(
      NUMBERS.map(([name, , limits]) => [name, html("input", { type: "number", name, ...limits })]),
    );
    this.form = this._form();
    place.append(
      html("div", { class: "asking" }, html("h2", { id: "playground-title" }, "Playground"), this.form),
      html("div", { class: "said" }, this.outcome, this.turns),
    );
    this.stop.addEventListener("click", () => this._cancel());
    this.anew.addEventListener("click", () => this._begin());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this._submit();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
    this.offer([]);
  }

  _form() {
    const mode = ([value, label], index) =>
      html(
        "label",
        {},
        html("input", { type: "radio", name: "mode", value, checked: index === 0 }),
        html("span", {}, label),
      );
    return html(
      "form",
      {},
      html("label", {}, "System prompt", this.system),
      html("label", { for: "prompt", class: "hidden" }, "Prompt"),
      this.prompt,
      html(
        "div",
        { class: "numbers" },
        NUMBERS.map(([name, label]) => html("label", {}, label, this.numbers.get(name))),
      ),
      html("label", {}, "Drafter", this.method),
      html("fieldset", { class: "choice modes" }, html("legend", { class: "hidden" }, "Speculation"), MODES.map(mode)),
      html("div", { class: "buttons" }, this.run, this.stop, this.anew),
      html("span", { class: "hint" }, "Ctrl + Enter runs"),
    );
  }

  /** Names the drafters that may be asked for. */
  offer(drafters) {
    const names = ["auto", ...drafters];
    if (names.join() === [...this.method.options].map((option) => option.value).join()) return;
    const chosen = this.method.value;
    this.method.replaceChildren(...names.map((value) => html("option", { value, selected: value === chosen }, value)));
  }

  get mode() {
    return new FormData(this.form).get("mode");
  }

  /** What to ask for: the conversation so far, and what is said now. */
  _fields() {
    const given = [...this.numbers]
      .filter(([, input]) => input.value !== "")
      .map(([name, input]) => [name, Number(input.value)]);
    const system = this.system.value.trim();
    return {
      input: [...this.said, { role: "user", content: this.prompt.value }],
      ...(system ? { instructions: system } : {}),
      ...Object.fromEntries(given),
    };
  }

  _cancel() {
    this.cancelled = true;
    this.session.cancel();
  }

  /** Forget what was said. */
  _begin() {
    this.said = [];
    this.turns.replaceChildren();
    this._say("", "");
    this.anew.disabled = true;
    this.prompt.focus();
  }

  async _submit() {
    if (this.run.disabled) return;
    this._busy(true);
    const fields = this._fields();
    this.turn = html("section", { class: "turn" }, html("p", { class: "user" }, this.prompt.value));
    this.turns.append(this.turn);
    try {
      const response = await (this.mode === "compare" ? this._compare(fields) : this._single(fields));
      this.said = [...fields.input, { role: "assistant", content: textOf(response) }];
      this.prompt.select(); // what is typed next takes its place
    } catch (error) {
      this.turn.remove();
      if (this.cancelled) this._say("Stopped.", "");
      else this._say(`It failed: ${error.message}`, "bad");
    }
    this._busy(false);
    this.finished();
  }

  async _single(fields) {
    const response = await this._answer(this.mode === "off", fields);
    this._say(response.status === "cancelled" ? "Stopped." : "", "");
    return response;
  }

  /** Both ways with one seed. Plain decoding comes second, so that it gains if the prompt's KV is there already. */
  async _compare(fields) {
    fields.seed ??= Math.floor(Math.random() * 2 ** 31);
    this.turn.classList.add("compared");
    const first = await this._answer(false, fields),
      second = this.cancelled ? null : await this._answer(true, fields);
    if (this.cancelled) this._say("Stopped.", "");
    else this._judge(first, second, fields.seed);
    return first;
  }

  _judge(first, second, seed) {
    const [drafted, plain] = [first, second].map(textOf);
    if (drafted !== plain) {
      const [ours, theirs] = [[...drafted], [...plain]];
      const found = ours.findIndex((character, index) => character !== theirs[index]),
        place = found < 0 ? ours.length : found;
      const why =
        first.metrics?.exact === false
          ? "This server did not promise to be exact here."
          : "This should not happen: please report it.";
      return this._say(`The texts differ from character ${place + 1} on (seed ${seed}). ${why}`, "bad");
    }
    this.times.push([first, second].map((response) => response.metrics.generation_time_ms / 1000));
    this._say(...verdict(this.times));
  }

  async _answer(off, fields) {
    const answer = new Answer(off ? "Plain decoding" : "With speculation"),
      method = this.method.value;
    this.turn.append(answer.element);
    answer.element.scrollIntoView({ block: "nearest" });
    const speculation = off ? { off: true } : method === "auto" ? null : { method };
    const asked = speculation ? { ...fields, speculation } : fields;
    try {
      const response = await this.session.run(asked, (tokens, steps, text) => answer.add(tokens, steps, text));
      answer.end(response);
      return response;
    } finally {
      answer.stop();
    }
  }

  _busy(busy) {
    if (busy) [this.cancelled, this.outcome.textContent] = [false, ""];
    [this.run.disabled, this.stop.disabled] = [busy, !busy];
    this.anew.disabled = busy || !this.turns.children.length;
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
