// An answer as a model means it: Markdown, as much of it as models write. Text is never parsed as HTML.

import { html } from "./elements.js";

export const FENCE = /^(\s*)(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^\s*>\s?(.*)$/;
const ROW = /^\s*\|.*\|\s*$/;
const INLINE = /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)\*\*|(?<![\w*])\*(?=[^\s*])(.+?)\*(?![\w*])/s;
const DEEPEST = 12; // lists and quotes within each other

let depth = 0;

/** Code, bold and italic words in a text. */
function inline(text) {
  const parts = [];
  for (let found; (found = INLINE.exec(text)); text = text.slice(found.index + found[0].length)) {
    const [, , code, bold, italic] = found;
    parts.push(text.slice(0, found.index));
    parts.push(code ? html("code", code) : bold ? html("strong", inline(bold)) : html("em", inline(italic)));
  }
  return [...parts, text];
}

/** Splits lines into blocks: [what it is, its lines]. A fence that is still open goes on to the end. */
function blocks(lines) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    const kind = kindOf(lines[at]),
      from = at++;
    if (kind === "fence") {
      const close = FENCE.exec(lines[from])[2];
      while (at < lines.length && lines[at++].trim() !== close);
    } else if (kind === "item") while (at < lines.length && belongs(lines, at, lines[from])) at++;
    else if (["text", "quote", "row"].includes(kind)) while (at < lines.length && kindOf(lines[at]) === kind) at++;
    if (kind) found.push([kind, lines.slice(from, at)]);
  }
  return found;
}

function kindOf(line) {
  if (!line.trim()) return null;
  const tests = { fence: FENCE, heading: HEADING, rule: RULE, item: ITEM, quote: QUOTE, row: ROW };
  return Object.keys(tests).find((kind) => tests[kind].test(line)) ?? "text";
}

const indent = (line) => /^\s*/.exec(line)[0].length;
const numbered = (line) => /\d/.test(ITEM.exec(line)[2]);

/** Whether the line goes on with the list that `first` begins: another item, or what is indented below one. */
function belongs(lines, at, first) {
  const line = lines[at];
  if (!line.trim()) return at + 1 < lines.length && lines[at + 1].trim() !== "" && belongs(lines, at + 1, first);
  if (indent(line) > indent(first)) return true;
  const kind = kindOf(line);
  return kind === "item" ? numbered(line) === numbered(first) : kind === "text" && lines[at - 1].trim() !== "";
}

function list(lines) {
  const items = [],
    outer = indent(lines[0]);
  for (const line of lines)
    if (kindOf(line) === "item" && indent(line) <= outer) items.push([ITEM.exec(line)[3]]);
    else items.at(-1).push(line.slice(Math.min(indent(line), outer + 2)));
  const start = Number.parseInt(lines[0], 10) || 1,
    spread = items.map((one) => html("li", rendered(one, true)));
  return numbered(lines[0]) ? html("ol", { start }, spread) : html("ul", spread);
}

function code(lines) {
  const [, before, fence, language] = FENCE.exec(lines[0]),
    closed = lines.length > 1 && lines.at(-1).trim() === fence,
    body = lines.slice(1, closed ? -1 : undefined).map((line) => line.slice(Math.min(indent(line), before.length)));
  const text = body.join("\n"),
    button = html("button.quiet", { type: "button", onclick: () => copyText(text, button) }, "Copy");
  const shown = html("pre", { tabindex: 0, role: "region", "aria-label": "Code" }, html("code", text));
  return html("div.code", html("div", html("span", language), button), shown);
}

function grid(lines) {
  const rows = lines.map((line) => line.trim().slice(1, -1).split("|").map((cell) => inline(cell.trim()))),
    ruled = /^[\s|:-]+$/.test(lines[1] ?? "");
  const row = (tag) => (cells) => html("tr", cells.map((cell) => html(tag, cell)));
  if (!ruled) return html("table", html("tbody", rows.map(row("td"))));
  return html("table", html("thead", row("th")(rows[0])), html("tbody", rows.slice(2).map(row("td"))));
}

const MAKERS = {
  fence: code,
  heading: ([line]) => html(`h${Math.min(6, 3 + HEADING.exec(line)[1].length)}`, inline(HEADING.exec(line)[2])),
  rule: () => html("hr"),
  item: list,
  quote: (lines) => html("blockquote", rendered(lines.map((line) => QUOTE.exec(line)[1]))),
  row: (lines) => html("div.scroll", { tabindex: 0, role: "region", "aria-label": "Table" }, grid(lines)),
  text: (lines) => html("p", inline(lines.join("\n"))),
};

/** The elements of these lines; tight: the text of an item of a list is no paragraph of its own. */
function rendered(lines, tight = false) {
  if (depth === DEEPEST) return [lines.join("\n")];
  depth += 1;
  const made = blocks(lines).map(([kind, own]) =>
    tight && kind === "text" ? html("span", inline(own.join("\n"))) : MAKERS[kind](own),
  );
  depth -= 1;
  return made;
}

/** A text that grows. What has not changed since it was last shown stays as it is, and a selection in it too. */
export class Markdown {
  constructor() {
    this.element = html("div.markdown");
    this.sources = [];
  }

  show(text) {
    const now = blocks(text.split("\n")),
      sources = now.map(([, lines]) => lines.join("\n")),
      changed = sources.findIndex((source, at) => source !== this.sources[at]),
      kept = changed < 0 ? sources.length : changed;
    while (this.element.children.length > kept) this.element.lastChild.remove();
    this.element.append(...now.slice(kept).map(([kind, lines]) => MAKERS[kind](lines)));
    this.sources = sources;
  }
}

/** Copies a text, also where the page is not served securely and browsers hide their clipboard. */
async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = html("textarea", text);
    button.after(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}
