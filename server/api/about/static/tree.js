// The draft tree in use, its nodes shaded by how often they are accepted.

import { svg, html } from "./elements.js";
import { count, percent } from "./format.js";
import { card, empty, Plot } from "./plot.js";
import { DEEPEST, depthName } from "./spread.js";

const LARGEST = 19,
  PAD = 26;
/** Places that fewer trees than this share had are left out. */
const SELDOM = 0.02;

/** Nodes by depth and rank, the root first; the deepest ones, and all places there, are one. */
function laidOut(nodes, trees) {
  const levels = [[{ depth: 0, rank: 0, drafted: trees, accepted: trees }]];
  for (const node of nodes) {
    if (node.depth < DEEPEST && node.drafted >= SELDOM * trees) (levels[node.depth] ??= []).push({ ...node });
    else if (node.depth >= DEEPEST && levels[DEEPEST - 1]) {
      const [deep] = (levels[DEEPEST] ??= [{ depth: DEEPEST, rank: 0, parent: node.parent, drafted: 0, accepted: 0 }]);
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
  return levels;
}

const about = ({ depth, rank, drafted, accepted }) =>
  depth === 0
    ? `root: the last token of the text, in ${count(drafted)} trees`
    : `depth ${depthName(depth)}${depth < DEEPEST ? `, ${rank + 1}. choice` : ""}: drafted ${count(drafted)} times, ` +
      `accepted ${percent(accepted / drafted, 1)}`;

export class TreeChart extends Plot {
  constructor() {
    super("Draft tree", ".node", "plot tree");
    Object.assign(this, { data: { nodes: [], trees: 0 }, flat: [] });
    this.told = html("p", { class: "note told" });
    const note = "Each node shaded by how often it was accepted in the last minute.";
    this.element = card({ id: "tree", title: "Draft tree", note }, this.svg, this.told);
  }

  drawn(width) {
    const { nodes, trees } = this.data,
      levels = nodes.length ? laidOut(nodes, trees) : [];
    this.flat = levels.flat();
    if (!levels.length) return [120, empty(width / 2, 60, "nothing drafted in the last minute")];
    const widest = Math.max(...levels.map((level) => level.length)),
      across = Math.min((width - 2 * PAD) / Math.max(levels.length - 1, 1), 120),
      radius = Math.max(4, Math.min(LARGEST, across / 2 - 5, 150 / widest)),
      height = Math.max(110, widest * (2 * radius + 7) + 14);
    levels.forEach((level, depth) =>
      level.forEach((node, index) =>
        Object.assign(node, { x: PAD + depth * across, y: (height * (index + 0.5)) / level.length }),
      ),
    );
    const edge = (node) =>
      svg("path", { class: "edge", d: curve(node.above, node), "stroke-width": 1 + (5 * node.accepted) / trees });
    return [height, this.flat.slice(1).map(edge), this.flat.map((node) => this._node(node, radius))];
  }

  _node({ depth, drafted, accepted, x, y }, radius) {
    const share = drafted ? accepted / drafted : 0,
      circle = { cx: x, cy: y, r: radius };
    const name = depth ? `${Math.round(100 * share)}${radius > 16 ? "%" : ""}` : "root";
    return svg(
      "g",
      { class: depth ? "node" : "node root" },
      svg("circle", { class: "back", ...circle }),
      svg("circle", { class: "shade", ...circle, "fill-opacity": share.toFixed(3) }),
      radius < 13 ? null : svg("text", { class: share > 0.55 ? "on" : null, x, y: y + 3.5 }, name),
    );
  }

  tell(part) {
    const { nodes, trees } = this.data,
      node = this.flat[part] && about(this.flat[part]);
    const hint = `${nodes.length} places in ${count(trees)} trees; those that few of them had are left out.`;
    this.told.textContent = node ?? (this.flat.length ? hint : "");
    this.say(node ?? (this.flat.map(about).join("; ") || "nothing drafted"));
  }
}

function curve(from, to) {
  const middle = (from.x + to.x) / 2;
  return `M${from.x} ${from.y}C${middle} ${from.y} ${middle} ${to.y} ${to.x} ${to.y}`;
}
