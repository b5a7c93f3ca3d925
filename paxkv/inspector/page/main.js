// The inspector page: receives frames, keeps the last minutes, and draws the state at one moment.
import { CACHED, FIXED, FREE, SHARED, USED, decodeFrame } from "./state.js";
import { History } from "./history.js";
import { follow, replay } from "./feed.js";
import { BlockMap } from "./map.js";
import { Charts, compact, duration, percent } from "./charts.js";
import { RequestList, describeRunning, describeWaiting, drawHead, setText } from "./requests.js";
import { PrefixTree, buildTree } from "./tree.js";
import { Details } from "./details.js";
import { EventLog } from "./log.js";
import { ageGradient, css, readPalette } from "./palette.js";

const $ = (id) => document.getElementById(id);
const PANEL_MS = 200, TREE_MS = 1000, TREE_SLICE_MS = 5;
const TREE_EMPTY = $("tree-empty").textContent;
const TRACE_FRAME_MS = 60; // time per frame when a trace plays

const live = new History(); // the engine's frames; also grows while a trace is in view
let loaded = null; // the history of a loaded trace
let index = -1; // frame in view; -1 follows the newest frame
let hello = null;
let trouble = "";
let selectedKey = 0;
let pointed = -1;
let isDirty = true, arePanelsDue = true, areDetailsDue = true;
let drawnPanels = 0, drawnTree = 0, treeBuilder = null;
let playTimer = 0;

readPalette();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readPalette(); redraw(); });
const map = new BlockMap($("map"), (id) => { pointed = id; isDirty = areDetailsDue = true; });
map.onResize = redraw;
const charts = new Charts($("curves"));
charts.onPoint = redraw;
const running = new RequestList($("running"), select);
const waiting = new RequestList($("waiting"), select);
running.onScroll = waiting.onScroll = () => { arePanelsDue = true; };
const tree = new PrefixTree($("tree"), $("tree-note"), (ids) => { map.marked = ids === null ? null : new Set(ids); redraw(); });
const details = new Details($("details"));
details.onAnswer = () => { areDetailsDue = true; isDirty = true; };
const log = new EventLog($("log"));

const shown = () => loaded || live;
const isFollowing = () => index < 0;
const viewIndex = () => (isFollowing() ? shown().length - 1 : Math.min(index, shown().length - 1));

function redraw() { isDirty = arePanelsDue = true; drawnPanels = 0; }

function select(key) {
  selectedKey = selectedKey === key ? 0 : key;
  redraw();
}

// ---- time ----------------------------------------------------------------------------------

function goTo(wanted) {
  const last = shown().length - 1;
  stopPlaying();
  index = Math.min(Math.max(wanted, 0), last);
  redraw();
}

function goLive() {
  stopPlaying();
  if (loaded) { loaded = null; log.reset(live); treeBuilder = null; $("trace").value = ""; showNote(""); }
  index = -1;
  redraw();
}

function togglePause() {
  if (loaded) { if (playTimer) stopPlaying(); else play(); } else if (isFollowing()) goTo(shown().length - 1); else goLive();
  redraw();
}

function play() {
  if (index >= loaded.length - 1) index = 0;
  playTimer = setInterval(() => {
    if (index >= loaded.length - 1) { stopPlaying(); redraw(); return; }
    index++;
    isDirty = true;
  }, TRACE_FRAME_MS);
}

function stopPlaying() { clearInterval(playTimer); playTimer = 0; }

$("pause").addEventListener("click", togglePause);
$("back").addEventListener("click", () => goTo(viewIndex() - 1));
$("forward").addEventListener("click", () => goTo(viewIndex() + 1));
$("live").addEventListener("click", goLive);
$("scrub").addEventListener("input", (event) => goTo(Number(event.target.value)));
for (const radio of document.querySelectorAll("input[name=mode]")) radio.addEventListener("change", () => setMode(radio.value));

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isControl = event.target.closest?.("button, input, [contenteditable]");
  if (event.key === " " && !isControl) { event.preventDefault(); togglePause(); }
  if (event.key === "ArrowLeft" && !isControl) goTo(viewIndex() - 1);
  if (event.key === "ArrowRight" && !isControl) goTo(viewIndex() + 1);
  if (event.key === "l" || event.key === "L") goLive();
  const mode = { 1: "state", 2: "request", 3: "age" }[event.key];
  if (mode) { document.querySelector(`input[name=mode][value=${mode}]`).checked = true; setMode(mode); }
  if (event.key === "Escape") { selectedKey = 0; redraw(); }
});

function setMode(mode) { map.mode = mode; legendFor = ""; redraw(); }

// ---- frames --------------------------------------------------------------------------------

function addFrame(history, frame) {
  const entry = history.push(decodeFrame(frame));
  if (entry === null) return;
  if (history === shown()) {
    if (isFollowing() || loaded) log.add(entry, history.head);
    if (isFollowing()) isDirty = true;
  }
}

