// What runs and how well: the header, the notice below it, the tiles, the footer.

import { byId, html } from "./elements.js";
import { Explained, question } from "./explain.js";
import { FIGURES, say, title } from "./figures.js";
import { clock, count, number, percent, span, time } from "./format.js";
import { base, drafterName } from "./models.js";

const fact = (name, text, why, kind = "") => ({ name, text, why, kind });
const times = (value, one, more) => (value === 1 ? one : `${count(value)} ${more}`);

const TREE =
  "A draft may have several branches: so many guesses for the next token, for the one after it, and so on. The model " +
  "checks all of them in one pass and follows the branch that is right.";

function shape(widths) {
  if (!widths.length) return fact("shape", "no drafts", "Every pass writes one token.");
  if (widths.some((width) => width > 1)) return fact("shape", `drafts in a tree of ${widths.join(", ")}`, TREE);
  const why = "The most tokens that are guessed ahead in one pass. Fewer are, where more would not pay.";
  return fact("shape", `drafts up to ${times(widths.length, "1 token", "tokens")}`, why);
}

/** What the re-runs found; nothing where none was requested. */
function selfCheck({ share, ...counts }) {
  const { self_check_requests: checked, self_check_tokens: tokens, self_check_mismatch: mismatches } = counts,
    { self_check_waiting: waiting, self_check_skipped: skipped } = counts;
  if (!share && !checked) return [];
  const how = `${percent(share, share < 0.1 ? 1 : 0)} of the answers are decoded again without drafts in idle time`,
    why = `${how}: ${count(tokens)} tokens compared, ${count(waiting)} waiting, ${count(skipped)} skipped`;
  if (!checked) return [fact("check", "self-check: no answers yet", why)];
  const differ = times(mismatches, "1 differs", "differ");
  const text = `self-check: ${times(checked, "1 answer", "answers")}, ${differ}`;
  return [fact("check", text, why, mismatches ? "bad" : "good")];
}

function replaced({ restarts, resumed }) {
  if (!restarts) return [];
  const text = `engine replaced ${restarts === 1 ? "once" : `${count(restarts)} times`}`;
  return [fact("replaced", text, `Requests resumed in the next one: ${count(resumed)}`, "warn")];
}

/** The engines, where there are several, and how each of them is. */
function engines({ replicas }) {
  if (!replicas.length) return [];
  const each = replicas.map(({ name, address, drafter, running, waiting }) =>
    `${name} at ${address}: ${running} running, ${waiting} waiting, drafted by ${drafter}`);
  return [fact("engines", times(replicas.length, "1 replica", "replicas"), each.join("\n"))];
}

const SAME = "Exact: the text is that of decoding without drafts, bit for bit.";

function facts(server, checks) {
  if (server.exact === null) return [fact("status", server.status, server.message)];
  const portable = server.bits.startsWith("portable") && "One seed gives the same text on every CPU.",
    fingerprint = `Fingerprint of what texts depend on: ${server.fingerprint}.`,
    why = [server.exact_reason, portable, fingerprint].filter(Boolean);
  return [
    ...(server.status === "ready" ? [] : [fact("status", server.status, server.message, "warn")]),
    shape(server.draft_shape),
    server.exact
      ? fact("exact", "same text as without drafts", [SAME, ...why].join(" "), "good")
      : fact("exact", "text may differ from that without drafts", why.join(" "), "warn"),
    ...selfCheck(checks),
    ...replaced(server),
    ...engines(server),
    fact("device", `${server.dtype} on ${server.device}`, "The kind of numbers it calculates with, and on what."),
  ];
}

/** Chips that explain themselves, by name: one that is open or focused stays so while its numbers change. */
const chips = new Map();
function chip({ name, text, why, kind }) {
  if (!chips.has(name)) {
    const explained = new Explained("chip");
    chips.set(name, { explained, element: html("li", { "data-fact": name }, explained.elements) });
  }
  const { explained, element } = chips.get(name);
  explained.say(text, why || text);
  element.className = kind;
  return element;
}

/** Puts children in their place unless they are there already. */
function keep(place, children) {
  if (children.length !== place.children.length || children.some((one, at) => one !== place.children[at]))
    place.replaceChildren(...children);
}

const DRAFTER = "Guesses the next tokens quickly; the model checks the guesses, several in one pass.";
const whoDrafts = new Explained("drafter");
function showPair({ target, model, draft, drafter, drafter_reason }) {
  const place = byId("pair");
  if (!place.children.length) place.append(html("b"), html("span.by"), ...whoDrafts.elements);
  place.children[0].textContent = base(target || model);
  place.children[1].textContent = drafter ? "drafts by" : "";
  whoDrafts.button.hidden = !drafter;
  whoDrafts.say(drafterName(drafter), [DRAFTER, [draft, drafter_reason].filter(Boolean).join(": ")].join("\n"));
}

const speed = { value: html("b.big"), doubt: html("small"), why: question("times as fast as without drafts", "") };
function showSpeed(live, doubt) {
  const { speed_up, spread, root_seconds, step_seconds } = live,
    place = byId("speed"),
    known = speed_up !== null;
  if (!place.children.length)
    place.append(speed.value, html("span", "as fast as without drafts", speed.doubt), ...speed.why.elements);
  place.hidden = !known;
  if (!known) return;
  speed.value.textContent = say(FIGURES.speedUp, speed_up);
  speed.value.className = `big ${doubt ? "unknown" : speed_up >= 1 ? "good" : "warn"}`;
  const off = `± ${percent(spread)}`;
  speed.doubt.textContent = doubt ? "cannot tell" : spread ? `measured, ${off}` : "estimated speed-up";
  const plain = `${spread ? "takes" : "would have taken"} ${time(root_seconds)}`,
    figures =
      `${number((speed_up * step_seconds) / root_seconds)} tokens per pass where drafts are allowed, ` +
      `${time(step_seconds)} per pass; a pass without drafts ${plain}`;
  const how = spread ? `Measured by a few passes without drafts now and then, ${off}` : "Estimated";
  speed.why.say(null, doubt ? `Cannot tell, since ${doubt}: ${figures}` : `${how}: ${figures}.`);
}

