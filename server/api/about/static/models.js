// Which model the page tells of, where there are several, and what its drafters are called. The model is chosen in the
// header and kept in the page's address.

import { byId, html } from "./elements.js";

/** The model that the address names; null for the server's first one. */
export const chosen = new URLSearchParams(location.search).get("model");

const STATES = { ok: "", unloaded: " (not loaded)", loading: " (loading)", failed: " (cannot be loaded)" };

let names = [],
  drafters = {};

/** What a reader calls a path, or a repository: its last part. */
export const base = (path) => path.replace(/\/+$|\.gguf$/, "").split("/").at(-1) || path;

/** Learns the names of drafters: of each its kind, and its source as `--draft` names it, in the same order. */
export function learnDrafters({ drafters: kinds, draft }) {
  const sources = draft.split(", ");
  drafters = Object.fromEntries(kinds.length === sources.length ? kinds.map((kind, at) => [kind, sources[at]]) : []);
}

/** What one or several drafters (suffix+draft_model) are called: by their model's name where they have one. */
export const drafterName = (kinds) =>
  kinds.replace(/[^+, ]+/g, (kind) => base(drafters[kind] || kind));

/** What requests of the page call the model; null where there is one alone. */
export const model = () => (names.length ? (chosen ?? names[0]) : null);

/** A field to choose among `models`: by name, how each is. Nothing where there is one alone. */
export function showModels(models) {
  if (!models) return;
  const field = byId("model"),
    options = Object.entries(models);
  if (names.join("\n") !== options.map(([name]) => name).join("\n")) {
    names = options.map(([name]) => name);
    field.replaceChildren(...names.map((name) => html("option", { value: name, selected: name === model() })));
    field.addEventListener("change", () => (location.search = new URLSearchParams({ model: field.value })));
    byId("models").hidden = false;
  }
  options.forEach(([name, state], index) => {
    const text = name + (STATES[state] ?? ` (${state})`);
    if (field.options[index].textContent !== text) field.options[index].textContent = text;
  });
}
