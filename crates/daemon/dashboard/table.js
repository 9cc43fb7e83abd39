// A table that sorts, filters and pages, and keeps its rows when figures change: focus, selection
// and tooltips survive an update.

import { announce, bytesNode, countNode, el, noun, number, setBytes, state } from "./ui.js";

const PAGE_ROWS = 50;
/** A table this short needs no filter. */
const FEW_ROWS = 8;
const collator = new Intl.Collator("en", { numeric: true });

/** A bar of private and shared, with the commons as a line below. Numbers stand beside it. */
function bar(parts, scale) {
  const percent = (bytes) => `${scale > 0 ? ((bytes ?? 0) / scale * 100).toFixed(2) : 0}%`;
  const rect = (kind, x, width) => el("rect", { class: kind, x, width });
  const broken = parts.private_bytes + parts.shared_bytes > scale
    ? [rect("break", "90%", "2%"), rect("break", "94%", "2%")] : [];
  return el("svg", { class: "bar", "aria-hidden": "true" },
    rect("private", "0%", percent(parts.private_bytes)),
    rect("shared", percent(parts.private_bytes), percent(parts.shared_bytes)),
    rect("commons", "0%", percent(parts.commons_bytes)), ...broken);
}

/** Bytes of a full bar: the largest row's, unless that would shrink all others to nothing. */
function fullBar(lengths) {
  const sorted = [...lengths].sort((a, b) => a - b);
  return Math.min(sorted.at(-1) ?? 0, 4 * (sorted[sorted.length >> 1] || Infinity));
}

export class Table {
  /**
   * Fields of `spec`:
   * `id` names the state in the fragment; `title` is the id of the heading; `noun` is for counts.
   * `columns` are `{id, label, help, kind, cell, sort}`; the first one is the heading of the row.
   * The kind is `bytes`, `count`, `age`, `bar`, or none for text, which `sort` gives for sorting.
   * `key` identifies a row; `words` is the text that the filter searches.
   * `sort` is the first order, with `-` for descending; `remote`: the daemon sorts, one way only.
   * `length` is the field that bars show; `empty` says why there are no rows.
   */
  constructor(host, spec) {
    Object.assign(this, spec);
    this.rows = [];
    this.lines = new Map();
    this.input = el("input", { type: "search", autocomplete: "off", spellcheck: "false" });
    this.input.addEventListener("input", () =>
      state.set({ [`${this.id}.q`]: this.input.value, [`${this.id}.page`]: null }));
    this.range = el("span", { class: "range" });
    this.previous = this.pager("Previous", -1);
    this.next = this.pager("Next", 1);
    this.filter = el("label", {}, "Filter ", this.input);
    this.legend = el("span", { class: "legend" });
    this.body = el("tbody");
    this.body.addEventListener("click", followRow);
    host.append(
      el("div", { class: "tools" }, this.filter, this.legend,
        el("span", { class: "pages" }, this.range, this.previous, this.next)),
      el("div", { class: "scroll" }, el("table", { "aria-labelledby": this.title },
        el("thead", {}, el("tr", {}, ...this.columns.map((it) => this.header(it)))), this.body)),
    );
  }

  header(column) {
    column.th = el("th", { scope: "col", class: column.kind ?? "name", title: column.help });
    if (column.kind === "bar" || column.sort === false) {
      column.th.append(column.label);
      return column.th;
    }
    const button = el("button", {}, column.label);
    button.addEventListener("click", () => {
      const [id, down] = this.order();
      const first = column.kind !== undefined;
      const descending = id === column.id && !this.remote ? !down : first;
      const sort = (descending ? "-" : "") + column.id;
      state.set({ [`${this.id}.sort`]: sort, [`${this.id}.page`]: null });
      announce(`Sorted by ${column.label}, ${descending ? "descending" : "ascending"}`);
    });
    column.th.append(button);
    return column.th;
  }

  /** Buttons stay focusable at the ends: a disabled one would lose the focus. */
  pager(label, step) {
    const button = el("button", { "aria-label": `${label} page of ${this.noun}s` }, label);
    button.addEventListener("click", () => {
      if (button.ariaDisabled === "true") return;
      state.set({ [`${this.id}.page`]: String(this.page + step) });
      announce(`${number(this.from + 1)} to ${number(this.to)}`);
    });
    return button;
  }

  /** Column to sort by, and whether it descends. An unknown one in the fragment is ignored. */
  order() {
    const known = (it) => it && this.columns.some((column) => column.id === it.replace(/^-/, ""));
    const sort = [state.get(`${this.id}.sort`), this.sort].find(known);
    return [sort.replace(/^-/, ""), sort.startsWith("-")];
  }

