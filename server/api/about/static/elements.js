// Making HTML and SVG elements, and colouring them. Text is never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";
const given = (value) => value !== null && value !== undefined && value !== false;

function set(element, name, value) {
  if (name === "colour") paint(element, value);
  else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
  else if (given(value)) element.setAttribute(name, value === true ? "" : value);
}

/** Makes elements of "tag.class.class", attributes, which may be missing, and children; null and false are left out.
 * `onclick` and the like are listeners, `colour` says what an element means. */
const maker = (create) => (name, ...children) => {
  const [tag, ...classes] = name.split("."),
    element = create(tag),
    attributes = children[0]?.constructor === Object ? children.shift() : {};
  if (classes.length) element.setAttribute("class", classes.join(" "));
  for (const [name, value] of Object.entries(attributes)) set(element, name, value);
  element.append(...children.flat(Infinity).filter(given));
  return element;
};
export const html = maker((tag) => document.createElement(tag));
export const svg = maker((tag) => document.createElementNS(SVG, tag));

/** The element of the page with this id. */
export const byId = (id) => document.getElementById(id);

/** A table in a place that scrolls; `label` is for those who hear it. */
export function table(label, heads, body) {
  const head = html("thead", html("tr", heads.map((head) => html("th", { scope: "col" }, head))));
  return html("div.scroll", { tabindex: 0, role: "region", "aria-label": label }, html("table", head, body));
}

// -- colours ----------------------------------------------------------------------------------------------------------

// Which colour has which meaning: the variables of theme.css. Drafters are called as everywhere; several in one tree
// (suffix+draft_model) are stripes of their colours, so each combination has its own look, in every theme.

const STRIPE = 4;
const variable = (name) => `var(--${name}, var(--other))`;
const stripe = (name, index) => `${variable(name)} ${STRIPE * index}px ${STRIPE * (index + 1)}px`;

/** Gives an element the colour of a drafter, or of anything else that has one; of "" that of nobody. */
function paint(element, name) {
  const members = (name || "none").split("+");
  element.dataset.colour = name || "none";
  element.style.setProperty("--c", variable(members[0]));
  if (members.length === 1) return;
  if (element.namespaceURI === SVG) element.style.fill = `url(#${pattern(members)})`;
  else element.style.background = `repeating-linear-gradient(135deg, ${members.map(stripe).join()})`;
}

/** The id of the pattern of these stripes. */
function pattern(members) {
  const id = `mix-${members.join("-")}`;
  if (byId(id)) return id;
  const size = { width: STRIPE, height: STRIPE },
    stripes = members.map((colour, index) => svg("rect.fill", { ...size, colour, x: STRIPE * index })),
    turned = { patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" };
  const tile = svg("pattern", { id, ...size, width: STRIPE * members.length, ...turned }, stripes);
  document.body.append(svg("svg.hidden", { "aria-hidden": "true" }, tile));
  return id;
}
