// The nodes with their ranks and load, and a line for each pair of ranks between which KV moves.

import { byId, fillList, make, percent, rankName, rate, setText, whole } from "./dom.js";
import { placeKey, pushes } from "./requests.js";
import { growth, rankIn } from "./window.js";

const FLASH_MS = 700;
const cards = new Map();
const ranks = new Map();

export function draw(status) {
  const listed = new Set();
  for (const node of status.nodes) {
    listed.add(node.address);
    drawNode(node);
  }
  for (const [address, card] of cards) {
    if (!listed.has(address)) {
      card.element.remove();
      cards.delete(address);
    }
  }
  drawPushes();
}

function drawNode(node) {
  let card = cards.get(node.address);
  if (!card) {
    card = { element: make("div", "node"), head: make("p"), list: make("div") };
    card.element.append(card.head, card.list);
    cards.set(node.address, card);
    byId(node.role).append(card.element);
  }
  const state = node.state === "live" && node.answer !== "ok" ? node.answer : node.state;
  setText(card.head, `${node.address} · ${state}${node.reason ? `: ${node.reason}` : ""}`);
  card.head.className = state === "live" ? "good" : "bad";
  const keys = node.ranks.map((rank) => `${node.address}/${rank.local_rank}`);
  for (const [key, rank] of ranks) {
    if (rank.address === node.address && !keys.includes(key)) {
      rank.element.remove();
      ranks.delete(key);
    }
  }
  node.ranks.forEach((rank, i) => drawRank(card, node, rank, keys[i]));
}

function drawRank(card, node, rank, key) {
  let shown = ranks.get(key);
  if (!shown) {
    shown = { address: node.address, element: make("div", "rank"), figures: make("dl"), usage: make("meter") };
    shown.element.append(make("h4", "", `rank ${rank.global_rank}`), shown.usage, shown.figures);
    shown.usage.setAttribute("aria-label", `KV cache in use on ${rankName(node.address, rank.global_rank)}`);
    ranks.set(key, shown);
    card.list.append(shown.element);
  }
  const { counts } = rank;
  shown.usage.hidden = !counts;
  if (counts) shown.usage.value = counts.kv_cache_usage_ratio;
  fillList(shown.figures, [
    ["running", counts && whole(counts.running_requests)],
    ["waiting", counts && whole(counts.waiting_requests)],
    ["KV cache", counts && `${(100 * counts.kv_cache_usage_ratio).toFixed(1)} %`],
    ["from this proxy", whole(rank.in_flight_requests)],
    ...(node.role === "prefill" ? prefillFigures(node, rank) : decodeFigures(node, rank)),
  ]);
}

function prefillFigures(node, rank) {
  const pushed = growth((status) => rankIn(status, node.instance_id, rank.global_rank)?.kv.pushed_bytes ?? null);
  const window = rank.window_tokens === null ? "" : ` of ${whole(rank.window_tokens)}`;
  return [
    ["prompt tokens out", `${whole(rank.outstanding_prompt_tokens)}${window}`],
    ["KV pushed", pushed && rate(pushed.by / pushed.seconds)],
  ];
}

function decodeFigures(node, rank) {
  const grown = (field) => growth((status) => field(rankIn(status, node.instance_id, rank.global_rank)));
  const received = grown((counts) => counts?.kv.received_bytes ?? null);
  const drafts = grown((counts) => counts?.draft_tokens ?? null);
  const accepted = grown((counts) => counts?.accepted_tokens ?? null);
  const { counts } = rank;
  return [
    ["KV received", received && rate(received.by / received.seconds)],
    ["drafts accepted", drafts && accepted && percent(accepted.by, drafts.by)],
    ["blocks in quarantine", counts && counts.kv.quarantined_blocks ? whole(counts.kv.quarantined_blocks) : null],
  ];
}

// The text under the nodes says what the lines show.
export function drawPushes() {
  const now = performance.now();
  const pairs = pushes();
  const list = byId("pushes");
  const texts = pairs.map(
    (pair) =>
      `${rankName(pair.prefill.address, pair.prefill.global_rank)} → ${rankName(pair.decode.address, pair.decode.global_rank)}: ` +
      `${pair.computing} being computed, ${pair.pushing} with KV on its way, ${pair.arrived} arrived`,
  );
  if (!texts.length) texts.push("none");
  while (list.children.length > texts.length) list.lastElementChild.remove();
  texts.forEach((text, i) => {
    if (!list.children[i]) list.append(make("li"));
    setText(list.children[i], text);
  });
  drawLinks(pairs, now);
}

function drawLinks(pairs, now) {
  const links = byId("links");
  const origin = links.getBoundingClientRect();
  const drawn = new Set();
  for (const pair of pairs) {
    const [from, to] = [ranks.get(placeKey(pair.prefill)), ranks.get(placeKey(pair.decode))];
    if (!from || !to) continue;
    drawn.add(pair.key);
    let path = links.querySelector(`[data-pair="${CSS.escape(pair.key)}"]`);
    if (!path) {
      path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.dataset.pair = pair.key;
      links.append(path);
    }
    path.setAttribute("d", curve(from.element.getBoundingClientRect(), to.element.getBoundingClientRect(), origin));
    const state = pair.pushing ? "pushing" : now - pair.newest < FLASH_MS ? "arrived" : pair.computing ? "computing" : "";
    if (path.getAttribute("class") !== state) path.setAttribute("class", state);
  }
  for (const path of [...links.children]) if (!drawn.has(path.dataset.pair)) path.remove();
}

// Beside each other a line goes from side to side; in one column it goes down the right edge.
function curve(from, to, origin) {
  const [y1, y2] = [from.top + 20 - origin.top, to.top + 20 - origin.top];
  const x1 = from.right - origin.left;
  if (to.left > from.right) {
    const x2 = to.left - origin.left;
    const bend = (x2 - x1) / 2;
    return `M${x1} ${y1} C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
  }
  const x2 = to.right - origin.left;
  return `M${x1} ${y1} C${x1 + 14} ${y1} ${x2 + 14} ${y2} ${x2} ${y2}`;
}