/** How old the figures are that are not of now. */
function ofWhen({ until }, now) {
  const age = now - until;
  return age < 60 ? "Figures are of the last minute." : `Idle since ${clock(until)}; figures are of the minute before.`;
}

/** raced: why the races of this page make the speed-up doubtful, if they do. */
export function showHeader({ server, live, verdict, totals, now, self_check: checks }, raced = "") {
  showPair(server);
  keep(byId("facts"), facts(server, checks).map(chip));
  showSpeed(live, live.doubt || raced);
  const when = live.step_seconds === null && live.tokens_per_step === null ? "" : ofWhen(live, now);
  const found = raced ? `Cannot tell whether speculation pays: ${raced}.` : verdict;
  byId("verdict").textContent = `${found} ${when}`;
  const headline = live.speed_up === null || live.doubt || raced ? "" : `${say(FIGURES.speedUp, live.speed_up)} · `;
  document.title = `${headline}Foresay: ${server.model}`;
  const { num_requests_running: running, num_requests_waiting: waiting } = live.gauges,
    begun = totals.engine_steps || totals.request_success || running || waiting;
  document.documentElement.toggleAttribute("data-empty", !begun);
}

// -- tiles ----------------------------------------------------------------------------------------------------------

const tile = (figure, more = () => "") => ({
  name: title(figure),
  why: figure.why,
  value: (live) => say(figure, figure.live(live)),
  rest: (live, minute) => `${figure.term}; mean, ${minute}${more(live)}`,
});
const late = ({ time_to_first_token: { p99 } }) => (p99 === null ? "" : `; 99 % within ${time(p99)}`);

const TILES = [
  tile(FIGURES.throughput),
  tile(FIGURES.perPass),
  tile(FIGURES.right),
  tile(FIGURES.first, late),
  tile(FIGURES.perToken),
  tile(FIGURES.gap),
  {
    name: "Memory for texts",
    why:
      "What the model remembers of the texts at hand, in pages of a few tokens each: the share that running requests " +
      "use. Pages that are only kept let a prompt with the same beginning start sooner; they make room when needed.",
    value: ({ gauges }) => percent(gauges.kv_cache_usage_perc, 1),
    rest: ({ gauges: { kv_cache_kept_perc: kept } }) => `KV cache, now${kept ? `; ${percent(kept, 1)} kept` : ""}`,
  },
  {
    name: "Requests",
    why: "How many are being answered now, and how many wait until there is room for them.",
    value: ({ gauges }) => `${count(gauges.num_requests_running)} running`,
    rest: ({ gauges }) => `${count(gauges.num_requests_waiting)} waiting, now`,
  },
];

function made({ name, why }) {
  const [value, unit, rest] = [html("b"), html("small"), html("span.rest")],
    name_ = html("span.name", name, " ", question(name, why).elements);
  const element = html("li", { "data-tile": name }, name_, html("span.value", value, " ", unit), rest);
  return { element, value, unit, rest };
}

/** What is there instead of everything that has no data yet. */
const NOTHING_YET = () =>
  html(
    "p.card.nothing",
    "Nothing has been asked yet. After the first answer this page shows how fast it came, how many tokens each pass " +
      "of the model wrote, and how much time drafting saved. To see that, ",
    html("a", { href: "#playground" }, "ask something in the playground"),
    " or send a request to the API.",
  );

let tiles = null;
/** Shows the tiles whose figures are known, and which minute they are of. */
export function showTiles({ live, now }) {
  const minute = now - live.until < 60 ? "last minute" : `minute to ${clock(live.until)}`;
  if (!tiles) byId("tiles").before(NOTHING_YET());
  tiles ??= TILES.map(made);
  keep(byId("tiles"), tiles.map(({ element }) => element));
  for (const [index, { element, value, unit, rest }] of tiles.entries()) {
    const text = TILES[index].value(live);
    element.hidden = !text;
    [value.textContent, unit.textContent] = text.split(" ");
    rest.textContent = TILES[index].rest(live, minute);
  }
}

// -- notice and footer ----------------------------------------------------------------------------------------------

/** A line across the page; none if there is nothing to say. */
export function notice(text, kind = "") {
  const place = byId("notice");
  place.hidden = !text;
  place.className = `notice ${kind}`;
  if (place.textContent !== text) place.textContent = text;
}

/** The counters that are shown, in words, by their names in /metrics. */
const COUNTERS = {
  generation_tokens: "tokens written",
  prompt_tokens: "prompt tokens",
  prompt_tokens_cached: "of them known already",
  engine_steps: "passes",
  spec_decode_num_drafts: "drafts",
  spec_decode_num_draft_tokens: "tokens drafted",
  spec_decode_num_accepted_tokens: "of them right",
  spec_decode_num_discarded_tokens: "discarded after an end",
  request_success: "requests",
  request_errors: "failed",
  num_preemptions: "interrupted for memory",
};

export function showFooter({ server, totals }) {
  const counted = Object.entries(COUNTERS).map(([name, words]) =>
    html("li", { "data-total": name, hidden: !totals[name] }, `${words} `, html("b", count(totals[name]))));
  byId("footer").replaceChildren(
    html("span", `Foresay ${server.version}, up ${span(server.uptime)}`),
    html("ul", counted),
    html("a", { href: "metrics" }, "/metrics"),
    html("a", { href: "openapi.json" }, "/openapi.json"),
  );
}
