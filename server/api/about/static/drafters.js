// Acceptance by drafter, as a table, and the tree beside it.

import { html, paint } from "./elements.js";
import { count, number, percent } from "./format.js";
import { card, entries } from "./plot.js";
import { TreeChart } from "./tree.js";

const HEADS = ["drafter", "trees", "accepted", "per tree", "last hour"];

/** A name that may go on in the next line behind a "+". */
const breakable = (name) =>
  html(
    "span",
    {},
    name.split(/(?<=\+)/).flatMap((part) => [html("wbr"), part]),
  );

function row(name, now, hour) {
  const bar = html("span", { class: "meter", "aria-hidden": "true" }, paint(html("span"), name));
  bar.firstChild.style.width = `${100 * (now?.acceptance_rate ?? 0)}%`;
  return html(
    "tr",
    {},
    html("th", { scope: "row" }, html("ul", {}, entries([{ name: breakable(name), colour: name }]))),
    html("td", {}, count(now?.drafts ?? 0)),
    html("td", {}, bar, percent(now?.acceptance_rate)),
    html("td", {}, number(now?.mean_acceptance_length)),
    html("td", {}, percent(hour?.acceptance_rate)),
  );
}

/** A drafter beside the one in use: what would have been accepted, of the requests that ended in the last hour. */
function shadowRow(rates) {
  const shown = row(rates.drafter, rates, rates);
  shown.className = "shadow";
  shown.firstChild.append("(shadow)");
  shown.title = `drafts unverified, ${number(rates.milliseconds)} ms a step`;
  return shown;
}

const NOTE = "Of what each drafted in the last minute, what the target said too; tokens of a step with such a tree.";
const SHADOW_NOTE =
  "A shadow drafts beside them, unverified: what it would have had accepted, in requests that ended in the last hour.";

export function drafters(state) {
  const body = html("tbody"),
    beside = html("p", { class: "note", hidden: true }, SHADOW_NOTE),
    tree = new TreeChart();
  const heads = HEADS.map((head) => html("th", { scope: "col" }, head));
  const table = card(
    { id: "drafters", title: "Acceptance by drafter", note: NOTE },
    html(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Drafters" },
      html("table", {}, html("thead", {}, html("tr", {}, heads)), body),
    ),
    beside,
  );
  const none = html("tr", {}, html("td", { colspan: HEADS.length, class: "none" }, "nothing drafted in the last hour"));
  const draw = () => {
    const { drafters: now, drafters_hour: hour, shadows, nodes, accepted_by_depth: depths } = state.snapshot;
    const names = [...new Set([...now, ...hour].map((one) => one.drafter))].sort();
    const find = (rates, name) => rates.find((one) => one.drafter === name);
    const rows = names.map((name) => row(name, find(now, name), find(hour, name)));
    body.replaceChildren(...(rows.length ? rows : [none]), ...shadows.map(shadowRow));
    beside.hidden = !shadows.length;
    tree.show({ nodes, trees: depths.drafts });
  };
  return { elements: [tree.element, table], draw };
}
