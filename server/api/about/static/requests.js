// The recent requests of this key.

import { ask } from "./api.js";
import { html } from "./elements.js";
import { FIGURES, say } from "./figures.js";
import { clock, count } from "./format.js";
import { drafterName } from "./models.js";

const figure = (one) => [one.name, (request) => say(one, one.request(request)) || "–"];
const ENDS = { stop: "complete", length: "token limit", tool_calls: "tool call", null: "running" };

const COLUMNS = [
  ["when", (one) => clock(one.started)],
  ["how it was answered", how],
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

/** Who drafted, and how tokens were sampled. */
function how({ drafters, temperature, seed }) {
  const who = drafterName(Object.keys(drafters).sort().join(", "));
  const words = [who ? `drafts by ${who}` : "no drafts", `temperature ${temperature}`];
  if (seed !== null) words.push(`seed ${seed}`);
  return html("small", {}, words.join(", "));
}

/** How long the prompt is, and how much of it did not have to be read again; while it is read, how much of it is. */
function readAndReused({ prompt_tokens, cached_tokens, read_tokens, finish_reason }) {
  if (finish_reason === null && read_tokens < prompt_tokens)
    return `${count(read_tokens)} of ${count(prompt_tokens)} read`;
  return count(prompt_tokens) + (cached_tokens ? ` (${count(cached_tokens)} reused)` : "");
}

const cell = ([name, read], one) => html("td", { "data-head": name }, read(one));
const row = (one) => html("tr", { "data-id": one.id }, COLUMNS.map((column) => cell(column, one)));

export class Requests {
  constructor(place) {
    this.list = [];
    this.all = false;
    this.body = html("tbody");
    const heads = COLUMNS.map(([name]) => html("th", { scope: "col" }, name));
    const onclick = () => {
      this.all = !this.all;
      this._draw();
    };
    this.more = html("button", { type: "button", class: "quiet more", onclick });
    place.append(
      html("h2", { id: "requests-title" }, "Recent requests"),
      html("p", { class: "note" }, "Those made with your key. Their texts are not kept."),
      html("table", { class: "requests" }, html("thead", {}, html("tr", {}, heads)), this.body),
      this.more,
    );
    this._draw();
  }

  /** Fetches the list, and shows it. */
  async refresh() {
    this.list = await (await ask("dashboard/requests")).json();
    this._draw();
  }

  _draw() {
    const { list, all } = this;
    const none = html("td", { colspan: COLUMNS.length, class: "none" }, "None with this key yet.");
    const rows = (all ? list : list.slice(0, FEW)).map(row);
    this.body.replaceChildren(...(rows.length ? rows : [html("tr", {}, none)]));
    this.more.hidden = list.length <= FEW;
    this.more.textContent = all ? `Show the last ${FEW}` : `Show all ${list.length}`;
  }
}
