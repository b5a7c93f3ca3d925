// Lists of running and waiting requests, each with its block table.
import { STATUS } from "./state.js";
import { drawStrip, stateColor } from "./map.js";
import { css, requestColor } from "./palette.js";

const MAX_ROWS = 60;

export class RequestList {
  constructor(list, onSelect) {
    this.list = list;
    this.onSelect = onSelect;
    this.rows = new Map();
    // Draw only visible tables: drawing dozens would take longer than drawing the map.
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) entry.target.isSeen = entry.isIntersecting;
      this.onScroll?.();
    }, { root: list.parentElement });
  }

  // `items` are rows of the state; `describe` returns a row's text.
  draw(state, items, selectedKey, describe) {
    const shown = items.slice(0, MAX_ROWS);
    const keys = new Set(shown.map((item) => item.key));
    for (const [key, row] of this.rows) {
      if (!keys.has(key)) { this.observer.unobserve(row.element); row.element.remove(); this.rows.delete(key); }
    }
    shown.forEach((item, place) => {
      const row = this.rows.get(item.key) || this.add(item.key);
      if (this.list.children[place] !== row.element) this.list.insertBefore(row.element, this.list.children[place] || null);
      setText(row.name, state.name(item.key));
      setText(row.what, describe(item, state.requests.get(item.key)));
      row.dot.style.background = requestColor(item.key);
      row.element.setAttribute("aria-selected", String(item.key === selectedKey));
      row.canvas.hidden = !state.tables.has(item.key);
      if (row.element.isSeen) this.drawTables(state, item, row.canvas);
    });
  }

  add(key) {
    const element = document.createElement("li");
    element.className = "request";
    element.tabIndex = 0;
    element.setAttribute("role", "option");
    const dot = document.createElement("span");
    dot.className = "swatch";
    const name = document.createElement("span");
    name.className = "name";
    const what = document.createElement("span");
    what.className = "what";
    const canvas = document.createElement("canvas");
    canvas.setAttribute("role", "img");
    element.append(dot, name, what, canvas);
    element.addEventListener("click", () => this.onSelect(key));
    element.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.onSelect(key);
    });
    const row = { element, dot, name, what, canvas };
    this.rows.set(key, row);
    this.observer.observe(element);
    return row;
  }

  drawTables(state, item, canvas) {
    const groups = state.tables.get(item.key);
    if (!groups) return;
    const cells = [];
    for (const table of groups) {
      if (!table) continue;
      if (cells.length) cells.push(-2); // a space between groups
      for (let i = 0; i < table.ids.length; i++) cells.push(i < table.skipped ? -1 : table.ids[i]);
    }
    const holes = cells.filter((id) => id === -1).length;
    const label = `${cells.length} blocks` + (holes ? `, ${holes} left the sliding window` : "");
    if (canvas.getAttribute("aria-label") !== label) { canvas.setAttribute("aria-label", label); canvas.title = label; }
    drawStrip(canvas, cells, {
      maxCell: 10,
      color: (id) => (id === -1 || id === 0 ? null : id === -2 ? "transparent" : stateColor(state, id)),
    });
  }
}

export function describeRunning(item, info) {
  const numPrompt = info ? info.num_prompt_tokens : 0;
  const parts = [];
  if (item.numComputed < numPrompt) parts.push(`prompt ${item.numComputed} of ${numPrompt}`);
  else parts.push(`${numPrompt} + ${Math.max(item.numTokens - numPrompt, 0)} tokens`);
  if (item.numCached) parts.push(`${item.numCached} cached`);
  if (item.numPreemptions) parts.push(`preempted ${item.numPreemptions}×`);
  return parts.join(" · ");
}

export function describeWaiting(item) {
  const parts = [STATUS[item.status] || "waiting", `${item.numTokens} tokens`];
  if (item.numPreemptions) parts.push(`preempted ${item.numPreemptions}×`);
  return parts.join(" · ");
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function drawHead(canvas, state) {
  drawStrip(canvas, state.evictionHead, {
    maxCell: 18,
    color: (id) => (state.hash[id] === 0 ? css.free : css.cached),
  });
}
