// The recent requests of this key. One click shows the steps and the text of one.

import { ask } from "./api.js";
import { ColouredText, key, StepStrip } from "./coloured.js";
import { html } from "./elements.js";
import { FIGURES, say } from "./figures.js";
import { clock, count } from "./format.js";
import { drafterName } from "./models.js";

const figure = (one) => [one.name, (request) => say(one, one.request(request)) || "–"];
const ENDS = { stop: "complete", length: "token limit", tool_calls: "tool call", null: "running" };

const COLUMNS = [
  ["when", (one) => clock(one.started)],
  ["prompt, and how it was answered", promptLines],
  ["prompt tokens", readAndReused],
  ["answer tokens", (one) => count(one.output_tokens)],
  figure(FIGURES.first),
  figure(FIGURES.rate),
  figure(FIGURES.perPass),
  figure(FIGURES.right),
  ["end", (one) => ENDS[one.finish_reason] ?? one.finish_reason],
];
/** So many are shown at first. */
const FEW = 8;

/** The request in two lines: the prompt's first words, and below who drafted how. */
function promptLines({ prompt, drafters, temperature, seed }) {
  const who = drafterName(Object.keys(drafters).sort().join(", "));
  const how = [who ? `drafts by ${who}` : "no drafts", `temperature ${temperature}`];
  if (seed !== null) how.push(`seed ${seed}`);
  return [html("div", { class: "words" }, prompt ?? "(not kept)"), html("small", {}, how.join(", "))];
}

/** How long the prompt is, and how much of it did not have to be read again; while it is read, how much of it is. */
function readAndReused({ prompt_tokens, cached_tokens, read_tokens, finish_reason }) {
  if (finish_reason === null && read_tokens < prompt_tokens)
    return `${count(read_tokens)} of ${count(prompt_tokens)} read`;
  return count(prompt_tokens) + (cached_tokens ? ` (${count(cached_tokens)} reused)` : "");
}

const NOT_KEPT = "Its text was not kept, as store was false.";
const NOTE = "Those made with your key. Choose one to see its passes, and where each token of its text came from.";
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
    steps = new StepStrip("Passes of this request");
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
    this.all = false;
    this.detail = html("div", { class: "detail", id: "request-detail" });
    this.below = html("tr", { hidden: true }, html("td", { colspan: COLUMNS.length }, this.detail));
    this.body = html("tbody", this.below);
    const heads = COLUMNS.map(([name]) => html("th", { scope: "col" }, name));
    const onclick = () => {
      this.all = !this.all;
      this._draw();
    };
    this.more = html("button", { type: "button", class: "quiet more", onclick });
    place.append(
      html("h2", { id: "requests-title" }, "Recent requests"),
      html("p", { class: "note" }, NOTE),
      html("table", { class: "requests" }, html("thead", {}, html("tr", {}, heads)), this.body),
      this.more,
    );
    this._draw();
  }

  show(list) {
    if (JSON.stringify(list) === JSON.stringify(this.list)) return; // a row that is being clicked stays where it is
    this.list = list;
    this._draw();
  }

  _draw() {
    const { list, all } = this;
    const focused = document.activeElement?.closest?.("tr")?.dataset.id;
    const none = html("td", { colspan: COLUMNS.length, class: "none" }, "None with this key yet.");
    const listed = list.filter((one, index) => all || index < FEW || one.id === this.open),
      rows = listed.length ? listed.map((one) => this._row(one)) : [html("tr", {}, none)];
    this._place(rows, listed.findIndex((one) => one.id === this.open));
    this.more.hidden = list.length <= FEW;
    this.more.textContent = all ? `Show the last ${FEW}` : `Show all ${list.length}`;
    if (focused) this.body.querySelector(`tr[data-id="${CSS.escape(focused)}"] button`)?.focus({ preventScroll: true });
  }

  /** Rows around the details, which stay where they are: below the row `open`. */
  _place(rows, open) {
    for (const row of [...this.body.children]) if (row !== this.below) row.remove();
    this.below.before(...rows.slice(0, open + 1));
    this.below.after(...rows.slice(open + 1));
    this.below.hidden = open < 0;
  }

  _row(one) {
    const open = this.open === one.id;
    const [first, ...others] = COLUMNS.map(([, read]) => read(one));
    const button = { type: "button", class: "row", "aria-expanded": String(open), "aria-controls": "request-detail" };
    return html(
      "tr",
      { "data-id": one.id, class: open ? "open" : null, onclick: () => this.choose(one.id) },
      html("td", {}, html("button", button, first)),
      others.map((value, at) => html("td", { "data-head": COLUMNS[at + 1][0] }, value)),
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
      for (const row of [this.below, this.below.previousSibling]) row.scrollIntoView({ block: "nearest" });
    } catch (error) {
      this.detail.replaceChildren(html("p", { class: "wrong" }, error.message));
    }
  }
}
