// The line chart of one figure over time. The pointer or the arrow keys pick a point.

import { bytesNode, el, size, timeNode, timeText, zone } from "./ui.js";

const HEIGHT = 236;
const MARGIN = { top: 10, right: 8, bottom: 22, left: 68 };
const STEPS = [60, 300, 600, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

export class Chart {
  constructor(host, readout) {
    this.host = host;
    this.readout = readout;
    this.points = [];
    new ResizeObserver(() => this.draw()).observe(host);
    host.addEventListener("pointermove", (event) => this.pick(this.nearest(event)));
    host.addEventListener("pointerleave", () => this.pick(null));
    host.addEventListener("blur", () => this.pick(null));
    host.addEventListener("keydown", (event) => {
      const last = this.points.length - 1;
      const at = this.picked ?? last;
      const to = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1,
        PageDown: at - 10, PageUp: at + 10, Home: 0, End: last, Escape: null }[event.key];
      if (to === undefined || last < 0) return;
      event.preventDefault();
      this.pick(to === null ? null : Math.min(last, Math.max(0, to)));
    });
  }

  show(history, field, label) {
    this.points = history.points;
    // A point comes with the first report after an interval.
    this.interval = history.interval_seconds + history.period_seconds;
    this.field = field;
    this.host.ariaLabel = `${label} over time`;
    this.picked = null;
    this.draw();
  }

  draw() {
    const width = this.host.clientWidth;
    const points = this.points;
    if (points.length === 0 || width === 0) {
      this.host.replaceChildren(el("p", { class: "note" }, "No history yet."));
      this.readout.replaceChildren();
      return;
    }
    const values = points.map((point) => point[this.field]);
    const [start, end] = [points[0].time, points.at(-1).time];
    // Up to four times a power of two is exact with one decimal in binary units.
    const most = Math.max(...values, 1);
    const step = 2 ** Math.max(0, Math.ceil(Math.log2(most / 4)));
    const top = Math.ceil(most / step) * step;
    const [left, right, bottom] = [MARGIN.left, width - MARGIN.right, HEIGHT - MARGIN.bottom];
    this.x = (time) => left + (right - left) * (end > start ? (time - start) / (end - start) : 1);
    this.y = (bytes) => bottom - (bottom - MARGIN.top) * bytes / top;
    const line = (x1, x2, y1, y2) => el("line", { class: "grid", x1, x2, y1, y2 });
    const marks = [];
    for (let bytes = 0; bytes <= top; bytes += step) {
      const y = this.y(bytes);
      const label = el("text", { x: left - 8, y, class: "y", "data-bytes": bytes }, size(bytes));
      marks.push(line(left, right, y, y), label);
    }
    const every = STEPS.find((it) => (end - start) / it <= (right - left) / 72) ?? STEPS.at(-1);
    const offset = new Date(end * 1000).getTimezoneOffset() * 60;
    const first = Math.ceil((start - offset) / every) * every + offset;
    for (let time = first; time <= end; time += every) {
      const x = this.x(time);
      const text = timeText(time, { days: true });
      marks.push(line(x, x, bottom, bottom + 4),
        el("text", { x, y: HEIGHT - 4, class: "x", "data-time": time }, text));
    }
    this.cursor = el("g", { class: "cursor" });
    this.host.replaceChildren(el("svg", { width, height: HEIGHT, "aria-hidden": "true" },
      ...marks, ...this.runs().flatMap((run) => this.line(run)), this.cursor));
    this.range = [Math.min(...values), Math.max(...values)];
    this.pick(this.picked);
  }

  /** Points between gaps. A gap stays empty: nobody knows what was saved then. */
  runs() {
    const runs = [];
    let before = -Infinity;
    for (const point of this.points) {
      if (point.time - before > this.interval * 1.5) runs.push([]);
      runs.at(-1).push(point);
      before = point.time;
    }
    return runs;
  }

  line(run) {
    const x = (point) => this.x(point.time).toFixed(1);
    const at = (point) => `${x(point)} ${this.y(point[this.field]).toFixed(1)}`;
    // A point alone is a line without length: the round line cap makes it a dot.
    const alone = run.length === 1;
    const path = `M${run.map(at).join("L")}${alone ? "h0" : ""}`;
    return [el("path", { class: "area", d: `${path}V${this.y(0)}H${x(run[0])}Z` }),
      el("path", { class: alone ? "series dot" : "series", d: path })];
  }

  nearest(event) {
    const x = event.clientX - this.host.getBoundingClientRect().left;
    const distances = this.points.map((point) => Math.abs(this.x(point.time) - x));
    return distances.length ? distances.indexOf(Math.min(...distances)) : null;
  }

  pick(at) {
    this.picked = at;
    if (this.points.length === 0) return;
    const point = this.points[at ?? this.points.length - 1];
    this.host.ariaValueMin = 0;
    this.host.ariaValueMax = this.points.length - 1;
    this.host.ariaValueNow = at ?? this.points.length - 1;
    this.host.ariaValueText = `${timeText(point.time)}, ${size(point[this.field])}`;
    if (at === null) {
      this.cursor.replaceChildren();
      const [lowest, highest] = this.range.map(bytesNode);
      this.readout.replaceChildren("lowest ", lowest, ", highest ", highest);
      return;
    }
    const [x, y] = [this.x(point.time), this.y(point[this.field])];
    this.cursor.replaceChildren(el("line", { x1: x, x2: x, y1: MARGIN.top, y2: this.y(0) }),
      el("circle", { cx: x, cy: y, r: 3.5 }));
    this.readout.replaceChildren(timeNode(point.time), ` ${zone}: `, bytesNode(point[this.field]));
  }
}
