// The recent requests of this key. One click shows the steps and the text of one.

import { ask } from "./api.js";
import { ColouredText, key, StepStrip } from "./coloured.js";
import { html } from "./elements.js";
import { clock, count, number, percent, time } from "./format.js";

const COLUMNS = [
  ["when", (one) => clock(one.started)],
  ["prompt; drafter, temperature, seed", asked],
  ["in", (one) => count(one.prompt_tokens)],
  ["out", (one) => count(one.output_tokens)],
  ["first token", (one) => time(one.time_to_first_token)],
  ["tok/s", (one) => number(one.tokens_per_second)],
  ["tokens per step", (one) => number(one.tokens_per_step)],
  ["accepted", (one) => percent(one.acceptance_rate)],
  ["end", (one) => one.finish_reason ?? "running"],
];

/** What was asked for, in two lines: the prompt's first words, and below who drafted how. */
function asked({ prompt, drafters, temperature, seed }) {
  const who = Object.keys(drafters).sort().join(", ") || "none";
  return [
    html("div", { class: "words", title: prompt }, prompt ?? "(not kept)"),
    html("small", {}, `${who}, T ${number(temperature)}, seed ${seed ?? "–"}`),
  ];
}

const NOT_KEPT = "Its text was not kept, as store was false.";
const STEP = ["step", "drafter", "drafted", "accepted", "tokens", "milliseconds"];
const RUN = ["text", "drafter", "depth", "forced"];
const named = (names) => (values) => Object.fromEntries(names.map((name, index) => [name, values[index]]));

/** The steps, each with whose its accepted tokens were, as far as the text was kept. */
function withSources(steps, runs) {
  let begin = 0;
  return steps.map((step) => {
    const sources = runs.slice(begin, (begin += step.tokens)).map((run) => (run.forced ? "grammar" : run.drafter));
    return { ...step, sources: sources.slice(0, step.accepted) };
  });
}

function shown(detail) {
  const runs = detail.text.map(named(RUN)),
    steps = new StepStrip("Steps of this request");
  steps.draw(withSources(detail.steps.map(named(STEP)), runs));
  const whole = detail.whole ? null : html("p", { class: "note" }, "Only the beginning of this request was kept.");
  if (!detail.text_kept) return [steps.element, html("p", { class: "note" }, NOT_KEPT), whole];
  const text = new ColouredText("Text of this request, coloured by origin");
  text.add(runs);
  return [key(runs), steps.element, text.element, whole];
}

export class Requests {
  constructor(place) {
    this.list = [];
    this.open = null;
    this.body = html("tbody");
    this.detail = html("div", { class: "detail", id: "request-detail" });
    const heads = COLUMNS.map(([name]) => html("th", { scope: "col" }, name));
    this.table = html(
      "div",
      { class: "scroll list", tabindex: 0, role: "region", "aria-label": "Recent requests" },
      html("table", { class: "requests" }, html("thead", {}, html("tr", {}, heads)), this.body),
    );
    const note = "Requests made with your key. Choose one to see its steps and where each token of its text came from.";
    place.append(
      html("h3", { id: "requests-title" }, "Recent requests"),
      html("p", { class: "note" }, note),
      this.table,
      this.detail,
    );
    this._draw();
  }

  show(list) {
    if (JSON.stringify(list) === JSON.stringify(this.list)) return; // a row that is being clicked stays where it is
    this.list = list;
    this._draw();
  }

  _draw() {
    const { list } = this;
    const scrolled = this.table.scrollTop;
    const focused = document.activeElement?.closest?.("tr")?.dataset.id;
    const none = html("td", { colspan: COLUMNS.length, class: "none" }, "None yet. The playground sends one.");
    this.body.replaceChildren(...(list.length ? list.map((one) => this._row(one)) : [html("tr", {}, none)]));
    this.table.scrollTop = scrolled;
    if (focused) this.body.querySelector(`tr[data-id="${CSS.escape(focused)}"] button`)?.focus({ preventScroll: true });
  }

  _row(one) {
    const open = this.open === one.id;
    const [first, ...others] = COLUMNS.map(([, read]) => read(one));
    const button = { type: "button", class: "row", "aria-expanded": String(open), "aria-controls": "request-detail" };
    return html(
      "tr",
      { "data-id": one.id, class: open ? "open" : null, onclick: () => this.choose(one.id) },
      html("td", {}, html("button", button, first)),
      others.map((value) => html("td", {}, value)),
    );
  }

  /** Show a request's steps and text, or nothing if it was shown. */
  async choose(id) {
    this.open = this.open === id ? null : id;
    this._draw();
    this.detail.replaceChildren();
    if (this.open === null) return;
    try {
      const response = await ask(`dashboard/requests/${encodeURIComponent(id)}`);
      const detail = await response.json();
      if (this.open !== id) return;
      this.detail.replaceChildren(...shown(detail).filter(Boolean));
      this.detail.scrollIntoView({ block: "nearest" });
    } catch (error) {
      this.detail.replaceChildren(html("p", { class: "wrong" }, error.message));
    }
  }
}
