// Asking the server. If it wants a key, the reader is asked for it once; it is kept for this tab.

import { byId } from "./elements.js";
import { chosen } from "./models.js";

/** The server's address, wherever this page was served from. */
export const ROOT = new URL("../../", import.meta.url);
const KEPT = "foresay-key";

let asking = null;

const key = () => sessionStorage.getItem(KEPT);
const headers = () => (key() ? { Authorization: `Bearer ${key()}` } : {});

/** A response with status 200. Asks for a key as often as the server wants another one; other errors are thrown. */
export async function ask(path, options = {}) {
  for (;;) {
    const sent = key();
    const response = await fetch(address(path), {
      ...options,
      headers: { ...headers(), ...options.headers },
      cache: "no-store",
    });
    if (response.ok) return response;
    if (response.status !== 401) throw new Error(await complaint(response));
    if (sent === key()) await askForKey(sent !== null);
  }
}

/** Where to ask: of the dashboard's own numbers, those of the model that was chosen. */
function address(path) {
  const url = new URL(path, ROOT);
  if (chosen !== null && path.startsWith("dashboard/")) url.searchParams.set("model", chosen);
  return url;
}

async function complaint(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

/** Ask for a key, one dialog however many requests want it. wrong: whether the one we had was refused. */
function askForKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key"),
      field = byId("key-value");
    byId("key-wrong").textContent = wrong ? "The server does not know this key. Please check it." : "";
    field.value = "";
    field.toggleAttribute("aria-invalid", wrong);
    const done = () => {
      const given = field.value.trim();
      if (!given) return dialog.showModal();
      sessionStorage.setItem(KEPT, given);
      dialog.removeEventListener("close", done);
      asking = null;
      resolve();
    };
    dialog.addEventListener("close", done);
    dialog.showModal();
    field.focus();
  });
  return asking;
}

/** Opens the WebSocket of /v1/responses. A browser can set no header there: the key travels as a sub-protocol. */
export function openSocket() {
  const url = new URL("v1/responses", ROOT);
  url.protocol = url.protocol.replace("http", "ws");
  return new WebSocket(url, ["foresay.v1.json", ...(key() ? [`openai-insecure-api-key.${key()}`] : [])]);
}
