// Fetches snapshots of counters, and shows them. Rates are those between this page's own two last snapshots. All text
// comes into the page as text nodes, whatever a model is called.
"use strict";

const LOOK_MS = 2000;
const HISTORY_MS = 10000;
const TIMEOUT_MS = 10000;
const MOST_RETRY_MS = 20000;
const FILTER_FROM = 8;
const STATES = {READY: ["good", "Ready"], LOADING: ["", "Loading"], UNLOADING: ["", "Unloading"],
                UNAVAILABLE: ["bad", "Failed"], "": ["none", "Not loaded"]};
const PHASES = {starting: "Loading models", ready: "Not ready: a model failed", draining: "Draining", stopped: "Stopped"};
const FAILURES = {REJECTED: "rejected", CANCELED: "canceled", BACKEND: "in the model", OTHER: "other"};

const byId = id => document.getElementById(id);
const views = new Map();        // of models, by their keys
let before = null;              // the snapshot before
let history = {interval_secs: 10, models: []};
let historyAt = -HISTORY_MS;
let failures = 0;               // of fetches, in a row
let timer = 0;

function node(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const whole = new Intl.NumberFormat("en");
const NONE = "–";

function rateText(rate) {
  if (rate === null) return NONE;
  return rate >= 100 || rate === 0 ? whole.format(Math.round(rate)) : rate.toPrecision(rate < 1 ? 1 : 2 + (rate >= 10));
}

function timeText(ms) {
  if (ms === null || ms === undefined) return NONE;
  if (ms >= 1000) return `${Number((ms / 1000).toPrecision(3))} s`;
  return ms >= 1 ? `${Number(ms.toPrecision(3))} ms` : `${Math.round(ms * 1000)} µs`;
}

function bytesText(bytes) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (bytes >= size) return `${Number((bytes / size).toPrecision(3))} ${unit}`;
  }
  return `${bytes} B`;
}

function durationText(secs) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = Math.max(0, parts.findIndex(([size]) => secs >= size));
  const shown = secs < 1 ? [[1, "s"]] : parts.slice(first, first + 2);
  let left = Math.floor(secs);
  return shown.map(([size, unit]) => {
    const count = Math.floor(left / size);
    left -= count * size;
    return `${count} ${unit}`;
  }).join(" ");
}

const dateText = secs => new Date(secs * 1000).toLocaleDateString(undefined, {dateStyle: "medium"});

const plural = (count, word) => `${whole.format(count)} ${word}${count === 1 ? "" : "s"}`;

function spark(label) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const area = document.createElementNS(space, "polygon"), line = document.createElementNS(space, "polyline");
  svg.setAttribute("viewBox", "0 0 100 24");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  area.setAttribute("class", "area");
  line.setAttribute("class", "line");
  svg.append(area, line);
  return {svg, draw(values, text) {
    const most = Math.max(...values, 1e-9), step = 100 / Math.max(1, values.length - 1);
    const points = values.map((value, i) => `${(i * step).toFixed(1)},${(23 - 22 * value / most).toFixed(1)}`);
    svg.setAttribute("aria-label", values.length > 1
      ? `${label} over the last ten minutes: at most ${text(most)}, last ${text(values[values.length - 1])}`
      : `${label}: no history yet`);
    svg.toggleAttribute("hidden", !values.some(Boolean) || values.length < 2);
    line.setAttribute("points", points.join(" "));
    area.setAttribute("points", `0,24 ${points.join(" ")} 100,24`);
  }};
}

// ---- tiles

function tile(label, className) {
  const value = node("dd", "value"), below = node("dd", "muted");
  byId("tiles").append(node("div", className, node("dt", "", label), value, below));
  return {value, below};
}

const tiles = {};

function makeTiles() {
  tiles.requests = tile("Requests/s", "broad");
  tiles.requests.spark = spark("Requests per second");
  tiles.requests.below.append(tiles.requests.spark.svg);
  tiles.failures = tile("Failures/s");
  tiles.models = tile("Models ready");
  tiles.memory = tile("Server memory");
  tiles.cpu = tile("CPU in use");
  tiles.inflight = tile("Requests in memory", "broad");
  tiles.meter = node("meter", "");
  tiles.meter.setAttribute("aria-label", "Share of --max-inflight-mib in use");
  tiles.inflightText = node("span");
  tiles.inflight.below.append(tiles.meter, tiles.inflightText);
}

