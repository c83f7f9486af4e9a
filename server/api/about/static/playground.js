// The playground: a conversation, how to go on with it, and its answers; or two of them that race.

import { Answer, textOf, tokensButton } from "./answer.js";
import { doubted } from "./compare.js";
import { html } from "./elements.js";
import { drafterName } from "./models.js";
import { proof } from "./proof.js";
import { Race } from "./race.js";
import { Session } from "./session.js";
import { Settings } from "./settings.js";

const MODES = [
  ["compare", "Race", "Start the race"],
  ["on", "With drafts", "Send"],
  ["off", "Without", "Send"],
];
const IDEAS = [
  [
    "Put in commas",
    "Put in the missing commas and give me the whole text:\n\nThe fox lives in the forest near the river. Every " +
      "morning the fox walks from the forest to the river and drinks the cold water. Every evening the fox walks " +
      "from the river back to the forest and sleeps under an old tree. In winter the river is frozen, and the fox " +
      "stays in the forest.",
  ],
  ["Write code", "Write CSS for five buttons in different colours."],
  ["Explain something", "Explain how a rainbow forms, in a numbered list."],
];
const SUM = ["Do a sum", "Anna buys 4 pens for $2 each and 3 books for $5 each. How much does she spend?"];
const TOY = "This model is a toy that writes half-sense. foresay serve smollm2 brings a real one.";
const EXACT = "The answer is the same, token for token, in fewer passes.";
const ALIKE = "This server does not promise the same answer to the last token: the dashboard says why.";
const ALONE = "This server runs without a drafter, so both ways are alike here (--draft chooses one).";

export class Playground {
  constructor(place) {
    this.place = place;
    this.session = new Session();
    this.settings = new Settings();
    this.history = [];
    this.raced = { key: "", races: [], at: 0 }; // races of this page with the same model and settings, and when
    this.coloured = false;
    this.server = null;
    this.turns = html("div.turns");
    this.outcome = html("p.outcome", { role: "status" });
    this.second = html("p", EXACT);
    this.prompt = html("textarea", { id: "prompt", rows: 3, spellcheck: "false", required: true });
    this.send = html("button.main", { type: "submit" });
    this.stop = html("button.main.stop", { type: "button", hidden: true }, "Stop");
    this.anew = html("button.quiet.anew", { type: "button", hidden: true }, "New conversation");
    this.ideas = html("div.ideas", { role: "group", "aria-label": "Things to ask" });
    this.form = this._form();
    const first = "A drafter guesses the next few tokens; the model checks them all in one pass.";
    place.append(
      html(
        "div.hero",
        html("h2", { id: "playground-title" }, "Same answer, fewer passes"),
        html("div", html("p", first), this.second),
        this.anew,
      ),
      this.turns,
      this.outcome,
      this.form,
    );
    this._suggest();
    this._busy(false);
    this._listen();
  }

  _form() {
    const mode = ([value, label], index) =>
      html("label", html("input", { type: "radio", name: "mode", value, checked: index === 0 }), html("span", label));
    return html(
      "form.composer.card",
      html("label.hidden", { for: "prompt" }, "What to ask"),
      this.prompt,
      this.ideas,
      html("fieldset.choice.modes", html("legend.hidden", "How to answer"), MODES.map(mode)),
      html("span.hint", "Enter sends, Shift + Enter breaks the line"),
      this.send,
      this.stop,
      this.settings.element,
    );
  }

