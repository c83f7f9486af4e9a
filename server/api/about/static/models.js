// Which model the page tells of, where there are several. It is chosen in the header and kept in the page's address.

import { byId, html } from "./elements.js";

/** The model that the address names; null for the server's first one. */
export const chosen = new URLSearchParams(location.search).get("model");

const STATES = { ok: "", unloaded: " (not loaded)", loading: " (loading)", failed: " (cannot be loaded)" };

let names = [];

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
