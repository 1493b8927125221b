// The requests: their table, and the KV pushes that they stand for.

import { byId, make, milliseconds, rankName, setText, whole } from "./dom.js";

const SHOWN = 24;
const KEPT = 200;
const PUSH_WINDOW_MS = 10000;

const choices = new Map();
const arrivals = [];

// `first`: the event has what was there before the page was opened, so nothing in it happened just now.
export function add({ rows, left_out: leftOut }, first) {
  for (const row of rows) {
    noteArrivals(row, first);
    choices.delete(row.id);
    choices.set(row.id, row);
  }
  for (const id of choices.keys()) {
    if (choices.size <= KEPT) break;
    choices.delete(id);
  }
  byId("left-out").hidden = !leftOut;
  if (leftOut) setText(byId("left-out"), `${whole(leftOut)} more requests changed than this page was told.`);
  draw();
}

export function clear() {
  choices.clear();
}

// What the proxy knows to be in flight is all that may still be shown as running.
export function known(status) {
  if (status.proxy.in_flight_requests > 0) return;
  for (const [id, row] of choices) if (!row.outcome) choices.delete(id);
}

// By pair of ranks: prompts being computed, KV on its way, and pushes that ended in the last seconds.
export function pushes() {
  const now = performance.now();
  while (arrivals.length && now - arrivals[0].at > PUSH_WINDOW_MS) arrivals.shift();
  const pairs = new Map();
  const pair = (attempt) => {
    const key = `${placeKey(attempt.prefill)}>${placeKey(attempt.decode)}`;
    if (!pairs.has(key)) {
      pairs.set(key, { ...attempt, key, computing: 0, pushing: 0, arrived: 0, newest: -Infinity });
    }
    return pairs.get(key);
  };
  for (const row of choices.values()) {
    const live = row.outcome ? undefined : row.attempts[row.attempts.length - 1];
    if (!live || live.end) continue;
    if (live.phase === "dispatched" || live.phase === "sampled") pair(live).computing += 1;
    if (live.phase === "prefilled") pair(live).pushing += 1;
  }
  for (const { at, attempt } of arrivals) {
    const one = pair(attempt);
    one.arrived += 1;
    one.newest = Math.max(one.newest, at);
  }
  return [...pairs.values()];
}

export const placeKey = (place) => `${place.address}/${place.local_rank}`;

function noteArrivals(row, first) {
  if (first) return;
  const before = choices.get(row.id)?.attempts ?? [];
  row.attempts.forEach((attempt, i) => {
    const news = attempt.arrived_ms !== null && (before[i]?.arrived_ms ?? null) === null;
    if (news) arrivals.push({ at: performance.now(), attempt });
  });
}

function draw() {
  const body = byId("rows");
  const rows = [...choices.values()].reverse().slice(0, SHOWN);
  while (body.children.length > rows.length) body.lastElementChild.remove();
  rows.forEach((row, i) => {
    if (!body.children[i]) body.append(make("tr", "", ...Array.from({ length: 10 }, () => make("td"))));
    cellsOf(row).forEach((text, column) => setText(body.children[i].children[column], text));
  });
}

function cellsOf(row) {
  const attempt = row.attempts[row.attempts.length - 1];
  const kvMs = attempt?.arrived_ms != null && attempt.prefilled_ms != null ? attempt.arrived_ms - attempt.prefilled_ms : null;
  return [
    row.request_id,
    row.outcome || (attempt ? { dispatched: "prompt", sampled: "drafts", prefilled: "KV push", streaming: "decode" }[attempt.phase] : "queued"),
    whole(row.prompt_tokens),
    whole(row.output_tokens),
    milliseconds(row.ttft_ms),
    milliseconds(row.age_ms),
    milliseconds(attempt?.prefilled_ms),
    milliseconds(kvMs),
    row.attempts.map((one) => one.reason).join(", ") || "–",
    attempt ? `${rankName(attempt.prefill.address, attempt.prefill.global_rank)} → ${rankName(attempt.decode.address, attempt.decode.global_rank)}` : "–",
  ];
}
