// Polls the daemon and shows what its ledger says.

import { containersTable, domainsTable, filesTable, imageLabel, imageLink, imagesTable,
  machinesTable, setImages, splitKey, usersTable } from "./accounts.js";
import { Chart } from "./chart.js";
import { matrix } from "./matrix.js";
import { ageNode, announce, bytesNode, countNode, el, foreign, harmless, setBytes, short,
  size, state, timeNode, zone } from "./ui.js";

const POLL_MS = 5000;
const TIMEOUT_MS = 10000;
const SHARING_MS = 15000;
const FILES_MAX = 1000;
/** A daemon that answers with figures this old, and older than three periods, is stuck. */
const OLD_SECONDS = 60;

const $ = (id) => document.getElementById(id);
const chart = new Chart($("chart"), $("readout"));

let report = null;
/** When the report came, by the clock that nobody sets, and how old it was then. */
let received = 0;
let age = 0;
/** Why there is no newer report: a sentence, or null. */
let failure = null;
let paused = false;
let polling = false;
let timer;
/** Last answers for the chart and the matrix. `body` stays when `error` is set. */
let timeline = { at: -Infinity };
let sharing = { at: -Infinity, domain: null };
let machines = {};

// Asking the daemon.

/** Errors are whole sentences for people. */
async function get(path) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  } catch (error) {
    const late = error.name === "TimeoutError";
    throw new Error(late ? "The daemon did not answer in time." : "The daemon does not answer.");
  }
  const body = await response.json().catch(() => null);
  if (!response.ok) {
    const reason = body?.error ?? "no reason given";
    throw new Error(`The daemon reports an error: ${reason} (status ${response.status}).`);
  }
  if (body === null) throw new Error("The daemon's answer is not JSON.");
  return { body, date: Date.parse(response.headers.get("date")) / 1000 };
}

/** An answer that may fail on its own: the last one stays, with the error beside it. */
async function refetch(path, last) {
  try {
    const { body } = await get(path);
    return { body, at: performance.now() };
  } catch (error) {
    return { body: last, error: error.message, at: performance.now() };
  }
}

async function fetchTimeline() {
  timeline = await refetch("/v1/history", timeline.body);
}

async function fetchMachines() {
  machines = await refetch("/v1/machines", machines.body);
}

async function fetchSharing(domain) {
  const last = sharing.domain === domain ? sharing.body : undefined;
  const answer = await refetch(`/v1/sharing?domain=${encodeURIComponent(domain)}`, last);
  sharing = { ...answer, domain };
}

async function poll() {
  clearTimeout(timer);
  if (polling) return;
  polling = true;
  const before = failure;
  try {
    const { body, date } = await get("/v1/report");
    report = body;
    setImages(report.images);
    received = performance.now();
    // By the daemon's own clock: the one here may be wrong.
    age = Math.max(0, (date || report.time) - report.time);
    failure = null;
    show();
    const tries = [fetchMachines()];
    const interval = Math.max(POLL_MS, (timeline.body?.interval_seconds ?? 0) * 1000);
    if (received - timeline.at >= interval) tries.push(fetchTimeline());
    const domain = matrixDomain();
    const due = sharing.domain !== domain || received - sharing.at >= SHARING_MS;
    if (domain !== null && due) tries.push(fetchSharing(domain));
    await Promise.all(tries);
  } catch (error) {
    failure = error.message;
  }
  try {
    show();
  } catch (error) {
    failure = `This page failed: ${error.message}`;
    showStatus();
  }
  if (failure !== before) announce(failure ?? "The daemon answers again.");
  polling = false;
  if (!paused && !document.hidden) timer = setTimeout(poll, POLL_MS);
}

// Showing what it said.

/** The domain that is chosen, or null for all. */
function chosenDomain() {
  const name = state.get("domain");
  return report?.domains.some((it) => it.domain === name) ? name : null;
}

/** The domain that the matrix shows: images of different domains share nothing. */
function matrixDomain() {
  const more = (a, b) => (b.resident_bytes > a.resident_bytes ? b : a);
  const busiest = report?.domains.length ? report.domains.reduce(more).domain : null;
  return chosenDomain() ?? busiest;
}

function show() {
  showStatus();
  $("full").checked = state.get("full") === "1";
  document.body.classList.toggle("full", $("full").checked);
  if (report) showReport();
  showChart();
  showMatrix();
  showMachines();
  showDrawer();
  state.refreshLinks();
}

