// Making HTML and SVG elements, and colouring them. Attributes of value null or false are left out; text is never
// parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** An HTML element. `onclick` and the like are listeners. */
export const html = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);

/** An SVG element. */
export const svg = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

/** The element of the page with this id. */
export const byId = (id) => document.getElementById(id);

/** Calls `draw(width)` when the element's width changes, and once at the beginning. */
export function onWidth(element, draw) {
  let last = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width && width !== last) draw((last = width));
  }).observe(element);
}

// -- colours ----------------------------------------------------------------------------------------------------------

// Which colour has which meaning: the variables of theme.css. Drafters are called as everywhere; several in one tree
// (suffix+draft_model) are stripes of their colours, so each combination has its own look, in every theme.

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
