// Acceptance by drafter, as a table, and the tree beside it.

import { colourOf } from "./colours.js";
import { html } from "./elements.js";
import { count, number, percent } from "./format.js";
import { TreeChart } from "./tree.js";

const HEADS = ["drafter", "trees", "accepted", "per step", "last hour"];

function row(name, now, hour) {
  const bar = html("span", { class: "meter", "aria-hidden": "true" }, html("span", { class: `c-${colourOf(name)}` }));
  bar.firstChild.style.width = `${100 * (now?.acceptance_rate ?? 0)}%`;
  return html(
    "tr",
    {},
    html("th", { scope: "row" }, html("i", { class: `swatch c-${colourOf(name)}` }), name),
    html("td", {}, count(now?.drafts ?? 0)),
    html("td", {}, bar, percent(now?.acceptance_rate)),
    html("td", {}, number(now?.tokens_per_step)),
    html("td", {}, percent(hour?.acceptance_rate)),
  );
}

/** A drafter beside the one in use: what would have been accepted, of the requests that ended in the last hour. */
function shadowRow(rates) {
  const shown = row(rates.drafter, rates, rates);
  shown.className = "shadow";
  shown.firstChild.append(" (shadow)");
  shown.title = `drafts unverified, ${number(rates.milliseconds)} ms a step`;
  return shown;
}

const SHADOW_NOTE =
  "A shadow drafts beside them, unverified: what it would have had accepted, in requests that ended in the last hour.";

export function drafters(state) {
  const body = html("tbody"),
    beside = html("p", { class: "note", hidden: true }, SHADOW_NOTE),
    tree = new TreeChart();
  const table = html(
    "section",
    { class: "card chart", id: "drafters", "aria-label": "Acceptance by drafter" },
    html("h3", {}, "Acceptance by drafter"),
    html("p", { class: "note" }, "Of what each one drafted in the last minute, what the target said too."),
    html(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Drafters" },
      html(
        "table",
        {},
        html(
          "thead",
          {},
          html(
            "tr",
            {},
            HEADS.map((head) => html("th", { scope: "col" }, head)),
          ),
        ),
        body,
      ),
    ),
    beside,
  );
  const draw = () => {
    if (!state.snapshot) return;
    const { drafters: now, drafters_hour: hour, shadows, nodes } = state.snapshot;
    const names = [...new Set([...now, ...hour].map((one) => one.drafter))].sort();
    const find = (rates, name) => rates.find((one) => one.drafter === name);
    body.replaceChildren(
      ...(names.length
        ? names.map((name) => row(name, find(now, name), find(hour, name)))
        : [html("tr", {}, html("td", { colspan: HEADS.length, class: "none" }, "nothing drafted in the last hour"))]),
      ...shadows.map(shadowRow),
    );
    beside.hidden = !shadows.length;
    tree.show(
      nodes,
      now.reduce((all, one) => all + one.drafts, 0),
    );
  };
  return { elements: [tree.element, table], draw };
}
