// Which colour has which meaning: the variables of theme.css. Drafters are called as everywhere; several in one tree
// (suffix+draft_model) are stripes of their colours, so each combination has its own look, in every theme.

import { byId, svg } from "./elements.js";

const STRIPE = 4;
let patterns = null;

const colour = (name) => `var(--${name}, var(--other))`;

/** Gives an element the colour of a drafter, or of anything else that has one; of "" that of nobody. */
export function paint(element, name) {
  const members = (name || "none").split("+");
  element.dataset.colour = name || "none";
  element.style.setProperty("--c", colour(members[0]));
  if (members.length === 1) return element;
  if (element.namespaceURI.endsWith("svg")) element.style.fill = `url(#${pattern(members)})`;
  else element.style.background = `repeating-linear-gradient(135deg, ${members.map(stripe).join()})`;
  return element;
}

const stripe = (name, index) => `${colour(name)} ${STRIPE * index}px ${STRIPE * (index + 1)}px`;

/** The id of the pattern of these stripes. */
function pattern(members) {
  const id = `mix-${members.join("-")}`;
  if (byId(id)) return id;
  if (!patterns) document.body.append((patterns = svg("svg", { class: "hidden", "aria-hidden": "true" })));
  const size = { width: STRIPE * members.length, height: STRIPE };
  const place = { id, ...size, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" };
  const part = (name, index) =>
    paint(svg("rect", { class: "fill", x: STRIPE * index, width: STRIPE, height: STRIPE }), name);
  patterns.append(svg("pattern", place, members.map(part)));
  return id;
}
