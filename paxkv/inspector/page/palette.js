// Colors from the style sheet, and the same as pixel values.

const NAMES = ["free", "cached", "used", "shared2", "shared3", "shared8", "fixed", "evicted",
  "outline", "line", "sunken", "text", "quiet", "host", "device", "series2", "accent"];
// The palette of Okabe and Ito without black, with lighter and darker variants. Neighbors in the
// list also differ in lightness, for color-blind readers.
const REQUESTS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8ab1f",
  "#7a5aa6", "#8fd0b9", "#a33b00", "#9fc5e8", "#005a46"];
// Cividis, from recent to old.
const AGES = ["#fee838", "#e1cc55", "#c3b369", "#a59c74", "#8a8779", "#707173", "#575d6d", "#3b496c", "#123570", "#00224e"];

export const css = {};
let pixels = {};
let requestPixels = [];
let agePixels = [];

export function readPalette() {
  const style = getComputedStyle(document.documentElement);
  for (const name of NAMES) css[name] = style.getPropertyValue(`--${name}`).trim();
  pixels = Object.fromEntries(NAMES.map((name) => [name, pixel(css[name])]));
  requestPixels = REQUESTS.map(pixel);
  agePixels = AGES.map(pixel);
}

// "#rrggbb" as a little-endian RGBA pixel.
function pixel(color) {
  const value = parseInt(color.slice(1), 16);
  return ((255 << 24) | ((value & 255) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}

export const pixelOf = (name) => pixels[name];
export const requestColor = (key) => REQUESTS[key % REQUESTS.length];
export const requestPixel = (key) => requestPixels[key % requestPixels.length];

export function sharedName(refs) {
  return refs >= 8 ? "shared8" : refs >= 3 ? "shared3" : "shared2";
}

// 0 s has the first color, five minutes the last; the scale between is logarithmic.
export function agePixel(seconds) {
  const place = Math.log1p(Math.max(seconds, 0)) / Math.log1p(300);
  return agePixels[Math.min(Math.floor(place * agePixels.length), agePixels.length - 1)];
}
export const ageGradient = `linear-gradient(to right, ${AGES.join(", ")})`;