function showServer(now, secs, rates) {
  const server = now.server, used = Object.values(server.processes);
  setText(byId("name"), server.name);
  document.title = `${server.ready ? "" : "! "}${server.name}`;
  showState(server.ready ? "good" : server.state === "ready" ? "bad" : "",
            server.ready ? "Ready" : server.problem ? "Not live: no repository" : PHASES[server.state] || server.state);
  const took = Object.entries(server.startup_secs).filter(([, value]) => value >= 0.05)
    .map(([phase, value]) => `${phase.replace("_", "-")} ${timeText(value * 1000)}`);
  setText(byId("about"), [`Version ${server.version}`, `up ${durationText(server.uptime_secs)}`,
    ...(server.workers > 1 ? [`${server.workers} workers`] : []),
    ...(took.length ? [`start: ${took.join(", ")}`] : [])].join(" · "));
  setText(byId("problem"), server.problem);
  byId("problem").hidden = !server.problem;

  setText(tiles.requests.value, rateText(rates.requests));
  setText(tiles.failures.value, rateText(rates.failures));
  setText(tiles.failures.below, `${whole.format(rates.failed)} since the models were loaded`);
  const versions = server.versions, known = Object.values(versions).reduce((sum, count) => sum + count, 0);
  setText(tiles.models.value, `${versions.READY || 0} of ${known}`);
  setText(tiles.models.below, Object.entries(versions).filter(([state]) => state && state !== "READY")
    .map(([state, count]) => `${count} ${STATES[state][1].toLowerCase()}`).join(", "));
  const resident = used.reduce((sum, each) => sum + each.resident_bytes, 0);
  setText(tiles.memory.value, resident ? bytesText(resident) : NONE);
  setText(tiles.memory.below, `models: ${bytesText(now.models.reduce((sum, each) => sum + (each.memory_bytes || 0), 0))}`);
  const cores = secs ? Math.max(0, (cpuOf(now) - cpuOf(before)) / secs) : null;
  setText(tiles.cpu.value, cores === null ? NONE : `${cores.toFixed(cores < 10 ? 2 : 1)} cores`);
  setText(tiles.cpu.below, used.length > 1 ? `of ${used.length} processes` : "of one process");
  setText(tiles.inflight.value, bytesText(server.inflight_bytes));
  tiles.meter.max = server.inflight_limit_bytes;
  tiles.meter.high = 0.8 * server.inflight_limit_bytes;
  tiles.meter.value = server.inflight_bytes;
  setText(tiles.inflightText, `limit ${bytesText(server.inflight_limit_bytes)}`);
}

function cpuOf(snapshot) {
  return Object.values(snapshot.server.processes).reduce((sum, each) => sum + each.cpu_secs, 0);
}

function showState(className, text) {
  const state = byId("state");
  state.className = `pill ${className}`;
  setText(state, text);                   // a live region: its text changes only when the state does
}

// ---- models

const keyOf = model => `${model.name}\n${model.version}`;
const failedOf = model => Object.values(model.failures || {}).reduce((sum, count) => sum + count, 0);

function cell(className, label, ...children) {
  const made = node("td", className, ...children);
  made.setAttribute("role", "cell");
  if (label) made.dataset.label = label;
  return made;
}

