// The block map: an image with one pixel per block, scaled up. Fast also for very large pools.
import { CACHED, FIXED, FREE, USED } from "./state.js";
import { agePixel, css, pixelOf, requestPixel, sharedName } from "./palette.js";

const MAX_CELL = 30, MIN_CELL = 1;
const AREA_SHARE = 0.56; // height / width
const FLASH_S = 1.2, SMALL_FLASH_S = 0.3; // duration of an eviction's mark: a dot, or a small cell's color
const MIN_DOT_CELL = 8;

export class BlockMap {
  constructor(canvas, onPoint) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.tiny = document.createElement("canvas");
    this.state = null;
    this.mode = "state";
    this.pointed = -1;
    this.selectedKey = 0;
    this.marked = null; // ids of highlighted blocks, a Set; all others are dimmed
    this.columns = 0; this.cell = 0;
    canvas.addEventListener("pointermove", (event) => onPoint(this.idAt(event)));
    canvas.addEventListener("pointerdown", (event) => onPoint(this.idAt(event)));
    canvas.addEventListener("pointerleave", () => onPoint(-1));
    canvas.addEventListener("keydown", (event) => this.onKey(event, onPoint));
    new ResizeObserver(() => { this.layoutFor = ""; this.onResize?.(); }).observe(canvas.parentElement);
  }

  onKey(event, onPoint) {
    if (!this.state) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns,
      Home: -this.state.n, End: this.state.n };
    const move = moves[event.key];
    if (move === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const next = Math.min(Math.max(Math.max(this.pointed, 0) + move, 0), this.state.n - 1);
    this.pointed = next; // set here too: the next key may be pressed before the next drawing
    onPoint(next);
  }

  idAt(event) {
    if (!this.state || !this.cell) return -1;
    const box = this.canvas.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left) / this.cell);
    const y = Math.floor((event.clientY - box.top) / this.cell);
    const id = y * this.columns + x;
    return x >= 0 && x < this.columns && y >= 0 && id < this.state.n ? id : -1;
  }

  layout() {
    const width = Math.max(this.canvas.parentElement.clientWidth - 16, 40);
    const ratio = window.devicePixelRatio || 1;
    const wanted = `${width} ${ratio} ${this.state.n}`;
    if (this.layoutFor === wanted) return;
    this.layoutFor = wanted;
    const height = Math.max(width * AREA_SHARE, 420);
    this.cell = Math.min(Math.max(Math.floor(Math.sqrt((width * height) / this.state.n)), MIN_CELL), MAX_CELL);
    this.columns = Math.floor(width / this.cell);
    this.rows = Math.ceil(this.state.n / this.columns);
    this.ratio = ratio;
    this.canvas.style.height = `${this.rows * this.cell}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.rows * this.cell * ratio);
    this.tiny.width = this.columns;
    this.tiny.height = this.rows;
    this.tinyContext = this.tiny.getContext("2d");
    this.image = this.tinyContext.createImageData(this.columns, this.rows);
    this.pixels = new Uint32Array(this.image.data.buffer);
  }

  draw(state) {
    this.state = state;
    this.layout();
    this.color();
    this.tinyContext.putImageData(this.image, 0, 0);
    const c = this.context, size = this.cell * this.ratio;
    c.imageSmoothingEnabled = false;
    c.clearRect(0, 0, this.canvas.width, this.canvas.height);
    c.drawImage(this.tiny, 0, 0, this.columns * size, this.rows * size);
    if (this.cell >= 4) this.drawGaps(size);
    if (this.mode === "state" && this.cell >= MIN_DOT_CELL) this.drawEvictions(size);
    if (this.pointed >= 0 && this.pointed < state.n) this.drawPointed(size);
  }

  drawGaps(size) {
    const c = this.context;
    const gap = Math.max(1, Math.round(this.ratio * (this.cell >= 10 ? 2 : 1)));
    c.fillStyle = css.sunken;
    for (let x = 1; x <= this.columns; x++) c.fillRect(Math.round(x * size) - gap, 0, gap, this.canvas.height);
    for (let y = 1; y <= this.rows; y++) c.fillRect(0, Math.round(y * size) - gap, this.canvas.width, gap);
  }

  drawEvictions(size) {
    const { n, at, evictedAt } = this.state;
    const c = this.context, dot = Math.round(size * 0.36), inset = (size - dot) / 2 - this.ratio;
    c.fillStyle = css.evicted;
    for (let id = 0; id < n; id++) {
      if (at - evictedAt[id] >= FLASH_S) continue;
      c.fillRect((id % this.columns) * size + inset, Math.floor(id / this.columns) * size + inset, dot, dot);
    }
  }

  drawPointed(size) {
    const c = this.context;
    const x = (this.pointed % this.columns) * size, y = Math.floor(this.pointed / this.columns) * size;
    c.lineWidth = 2 * this.ratio;
    c.strokeStyle = css.outline;
    const grow = Math.max(3 * this.ratio - size / 2, 0) + this.ratio;
    c.strokeRect(x - grow, y - grow, size + 2 * grow, size + 2 * grow);
  }

  color() {
    const { state, pixels, mode, selectedKey, marked } = this;
    const { refs, hash, owner, changedAt, evictedAt, n, at } = state;
    const free = pixelOf("free"), cached = pixelOf("cached"), used = pixelOf("used");
    const fixed = pixelOf("fixed"), evicted = pixelOf("evicted");
    const shared = [2, 3, 8].map((count) => pixelOf(sharedName(count)));
    const flashes = mode === "state" && this.cell < MIN_DOT_CELL;
    const held = marked === null && selectedKey ? new Set() : marked;
    if (marked === null && selectedKey) {
      for (const table of state.tables.get(selectedKey) || []) if (table) table.ids.forEach((id) => held.add(id));
    }
    for (let id = 0; id < n; id++) {
      const count = refs[id];
      let color;
      if (count === 0 && hash[id] === 0) color = free;
      else if (mode === "age") color = agePixel(at - changedAt[id]);
      else if (mode === "request" && count > 0) color = count > 1 ? shared[count >= 8 ? 2 : count >= 3 ? 1 : 0] : requestPixel(owner[id]);
      else if (count === 0) color = cached;
      else color = count === 1 ? used : shared[count >= 8 ? 2 : count >= 3 ? 1 : 0];
      if (flashes && at - evictedAt[id] < SMALL_FLASH_S) color = evicted;
      if (held && !held.has(id)) color = (color & 0x00ffffff) | 0x38000000;
      pixels[id] = color;
    }
    for (const id of state.fixed) if (id < n) pixels[id] = fixed;
    pixels.fill(0, n);
  }
}

// Draws a row of small cells: a block table, or the head of the eviction queue.
export function drawStrip(canvas, cells, { maxCell = 12, color } = {}) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const c = canvas.getContext("2d");
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.clearRect(0, 0, width, height);
  const cell = Math.min(width / Math.max(cells.length, 1), maxCell);
  const gap = cell >= 5 ? 1.5 : cell >= 3 ? 0.5 : 0;
  const rowsOf = Math.max(height, 1);
  // If a cell is narrower than a pixel, draw one of several cells.
  const step = cell < 1 ? Math.ceil(1 / cell) : 1;
  for (let i = 0; i < cells.length; i += step) {
    const fill = color(cells[i], i);
    if (fill === null) {
      c.strokeStyle = css.quiet;
      c.setLineDash(cell >= 6 ? [2, 2] : []);
      c.lineWidth = 1;
      if (cell >= 4) c.strokeRect(i * cell + 0.5, 0.5, cell - gap - 1, rowsOf - 1);
      else c.strokeRect(i * cell, rowsOf - 1, cell * step, 0.5);
      continue;
    }
    c.fillStyle = fill;
    c.fillRect(i * cell, 0, Math.max(cell * step - gap, 0.75), rowsOf);
  }
}

export function stateColor(state, id) {
  switch (state.stateOf(id)) {
    case FREE: return css.free;
    case CACHED: return css.cached;
    case USED: return css.used;
    case FIXED: return css.fixed;
    default: return css[sharedName(state.refs[id])];
  }
}
