// Making HTML and SVG elements. Attributes of value null or false are left out; text is never parsed as HTML.

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