follow(new AbortController().signal, {
  event(name, data) {
    if (name === "hello") { hello = data; details.showsText = data.shows_text; }
    else if (name === "snapshot" || name === "delta") {
      const numDropped = live.numDropped, length = live.length;
      trouble = "";
      addFrame(live, data);
      // Correct `index` for dropped frames, so that the same frame stays in view while it exists.
      if (!loaded && index >= 0) index = live.length < length - (live.numDropped - numDropped) ? 0 : Math.max(index - (live.numDropped - numDropped), 0);
    } else if (name === "trouble") { trouble = data.message; isDirty = true; }
  },
  lost(message) { trouble = message; isDirty = true; },
});

async function loadTrace(file) {
  if (!file) return;
  if (hello && file.size > hello.max_trace_bytes) {
    showNote(`${file.name} has ${file.size} bytes; this server accepts at most ${hello.max_trace_bytes}. Start it with a larger --inspector-max-trace-bytes.`);
    return;
  }
  stopPlaying();
  showNote(`Replaying ${file.name} on the server…`);
  const history = new History();
  history.name = file.name;
  try {
    await replay(file, new AbortController().signal, (line) => {
      if (line.error) throw new Error(line.error);
      if (line.end) { history.end = line.end; return; }
      if (history.length === 0) { loaded = history; index = 0; log.reset(history); treeBuilder = null; selectedKey = 0; }
      addFrame(history, line.frame);
      isDirty = true;
    });
    const end = history.end;
    showNote(end && end.note ? `${file.name}: ${end.note}` : "");
    if (loaded === history && !playTimer) play();
    if (end) history.title = `${file.name}: ${end.num_steps} steps, ${end.num_requests} requests, ${end.num_preemptions} preemptions`;
  } catch (error) {
    showNote(`${file.name} cannot be shown: ${error.message}`);
    if (history.length === 0 && loaded === history) goLive();
  }
  $("trace").value = "";
  redraw();
}

$("trace").addEventListener("change", (event) => loadTrace(event.target.files[0]));
document.addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dropping"); });
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  loadTrace(event.dataTransfer.files[0]);
});

function showNote(text) {
  $("note").hidden = !text;
  setText($("note"), text);
}

// ---- drawing -------------------------------------------------------------------------------

let legendFor = "";
function drawLegend(state) {
  const wanted = `${map.mode} ${css.used} ${state.pool.groups.some((g) => g.window)}`;
  if (legendFor !== wanted) {
    legendFor = wanted;
    const items = map.mode === "age"
      ? [["", "ramp", "just changed → five minutes ago or before"], ["free", "free", "never used"], ["fixed", "fixed", "never handed out"]]
      : map.mode === "request"
        ? [["", "requests", "one color per request"], ["cached", "cached", "cached, evictable"], ["shared2", "shared", "shared by several"], ["free", "free", "free"]]
        : [["free", "free", "free"], ["cached", "cached", "cached, evictable"], ["used", "used", "in use"], ["shared2", "shared", "shared by 2"],
          ["shared3", "", "3–7"], ["shared8", "", "8+"], ["evicted", "", "just evicted"], ["fixed", "fixed", "never handed out"]];
    const list = items.map(([color, id, text]) => legendItem(color, id, text));
    if (state.pool.groups.some((group) => group.window)) list.push(legendItem("hole", "", "in tables: left the window"));
    $("legend").replaceChildren(...list);
  }
  const counts = state.counts();
  const texts = { free: counts[FREE], cached: counts[CACHED], used: counts[USED], shared: counts[SHARED], fixed: counts[FIXED] };
  for (const [id, count] of Object.entries(texts)) {
    const element = document.getElementById(`count-${id}`);
    if (element) setText(element, String(count));
  }
  return counts;
}

function legendItem(color, id, text) {
  const item = document.createElement("li");
  const swatch = document.createElement("span");
  swatch.className = id === "ramp" ? "ramp" : "swatch";
  if (id === "ramp") swatch.style.background = ageGradient;
  else if (id === "requests") swatch.style.background = "conic-gradient(#0072b2 0 25%, #e69f00 0 50%, #009e73 0 75%, #cc79a7 0)";
  else if (color === "hole") swatch.classList.add("hole");
  else swatch.style.background = css[color];
  item.append(swatch, text);
  if (id && id !== "ramp" && id !== "requests") {
    const count = document.createElement("b");
    count.id = `count-${id}`;
    item.append(count);
  }
  return item;
}

