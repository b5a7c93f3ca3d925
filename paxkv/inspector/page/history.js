// The last minutes: a ring of frames with some complete states, and the points of the curves.
import { PoolState } from "./state.js";

const MAX_FRAMES = 3000; // five minutes at ten frames per second
const KEYFRAME_BYTES = 96 * 2 ** 20;
const MAX_POINTS = MAX_FRAMES;
const WINDOW_S = 1; // for throughput and step times
const LONG_WINDOW_S = 10; // for hit rates and times to first token

export class History {
  constructor() { this.clear(); }

  clear() {
    this.frames = []; // {frame, events, keyframe: PoolState | null, point}
    this.head = null; // state after the last frame
    this.view = null; this.viewIndex = -1;
    this.sinceKeyframe = 0;
    this.keyframeEvery = 100;
    this.numDropped = 0;
  }

  get length() { return this.frames.length; }

  push(frame) {
    if (frame.pool !== null) {
      this.restartAt(frame);
    } else if (this.head === null) {
      return null;
    }
    const state = this.head;
    const events = state.apply(frame);
    const entry = { frame, events, keyframe: null, point: null };
    if (frame.pool !== null || ++this.sinceKeyframe >= this.keyframeEvery) {
      entry.keyframe = state.clone();
      this.sinceKeyframe = 0;
    }
    this.frames.push(entry);
    entry.point = makePoint(this.frames, this.frames.length - 1, state);
    this.trim();
    return entry;
  }

  restartAt(frame) {
    const old = this.head;
    // Drop earlier frames if the pool is another one or the engine has restarted.
    const isSame = old !== null && old.n === frame.pool.num_blocks && frame.at_s >= old.at
      && frame.counters.num_steps >= old.counters.num_steps;
    if (!isSame) this.clear();
    this.head = new PoolState(frame.pool);
    if (isSame) this.head.changedAt.set(old.changedAt);
    this.keyframeEvery = Math.max(100, Math.ceil((48 * this.head.n * MAX_FRAMES) / KEYFRAME_BYTES));
  }

  trim() {
    if (this.frames.length <= MAX_POINTS) return;
    // The first remaining frame must be a keyframe, because later states are computed from it.
    let first = this.frames.length - MAX_POINTS;
    while (first < this.frames.length && this.frames[first].keyframe === null) first++;
    if (first >= this.frames.length) return; // no later keyframe yet
    this.frames.splice(0, first);
    this.numDropped += first;
    this.viewIndex = Math.max(this.viewIndex - first, -1);
  }

  // Returns the state after frame `index`. The caller must not change it.
  at(index) {
    if (index >= this.frames.length - 1) return this.head;
    if (this.view !== null && this.viewIndex === index) return this.view;
    let start = index;
    while (this.frames[start].keyframe === null) start--;
    const canGoOn = this.view !== null && this.viewIndex >= start && this.viewIndex < index;
    if (!canGoOn) {
      this.view = this.frames[start].keyframe.clone();
      this.viewIndex = start;
    }
    while (this.viewIndex < index) this.view.apply(this.frames[++this.viewIndex].frame);
    return this.view;
  }
}

// Returns the values of all curves at one frame. Rates are differences over a time window.
function makePoint(frames, index, state) {
  const now = frames[index].frame;
  const short = before(frames, index, WINDOW_S);
  const long = before(frames, index, LONG_WINDOW_S);
  const c = now.counters;
  const usable = state.n - state.fixed.size;
  const point = {
    at: now.at_s,
    usage: usable > 0 ? 1 - now.num_free_blocks / usable : 0,
    running: state.running.length,
    waiting: state.numWaiting,
    out: NaN, prompt: NaN, host: NaN, device: NaN, hits: NaN, ttft: NaN, ttftMax: NaN,
  };
  if (short !== null) {
    const s = short.counters, dt = now.at_s - short.at_s, steps = c.num_steps - s.num_steps;
    if (dt > 0) {
      point.out = (c.num_output_tokens - s.num_output_tokens) / dt;
      const computed = (c.num_scheduled_tokens - s.num_scheduled_tokens) / dt;
      point.prompt = Math.max(computed - point.out, 0);
    }
    if (steps > 0) {
      point.host = (1000 * (c.host_s - s.host_s)) / steps;
      point.device = (1000 * (c.device_s - s.device_s)) / steps;
    }
  }
  if (long !== null) {
    const queries = c.prefix_cache_queries - long.counters.prefix_cache_queries;
    if (queries > 0) point.hits = (c.prefix_cache_hits - long.counters.prefix_cache_hits) / queries;
  }
  const ttfts = [];
  for (let i = index; i >= 0 && now.at_s - frames[i].frame.at_s <= LONG_WINDOW_S; i--) {
    for (const value of frames[i].frame.ttft_s) ttfts.push(value);
    if (ttfts.length > 2000) break;
  }
  if (ttfts.length) {
    ttfts.sort((a, b) => a - b);
    point.ttft = ttfts[ttfts.length >> 1];
    point.ttftMax = ttfts[ttfts.length - 1];
  }
  return point;
}

function before(frames, index, window) {
  const now = frames[index].frame;
  let found = null;
  for (let i = index - 1; i >= 0; i--) {
    const frame = frames[i].frame;
    // Stop at a restart of the engine or of its recording: its counters began at 0 again.
    if (frame.counters.num_steps > now.counters.num_steps) break;
    found = frame;
    if (now.at_s - frame.at_s >= window) break;
  }
  return found;
}