function makeView(model) {
  const view = {row: node("tr"), name: node("th"), about: node("span", "muted"), pill: node("span", "pill"),
                cells: {}, rates: spark(`Requests per second of ${model.name}`),
                latencies: spark(`Mean latency of ${model.name}`), rate: node("span"), latency: node("span"),
                items: node("span", "muted"),
                failed: node("span", "muted"), details: null, before: null};
  view.row.setAttribute("role", "row");
  view.name.scope = "row";
  view.name.setAttribute("role", "rowheader");
  view.name.append(model.name, ...(model.version ? [" ", node("span", "version", `v${model.version}`)] : []), view.about);
  view.state = cell("state", "", view.pill);
  view.reason = cell("reason", "");
  view.reason.colSpan = 8;
  const {cells} = view;
  cells.rate = cell("wide", "Requests/s", node("div", "spark", view.rate, view.rates.svg), view.items);
  cells.latency = cell("wide", "Mean latency", node("div", "spark", view.latency, view.latencies.svg));
  for (const name of ["p50", "p90", "p99"]) cells[name] = cell("number quantile", name);
  cells.waiting = cell("number", "Waiting");
  cells.failed = cell("number", "Failed", node("span"), view.failed);
  cells.memory = cell("number", "Memory");
  view.rates.draw([], rateText);
  view.latencies.draw([], timeText);
  return view;
}

function showModel(view, model, now) {
  const [className, state] = STATES[model.state] || ["", model.state];
  view.pill.className = `pill ${className}`;
  setText(view.pill, state);
  const loaded = model.requests !== undefined;
  setText(view.about, !loaded ? "" : [model.precision || model.platform,
    model.built_secs ? `built ${dateText(model.built_secs)}` : "",
    model.instances && `${model.instances} ${model.instances === "1" ? "instance" : "instances"}`].filter(Boolean).join(" · "));
  const wanted = loaded ? [view.name, view.state, ...Object.values(view.cells)] : [view.name, view.state, view.reason];
  if (view.row.children.length !== wanted.length) view.row.replaceChildren(...wanted);
  const sums = {requests: 0, items: 0, failures: 0, failed: 0, known: false};
  if (!loaded) {
    setText(view.reason, model.reason || "");
    view.before = null;
    return sums;
  }
  const failed = failedOf(model), last = view.before;
  view.before = {revision: model.revision, at: now, requests: model.requests, items: model.items, failed};
  const secs = last && last.revision === model.revision && model.requests >= last.requests ? now - last.at : 0;
  if (secs > 0) {
    Object.assign(sums, {requests: (model.requests - last.requests) / secs, items: (model.items - last.items) / secs,
                         failures: Math.max(0, failed - last.failed) / secs, known: true});
  }
  sums.failed = failed;
  setText(view.rate, rateText(sums.known ? sums.requests : null));
  setText(view.items, sums.items > 0 ? `${rateText(sums.items)} items/s` : "");
  view.row.classList.toggle("idle", !model.requests && !model.pending);
  const {cells} = view, quantiles = model.latencies_ms || [null, null, null];
  ["p50", "p90", "p99"].forEach((name, i) => setText(cells[name], timeText(quantiles[i])));
  setText(cells.waiting, whole.format(model.pending));
  setText(cells.failed.firstChild, whole.format(failed));
  setText(view.failed, Object.entries(model.failures).map(([why, count]) =>
    `${whole.format(count)} ${FAILURES[why] || why}`).join(", "));
  cells.failed.classList.toggle("failing", failed > 0);
  setText(cells.memory, model.memory_bytes ? bytesText(model.memory_bytes) : NONE);
  return sums;
}

function showModels(snapshot) {
  const now = snapshot.server.now_secs, seen = new Set(), rows = byId("rows");
  const rates = {requests: 0, failures: 0, failed: 0};
  let known = false, at = rows.firstElementChild;
  for (const model of snapshot.models) {
    const key = keyOf(model);
    seen.add(key);
    let view = views.get(key);
    if (!view) views.set(key, view = makeView(model));
    const sums = showModel(view, model, now);
    known ||= sums.known;
    for (const name of Object.keys(rates)) rates[name] += sums[name];
    if (view.row === at) at = at.nextElementSibling;
    else rows.insertBefore(view.row, at);
    showBatches(view, model);
  }
  for (const [key, view] of views) {
    if (seen.has(key)) continue;
    view.row.remove();
    if (view.details) view.details.remove();
    views.delete(key);
  }
  byId("models").hidden = !views.size;
  const empty = views.size === 0 ? "There is no model in the repository." : snapshot.omitted
    ? `${plural(snapshot.omitted, "more version")} not shown; /v2/repository/index has all.` : "";
  setText(byId("empty"), empty);
  byId("empty").hidden = !empty;
  byId("filter-label").hidden = views.size < FILTER_FROM;
  byId("batches").hidden = !byId("batch-list").children.length;
  applyFilter();
  if (!known && before === null) rates.requests = rates.failures = null;
  return rates;
}