  /** Shows rows, or the same ones in another order. */
  show(rows = this.rows) {
    this.rows = rows;
    const query = (state.get(`${this.id}.q`) ?? "").toLowerCase();
    if (this.input !== document.activeElement) this.input.value = state.get(`${this.id}.q`) ?? "";
    const found = rows.filter((row) => !query || this.words(row).toLowerCase().includes(query));
    const [id, down] = this.order();
    const column = this.columns.find((it) => it.id === id);
    if (!this.remote) found.sort((a, b) => compare(column, a, b) * (down ? -1 : 1)
      || collator.compare(this.key(a), this.key(b)));
    for (const it of this.columns) {
      if (it === column) it.th.ariaSort = down ? "descending" : "ascending";
      else it.th.removeAttribute("aria-sort");
    }
    this.filter.hidden = rows.length <= FEW_ROWS && !query;
    const pages = Math.max(1, Math.ceil(found.length / PAGE_ROWS));
    const wanted = Number.parseInt(state.get(`${this.id}.page`), 10) || 1;
    this.page = Math.min(pages, Math.max(1, wanted));
    this.from = (this.page - 1) * PAGE_ROWS;
    this.to = Math.min(found.length, this.from + PAGE_ROWS);
    this.previous.ariaDisabled = String(this.page === 1);
    this.next.ariaDisabled = String(this.page === pages);
    this.previous.hidden = this.next.hidden = pages === 1;
    const shown = pages === 1 ? [] : [countNode(this.from + 1), "–", countNode(this.to), " of "];
    const all = query ? [" of ", countNode(rows.length)] : [];
    this.range.replaceChildren(...shown, countNode(found.length), ...all,
      ` ${noun(query ? rows.length : found.length, this.noun)}`);
    this.fill(found.slice(this.from, this.to));
    if (found.length === 0) {
      const why = rows.length > 0 ? `No ${this.noun} matches the filter.` : this.empty;
      const cell = el("td", { colspan: this.columns.length }, why);
      this.body.append(el("tr", { class: "empty" }, cell));
    }
  }

  fill(rows) {
    const lengths = rows.map((row) => row[this.length]);
    const scale = fullBar(lengths);
    const focused = document.activeElement;
    const lines = new Map();
    for (const row of rows) {
      const key = this.key(row);
      lines.set(key, this.lines.get(key) ?? this.line(key));
      this.update(lines.get(key), row, scale);
    }
    for (const child of [...this.body.children]) {
      if (lines.get(child.dataset.key) !== child) child.remove();
    }
    [...lines.values()].forEach((line, at) => {
      const there = this.body.children[at] ?? null;
      if (there !== line) this.body.insertBefore(line, there);
    });
    this.lines = lines;
    // A row that moved has lost the focus.
    if (focused !== document.activeElement && focused.isConnected) {
      focused.focus({ preventScroll: true });
    }
    const broken = lengths.some((it) => it > scale);
    if (this.length) this.legend.replaceChildren(...legend(this.columns, scale, broken));
  }

  line(key) {
    const cells = this.columns.map((column, at) => el(at === 0 ? "th" : "td", {
      class: column.kind ?? "name", scope: at === 0 ? "row" : undefined, "data-field": column.id,
    }));
    const line = el("tr", {}, ...cells);
    line.dataset.key = key;
    return line;
  }

  update(line, row, scale) {
    this.columns.forEach((column, at) => {
      const cell = line.children[at];
      if (column.kind === "bytes") {
        setBytes(cell, row[column.id]);
      } else if (column.kind === "count") {
        cell.dataset.count = row[column.id];
        cell.textContent = number(row[column.id]);
      } else {
        // Rebuilding a cell would drop its focus and any selected text.
        const nodes = column.kind === "bar" ? [bar(row, scale)] : column.cell(row);
        const next = el("div", {}, ...nodes);
        if (!cell.firstChild?.isEqualNode(withLinks(next, cell))) cell.replaceChildren(next);
      }
    });
  }
}

/** Links differ in their address only, which depends on the state: compare without it. */
function withLinks(next, cell) {
  const old = cell.querySelectorAll("a");
  next.querySelectorAll("a").forEach((link, at) => {
    if (old[at]) link.setAttribute("href", old[at].getAttribute("href"));
  });
  return next;
}

function compare(column, a, b) {
  if (column.kind) return (a[column.id] ?? -1) - (b[column.id] ?? -1);
  return collator.compare(column.sort(a), column.sort(b));
}

function legend(columns, scale, broken) {
  if (scale === 0) return [];
  const has = (kind) => columns.some((it) => it.id === `${kind}_bytes`);
  const swatch = (kind) => el("span", {}, el("i", { class: `swatch ${kind}` }), kind);
  const longer = broken ? "; broken bars are longer" : "";
  return [...["private", "shared", "commons"].filter(has).map(swatch),
    el("span", {}, "full bar ", bytesNode(scale), longer)];
}

/** A click anywhere on a row follows its link, unless text is being selected. */
function followRow(event) {
  const target = event.target.closest("tr")?.querySelector("th a");
  if (target && !event.target.closest("a") && getSelection().isCollapsed) target.click();
}
