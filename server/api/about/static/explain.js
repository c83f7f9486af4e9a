// Explanations: a button opens one, by mouse, touch or keyboard; Escape, the button or a click elsewhere closes it.

import { html } from "./elements.js";

const [WIDTH, GAP] = [320, 6];
let made = 0;

/** Puts an explanation below its button, within the page. */
function place(why, button) {
  const { left, bottom } = button.getBoundingClientRect(),
    most = document.documentElement.clientWidth - WIDTH - GAP;
  why.style.left = `${scrollX + Math.max(GAP, Math.min(left, most))}px`;
  why.style.top = `${scrollY + bottom + GAP}px`;
}

/** A button with `text` on it and the explanation `why` that it opens; both can be given another text. */
export class Explained {
  constructor(kind, text = "", why = "", label = null) {
    const id = `why-${++made}`;
    this.button = html(`button.${kind}`, { type: "button", popovertarget: id, "aria-label": label }, text);
    this.why = html("div.why", { id, popover: "auto" }, why);
    this.elements = [this.button, this.why];
    this.why.addEventListener("beforetoggle", ({ newState }) => newState === "open" && place(this.why, this.button));
    this.why.addEventListener("toggle", ({ newState }) => {
      if (newState === "open") this.why.scrollIntoView({ block: "nearest" });
    });
    addEventListener("resize", () => this.why.matches(":popover-open") && place(this.why, this.button));
  }

  say(text, why) {
    if (text !== null && this.button.textContent !== text) this.button.textContent = text;
    if (this.why.textContent !== why) this.why.textContent = why;
  }
}

/** A question mark that explains `name`. */
export const question = (name, why) => new Explained("ask", "?", why, `What is meant: ${name}`);
