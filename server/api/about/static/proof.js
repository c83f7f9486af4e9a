// Proving one answer: it is written again the other way, with drafts or without, and both are compared token by token.

import { html } from "./elements.js";
import { count } from "./format.js";

/** The sha256 of token ids, as `foresay prove` makes it; "" where the page was not served securely. */
async function digest(ids) {
  if (!globalThis.crypto?.subtle) return "";
  const sum = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(JSON.stringify(ids)));
  return [...new Uint8Array(sum)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function judged(ids, others, off) {
  const [first, second] = off ? ["without drafts", "with drafts"] : ["with drafts", "without drafts"],
    at = ids.findIndex((id, index) => id !== others[index]),
    differs = at < 0 ? Math.min(ids.length, others.length) : at,
    sums = await Promise.all([ids, others].map(digest)),
    named = [first, second].map((way, index) => [` sha256 ${way} `, html("code", sums[index]), "."]),
    said = sums[0] ? named.flat() : [];
  if (at < 0 && ids.length === others.length)
    return ["good", [`Proved: the same ${count(ids.length)} tokens ${second}.`, ...said]];
  return ["bad", [`Not the same: token ${count(differs + 1)} differs ${second}.`, ...said]];
}

/** A button, and the place for what it finds. ids: the tokens of the answer; off: whether it was written without
 * drafts; again(): the tokens that the other way writes; fingerprint: of what wrote it. */
export function proof(ids, off, again, fingerprint) {
  const outcome = html("p.outcome.proof", { role: "status" }),
    button = html("button.quiet", { type: "button" }, "Prove it");
  button.addEventListener("click", async () => {
    button.disabled = true;
    outcome.className = "outcome proof";
    outcome.textContent = `Writing it again ${off ? "with" : "without"} drafts, from the same seed.`;
    try {
      const [kind, said] = await judged(ids, await again(), off);
      outcome.classList.add(kind);
      outcome.replaceChildren(...said, " Fingerprint of what a text depends on: ", html("code", fingerprint), ".");
    } catch (error) {
      outcome.textContent = `It could not be proved: ${error.message}`;
    }
    button.disabled = false;
  });
  return [button, outcome];
}