function applyFilter() {
  const wanted = byId("filter").value.trim().toLowerCase();
  for (const [key, view] of views) view.row.hidden = !key.toLowerCase().includes(wanted);
}

// ---- batches

function showBatches(view, model) {
  if (!model.batches || !model.batches.length) {
    if (view.details) view.details.remove();
    view.details = null;
    return;
  }
  if (!view.details) {
    view.summary = node("span", "muted");
    view.table = node("tbody");
    view.closed = node("p", "muted");
    const head = node("tr", "");
    for (const [text, className] of [["Batch size", ""], ["Executions", "number"], ["Mean time", "number"], ["Share", "share"]]) {
      const th = node("th", className, text);
      th.scope = "col";
      head.append(th);
    }
    const caption = node("caption", "", "Executed batches by size, since the model was loaded");
    view.details = node("details", "", node("summary", "", model.name, " ", node("span", "version", `v${model.version}`),
      view.summary), node("table", "", caption, node("thead", "", head), view.table), view.closed);
    byId("batch-list").append(view.details);
  }
  const total = model.batches.reduce((sum, [, count]) => sum + count, 0);
  setText(view.summary, `${plural(total, "execution")}, mean batch ${Number((model.items / Math.max(1, total)).toPrecision(3))}`);
  if (!view.details.open && view.table.children.length) return;
  view.table.replaceChildren(...model.batches.map(([size, count, ms]) => {
    const bar = node("progress"), first = node("th", "", whole.format(size));
    bar.max = total;
    bar.value = count;
    bar.setAttribute("aria-hidden", "true");
    first.scope = "row";
    return node("tr", "", first, node("td", "number", whole.format(count)), node("td", "number", timeText(ms)),
                node("td", "share", bar, `${Math.round(100 * count / total)} %`));
  }));
  const closed = Object.entries(model.closed).map(([why, count]) => `${why} ${whole.format(count)}`).join(", ");
  setText(view.closed, `Batches closed: ${closed || "none"}. Loaded in ${timeText(1000 * model.load_secs)}, ` +
    `of it warm-up ${timeText(1000 * model.warmup_secs)}.`);
}

// ---- history

function showHistory() {
  const sums = [];
  for (const model of history.models) {
    const view = views.get(keyOf(model));
    if (view) {
      view.rates.draw(model.rates, rateText);
      view.latencies.draw(model.latencies_ms, timeText);
      setText(view.latency, timeText([...model.latencies_ms].reverse().find(ms => ms > 0)));
    }
    [...model.rates].reverse().forEach((rate, i) => { sums[i] = (sums[i] || 0) + rate; });
  }
  for (const view of views.values()) if (!view.latency.textContent) setText(view.latency, NONE);
  tiles.requests.spark.draw(sums.reverse(), rateText);
}

// ---- fetching

async function fetched(path) {
  const response = await fetch(path, {cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS)});
  if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
  return response.json();
}

async function look() {
  clearTimeout(timer);
  try {
    const now = await fetched("status/data.json");
    if (before && now.server.now_secs < before.server.now_secs) before = null;     // the server was restarted
    const secs = before ? now.server.now_secs - before.server.now_secs : 0;
    if (secs > 0 || !before) {
      showServer(now, secs, showModels(now));
      before = now;
    }
    if (performance.now() - historyAt >= HISTORY_MS) {
      historyAt = performance.now();
      history = await fetched("status/history.json");
    }
    showHistory();
    failures = 0;
    document.body.classList.remove("stale");
  } catch (error) {
    failures += 1;
    document.body.classList.add("stale");
    showState("bad", `No answer from the server (${error.message})`.slice(0, 80));
  }
  if (!document.hidden) timer = setTimeout(look, Math.min(MOST_RETRY_MS, LOOK_MS * (1 + failures)));
}

makeTiles();
byId("filter").addEventListener("input", applyFilter);
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
look();
