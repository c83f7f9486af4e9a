// The recent requests of this key. One click shows the steps and the text of one.

import { ask } from "./api.js";
import { ColouredText, key } from "./coloured.js";
import { html } from "./elements.js";
import { clock, count, number, percent, time } from "./format.js";
import { StepStrip } from "./strip.js";

const COLUMNS = [
  ["when", (one) => clock(one.started)],
  ["prompt", (one) => count(one.prompt_tokens)],
  ["output", (one) => count(one.output_tokens)],
  ["first token", (one) => time(one.time_to_first_token)],
  ["tok/s", (one) => number(one.tokens_per_second)],
  ["tokens per step", (one) => number(one.tokens_per_step)],
  ["accepted", (one) => percent(one.acceptance_rate)],
  ["end", (one) => one.finish_reason ?? "running"],
];

const NOT_KEPT = "Its text was not kept: store is false.";
const STEP = ["step", "drafter", "drafted", "accepted", "tokens", "milliseconds"];
const RUN = ["text", "drafter", "depth", "forced"];
const named = (names) => (values) => Object.fromEntries(names.map((name, index) => [name, values[index]]));

function shown(detail) {
  const steps = new StepStrip("Steps of this request");
  steps.show(detail.steps.map(named(STEP)));
  const whole = detail.whole ? null : html("p", { class: "note" }, "Only the beginning of this request was kept.");
  if (!detail.text_kept) return [steps.element, html("p", { class: "note" }, NOT_KEPT), whole];
  const text = new ColouredText("Text of this request, coloured by origin");
  const runs = detail.text.map(named(RUN));
  text.add(runs);
  const names = [...new Set(runs.filter((run) => run.depth && !run.forced).map((run) => run.drafter))];
  return [
    key(
      names,
      runs.some((run) => run.forced),
    ),
    steps.element,
    text.element,
    whole,
  ];
}

export class Requests {
  constructor(place) {
    this.list = [];
    this.open = null;
    this.body = html("tbody");
    this.detail = html("div", { class: "detail", id: "request-detail" });
    this.table = html(
      "div",
      { class: "scroll list", tabindex: 0, role: "region", "aria-label": "Recent requests" },
      html(
        "table",
        { class: "requests" },
        html(
          "thead",
          {},
          html(
            "tr",
            {},
            COLUMNS.map(([name]) => html("th", { scope: "col" }, name)),
          ),
        ),
        this.body,
      ),
    );
    place.append(
      html("h3", { id: "requests-title" }, "Recent requests"),
      html(
        "p",
        { class: "note" },
        "Those of your key. Choose one to see its steps and where each token of its text came from.",
      ),
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
    this.body.replaceChildren(
      ...(list.length
        ? list.map((one) => this._row(one))
        : [
            html(
              "tr",
              {},
              html("td", { colspan: COLUMNS.length, class: "none" }, "None yet. The playground sends one."),
            ),
          ]),
    );
    this.table.scrollTop = scrolled;
    if (focused) this.body.querySelector(`tr[data-id="${CSS.escape(focused)}"] button`)?.focus({ preventScroll: true });
  }

  _row(one) {
    const open = this.open === one.id;
    const [first, ...others] = COLUMNS.map(([, read]) => read(one));
    return html(
      "tr",
      { "data-id": one.id, class: open ? "open" : null, onclick: () => this.choose(one.id) },
      html(
        "td",
        {},
        html(
          "button",
          { type: "button", class: "row", "aria-expanded": String(open), "aria-controls": "request-detail" },
          first,
        ),
      ),
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