function drawNumbers(state, point, counts) {
  const usable = state.n - state.fixed.size;
  const counters = state.counters;
  setText($("kpi-usage"), percent(point.usage));
  setText($("kpi-blocks"), `${usable - state.numFree} of ${usable} blocks`);
  setText($("kpi-running"), String(state.running.length));
  setText($("kpi-waiting"), `${state.numWaiting} waiting`);
  setText($("kpi-tps"), compact(point.out));
  setText($("kpi-ttft"), duration(point.ttft));
  setText($("kpi-hits"), percent(point.hits));
  setText($("kpi-preemptions"), String(counters.num_preemptions));
  setText($("kpi-evictions"), String(counters.num_evictions));
  const numDrafts = counters.num_draft_tokens;
  setText($("kpi-drafts"), numDrafts ? percent(counters.num_accepted_tokens / numDrafts) : "–");
  setText($("kpi-accepted"), numDrafts ? `accepted, of ${numDrafts}` : "accepted");
  setText($("kpi-step"), duration((point.host + point.device) / 1000));
  setText($("kpi-step-split"), Number.isFinite(point.host) ? `${duration(point.host / 1000)} host + ${duration(point.device / 1000)}` : "host + device");
  setText($("pool-size"), `${state.n} blocks of ${[...new Set(state.pool.groups.map((g) => g.block_size))].join(" and ")} tokens`);
  setText($("head-note"), state.numFree ? `${state.numFree} free; ${counts[CACHED]} of them are still cached` : "no block is free: the next request waits, or the scheduler preempts one");
  setText($("requests-note"), `${state.running.length} running, at most ${state.pool.max_num_seqs}`);
  setText($("waiting-note"), state.numWaiting ? `${state.numWaiting}, the next one first` : "");
}

function drawPlayer() {
  const history = shown(), at = viewIndex(), last = history.length - 1;
  const isPaused = !isFollowing() && !playTimer;
  $("scrub").max = String(Math.max(last, 0));
  $("scrub").value = String(Math.max(at, 0));
  $("scrub").disabled = last < 1;
  $("back").disabled = at <= 0;
  $("forward").disabled = isFollowing() || at >= last;
  $("live").disabled = isFollowing() && !loaded;
  const offset = last >= 0 ? history.frames[at].frame.at_s - (loaded ? history.frames[0] : history.frames[last]).frame.at_s : 0;
  const clock = loaded ? `${offset.toFixed(2)} s` : isFollowing() ? "now" : `${offset.toFixed(1)} s`;
  setText($("clock"), clock);
  $("scrub").setAttribute("aria-valuetext", clock);
  setText($("pause"), loaded ? (playTimer ? "Pause" : "Play") : isPaused ? "Resume" : "Pause");
  $("pause").setAttribute("aria-pressed", String(isPaused && !loaded));
  const [kind, text] = loaded ? ["trace", "trace"] : trouble ? ["trouble", "no feed"] : last < 0 ? ["wait", "connecting"] : isPaused ? ["paused", "paused"] : ["live", "live"];
  $("status").dataset.kind = kind;
  setText($("status"), text);
  setText($("source"), loaded ? history.title || history.name : trouble || (hello ? `${hello.model} · paxkv ${hello.version}` : "connecting"));
  $("source").title = $("source").textContent;
}

function drawPanels(state, entry) {
  const counts = drawLegend(state);
  drawNumbers(state, entry.point, counts);
  running.draw(state, state.running, selectedKey, describeRunning);
  waiting.draw(state, state.waiting, selectedKey, describeWaiting);
  setText($("tree-empty"), state.pool.enable_prefix_caching ? TREE_EMPTY : "Prefix caching is off: start the server without --no-enable-prefix-caching to share prefixes.");
  $("running-empty").hidden = state.running.length > 0;
  $("waiting-empty").hidden = state.waiting.length > 0;
  drawHead($("head"), state);
  charts.draw(shown().frames, viewIndex());
  log.draw(shown(), viewIndex());
  $("log-empty").hidden = log.length > 0;
}

// Builds the tree in slices, one per animation frame, and draws it at most once per second.
function workOnTree(state, now) {
  if (treeBuilder === null) {
    if (now - drawnTree < TREE_MS) return;
    treeBuilder = buildTree(state);
  }
  const until = performance.now() + TREE_SLICE_MS;
  while (performance.now() < until) {
    const { value, done } = treeBuilder.next();
    if (!done) continue;
    treeBuilder = null;
    drawnTree = now;
    $("tree-empty").hidden = tree.draw(value) > 0;
    return;
  }
}

function frame(now) {
  requestAnimationFrame(frame);
  const history = shown();
  if (history.length === 0) { if (isDirty) { drawPlayer(); isDirty = false; } return; }
  const at = viewIndex();
  const state = history.at(at);
  workOnTree(state, now);
  if (isDirty) drawNow(state);
  // Panels contain text to read, so five updates per second are enough.
  const isPanelTime = arePanelsDue && now - drawnPanels >= PANEL_MS;
  if (isPanelTime) {
    drawnPanels = now;
    arePanelsDue = false;
    drawPanels(state, history.frames[at]);
  }
  if (isPanelTime || areDetailsDue) {
    areDetailsDue = false;
    details.whyNotAsked = loaded ? "not available in a trace" : isFollowing() ? "" : "return to live to see them: the engine may have changed this block since";
    details.draw(state, pointed);
  }
}

function drawNow(state) {
  isDirty = false;
  arePanelsDue = true;
  $("map-empty").hidden = true;
  map.selectedKey = state.requests.has(selectedKey) ? selectedKey : 0;
  map.pointed = pointed;
  map.draw(state);
  drawPlayer();
}
requestAnimationFrame(frame);

// For the browser's console and for tests.
globalThis.inspector = { live, shown, viewIndex, get state() { return shown().length ? shown().at(viewIndex()) : null; } };
