// Opens the stream of events, hands them to what shows them, and says how the stream is doing.

import { byId, fillList, milliseconds, setText, whole } from "./dom.js";
import * as lanes from "./lanes.js";
import * as requests from "./requests.js";
import * as topology from "./topology.js";
import { forget, growth, remember } from "./window.js";

const RETRY_MS = 10000;
let source = null;
let first = true; // the next event of requests has what was there before
let lost = 0;

function open() {
  source = new EventSource("events");
  source.onopen = () => {
    first = true;
    forget();
    lanes.clear();
    requests.clear();
    say("stream", "live", "good");
  };
  source.onerror = () => {
    say("stream", "not connected, trying again", "bad");
    // The browser tries again by itself unless the proxy refused, as it does when too many pages are open.
    if (source.readyState === EventSource.CLOSED) setTimeout(open, RETRY_MS);
  };
  listen("steps", lanes.add);
  listen("requests", (event) => {
    requests.add(event, first);
    first = false;
    topology.drawPushes();
  });
  listen("status", onStatus);
  listen("lost", (frames) => {
    lost += frames;
    say("stream", `live, ${whole(lost)} frames lost`, "bad");
  });
}

function listen(name, use) {
  source.addEventListener(name, (event) => use(JSON.parse(event.data)));
}

function onStatus(status) {
  remember(status);
  lanes.known(status);
  requests.known(status);
  topology.draw(status);
  const { proxy } = status;
  setText(byId("model"), proxy.served_models.join(", "));
  const worker = proxy.workers > 1 ? `, worker ${proxy.worker} of ${proxy.workers}` : "";
  say("ready", (proxy.ready ? "ready" : "not ready") + worker, proxy.ready ? "good" : "bad");
  byId("why").hidden = proxy.ready;
  setText(byId("why"), proxy.not_ready_because);
  drawFigures(proxy);
}

function drawFigures(proxy) {
  const sum = (counts) => Object.values(counts).reduce((total, count) => total + count, 0);
  const ended = growth((status) => sum(status.proxy.requests_by_outcome));
  const firstTokens = growth((status) => status.proxy.ttft_count);
  const waits = growth((status) => status.proxy.ttft_sum_s);
  const attempts = growth((status) => sum(status.proxy.attempts_by_reason));
  fillList(byId("figures"), [
    ["in flight", whole(proxy.in_flight_requests)],
    ["queued here", whole(proxy.queued_requests)],
    ["ended, 10 s", ended && `${(ended.by / ended.seconds).toFixed(1)} /s`],
    ["first token, mean of 10 s", firstTokens?.by && waits ? milliseconds((1000 * waits.by) / firstTokens.by) : null],
    ["attempts, 10 s", attempts && whole(attempts.by)],
  ]);
  const list = (counts) =>
    Object.entries(counts)
      .filter(([, count]) => count > 0)
      .map(([name, count]) => `${name} ${whole(count)}`)
      .join(", ") || "none";
  setText(
    byId("totals"),
    `Since the start: ended by ${list(proxy.requests_by_outcome)}; attempts by reason: ${list(proxy.attempts_by_reason)}.`,
  );
}

function say(id, text, className) {
  setText(byId(id), text);
  byId(id).className = `pill ${className}`;
}

setInterval(topology.drawPushes, 500);
addEventListener("resize", topology.drawPushes);
addEventListener("pagehide", () => source.close());
open();
