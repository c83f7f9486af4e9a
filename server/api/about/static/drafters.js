// Who drafts: the draft tree in use, its nodes shaded by how often they are accepted, and a table of the drafters.

import { DEEPEST, depthName } from "./bars.js";
import { html, svg, table } from "./elements.js";
import { FIGURES, say } from "./figures.js";
import { count, number, percent } from "./format.js";
import { drafterName } from "./models.js";
import { card, entries, Plot } from "./plot.js";

const [LARGEST, PAD] = [14, 20];
/** Places that fewer trees than this share had are left out. */
const SELDOM = 0.02;

/** Nodes by depth and rank, the root first; the places of the deepest level are one, for all that is deeper too. */
function laidOut(nodes, trees) {
  const levels = [[{ depth: 0, drafted: trees, accepted: trees }]];
  for (const node of nodes) {
    if (node.depth < DEEPEST && node.drafted >= SELDOM * trees) (levels[node.depth] ??= []).push({ ...node });
    else if (node.depth === DEEPEST && levels[DEEPEST - 1]) {
      const [deep] = (levels[DEEPEST] ??= [{ ...node, drafted: 0, accepted: 0 }]);
      deep.drafted += node.drafted;
      deep.accepted += node.accepted;
    }
  }
  levels.slice(1).forEach((level, depth) => {
    const above = levels[depth],
      place = (node) => above.findIndex((one) => one.rank === node.parent);
    level.sort((a, b) => place(a) - place(b) || a.rank - b.rank);
    for (const node of level) node.above = above[place(node)] ?? above[0];
  });
  for (const node of levels.flat()) node.share = node.accepted / trees;
  return levels;
}

function about({ depth, rank, drafted, share }) {
  if (!depth) return `the last token of the text, in ${count(drafted)} drafts`;
  const choice = depth < DEEPEST ? `, guess ${rank + 1}` : "",
    times = `drafted ${count(drafted)} times, right in ${percent(share, 1)} of all drafts`;
  return `token ${depthName(depth)}${choice}: ${times}`;
}

class TreeChart extends Plot {
  constructor() {
    const named = { id: "tree", title: "Which guesses were right", term: "draft tree" },
      note =
        "From left to right: the first, second, third guessed token and so on, and in how many percent of all drafts " +
        "it was right; the fuller a circle, the more often.";
    super(named.title, html("p.note.readout"), "node");
    this.data = { nodes: [], trees: 0 };
    this.element = card({ ...named, note }, this.svg, this.readout, this.numbers);
  }

  get nothing() {
    return !this.data.nodes.length;
  }

  table() {
    const cells = ({ depth, rank, drafted, share }) =>
      [depthName(depth), depth < DEEPEST ? rank + 1 : "any", count(drafted), percent(share, 1)];
    const levels = laidOut(this.data.nodes, this.data.trees);
    return { heads: ["token", "guess", "drafted", "right, of all drafts"], rows: levels.slice(1).flat().map(cells) };
  }

  drawn(width) {
    const { nodes, trees } = this.data,
      levels = laidOut(nodes, trees),
      flat = levels.flat(),
      widest = Math.max(...levels.map((level) => level.length)),
      across = Math.min((width - 2 * PAD) / Math.max(levels.length - 1, 1), 120),
      radius = Math.max(4, Math.min(LARGEST, across / 2 - 5, 150 / widest)),
      height = Math.max(110, widest * (2 * radius + 28));
    for (const level of levels) {
      for (const [index, node] of level.entries()) {
        Object.assign(node, { x: PAD + node.depth * across, y: (height * (index + 0.5)) / level.length });
      }
    }
    return {
      height,
      marks: [flat.slice(1).map(edge), flat.map((node) => circle(node, radius))],
      parts: flat.map(about),
      hint: `${count(trees)} drafts of the last minute; rare guesses are left out.`,
      all: flat.map(about).join("; "),
    };
  }
}

/** A node, and below it its share in percent. */
function circle({ depth, share, x, y }, radius) {
  const name = depth ? Math.round(100 * share) : "text",
    [line, shade, text] = depth ? ["now", "now", "ink"] : ["soft", "grid", "soft"],
    place = { cx: x, cy: y, r: radius };
  return svg(
    depth ? "g.node" : "g.node.root",
    svg("circle.back", { colour: line, ...place }),
    svg("circle.fill", { colour: shade, ...place, "fill-opacity": share.toFixed(3) }),
    svg("text", { colour: text, x, y: y + radius + 12 }, name),
  );
}

function edge({ above, x, y, share }) {
  const middle = (above.x + x) / 2,
    d = `M${above.x} ${above.y}C${middle} ${above.y} ${middle} ${y} ${x} ${y}`;
  return svg("path.line", { colour: "before", d, "stroke-width": 1 + 5 * share });
}

// -- by drafter -------------------------------------------------------------------------------------------------------

const HEADS = ["drafter", "drafts", FIGURES.right.name, "tokens per pass", "right, hour"];
const NOTE =
  "How many drafts each made in the last minute, how many of their tokens were right, and how many tokens a pass " +
  "with one of them added (mean acceptance length).";

/** A name that may go on in the next line behind a "+". */
const breakable = (name) => html("span", name.split(/(?<=\+)/).map((part) => [html("wbr"), part]));

function row(name, now, hour) {
  const meter = html("span", { colour: name });
  meter.style.width = `${100 * (now?.acceptance_rate ?? 0)}%`;
  return html(
    "tr",
    html("th", { scope: "row" }, html("ul", entries([{ name: breakable(drafterName(name)), colour: name }]))),
    html("td", count(now?.drafts ?? 0)),
    html("td", html("span.meter", { "aria-hidden": "true" }, meter), say(FIGURES.right, now?.acceptance_rate)),
    html("td", now && number(now.mean_acceptance_length)),
    html("td", say(FIGURES.right, hour?.acceptance_rate)),
  );
}

export function drafters(state) {
  const body = html("tbody"),
    tree = new TreeChart(),
    about = { id: "drafters", title: "Drafters compared", term: "acceptance by drafter", note: NOTE },
    compared = card(about, table(`${about.title}: table`, HEADS, body));
  const draw = () => {
    const { drafters: now, drafters_hour: hour, nodes, accepted_by_depth: depths } = state.snapshot;
    const names = [...new Set([...now, ...hour].map((one) => one.drafter))].sort(),
      rates = (all, name) => all.find((one) => one.drafter === name),
      rows = names.map((name) => row(name, rates(now, name), rates(hour, name)));
    body.replaceChildren(...rows);
    compared.hidden = !body.children.length;
    tree.draw({ nodes, trees: depths.drafts });
  };
  return { elements: [tree.element, compared], draw };
}
