// A race: the same answer with drafts and without. Two at once would slow each other, so they are written one after the
// other. Quick answers are then shown side by side at the pace that was measured, slow ones while they are written.

import { Answer, secondsOf, textOf, tokensButton } from "./answer.js";
import { difference, faster, headline, MOST, verdict } from "./compare.js";
import { html } from "./elements.js";
import { time } from "./format.js";
import { pictureButtons } from "./picture.js";

const TITLES = ["With drafts", "Without drafts"];
const WARM_TOKENS = 8;
const SHORTEST = 2.5; // seconds that a race is shown at least, slower than it was if need be
const SLOW = 4; // seconds that an answer takes before it is shown while it is written
const DRAWN = 0.25; // seconds from one drawing of it to the next: drawing takes time from what is measured
const LARGEST_SEED = 2 ** 31;

const random = (below) => Math.floor(Math.random() * below);
const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));

export class Race {
  /** run(off, fields, more): makes a response; more(delta) is called for each of its deltas. about(): what ran.
   * buttons: what else can be done with a race that is over. */
  constructor(prompt, run, about, buttons) {
    [this.prompt, this.run] = [prompt, run];
    this.stopped = this.live = false;
    this.first = null;
    const strips = [];
    this.lanes = TITLES.map((title) => new Answer(title, strips));
    this.outcome = html("div.outcome", { role: "status" });
    this.how = html("p.note");
    const made = [buttons, tokensButton(this.lanes, true), pictureButtons(this, about)];
    this.buttons = html("div.buttons", { hidden: true }, made);
    for (const lane of this.lanes) {
      lane.element.dataset.state = "waiting";
      lane.counts.replaceChildren("waits its turn");
    }
    const lanes = html("div.lanes", this.lanes.map((lane) => lane.element));
    this.element = html("div.race", this.outcome, lanes, html("div.finish", this.how, this.buttons));
  }

  /** Ends what runs, or what is shown of it. */
  stop() {
    this.stopped = true;
  }

  /** The whole of it. Returns the races that the verdict is made of: `before`, those of this page with the same model
   * and settings, and this one. `first` is the response with drafts, once the race was shown. */
  async go(fields, before) {
    if (!before.length) {
      this._say("Warming up", "The first answers find nothing ready, so they do not count.");
      await this._both({ ...fields, max_output_tokens: WARM_TOKENS });
    }
    const request = { ...fields, seed: fields.seed ?? random(LARGEST_SEED) },
      runs = this.stopped ? null : await this._both(request, true);
    if (!runs) return before;
    if (this.live) this.how.textContent = "Measured and shown one after the other.";
    else await this._show(runs);
    this.first = runs[0].response;
    return this._judge(runs, before, request.seed);
  }

  /**
   * Both ways, one after the other; null if they were stopped. The prompt is computed before each: by then the engine
   * has also put away the answer before, which the next one's first token would wait for. Under a salt of their own
   * they find nothing of earlier answers. So neither profits from the other, or suffers.
   */
  async _both(fields, seen = false) {
    const request = { ...fields, cache_salt: `race ${random(2 ** 48)}` },
      runs = [];
    for (const [index, title] of TITLES.entries()) {
      await this.run(true, { ...request, generate: false }, () => {});
      if (this.stopped) return null;
      if (seen) this._say(`Measuring: ${title.toLowerCase()}`, "One after the other, so that neither slows the other.");
      runs.push(await this._measured(index === 1, request, seen ? this.lanes[index] : null));
    }
    return this.stopped ? null : runs;
  }

  /** One response, its seconds, those of its passes, and its deltas with when they came. lane: shows how far it is. */
  async _measured(off, fields, lane) {
    const deltas = [],
      began = performance.now();
    let [tokens, shown, drawn] = [0, 0, 0];
    const response = await this.run(off, fields, (delta) => {
      const at = (performance.now() - began) / 1000;
      deltas.push({ at, delta });
      tokens += delta.tokens.length;
      lane?.advance(tokens / fields.max_output_tokens);
      this.live ||= lane === this.lanes[0] && at > SLOW;
      if (!this.live) return lane?.counts.replaceChildren(`${tokens} tokens so far`);
      lane.element.dataset.state = "running";
      while (shown < deltas.length) lane.add(deltas[shown++].delta);
      if (at - drawn > DRAWN) lane.tick((drawn = at));
    });
    lane?.advance(1);
    if (this.live) lane.end(response);
    else lane?.counts.replaceChildren("measured");
    const seconds = secondsOf(response),
      pace = seconds / (deltas.at(-1)?.at || 1);
    return { response, seconds, deltas: deltas.map(({ at, delta }) => ({ at: at * pace, delta })) };
  }

  /** Shows both side by side, as they came. */
  async _show(runs) {
    const slowest = Math.max(...runs.map((run) => run.seconds)),
      slower = Math.max(1, Math.round(SHORTEST / slowest)),
      left = runs.map((run) => [...run.deltas]),
      began = performance.now();
    const pace = slower === 1 ? "at the pace measured" : `${slower} times slower than measured; the clocks are true`;
    this._say("The race", `Side by side, ${pace}.`);
    this.how.textContent = `Measured one after the other, shown side by side ${pace}.`;
    for (const lane of this.lanes) lane.element.dataset.state = "running";
    for (let open = true; open; await frame()) {
      const now = this.stopped ? Infinity : (performance.now() - began) / 1000 / slower;
      open = false;
      runs.forEach(({ seconds, response }, index) => {
        const lane = this.lanes[index];
        if (lane.element.dataset.state === "done") return;
        while (left[index][0]?.at <= now) lane.add(left[index].shift().delta);
        lane.advance(lane.text.tokens.length / response.usage.output_tokens);
        if (now < seconds) lane.tick(now);
        else lane.end(response);
        open ||= now < seconds;
      });
    }
  }

  /** Says what came of it, and of the races before. Returns those that count. */
  _judge(runs, before, seed) {
    const [drafted, plain] = runs.map(({ response }) => textOf(response)),
      exact = runs[0].response.metrics?.exact !== false,
      differs = difference(drafted, plain, seed, exact),
      seconds = runs.map((run) => run.seconds),
      passes = this.lanes.map((lane) => [...lane.steps.values()].map((step) => step.milliseconds)),
      races = differs ? before : [...before, { seconds, passes }].slice(-MOST);
    this.seconds = seconds;
    if (differs) this._say(...differs);
    else this._say(headline(passes.map((all) => all.length)), ...verdict(races));
    const first = { drafts: 0, plain: 1 }[faster([{ seconds, passes }])];
    this.lanes[first]?.element.classList.add("first");
    const item = ({ seconds: [drafted, plain] }, index) =>
      html("li", `Race ${index + 1} `, html("b", time(drafted)), " with drafts, ", html("b", time(plain)), " without");
    if (races.length > 1) this.buttons.after(html("ol.races", races.map(item)));
    this.buttons.hidden = false;
    return races;
  }

  _say(headline, detail, kind = "") {
    Object.assign(this, { headline, detail, kind });
    this.outcome.className = `outcome ${kind}`;
    this.outcome.replaceChildren(html("b", headline), html("span", detail));
  }
}
