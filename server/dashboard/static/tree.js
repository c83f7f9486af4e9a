// The draft tree in use, its nodes shaded by how often they are accepted.

import { html, onWidth, svg } from "./elements.js";
import { count, percent } from "./format.js";

const LARGEST = 19,
  PAD = 26;

/** Nodes by depth and rank with the share of trees that had them and of those that were accepted; the root first. */
function laidOut(nodes, trees) {
  const root = { depth: 0, rank: 0, parent: null, drafted: trees, accepted: trees };
  const byDepth = [[root]];
  for (const node of [...nodes].sort((a, b) => a.depth - b.depth || a.rank - b.rank))
    (byDepth[node.depth] ??= []).push(node);
  const levels = byDepth.filter((level) => level?.length);
  levels.slice(1).forEach((level, depth) => {
    const above = levels[depth],
      place = (node) => above.findIndex((one) => one.rank === node.parent);
    level.sort((a, b) => place(a) - place(b) || a.rank - b.rank);
    for (const node of level) node.above = above[place(node)] ?? above[0];
  });
  return levels;
}

const about = (node) =>
  node.depth === 0
    ? `root: the last token of the text, in ${count(node.drafted)} trees`
    : `depth ${node.depth}, ${node.rank + 1}. choice: drafted ${count(node.drafted)} times, ` +
      `accepted ${percent(node.accepted / node.drafted, 1)}`;

export class TreeChart {
  constructor() {
    Object.assign(this, { width: 0, nodes: [], trees: 0, chosen: 0, flat: [] });
    this.told = html("p", { class: "note told" });
    this.svg = svg("svg", { tabindex: 0, role: "img", class: "plot tree" });
    this.element = html(
      "section",
      { class: "card chart", id: "tree", "aria-label": "Draft tree" },
      html("h3", {}, "Draft tree"),
      html("p", { class: "note" }, "Each node shaded by how often it was accepted in the last minute."),
      this.svg,
      this.told,
    );
    this.svg.addEventListener("keydown", (event) => this._key(event));
    this.svg.addEventListener("pointerleave", () => this._tell(null));
    onWidth(this.svg, (width) => {
      this.width = width;
      this.draw();
    });
  }

  show(nodes, trees) {
    [this.nodes, this.trees] = [nodes, trees];
    this.draw();
  }

  draw() {
    if (!this.width) return;
    if (!this.nodes.length) {
      this.svg.setAttribute("height", 120);
      this.svg.setAttribute("viewBox", `0 0 ${this.width} 120`);
      this.svg.replaceChildren(
        svg("text", { class: "empty", x: this.width / 2, y: 60 }, "nothing drafted in the last minute"),
      );
      this.flat = [];
      return this._tell(null);
    }
    const levels = laidOut(this.nodes, this.trees),
      widest = Math.max(...levels.map((level) => level.length));
    const across = (this.width - 2 * PAD) / Math.max(levels.length - 1, 1);
    const radius = Math.max(4, Math.min(LARGEST, across / 2 - 5, 150 / widest));
    const height = Math.max(110, widest * (2 * radius + 7) + 14);
    this.svg.setAttribute("height", height);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
    levels.forEach((level, depth) =>
      level.forEach((node, index) => {
        node.x = PAD + Math.min(depth * across, depth * 120);
        node.y = (height * (index + 0.5)) / level.length;
      }),
    );
    this.flat = levels.flat();
    const edges = this.flat.slice(1).map((node) =>
      svg("path", {
        class: "edge",
        d: curve(node.above, node),
        "stroke-width": (1 + 5 * (node.accepted / this.trees)).toFixed(1),
      }),
    );
    this.svg.replaceChildren(...edges, ...this.flat.map((node, index) => this._node(node, index, radius)));
    this._tell(null);
  }

  _node(node, index, radius) {
    const share = node.drafted ? node.accepted / node.drafted : 0;
    const fill = svg("circle", { class: "shade", cx: node.x, cy: node.y, r: radius, "fill-opacity": share.toFixed(3) });
    const told =
      radius >= 13
        ? svg(
            "text",
            { class: share > 0.55 ? "on" : "off", x: node.x, y: node.y + 3.5 },
            node.depth ? `${Math.round(100 * share)}${radius > 16 ? "%" : ""}` : "root",
          )
        : null;
    const group = svg(
      "g",
      { class: node.depth ? "node" : "node root" },
      svg("circle", { class: "back", cx: node.x, cy: node.y, r: radius }),
      fill,
      told,
    );
    group.addEventListener("pointerenter", () => this._tell(index));
    return group;
  }

  _tell(index) {
    this.chosen = index ?? 0;
    const node = index === null ? null : this.flat[index];
    [...this.svg.querySelectorAll(".node")].forEach((one, place) =>
      one.classList.toggle("chosen", node !== null && place === index),
    );
    const hint = this.flat.length
      ? `${this.flat.length - 1} nodes, ${count(this.trees)} trees. Point at a node, or use the arrow keys.`
      : "";
    this.told.textContent = node ? about(node) : hint;
    this.svg.setAttribute(
      "aria-label",
      `Draft tree: ${node ? about(node) : this.flat.map(about).join("; ") || "nothing drafted"}`,
    );
  }

  _key(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || !this.flat.length) return;
    this._tell((this.chosen + step + this.flat.length) % this.flat.length);
    event.preventDefault();
  }
}

function curve(from, to) {
  const middle = (from.x + to.x) / 2;
  return `M${from.x} ${from.y}C${middle} ${from.y} ${middle} ${to.y} ${to.x} ${to.y}`;
}
