// The page: what the server has kept, then its feed; everything is redrawn once a second.

import { ask } from "./api.js";
import { spread } from "./bars.js";
import { drafters } from "./drafters.js";
import { byId, html } from "./elements.js";
import { follow } from "./feed.js";
import { clock, percent } from "./format.js";
import { notice, showFooter, showHeader, showTiles } from "./header.js";
import { learnDrafters, showModels } from "./models.js";
import { overTime } from "./overtime.js";
import { Playground } from "./playground.js";
import { Requests } from "./requests.js";
import { SPANS, Timeline } from "./timeline.js";

const VIEWS = { "#dashboard": "dashboard-view", "#playground": "playground", "#prompt": "playground" };
const BUSY = 0.25; // share of its time that an engine waits for a core on a machine that is busy, as in the log
const state = { snapshot: null, bounds: [], heard: null };
const timeline = new Timeline();
const requests = new Requests(byId("requests"));
const playground = new Playground(byId("playground"));
let charts = [];

/** Puts the charts on the page, once there is something to draw. */
function build() {
  const times = overTime(timeline, state),
    spreads = spread(timeline, state),
    drafting = drafters(state);
  charts = [...times, spreads, drafting];
  byId("charts").append(...times.map((chart) => chart.element), ...spreads.elements, ...drafting.elements);
}

/** Draws what is in view: the rest would take time from the answers that the playground measures. */
function draw() {
  playground.offer(state.snapshot);
  showHeader(state.snapshot, playground.doubt(state.snapshot));
  if (byId("dashboard-view").hidden) return;
  if (!charts.length) build();
  showTiles(state.snapshot);
  showFooter(state.snapshot);
  showSpans();
  for (const chart of charts) chart.draw();
}

// -- the two views ----------------------------------------------------------------------------------------------------

/** Shows the view that the address names; without one, /dashboard is the dashboard and / the playground. */
function showView() {
  const view = VIEWS[location.hash] ?? (location.pathname.endsWith("/dashboard") ? "dashboard-view" : "playground");
  for (const id of new Set(Object.values(VIEWS))) byId(id).hidden = id !== view;
  for (const link of document.querySelectorAll(".views a"))
    if (VIEWS[link.hash] === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  scrollTo(0, 0);
  if (!state.snapshot) return;
  draw();
  refreshRequests();
}

addEventListener("hashchange", showView);
showView();

// -- what the server tells ------------------------------------------------------------------------------------------

let listed = false;

function take({ snapshot, points, models }) {
  const restarted = state.snapshot !== null && state.snapshot.server.started !== snapshot.server.started;
  Object.assign(state, { snapshot, heard: Date.now() / 1000 });
  document.documentElement.removeAttribute("data-unreachable");
  if (restarted) return begin().catch(console.debug);
  showModels(models);
  learnDrafters(snapshot.server);
  timeline.more(points, snapshot.now);
  tellStatus(snapshot);
  draw();
  const over = points.reduce((sum, point) => sum + point.finished + point.failed, 0);
  if (over > 0 || !listed || snapshot.live.gauges.num_requests_running > 0) refreshRequests();
  listed = true;
}

function tellStatus({ server: { status, message }, live: { crowded } }) {
  const waits = `the engine spends ${percent(crowded, 0)} of its time waiting for a CPU core.`;
  const words = {
    ready: crowded < BUSY ? "" : `Other programs keep this machine busy: ${waits}`,
    unloaded: `Not loaded: the next request loads it.${message && ` Loading failed: ${message}`}`,
    loading: `Loading: ${message}`,
    down: `The engine is down: ${message}`,
    failed: `The engine cannot start: ${message}`,
    draining: `The server is shutting down: ${message}.`,
  };
  const calm = ["ready", "unloaded", "loading", "draining"];
  notice(words[status] ?? `${status}: ${message}`, calm.includes(status) ? "" : "bad");
}

/** What is on the page is what was last heard, and says so. */
function lost() {
  document.documentElement.dataset.unreachable = "yes";
  notice(`Server unreachable since ${clock(state.heard)}. Trying again; the numbers are from then.`, "bad");
}

async function refreshRequests() {
  if (byId("dashboard-view").hidden) return;
  try {
    await requests.refresh();
  } catch (error) {
    console.debug("requests:", error);
  }
}

// -- what the reader chooses ----------------------------------------------------------------------------------------

const label = (span) => (span < 3600 ? `${span / 60} min` : "1 h");

for (const span of SPANS) {
  const onclick = () => {
    timeline.choose(span);
    if (state.snapshot) draw();
  };
  byId("span").append(html("button", { type: "button", role: "radio", "data-span": span, onclick }, label(span)));
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

/** Take over all that the server has kept; again, where it was started again. */
async function begin() {
  const { snapshot, history, models } = await (await ask("dashboard/state")).json();
  state.bounds = history.bounds;
  timeline.begin(history);
  state.snapshot = snapshot;
  take({ snapshot, points: [], models });
}

/** The server may not be there yet, or not let this page in: say so and try again. */
async function keepBeginning() {
  for (;;) {
    try {
      await begin();
      break;
    } catch (error) {
      notice(`The server does not respond: ${error.message}`, "bad");
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
  document.documentElement.dataset.ready = "yes";
  const since = () => (timeline.seconds.length ? timeline.seconds.at(-1).at + 1 : Math.floor(timeline.now));
  follow(since, take, lost);
}

keepBeginning();