function showReport() {
  const domain = chosenDomain();
  const inDomain = (it) => domain === null || it.domain === domain;
  const total = (field) => report.domains.filter(inDomain).reduce((sum, it) => sum + it[field], 0);
  for (const node of document.querySelectorAll("[data-total]")) {
    setBytes(node, total(node.dataset.total));
  }
  for (const node of document.querySelectorAll("[data-machine]")) {
    setBytes(node, report.machine[node.dataset.machine]);
  }
  domainsTable.show(report.domains);
  imagesTable.show(report.images.filter(inDomain));
  const using = (it) => domain === null || it.images.some(inDomain);
  containersTable.show(report.containers.filter(using));
  const title = failure ? "No answer" : `${size(total("saved_bytes"))} saved`;
  document.title = `${title} – Cofolio`;

  $("domains").hidden = $("domain-label").hidden = report.domains.length < 2;
  const names = ["", ...report.domains.map((it) => it.domain)];
  const shown = [...$("domain").options].map((it) => it.value);
  if (JSON.stringify(names) !== JSON.stringify(shown)) {
    const option = (value) => el("option", { value, "data-foreign": "" }, harmless(value) || "All");
    $("domain").replaceChildren(...names.map(option));
  }
  $("domain").value = domain ?? "";
}

/** How old the figures are and what is missing from them. Runs every second. */
function showStatus() {
  const since = report ? age + (performance.now() - received) / 1000 : 0;
  const stuck = report?.time && age > Math.max(OLD_SECONDS, 3 * (timeline.body?.period_seconds ?? 0));
  const none = report && !report.time;
  const trouble = failure ?? (none ? "The daemon has just started." : null)
    ?? (stuck ? "The daemon answers, but its figures are not new." : null);
  document.body.classList.toggle("old", Boolean(report && trouble));
  $("banner").hidden = !trouble;
  if (trouble) {
    const rest = report?.time
      ? [" All figures on this page are old: from ", timeNode(report.time), ` ${zone}.`]
      : [" There are no figures yet. Trying again."];
    const banner = el("p", {}, el("strong", { "data-foreign": "" }, harmless(trouble)), ...rest);
    // Only if it changed, so that it can be selected and copied.
    if (!$("banner").firstChild?.isEqualNode(banner)) $("banner").replaceChildren(banner);
  }
  if (!report) return;
  $("ages").replaceChildren(paused ? "Paused. " : "", "Figures ", ageNode(since), " old. ",
    "Residency looked at ", ageNode(since + report.residency_age_seconds), " ago, ",
    "processes ", ageNode(since + report.processes_age_seconds), " ago.");
  const kind = (count, one, many) =>
    el("span", { class: count ? "some" : "" }, countNode(count), ` ${count === 1 ? one : many}`);
  const { openers, overflows, processes, images, objects, files, mounts } = report.unknown;
  $("unknown").replaceChildren("Unknown: ",
    kind(openers, "opener", "openers"), ", ",
    kind(overflows, "queue overflow", "queue overflows"), ", ",
    kind(processes, "process", "processes"), ", ",
    kind(images, "image", "images"), ", ",
    kind(objects, "object", "objects"), ", ",
    kind(files, "opened file", "opened files"), ", ",
    kind(mounts, "mount", "mounts"), ".");
  const reasons = report.warnings.map((it) => el("li", { "data-foreign": "" }, harmless(it)));
  $("warnings").hidden = !reasons.length;
  // Only if they changed, so that they can be selected and copied.
  const shown = [...$("warnings").querySelectorAll("li")];
  const same = shown.length === reasons.length && shown.every((it, n) => it.isEqualNode(reasons[n]));
  if (!same) $("warnings").querySelector("ul").replaceChildren(...reasons);
}

function showChart() {
  const select = $("series");
  select.value = state.get("series");
  if (select.selectedIndex < 0) select.selectedIndex = 0;
  const note = chosenDomain() === null ? "" : "All trust domains together.";
  $("history-note").textContent = timeline.error ?? note;
  const same = showChart.body === timeline.body && showChart.field === select.value;
  if (!timeline.body || same) return;
  [showChart.body, showChart.field] = [timeline.body, select.value];
  chart.show(timeline.body, select.value, select.selectedOptions[0].text);
}

function showMachines() {
  const { body, error } = machines;
  $("machines").hidden = !error && !body?.machines.length;
  const note = error ? [el("strong", { "data-foreign": "" }, harmless(error)), " "] : [];
  if (body) {
    const domain = chosenDomain();
    machinesTable.show(body.machines.filter((it) => domain === null || it.domain === domain));
    note.push(bytesNode(body.image_bytes), " of images and ", bytesNode(body.pool_bytes),
      " of pools, each once for all machines. Pulses have returned ",
      bytesNode(body.returned_bytes), ".");
    const { p50_ms, p99_ms } = body.latency;
    const within = (ms) => el("span", { class: "n", "data-ms": ms }, `${ms / 1000} s`);
    if (p50_ms !== null) note.push(" Half of freed memory was returned within ", within(p50_ms));
    if (p99_ms !== null) note.push(", ", countNode(99), " % within ", within(p99_ms));
    if (p50_ms !== null) note.push(".");
  }
  $("machines-note").replaceChildren(...note);
}

