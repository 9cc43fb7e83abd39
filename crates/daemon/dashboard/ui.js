// Nodes, numbers, times, and the state of the view in the URL's fragment.
//
// Names come from images and containers, so they are hostile: they only ever become text nodes.
// Every number that a person sees carries its exact value in a data attribute, for tests.

/** An element. Attributes that are undefined are left out. */
export function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "path", "line", "text", "circle", "g"].includes(tag);
  const space = svg ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const node = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** A size as `cofolio top` prints it: one decimal, binary units. */
export function size(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  const units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let value = bytes / 1024;
  let unit = 0;
  // 1023.95 would be printed as 1024.0.
  for (; unit < units.length - 1 && value >= 1023.95; unit++) value /= 1024;
  // Rust rounds a tie to even, toFixed rounds it up. One decimal ties at .25 and .75 only.
  const text = value % 1 === 0.25 ? `${Math.floor(value)}.2` : value.toFixed(1);
  return `${text} ${units[unit]}`;
}

export const number = (count) => count.toLocaleString("en-US");
export const noun = (count, word) => (count === 1 ? word : `${word}s`);

/** A duration as `cofolio top` prints it: in its largest sensible unit, rounded down. */
export function duration(seconds) {
  const [unit, per] = seconds < 120 ? ["s", 1] : seconds < 7200 ? ["min", 60]
    : seconds < 172800 ? ["h", 3600] : ["d", 86400];
  return `${Math.floor(seconds / per)} ${unit}`;
}

/** Writes a size, or a dash if the daemon does not report it. Keeps the node if nothing changed. */
export function setBytes(node, bytes) {
  const text = bytes === undefined || bytes === null ? "–" : size(bytes);
  if (text === "–") delete node.dataset.bytes;
  else node.dataset.bytes = bytes;
  if (node.textContent !== text) node.textContent = text;
  return node;
}

export const bytesNode = (bytes) => setBytes(el("span", { class: "n" }), bytes);
export const countNode = (count) =>
  el("span", { class: "n", "data-count": count }, number(count));
export const ageNode = (seconds) =>
  el("span", { class: "n", "data-seconds": Math.floor(seconds) }, duration(seconds));

const format = (options) => new Intl.DateTimeFormat("en-GB", options);
const clock = format({ hour: "2-digit", minute: "2-digit", second: "2-digit" });
const minutes = format({ hour: "2-digit", minute: "2-digit" });
const day = format({ day: "numeric", month: "short" });
export const zone = format({ timeZoneName: "short" }).formatToParts()
 .find((part) => part.type === "timeZoneName").value;

/** Local time of day, or the date at midnight if `days`. */
export function timeText(seconds, { days = false, exact = false } = {}) {
  const date = new Date(seconds * 1000);
  const midnight = date.getHours() === 0 && date.getMinutes() === 0;
  return days && midnight ? day.format(date) : (exact ? clock : minutes).format(date);
}
export const timeNode = (seconds) => el("time", {
  datetime: new Date(seconds * 1000).toISOString(), "data-time": seconds,
}, timeText(seconds, { exact: true }));

/** Control characters and those that reverse the direction, written out as `\xNN` like the CLI. */
export function harmless(text) {
  const escape = (char) => [...new TextEncoder().encode(char)]
    .map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
  return text.replace(/[\p{Cc}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/gu, escape);
}

/** Text from outside. */
export const foreign = (text, attributes = {}) =>
  el("span", { "data-foreign": "", title: harmless(text), ...attributes }, harmless(text));

export const short = (digest) => digest.slice(0, 12);

/** The state of the view. What the fragment says, with changes that are not written to it yet. */
let params = new URLSearchParams(location.hash.slice(1));
let writing;
let changed = () => {};

function patched(patch) {
  const next = new URLSearchParams(params);
  for (const [name, value] of Object.entries(patch)) {
    if (value === null || value === "") next.delete(name);
    else next.set(name, value);
  }
  return next;
}

function write() {
  clearTimeout(writing);
  writing = undefined;
  history.replaceState(null, "", `#${params}`);
}

export const state = {
  get: (name) => params.get(name),
  /** Changes the view in place. Browsers limit how often the URL may change: typing is batched. */
  set(patch) {
    params = patched(patch);
    writing ??= setTimeout(write, 200);
    changed();
  },
  onChange(callback) { changed = callback; },
  /** Links carry a patch, and get their address here: it depends on the rest of the state. */
  refreshLinks() {
    for (const link of document.querySelectorAll("a[data-go]")) {
      link.href = `#${patched(JSON.parse(link.dataset.go))}`;
    }
  },
};

addEventListener("hashchange", (event) => {
  params = new URLSearchParams(new URL(event.newURL).hash.slice(1));
  // The timer may have written the state of before over the new address.
  write();
  changed();
});

/** A link that changes the view and can be copied. */
export const link = (patch, ...children) =>
  el("a", { "data-go": JSON.stringify(patch), href: "#" }, ...children);

/** Tells screen readers. */
export function announce(text) {
  document.getElementById("announce").textContent = text;
}
