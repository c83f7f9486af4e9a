// How the playground asks: the system prompt, how tokens are sampled, who drafts.

import { ask } from "./api.js";
import { html } from "./elements.js";
import { drafterName, model } from "./models.js";

const NUMBERS = [
  ["max_output_tokens", "Tokens at most", { value: 160, min: 1, step: 1 }],
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["top_p", "Top-p", { min: 0, max: 1, step: 0.05 }],
  ["seed", "Seed", { placeholder: "any", step: 1 }],
];
const SAMPLED = ["temperature", "top_k", "top_p"];

export class Settings {
  constructor() {
    this.usual = null; // what the server says people sample this model with
    this.system = html("textarea", { name: "system", rows: 2, spellcheck: "false", placeholder: "none" });
    this.method = html("select", { name: "method" });
    const field = ([name, , limits]) => [name, html("input", { type: "number", name, ...limits })];
    this.numbers = new Map(NUMBERS.map(field));
    this.line = html("span.sampling");
    this.note = html("p.note", { hidden: true }, "This model rarely calls tools, unless tool_choice makes it.");
    this.element = html(
      "details.settings",
      html("summary", "Settings", this.line),
      this.note,
      html("label", "System prompt", this.system),
      html(
        "div.numbers",
        NUMBERS.map(([name, label]) => html("label", label, this.numbers.get(name))),
        html("label", "Drafter", this.method),
      ),
    );
    this.element.addEventListener("input", () => this._tell());
    this.offer([]);
    this._tell();
  }

  /** Names the drafters that may be chosen. */
  offer(drafters) {
    const names = ["auto", ...drafters];
    if (names.join() === [...this.method.options].map((option) => option.value).join()) return;
    const chosen = this.method.value;
    const option = (value) => html("option", { value, selected: value === chosen }, drafterName(value));
    this.method.replaceChildren(...names.map(option));
  }

  /** Learns how people sample the model called `name`; a server with several may not know before it is loaded. */
  async learn(name) {
    const card = await (await ask(`v1/models/${encodeURIComponent(model() ?? name)}`)).json();
    this.usual = card.sampling ?? null;
    this.note.hidden = !card.rarely_calls_tools;
    for (const name of ["temperature", "top_p"]) this.numbers.get(name).placeholder = this.usual?.[name] ?? "";
    this._tell();
  }

  /** Whether to take the likeliest token each time, unless a temperature is set here. */
  likeliest(on) {
    this.greedy = on;
    this._tell();
  }

  /** The fields of a request. */
  get fields() {
    const usual = { ...this.usual, ...(this.greedy ? { temperature: 0 } : {}) },
      given = [...this.numbers].map(([name, input]) => [name, input.value || (usual[name] ?? "")]),
      system = this.system.value.trim();
    return {
      ...(system ? { instructions: system } : {}),
      ...Object.fromEntries(given.filter(([, value]) => value !== "").map(([name, value]) => [name, Number(value)])),
    };
  }

  /** Who drafts; off: nobody. */
  speculation(off) {
    const method = this.method.value;
    return off ? { speculation: { off } } : method === "auto" ? {} : { speculation: { method } };
  }

  /** Says how tokens are sampled, and who says so. */
  _tell() {
    if (!this.usual) return (this.line.textContent = "sampling: known once the model is loaded");
    const own = SAMPLED.filter((name) => this.numbers.get(name)?.value),
      fields = this.fields,
      used = SAMPLED.map((name) => [name, name in fields ? `${fields[name]}` : this.usual[name]]),
      parts = used.filter(([, value]) => value ?? false).map(([name, value]) => `${name.replace("_", "-")} ${value}`);
    const source = own.length
      ? `${own.map((name) => name.replace("_", "-")).join(" and ")} as set here`
      : this.greedy
        ? "temperature 0 for this idea"
        : this.usual.recommended.length
          ? `${this.usual.recommended.map((name) => name.replace("_", "-")).join(" and ")} as the model recommends`
          : "the usual values: the model recommends none";
    this.line.textContent = `${parts.join(", ")} (${source})`;
  }
}