  _listen() {
    this.stop.addEventListener("click", () => this._cancel());
    this.anew.addEventListener("click", () => this._begin());
    this.form.addEventListener("change", () => this._label());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this._submit();
    });
    this.prompt.addEventListener("input", () => this.settings.likeliest(false));
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.form.requestSubmit();
    });
  }

  /** Ideas of what to ask. */
  _suggest() {
    const toy = this.server?.target === "bundled",
      ideas = toy ? [SUM] : IDEAS,
      untouched = [...IDEAS.map(([, text]) => text), ""].includes(this.prompt.value);
    const put = (text) => {
      this.prompt.value = text;
      this.settings.likeliest(!toy); // what an idea asks for, a small model does only by its likeliest tokens
    };
    const take = (text) => () => {
      put(text);
      this.prompt.focus();
    };
    this.ideas.replaceChildren(
      ...ideas.map(([label, text]) => html("button.quiet", { type: "button", onclick: take(text) }, label)),
      html("span.note", toy && TOY),
    );
    if (untouched && !this.history.length) put(ideas[0][1]);
  }

  /** What is known of the server, each second: who may draft, and whether its answers are exact. */
  offer({ server, now }) {
    const before = this.server;
    [this.server, this.now] = [server, now];
    this.settings.offer(server.drafters);
    this.second.textContent = server.exact === false ? ALIKE : server.exact && !server.drafters.length ? ALONE : EXACT;
    if (before?.status === server.status) return;
    this.settings.learn(server.model).catch(console.debug);
    if (before?.target !== server.target) this._suggest();
  }

  /** Why the estimated speed-up, which is of a minute, is doubtful after the races of this minute; "" if it is not. */
  doubt({ live: { speed_up, until } }) {
    const { races, at } = this.raced;
    return speed_up !== null && races.length && until - at < 60 ? doubted(races, speed_up) : "";
  }

  get mode() {
    return new FormData(this.form).get("mode");
  }

  _label() {
    this.send.textContent = MODES.find(([mode]) => mode === this.mode)[2];
  }

  _cancel() {
    this.cancelled = true;
    this.race?.stop();
    this.session.cancel();
  }

  /** Forget the conversation. */
  _begin() {
    this.history = [];
    this.turns.replaceChildren();
    this._say("", "");
    this._busy(false);
    this._suggest();
    this.prompt.focus();
  }

  async _submit() {
    if (this.busy || !this.prompt.value.trim()) return;
    const prompt = this.prompt.value,
      input = [...this.history, { role: "user", content: prompt }],
      turn = html("section.turn", html("p.user", prompt));
    this.turns.append(turn);
    this.prompt.value = "";
    this._busy(true);
    this._say("", "");
    const response = await this._answered(turn, prompt, input);
    if (response) this.history = [...input, { role: "assistant", content: textOf(response) }];
    else {
      turn.remove();
      this.prompt.value ||= prompt;
    }
    this._busy(false);
  }

  /** The response that the conversation goes on with; null if there is none, and why is shown. */
  async _answered(turn, prompt, input) {
    let response = null;
    try {
      await this._prepare(input);
      if (this.mode === "compare") response = await this._race(turn, prompt, input);
      else response = await this._single(turn, input, this.mode === "off");
      if (this.cancelled) this._say("Stopped.", "");
    } catch (error) {
      if (this.cancelled) this._say("Stopped.", "");
      else this._say(`It failed: ${error.message}`, "bad");
    }
    return response ?? this.race?.first;
  }

  /** A model that is not loaded is loaded first: what it is sampled with is known only then. */
  async _prepare(input) {
    this.race = null;
    if (this.settings.usual || !this.server) return;
    await this.session.run({ input, generate: false }, () => {});
    await this.settings.learn(this.server.model);
  }

  _ask(off, fields, more) {
    return this.session.run({ ...fields, ...this.settings.speculation(off) }, more);
  }

  async _single(turn, input, off) {
    const answer = new Answer(off ? "Without drafts" : "With drafts"),
      began = performance.now();
    const show = (coloured) => (this.coloured = coloured); // the next answer, too
    const buttons = html("div.buttons", tokensButton([answer], this.coloured, show));
    answer.element.append(buttons);
    turn.append(answer.element);
    turn.scrollIntoView({ block: "nearest" });
    const tick = () => {
      if (answer.element.dataset.state === "done") return;
      answer.tick((performance.now() - began) / 1000);
      requestAnimationFrame(tick);
    };
    tick();
    try {
      const fields = { input, ...this.settings.fields },
        ids = [];
      const response = await this._ask(off, fields, (delta) => {
        ids.push(...delta.tokens.map(({ id }) => id));
        answer.add(delta);
      });
      answer.end(response);
      const by = response.system_fingerprint,
        most = this.cancelled ? { max_output_tokens: ids.length } : {}, // as far as it was written
        [button, outcome] = this._proof(ids, off, { ...fields, ...most, seed: response.seed }, by);
      if (ids.length && this.server?.drafters.length) buttons.append(button);
      answer.element.append(outcome);
      return response;
    } finally {
      answer.stop();
    }
  }

  /** How an answer is proved: with nothing kept of it, so that its prompt is read again too. */
  _proof(ids, off, fields, by) {
    const again = async () => {
      if (this.busy) throw new Error("another answer is being written");
      const others = [];
      this._busy(true);
      try {
        const request = { ...fields, cache_salt: crypto.getRandomValues(new Uint32Array(2)).join("") };
        const more = ({ tokens }) => others.push(...tokens.map(({ id }) => id)),
          response = await this._ask(!off, request, more);
        if (response.system_fingerprint !== by) throw new Error("another model, or other settings, answer by now");
      } finally {
        this._busy(false);
      }
      if (this.cancelled) throw new Error("it was stopped");
      return others;
    };
    return proof(ids, off, again, by);
  }

  async _race(turn, prompt, input) {
    const fields = this.settings.fields,
      key = JSON.stringify([this.server?.target, { ...fields, seed: 0 }, this.settings.speculation(false)]);
    if (key !== this.raced.key) this.raced = { key, races: [] };
    this.race = new Race(prompt, this._ask.bind(this), () => this._about(), this._further(turn, prompt, input));
    turn.append(this.race.element);
    this.race.element.scrollIntoView({ block: "nearest" });
    this.raced.races = await this.race.go({ input, ...fields }, this.raced.races);
    this.raced.at = this.now;
    return this.race.first;
  }

  /** What to do with a race that is over: the same again, or its prompt changed. Both take its place. */
  _further(turn, prompt, input) {
    const instead = (again) => () => {
      if (this.busy) return;
      const typed = this.prompt.value;
      this.history = input.slice(0, -1);
      while (this.turns.lastChild !== turn) this.turns.lastChild.remove();
      turn.remove();
      this.prompt.value = prompt;
      this._busy(false);
      if (!again) return this.prompt.focus();
      this.form.elements.mode.value = "compare";
      this.form.requestSubmit();
      this.prompt.value = typed;
    };
    const button = (label, again) => html("button.quiet", { type: "button", onclick: instead(again) }, label);
    return [button("Race again", true), button("Edit", false)];
  }

  /** A line for a picture on what ran. */
  _about() {
    const { target, model, drafter, dtype, device, version } = this.server;
    const name = (target || model).replace(/\/+$/, "").split("/").at(-1);
    return `${name}, drafted by ${drafterName(drafter || "none")}, ${dtype} on ${device} · Foresay ${version}`;
  }

  _busy(busy) {
    const focused = [this.send, this.stop, document.body].includes(document.activeElement);
    this.busy = busy;
    if (busy) this.cancelled = false;
    [this.send.hidden, this.stop.hidden] = [busy, !busy];
    this.anew.hidden = busy || !this.turns.children.length;
    this.place.classList.toggle("begun", this.turns.children.length > 0);
    this.prompt.placeholder = this.turns.children.length ? "Ask something else" : "Ask something";
    this.prompt.rows = this.turns.children.length ? 1 : 3;
    this.form.dataset.busy = busy;
    this._label();
    if (focused && busy) this.stop.focus();
    else if (focused && matchMedia("(pointer: fine)").matches) this.prompt.focus({ preventScroll: true });
  }

  _say(text, kind) {
    this.outcome.className = `outcome ${kind}`;
    this.outcome.textContent = text;
  }
}
