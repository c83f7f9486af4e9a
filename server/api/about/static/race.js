// A race: the same answer with drafts and without. Two at once would slow each other, so they are written one after the
// other and shown side by side at the pace that was measured. Then more of them, for a verdict.

import { Answer, secondsOf, textOf, tokensButton } from "./answer.js";
import { difference, ENOUGH, verdict, winner } from "./compare.js";
import { html } from "./elements.js";
import { time } from "./format.js";
import { pictureButtons } from "./picture.js";

const TITLES = ["With drafts", "Without drafts"];
const WARM_TOKENS = 8;
const SHORTEST = 2.5; // seconds that a race is shown at least, slower than it was if need be
const LARGEST_SEED = 2 ** 31;

const random = (below) => Math.floor(Math.random() * below);
const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));

export class Race {
  /** run(off, fields, more): makes a response; more(delta) is called for each of its deltas. about(): what ran. */
  constructor(prompt, run, about) {
    [this.prompt, this.run] = [prompt, run];
    this.stopped = false;
    this.crowded = 0; // the share of its time in which the engine waits for a core
    this.times = [];
    this.first = null;
    this.lanes = TITLES.map((title) => new Answer(title));
    this.outcome = html("div.outcome", { role: "status" });
    this.how = html("p.note");
    this.races = html("ol.races");
    this.buttons = html("div.buttons", { hidden: true }, tokensButton(this.lanes, true), pictureButtons(this, about));
    for (const lane of this.lanes) {
      lane.element.dataset.state = "waiting";
      lane.counts.replaceChildren("waits its turn");
    }
    const lanes = html("div.lanes", this.lanes.map((lane) => lane.element));
    this.element = html("div.race", this.outcome, lanes, html("div.finish", this.how, this.races, this.buttons));
  }

  /** Ends what runs, or what is shown of it; later races do not begin. */
  stop() {
    this.stopped = true;
  }

  /** The whole of it. `first` is the first race's response with drafts, once that race was shown. */
  async go(fields) {
    this._say("Warming up", "The first answers find nothing ready, so they do not count.");
    await this._both({ ...fields, max_output_tokens: WARM_TOKENS });
    const seed = fields.seed ?? random(LARGEST_SEED - ENOUGH);
    for (let number = 0; number < ENOUGH && !this.stopped; number++) {
      const item = html("li", `Race ${number + 1} `, "…");
      this.races.append(item);
      const runs = await this._both({ ...fields, seed: seed + number }, number === 0).finally(() => {
        if (this.stopped) item.remove();
      });
      if (!runs) return;
      if (number === 0) await this._show(runs);
      this.first ??= runs[0].response;
      this._judge(runs, seed + number);
      const [drafted, plain] = this.times.at(-1).map((seconds) => html("b", time(seconds)));
      item.lastChild.replaceWith(drafted, " with drafts, ", plain, " without");
    }
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
    if (this.stopped) return null;
    this.times.push(runs.map((run) => run.seconds));
    return runs;
  }

  /** One response, its seconds, and its deltas with when they came. lane: shows how far it is. */
  async _measured(off, fields, lane) {
    const deltas = [],
      began = performance.now();
    let tokens = 0;
    const response = await this.run(off, fields, (delta) => {
      deltas.push({ at: performance.now() - began, delta });
      tokens += delta.tokens.length;
      lane?.advance(tokens / fields.max_output_tokens);
      lane?.counts.replaceChildren(`${tokens} tokens so far`);
    });
    lane?.counts.replaceChildren("measured");
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
    this.shownRuns = runs;
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
    const first = winner(runs.map((run) => run.seconds));
    if (first !== null) this.lanes[first].element.classList.add("first");
    this.buttons.hidden = false;
  }

  _judge(runs, seed) {
    const [drafted, plain] = runs.map(({ response }) => textOf(response)),
      exact = runs[0].response.metrics?.exact !== false;
    this.differs ??= difference(drafted, plain, seed, exact);
    this._say(...(this.differs ?? verdict(this.times, this.crowded)));
  }

  _say(headline, detail, kind = "") {
    Object.assign(this, { headline, detail, kind });
    this.outcome.className = `outcome ${kind}`;
    this.outcome.replaceChildren(html("b", headline), html("span", detail));
  }
}
