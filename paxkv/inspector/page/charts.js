// Curves of the last minutes, drawn on canvases. Pointing at one shows the same moment on all.
import { css } from "./palette.js";

const SPAN_S = 120;
const number = (digits) => (value) => (Number.isFinite(value) ? value.toFixed(digits) : "–");
export const percent = (value) => (Number.isFinite(value) ? `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %` : "–");
export const compact = (value) => {
  if (!Number.isFinite(value)) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return value >= 100 ? value.toFixed(0) : value.toFixed(1);
};
export const duration = (seconds) => {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 0.001) return `${(1e6 * seconds).toFixed(0)} µs`;
  return seconds < 1 ? `${(1e3 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(seconds < 10 ? 2 : 0)} s`;
};

const CURVES = [
  { title: "Tokens per second", format: compact, series: [
    { field: "out", name: "out", color: "device" }, { field: "prompt", name: "prompt", color: "host", dash: [4, 3] }] },
  { title: "Time to first token", format: duration, series: [
    { field: "ttft", name: "median", color: "device" }, { field: "ttftMax", name: "slowest", color: "host", dash: [4, 3] }] },
  { title: "KV cache in use", format: percent, max: 1, series: [{ field: "usage", name: "share of blocks", color: "device", fill: true }] },
  { title: "Prefix hit rate", format: percent, max: 1, series: [{ field: "hits", name: "of prompt tokens, 10 s", color: "series2", fill: true }] },
  { title: "Step time", format: (ms) => duration(ms / 1000), stacked: true, series: [
    { field: "host", name: "host", color: "host", fill: true }, { field: "device", name: "waiting for the device", color: "device", fill: true }] },
];

export class Charts {
  constructor(parent) {
    this.pointedAt = null;
    this.curves = CURVES.map((curve) => this.build(parent, curve));
  }

  build(parent, curve) {
    const box = document.createElement("div");
    box.className = "curve";
    const head = document.createElement("h3");
    const value = document.createElement("output");
    head.append(curve.title, value);
    const canvas = document.createElement("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", curve.title);
    const legend = document.createElement("ul");
    const swatches = curve.series.map((series) => {
      const item = document.createElement("li");
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      item.append(swatch, series.name);
      legend.append(item);
      return swatch;
    });
    box.append(head, canvas, legend);
    parent.append(box);
    canvas.addEventListener("pointermove", (event) => {
      const bounds = canvas.getBoundingClientRect();
      this.pointedAt = (event.clientX - bounds.left) / bounds.width;
      this.onPoint?.();
    });
    canvas.addEventListener("pointerleave", () => { this.pointedAt = null; this.onPoint?.(); });
    return { ...curve, canvas, value, swatches };
  }

  // `index` is the frame in view.
  draw(frames, index) {
    if (!frames.length) return;
    const last = frames[frames.length - 1].point.at;
    const viewed = frames[index].point.at;
    const end = Math.min(Math.max(last, viewed), viewed + SPAN_S / 2);
    const start = end - SPAN_S;
    const first = firstAfter(frames, start);
    const until = Math.min(firstAfter(frames, end) + 1, frames.length);
    const points = frames.slice(first, until).map((entry) => entry.point);
    const cursor = this.pointedAt === null ? viewed : start + this.pointedAt * SPAN_S;
    const shown = nearest(points, cursor) || frames[index].point;
    const isCursorDrawn = this.pointedAt !== null || viewed < last;
    for (const curve of this.curves) drawCurve(curve, points, start, shown, isCursorDrawn);
  }
}

function drawCurve(curve, points, start, shown, isCursorDrawn) {
  const { canvas, series, stacked } = curve;
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
  const c = canvas.getContext("2d");
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.clearRect(0, 0, width, height);
  const total = (point) => series.reduce((sum, s) => (stacked ? sum + (point[s.field] || 0) : Math.max(sum, point[s.field] || 0)), 0);
  const top = curve.max || nice(points.reduce((most, point) => Math.max(most, total(point)), 0));
  const y = (value) => height - 1 - (value / top) * (height - 14);
  const x = (at) => ((at - start) / SPAN_S) * width;
  c.strokeStyle = css.line;
  c.lineWidth = 1;
  for (const share of [0, 0.5, 1]) line(c, 0, y(share * top), width, y(share * top));
  c.fillStyle = css.quiet;
  c.font = "10px system-ui, sans-serif";
  c.fillText(curve.format(top), 2, 9);
  const below = new Float64Array(points.length);
  for (const s of series) drawSeries(c, s, points, { x, y, below, stacked });
  curve.swatches.forEach((swatch, i) => { swatch.style.background = css[series[i].color]; });
  curve.value.textContent = series.map((s) => curve.format(shown[s.field])).join(" · ");
  if (isCursorDrawn) {
    c.setLineDash([]);
    c.strokeStyle = css.outline;
    line(c, x(shown.at), 12, x(shown.at), height);
  }
}

function drawSeries(c, s, points, { x, y, below, stacked }) {
  c.strokeStyle = css[s.color];
  c.fillStyle = css[s.color];
  c.lineWidth = 1.75;
  c.setLineDash(s.dash || []);
  for (let i = 0; i < points.length; ) {
    if (!Number.isFinite(points[i][s.field])) { i++; continue; }
    const from = i;
    while (i < points.length && Number.isFinite(points[i][s.field])) i++;
    const value = (k) => points[k][s.field] + (stacked ? below[k] : 0);
    c.beginPath();
    for (let k = from; k < i; k++) c.lineTo(x(points[k].at), y(value(k)));
    if (s.fill) {
      c.save();
      c.globalAlpha = stacked ? 0.75 : 0.22;
      const area = new Path2D();
      for (let k = from; k < i; k++) area.lineTo(x(points[k].at), y(value(k)));
      for (let k = i - 1; k >= from; k--) area.lineTo(x(points[k].at), y(stacked ? below[k] : 0));
      c.fill(area);
      c.restore();
    }
    c.stroke();
    if (stacked) for (let k = from; k < i; k++) below[k] = value(k);
  }
  c.setLineDash([]);
}

function line(c, x1, y1, x2, y2) {
  c.beginPath();
  c.moveTo(x1, Math.round(y1) + 0.5);
  c.lineTo(x2, Math.round(y2) + 0.5);
  c.stroke();
}

function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

function firstAfter(frames, at) {
  let low = 0, high = frames.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (frames[middle].point.at < at) low = middle + 1; else high = middle;
  }
  return low;
}

function nearest(points, at) {
  let best = null;
  for (const point of points) if (best === null || Math.abs(point.at - at) < Math.abs(best.at - at)) best = point;
  return best;
}
