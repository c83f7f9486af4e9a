// Who runs: the header, the notice below it, the tiles, the footer.

import { byId, html } from "./elements.js";
import { count, number, percent, span, time, timeParts } from "./format.js";

const fact = (text, title, kind) => html("li", { title, class: kind }, text);
const base = (path) => path.replace(/\/+$/, "").split("/").at(-1) || path;

function shape(widths) {
  if (!widths.length) return "no drafts";
  return widths.every((width) => width === 1) ? `chain of ${widths.length}` : `tree ${widths.join(",")}`;
}

/** What the re-runs found; nothing where nobody asked for any. */
function selfCheck({ share, checked, tokens, mismatches, waiting, skipped }) {
  if (!share && !checked) return [];
  const how = `${percent(share, share < 0.1 ? 1 : 0)} of the answers are decoded again without drafts in idle time`;
  const told = `${how}: ${count(tokens)} tokens compared, ${count(waiting)} waiting, ${count(skipped)} skipped`;
  if (!checked) return [fact("self-check: no answers yet", told, "check")];
  const answers = checked === 1 ? "1 answer" : `${count(checked)} answers`;
  const differ = mismatches === 1 ? "1 differs" : `${count(mismatches)} differ`;
  return [fact(`self-check: ${answers}, ${differ}`, told, mismatches ? "check bad" : "check good")];
}

function replaced({ restarts, resumed }) {
  if (!restarts) return [];
  const engines = restarts === 1 ? "engine replaced once" : `engine replaced ${count(restarts)} times`;
  return [fact(engines, `Requests resumed in the next one: ${count(resumed)}`, "warn")];
}

/** The engines, where there are several, and how each of them is. */
function engines({ replicas }) {
  if (!replicas.length) return [];
  const each = replicas.map(({ name, address, drafter, running, waiting }) =>
    `${name} at ${address}: ${running} running, ${waiting} waiting, drafted by ${drafter}`);
  return [fact(replicas.length === 1 ? "1 replica" : `${count(replicas.length)} replicas`, each.join("\n"))];
}

function facts(server, checks) {
  if (server.exact === null) return [fact(server.status, server.message)];
  return [
    ...(server.status === "ready" ? [] : [fact(server.status, server.message, "warn")]),
    fact(shape(server.draft_shape), "How deep and how wide each step drafts"),
    server.exact
      ? fact("exact", server.exact_reason || "The text is that of plain decoding, bit for bit", "good")
      : fact("not exact", server.exact_reason, "warn"),
    ...selfCheck(checks),
    ...replaced(server),
    ...engines(server),
    fact(`${server.dtype} on ${server.device}`, "Numbers and device"),
    fact(`up ${span(server.uptime)}`, `since ${new Date(1000 * server.started).toLocaleString("en-GB")}`),
  ];
}

function speed({ speed_up, doubt }) {
  const known = speed_up !== null;
  const class_ = !known || doubt ? "big unknown" : speed_up >= 1 ? "big good" : "big warn";
  return [
    html("b", { class: class_ }, known ? `${number(speed_up)}×` : "–"),
    html("span", {}, "speed-up now", html("small", {}, known && doubt ? "cannot tell" : "estimated")),
  ];
}

function aboutSpeed({ speed_up, doubt, tokens_per_step, step_seconds, root_seconds }) {
  if (speed_up === null) return "Nothing has run in the last minute";
  const figures =
    `${number(tokens_per_step)} tokens per step, ${time(step_seconds)} per step; ` +
    `a step that drafts nothing takes ${time(root_seconds)}`;
  return doubt ? `Cannot tell, since ${doubt}: ${figures}` : figures;
}

export function showHeader({ server, live, verdict, self_check: checks }) {
  byId("pair").replaceChildren(
    html("b", {}, base(server.target || server.model)),
    html("span", { class: "arrow", "aria-label": "drafted by" }, "←"),
    html("b", { class: "drafter", title: `${server.draft}: ${server.drafter_reason}` }, server.drafter || "none"),
  );
  byId("facts").replaceChildren(...facts(server, checks));
  byId("speed").replaceChildren(...speed(live));
  byId("speed").title = aboutSpeed(live);
  byId("verdict").textContent = verdict;
  const headline = live.speed_up === null || live.doubt ? "" : `${number(live.speed_up)}× · `;
  document.title = `${headline}Foresay: ${server.model}`;
}

// -- tiles ----------------------------------------------------------------------------------------------------------

const pair = ([value, unit], rest) => ({ value, unit, rest });
const share = (value, digits) => percent(value, digits).split(" ");
const quantiles = ({ p50, p99 }) => pair(timeParts(p50), p99 === null ? "" : `p99 ${time(p99)}`);

/** Of what runs; else of what ran last. */
const rate = ({ tokens_per_second: now, last_request_tokens_per_second: last }) =>
  pair([number(now ?? last), "tok/s"], now !== null ? "last 10 s" : last !== null ? "last request" : "");

const TILES = [
  ["Throughput", rate],
  ["Tokens per step", (live) => pair([number(live.tokens_per_step), ""], "plain is 1")],
  ["Acceptance", (live) => pair(share(live.acceptance_rate), "of drafted tokens")],
  ["Time per token", (live) => quantiles(live.time_per_token)],
  ["Chunk gap", (live) => quantiles(live.chunk_gap)],
  ["First token", (live) => quantiles(live.time_to_first_token)],
  [
    "KV pages",
    ({ gauges }) => pair(share(gauges.kv_used, 1), gauges.kv_kept ? `${percent(gauges.kv_kept, 1)} kept` : "in use"),
  ],
  ["Requests", ({ gauges }) => pair([count(gauges.running), "running"], `${count(gauges.waiting)} waiting`)],
];

export function showTiles({ live }) {
  byId("tiles").replaceChildren(
    ...TILES.map(([name, read]) => {
      const { value, unit, rest } = read(live);
      return html(
        "li",
        { "data-tile": name },
        html("span", { class: "name" }, name),
        html("span", { class: "value" }, html("b", {}, value), unit ? html("small", {}, ` ${unit}`) : null),
        html("span", { class: "rest" }, rest),
      );
    }),
  );
}

// -- notice and footer ----------------------------------------------------------------------------------------------

/** A line across the page; none if there is nothing to say. */
export function notice(text, kind = "") {
  const place = byId("notice");
  place.hidden = !text;
  place.className = `notice ${kind}`;
  if (place.textContent !== text) place.textContent = text;
}

export function showFooter({ server, totals }) {
  const said = Object.entries(totals).map(([name, value]) =>
    html(
      "li",
      { "data-total": name },
      html("b", {}, count(value)),
      ` ${name.replace("spec_decode_", "").replace("num_", "").replaceAll("_", " ")}`,
    ),
  );
  byId("footer").replaceChildren(
    html("span", {}, `Foresay ${server.version}, since it started:`),
    html("ul", {}, said),
    html("a", { href: "metrics" }, "/metrics"),
    html("a", { href: "openapi.json" }, "/openapi.json"),
  );
}
