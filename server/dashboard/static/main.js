// The page: what the server has kept, then its feed; everything is redrawn once a second.

import { ask } from "./api.js";
import { drafters } from "./drafters.js";
import { byId, html } from "./elements.js";
import { follow } from "./feed.js";
import { notice, showFooter, showHeader, showTiles } from "./header.js";
import { showModels } from "./models.js";
import { overTime } from "./overtime.js";
import { Playground } from "./playground.js";
import { Requests } from "./requests.js";
import { spread } from "./spread.js";
import { SPANS, Timeline } from "./timeline.js";

const state = { snapshot: null, bounds: [] };
const timeline = new Timeline();
const times = overTime(timeline, state),
  spreads = spread(timeline, state),
  drafting = drafters(state);
const requests = new Requests(byId("requests"));

byId("over-time").append(...times.map((chart) => chart.element));
byId("spread").append(...spreads.charts.map((chart) => chart.element));
byId("drafting").append(...drafting.elements);
new Playground(byId("playground"), () => setTimeout(refreshRequests, 200));

function draw() {
  showHeader(state.snapshot);
  showTiles(state.snapshot);
  showFooter(state.snapshot);
  showSpans();
  for (const chart of times) chart.draw();
  spreads.draw();
  drafting.draw();
}

// -- what the server tells ------------------------------------------------------------------------------------------

let listed = false;

function take({ snapshot, points, models }) {
  state.snapshot = snapshot;
  showModels(models);
  timeline.more(points, snapshot.now);
  tellStatus(snapshot.server);
  draw();
  const over = points.reduce((sum, point) => sum + point.finished + point.failed, 0);
  if (over > 0 || !listed || snapshot.live.gauges.running > 0) refreshRequests();
  listed = true;
}

function tellStatus({ status, message }) {
  const words = {
    ready: "",
    unloaded: `Not loaded: the next request waits until it is.${message && ` It could not be: ${message}`}`,
    loading: `Loading: ${message}`,
    down: `The engine is down: ${message}`,
    failed: `The engine cannot start: ${message}`,
    draining: `The server is shutting down: ${message}.`,
  };
  notice(words[status] ?? `${status}: ${message}`, ["loading", "draining", "unloaded"].includes(status) ? "" : "bad");
}

async function refreshRequests() {
  try {
    requests.show(await (await ask("dashboard/requests")).json());
  } catch (error) {
    console.debug("requests:", error);
  }
}

// -- what the reader chooses ----------------------------------------------------------------------------------------

const label = (span) => (span < 3600 ? `${span / 60} min` : "1 h");

for (const span of SPANS) {
  const button = html(
    "button",
    {
      type: "button",
      role: "radio",
      "data-span": span,
      onclick: () => {
        timeline.choose(span);
        if (state.snapshot) draw();
      },
    },
    label(span),
  );
  byId("span").append(button);
}
byId("span").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const buttons = [...byId("span").children],
    next = buttons[(buttons.indexOf(event.target) + step + buttons.length) % buttons.length];
  next.click();
  next.focus();
});

function showSpans() {
  for (const button of byId("span").children) {
    const chosen = Number(button.dataset.span) === timeline.span;
    button.setAttribute("aria-checked", chosen);
    button.tabIndex = chosen ? 0 : -1;
  }
}

byId("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("foresay-theme", theme);
  } catch {
    /* not kept, then */
  }
});

// -- begin ----------------------------------------------------------------------------------------------------------

async function begin() {
  const { snapshot, history, models } = await (await ask("dashboard/state")).json();
  state.bounds = history.bounds;
  timeline.begin(history);
  take({ snapshot, points: [], models });
  document.documentElement.dataset.ready = "yes";
  const since = () => (timeline.seconds.length ? timeline.seconds.at(-1).at + 1 : Math.floor(history.now));
  follow(since, take, () => notice("The connection to the server was lost; trying again.", "bad"));
}

/** The server may not be there yet, or not let this page in: say so and try again. */
async function keepBeginning() {
  for (;;) {
    try {
      return await begin();
    } catch (error) {
      notice(`The server does not answer: ${error.message}`, "bad");
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
}

keepBeginning();