function showMatrix() {
  const { body, error } = sharing.domain === matrixDomain() ? sharing : {};
  const total = report?.images.filter((it) => it.domain === body?.domain).length;
  const { table, note } = body ? matrix(body, total) : { table: null, note: [] };
  if (report?.domains.length === 0) note.push("No trust domain exists.");
  if (body && chosenDomain() === null && report.domains.length > 1) {
    note.unshift("Trust domain ", foreign(body.domain), ", the one with most resident. ");
  }
  if (error) note.unshift(el("strong", { "data-foreign": "" }, harmless(error)), " ");
  $("matrix-note").replaceChildren(...note);
  // Rebuilding the table drops selected text.
  if (showMatrix.body !== body) $("matrix").replaceChildren(...(table ? [table] : []));
  showMatrix.body = body;
}

// The drawer: files of the image in the fragment, or users of its object. It is fetched when opened
// and on demand, not polled, because the daemon has to read the image for it.

/** The address that the drawer shows, and `body` with its `time`, or `error`. */
let drawer = { path: null };

function drawerPath(key, object) {
  const [domain, image] = splitKey(key).map(encodeURIComponent);
  if (object) return `/v1/objects/${domain}/${encodeURIComponent(object)}/users`;
  const sort = { path: "path", bytes: "size" }[filesTable.order()[0]] ?? "resident";
  return `/v1/images/${domain}/${image}/files?sort=${sort}&limit=${FILES_MAX}`;
}

function showDrawer() {
  const [key, object] = [state.get("image"), state.get("object")];
  if (!key) {
    drawer = { path: null };
    if ($("drawer").open) $("drawer").close();
    return;
  }
  if (!$("drawer").open) $("drawer").showModal();
  const path = drawerPath(key, object);
  if (drawer.path !== path) fetchDrawer(path);
  const { body, time, error } = drawer;
  const digest = splitKey(key)[1];
  const note = [];
  if (error) note.push(el("strong", { "data-foreign": "" }, harmless(error)));
  else note.push(...(body ? ["As of ", timeNode(time), ". "] : ["Asking the daemon."]));
  if (object) {
    $("drawer-trail").replaceChildren("Users of a file of ", imageLink(key));
    $("drawer-title").replaceChildren(foreign(state.get("path") ?? short(object)));
    if (body) note.push(bytesNode(body.resident_bytes), " resident of ", bytesNode(body.bytes),
      ". Object ", foreign(body.object, { class: "digest" }), ".");
    // Only the answer itself names the domain.
    usersTable.show((body?.users ?? []).map((it) => ({ ...it, domain: body.domain })));
  } else {
    const name = foreign(short(digest), { title: harmless(digest) });
    $("drawer-trail").replaceChildren("Files of image ", name);
    $("drawer-title").replaceChildren(foreign(imageLabel(key)));
    if (body?.total > body?.files.length) {
      note.push("The first ", countNode(body.files.length), " of ", countNode(body.total),
        " files in this order. The filter searches these.");
    }
    filesTable.show(body?.files ?? []);
  }
  $("drawer-note").replaceChildren(...note);
  $("files-table").hidden = !body || Boolean(object);
  $("users-table").hidden = !body || !object;
}

async function fetchDrawer(path) {
  // While the same files come in another order, the old ones stay.
  const resource = (it) => it?.split("?")[0];
  const kept = resource(drawer.path) === resource(path) ? drawer.body : undefined;
  const mine = drawer = { path, body: kept, time: drawer.time };
  try {
    const { body } = await get(path);
    Object.assign(mine, { body, time: Math.floor(Date.now() / 1000) });
  } catch (error) {
    Object.assign(mine, { body: undefined, error: error.message });
  }
  if (drawer === mine) show();
}

// What people do.

state.onChange(() => {
  show();
  const domain = matrixDomain();
  if (domain !== null && sharing.domain !== domain) fetchSharing(domain).then(show);
});
$("domain").addEventListener("change", () =>
  state.set({ domain: $("domain").value, "containers.page": null, "images.page": null }));
$("series").addEventListener("change", () => state.set({ series: $("series").value }));
$("full").addEventListener("change", () => state.set({ full: $("full").checked ? "1" : null }));
$("drawer-close").addEventListener("click", () => $("drawer").close());
$("drawer-refresh").addEventListener("click", () => fetchDrawer(drawer.path));
$("drawer").addEventListener("close", () => {
  if (state.get("image")) state.set({ image: null, object: null, path: null });
});
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").ariaPressed = String(paused);
  if (paused) clearTimeout(timer);
  else poll();
  showStatus();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else if (!paused) poll();
});
setInterval(showStatus, 1000);
$("host").textContent = location.host;
poll();
