// The lanes: the last steps of each decode rank, those of one group in common columns, and the step that a person
// has chosen in one.

import { byId, make, percent, setText } from "./dom.js";

const COLUMNS = 120;
const KEPT = 240;
const [STEP, MODE, CAUSE, WIDTH, ROWS, TOKENS, PADDED, IDLE] = [0, 1, 2, 3, 4, 5, 6, 7];

const CAUSES = {
  short_row: "a row of this rank was too short",
  long_row: "a row of this rank was too long",
  oversized: "the batch was larger than the largest graph",
  peer: "another rank of the group broke it",
  no_graph: "the node runs without full graphs",
};

const lanes = new Map();
let groups = new Map();

// `steps` as the event has them: per rank, in order.
export function add(ranks) {
  for (const { address, local_rank, global_rank, steps } of ranks) {
    const key = `${address}/${local_rank}`;
    const lane = lanes.get(key) ?? newLane(key, address, global_rank);
    const last = lane.order[lane.order.length - 1];
    if (last !== undefined && steps[0][STEP] < last && steps[steps.length - 1][STEP] < last) reset(lane);
    for (const step of steps) {
      if (!lane.steps.has(step[STEP])) lane.order.push(step[STEP]);
      lane.steps.set(step[STEP], step);
    }
    while (lane.order.length > KEPT) lane.steps.delete(lane.order.shift());
  }
  draw();
}

// Which nodes are one group; the lanes of a node that is not listed any more go.
export function known(status) {
  groups = new Map(status.nodes.map((node) => [node.address, node.group_id || node.address]));
  for (const [key, lane] of lanes) {
    if (groups.has(lane.address)) continue;
    lane.element.remove();
    lanes.delete(key);
  }
}

export function clear() {
  for (const lane of lanes.values()) reset(lane);
  draw();
}

function newLane(key, address, globalRank) {
  const name = make("span");
  const share = make("span");
  const cells = make("div", "cells");
  for (let i = 0; i < COLUMNS; i++) cells.append(make("i", "cell"));
  const detail = make("p", "detail");
  const element = make("div", "lane", make("div", "lane-head", name, share), cells, detail);
  const lane = { key, address, globalRank, steps: new Map(), order: [], element, name, share, cells, detail };
  setText(name, `rank ${globalRank} · ${address}`);
  cells.tabIndex = 0;
  cells.setAttribute("role", "slider");
  cells.setAttribute("aria-label", `Steps of decode rank ${globalRank}, ${address}`);
  cells.addEventListener("keydown", (event) => onKey(lane, event));
  cells.addEventListener("pointerdown", (event) => onPointer(lane, event));
  cells.addEventListener("pointermove", (event) => onPointer(lane, event));
  lanes.set(key, lane);
  const list = byId("lane-list");
  list.querySelector(".empty")?.remove();
  const sorted = [...lanes.values()].sort(
    (a, b) => a.address.localeCompare(b.address) || a.globalRank - b.globalRank,
  );
  list.replaceChildren(...sorted.map((one) => one.element));
  return lane;
}

function reset(lane) {
  lane.steps.clear();
  lane.order.length = 0;
  lane.chosen = undefined;
}

const groupOf = (lane) => groups.get(lane.address) ?? lane.address;
const newest = (lane) => lane.order[lane.order.length - 1] ?? -1;

function draw() {
  const ends = new Map();
  for (const lane of lanes.values()) {
    ends.set(groupOf(lane), Math.max(ends.get(groupOf(lane)) ?? -1, newest(lane)));
  }
  for (const lane of lanes.values()) drawLane(lane, ends.get(groupOf(lane)) - COLUMNS + 1);
}

function drawLane(lane, first) {
  lane.first = first;
  let [full, seen] = [0, 0];
  for (let i = 0; i < COLUMNS; i++) {
    const step = lane.steps.get(first + i);
    let name = "cell";
    if (step) {
      seen += 1;
      full += step[MODE] === "FULL";
      name += ` ${step[MODE].toLowerCase()}${step[IDLE] ? " idle" : ""}`;
      if (step[STEP] === lane.chosen) name += " chosen";
    }
    if (lane.cells.children[i].className !== name) lane.cells.children[i].className = name;
  }
  setText(lane.share, seen ? `${percent(full, seen)} of the last ${seen} steps in the full graph` : "");
  drawChosen(lane);
}

function drawChosen(lane) {
  const step = lane.steps.get(lane.chosen) ?? lane.steps.get(newest(lane));
  if (!step) return;
  const text = describe(step, lane.steps.has(lane.chosen) ? "" : "last: ");
  setText(lane.detail, text);
  lane.cells.setAttribute("aria-valuemin", lane.order[0]);
  lane.cells.setAttribute("aria-valuemax", newest(lane));
  lane.cells.setAttribute("aria-valuenow", step[STEP]);
  lane.cells.setAttribute("aria-valuetext", text);
}

function describe(step, before) {
  const why = step[CAUSE] ? ` (${CAUSES[step[CAUSE]] ?? step[CAUSE]})` : "";
  const idle = step[IDLE] ? ", idle" : "";
  const padded = step[PADDED] - step[TOKENS];
  return (
    `${before}step ${step[STEP]}: ${step[MODE]}${why}${idle}, ${step[ROWS]} × up to ${step[WIDTH]} tokens` +
    (padded > 0 ? `, ${step[TOKENS]} padded to ${step[PADDED]}` : `, ${step[TOKENS]} in all`)
  );
}

function choose(lane, number) {
  const at = lane.order.findIndex((one) => one >= number);
  lane.chosen = lane.order[at === -1 ? lane.order.length - 1 : at];
  drawLane(lane, lane.first);
}

function onKey(lane, event) {
  if (!lane.order.length) return;
  const current = lane.order.indexOf(lane.chosen);
  const at = current === -1 ? lane.order.length - 1 : current;
  const shown = Math.max(0, lane.order.findIndex((one) => one >= lane.first));
  const moves = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, Home: shown, End: lane.order.length - 1 };
  if (event.key === "Escape") {
    lane.chosen = undefined;
    drawLane(lane, lane.first);
  } else if (event.key in moves) {
    choose(lane, lane.order[Math.min(Math.max(moves[event.key], shown), lane.order.length - 1)]);
    event.preventDefault();
  }
}

function onPointer(lane, event) {
  const i = [...lane.cells.children].indexOf(event.target);
  if (i >= 0 && lane.steps.has(lane.first + i)) choose(lane, lane.first + i);
}
