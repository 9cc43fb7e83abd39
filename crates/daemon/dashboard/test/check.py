#!/usr/bin/env python3
"""Checks the dashboard in a headless Chromium against made-up answers of the daemon.

Every number on the page must equal the API's, foreign names must appear literally, the keyboard
must reach everything, and nothing may be requested from elsewhere. `--screenshots DIR` also takes
pictures.
"""

import argparse
import html.parser
import os
import time
from urllib.parse import parse_qs, urlencode

import fixtures
import serve
from browser import Browser, dump_dom

# Visible text with a contrast below 4.5, as WCAG 2 defines it.
LOW_CONTRAST = """(() => {
  const rgb = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = (colour) => [0.2126, 0.7152, 0.0722]
    .reduce((sum, part, at) => sum + part * linear(colour[at] / 255), 0);
  const ground = (node) => {
    const colour = rgb(getComputedStyle(node ?? document.body).backgroundColor);
    return colour[3] !== 0 || !node ? colour : ground(node.parentElement);
  };
  const contrast = (node) => {
    const style = getComputedStyle(node);
    const text = rgb(node.namespaceURI.endsWith("svg") ? style.fill : style.color);
    const [dark, bright] = [light(text), light(ground(node))].sort((a, b) => a - b);
    return (bright + 0.05) / (dark + 0.05);
  };
  const own = (node) => [...node.childNodes].some((it) => it.nodeType === 3 && it.data.trim());
  return [...document.querySelectorAll("body *")]
    .filter((node) => own(node) && node.checkVisibility())
    .map((node) => [contrast(node), node.outerHTML.slice(0, 80)])
    .filter(([contrast]) => contrast < 4.5).slice(0, 5);
})()"""
ACTIVE = """(() => {
  const node = document.activeElement;
  if (node === document.body) return "";
  const name = node.id || node.ariaLabel || node.textContent || node.type;
  return `${name}|${getComputedStyle(node).outlineStyle}`;
})()"""
VOID = {"meta", "link", "input", "img", "br"}
TOTALS = ["saved_bytes", "resident_bytes", "used_bytes", "shared_bytes", "metadata_bytes"]
# Numbers of the API that the page does not show.
NOT_SHOWN = {
    "images-table": {"commons_bytes"},
    "domains-table": {"commons_bytes"},
    "machines-table": {"pid", "attended"},
}


class Node:
    def __init__(self, tag, attrs, parent):
        self.tag, self.attrs, self.parent, self.children = tag, dict(attrs), parent, []

    def walk(self):
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    def find(self, **wanted):
        """All nodes that have the attributes; True for any value."""
        match = lambda node: all(
            (k in node.attrs) if v is True else node.attrs.get(k) == v for k, v in wanted.items()
        )
        return [node for node in self.walk() if match(node)]

    def one(self, id):
        return self.find(id=id)[0]

    def text(self):
        return "".join(child if isinstance(child, str) else child.text() for child in self.children)


class Parser(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.root = self.at = Node("root", {}, None)
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        node = Node(
            tag,
            [(k.replace("-", "_") if k.startswith("data-") else k, v) for k, v in attrs],
            self.at,
        )
        self.at.children.append(node)
        if tag not in VOID:
            self.at = node

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.at = self.at.parent

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.at.tag == tag, (self.at.tag, tag)
            self.at = self.at.parent

    def handle_data(self, data):
        self.at.children.append(data)


def size(bytes):
    """Like `human_size` in crates/cli/src/ui.rs: Python rounds ties to even too."""
    if bytes < 1024:
        return f"{bytes} B"
    value, units = bytes / 1024, ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while value >= 1023.95 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f} {units[0]}"


def duration(seconds):
    for limit, per, unit in (
        (120, 1, "s"),
        (7200, 60, "min"),
        (172800, 3600, "h"),
        (1 << 62, 86400, "d"),
    ):
        if seconds < limit:
            return f"{seconds // per} {unit}"


def harmless(text):
    bad = lambda c: (
        ord(c) < 32
        or 127 <= ord(c) < 160
        or c in "\u061c\u200e\u200f"
        or "\u202a" <= c <= "\u202e"
        or "\u2066" <= c <= "\u2069"
    )
    return "".join("".join(f"\\x{b:02x}" for b in c.encode()) if bad(c) else c for c in text)


def in_domain(image):
    return "" if image["domain"] == "default" else f" ({image['domain']})"


def labels(report):
    """What the page calls each image where it has only its domain and digest."""
    more = lambda names: f" +{len(names) - 1}" if len(names) > 1 else ""
    return {
        (i["domain"], i["image"]): ((i["names"] or [""])[0] or i["image"][:12])
        + in_domain(i)
        + more(i["names"])
        for i in report["images"]
    }


class Checks:
    def __init__(self):
        self.count, self.failed = 0, []

    def equal(self, what, got, wanted):
        self.count += 1
        if got != wanted:
            self.failed.append(f"{what}: {got!r:.300}, expected {wanted!r:.300}")

    def true(self, what, got):
        self.equal(what, bool(got), True)

    # Numbers.

    def marked(self, what, root):
        """Every visible digit belongs to a number with its exact value, or to foreign text."""
        forms = {
            "data_bytes": size,
            "data_count": lambda n: f"{n:,}",
            "data_seconds": duration,
            "data_ms": lambda n: f"{n / 1000:g} s",
        }
        for node in root.walk():
            if node.tag in ("script", "title", "style"):
                continue
            for name, form in forms.items():
                if name in node.attrs:
                    self.equal(
                        f"{what}: {name} of {node.tag}", node.text(), form(int(node.attrs[name]))
                    )
            own = "".join(child for child in node.children if isinstance(child, str))
            if any(c.isdigit() for c in own):
                up, marks = node, set(forms) | {"data_time", "data_foreign"}
                while up and not marks & set(up.attrs):
                    up = up.parent
                self.true(f"{what}: number without its exact value: {own!r}", up)

    def table(self, what, root, id, wanted, key, names):
        """The rows of a table are these, in this order, with these numbers and names."""
        rows = root.one(id).find(data_key=True)
        self.equal(
            f"{what}: keys of {id}",
            [row.attrs["data_key"] for row in rows],
            [key(row) for row in wanted],
        )
        for row, account in zip(rows, wanted):
            cells = row.find(data_field=True)
            shown = {cell.attrs["data_field"] for cell in cells}
            is_number = lambda it: isinstance(account[it], int) or it.endswith("_bytes")
            numbers = set(filter(is_number, account)) - NOT_SHOWN.get(id, set())
            self.equal(f"{what}: numbers without a column in {id}", numbers - shown, set())
            for cell in cells:
                field = cell.attrs["data_field"]
                if field not in account or isinstance(account[field], (str, list)):
                    continue
                number = [
                    node.attrs[a]
                    for node in cell.walk()
                    for a in ("data_bytes", "data_count", "data_seconds")
                    if a in node.attrs
                ]
                self.equal(
                    f"{what}: {field} of {key(account)}",
                    number,
                    [] if account[field] is None else [str(account[field])],
                )
            for name in names(account):
                self.true(f"{what}: name {name!r} of {key(account)}", harmless(name) in row.text())

    def sharing(self, what, root, data, domain, label):
        sharing = data.sharing(domain)
        order = sorted(range(len(sharing["images"])), key=lambda n: -sharing["bytes"][n][n])[:20]
        hexes = [i["image"] for i in sharing["images"]]
        rows = root.one("matrix").find(data_key=True)
        self.equal(
            f"{what}: rows of matrix",
            [row.attrs["data_key"] for row in rows],
            [f"{domain}/{hexes[n]}" for n in order],
        )
        for a, row in zip(order, rows):
            # It had the domain in it, as "undefined".
            name = row.find(scope="row")[0].find(data_foreign=True)[0].text()
            self.equal(f"{what}: name in matrix", name, harmless(label[domain, hexes[a]]))
            cells = row.find(data_column=True)
            self.equal(
                f"{what}: matrix row",
                [(c.attrs["data_column"], int(c.attrs["data_bytes"])) for c in cells],
                [(hexes[b], sharing["bytes"][a][b]) for b in order],
            )

    def machines(self, what, root, report, inside):
        machines = report["machines"]
        self.equal(
            f"{what}: machines are hidden", "hidden" in root.one("machines").attrs, not machines
        )
        note = root.one("machines-note")
        self.equal(
            f"{what}: what machines share",
            [int(node.attrs["data_bytes"]) for node in note.find(data_bytes=True)],
            [report["image_bytes"], report["pool_bytes"], report["returned_bytes"]],
        )
        latency = [report["latency"][it] for it in ("p50_ms", "p99_ms")]
        self.equal(
            f"{what}: latencies",
            [int(node.attrs["data_ms"]) for node in note.find(data_ms=True)],
            [it for it in latency if it is not None],
        )
        shown = sorted(filter(inside, machines), key=lambda m: -m["proportional_bytes"])[:50]
        self.table(
            what,
            root,
            "machines-table",
            shown,
            lambda m: m["name"],
            lambda m: [m["name"], m["image_name"], m["recycling"]["refusal"] or ""],
        )

    def page(self, what, text, data, domain=None, containers=None, images=None):
        """A whole page at its default sorts. `domain`: the one that is chosen."""
        root, report = Parser(text).root, data.report()
        self.marked(what, root)
        inside = lambda it: domain is None or it["domain"] == domain
        totals, machine = root.find(data_total=True), root.find(data_machine=True)
        self.equal(f"{what}: totals", [node.attrs["data_total"] for node in totals], TOTALS)
        named = sorted(node.attrs["data_machine"] for node in machine)
        self.equal(f"{what}: figures of the machine", named, sorted(report["machine"]))
        for node in totals:
            total = sum(d[node.attrs["data_total"]] for d in report["domains"] if inside(d))
            self.equal(f"{what}: {node.attrs['data_total']}", node.attrs["data_bytes"], str(total))
        for node in machine:
            self.equal(
                f"{what}: machine",
                node.attrs["data_bytes"],
                str(report["machine"][node.attrs["data_machine"]]),
            )
        unknown = [node.attrs["data_count"] for node in root.one("unknown").find(data_count=True)]
        self.equal(f"{what}: unknown", unknown, [str(n) for n in report["unknown"].values()])
        reasons = [node.text() for node in root.one("warnings").find(data_foreign=True)]
        self.equal(f"{what}: warnings", reasons, [harmless(it) for it in report["warnings"]])
        points = [point["saved_bytes"] for point in data.history()["points"]]
        readout = [int(n.attrs["data_bytes"]) for n in root.one("readout").find(data_bytes=True)]
        self.equal(f"{what}: history", readout, [min(points), max(points)] if points else [])
        lines = [n.attrs["d"] for n in root.one("chart").walk() if "series" in n.attrs.get("class", "")]
        self.equal(f"{what}: points in chart", sum(d.count(" ") for d in lines), len(points))
        ages = [
            int(node.attrs["data_seconds"]) for node in root.one("ages").find(data_seconds=True)
        ]
        late = data.late_seconds
        for got, least in zip(
            ages,
            (late, late + report["residency_age_seconds"], late + report["processes_age_seconds"]),
        ):
            self.true(f"{what}: age {got} from {least}", least <= got <= least + 30)
        self.equal(f"{what}: ages", len(ages), 3)
        if containers is None:
            mine = [
                c for c in report["containers"] if domain is None or any(map(inside, c["images"]))
            ]
            containers = sorted(mine, key=lambda c: -c["private_bytes"])[:50]
        if images is None:
            images = sorted(filter(inside, report["images"]), key=lambda i: -i["resident_bytes"])[
                :50
            ]
        self.machines(what, root, data.machine_report(), inside)
        label = labels(report)
        self.table(
            what,
            root,
            "containers-table",
            containers,
            lambda c: c["cgroup"],
            lambda c: [
                *c["cgroup"].rstrip("/").rpartition("/")[::2],
                c["name"] or "",
                *(label[i["domain"], i["image"]] for i in c["images"]),
            ],
        )
        self.table(
            what,
            root,
            "images-table",
            images,
            lambda i: f"{i['domain']}/{i['image']}",
            lambda i: [*i["names"], i["image"][:12] + (in_domain(i) if not i["names"] else "")],
        )
        self.table(
            what,
            root,
            "domains-table",
            sorted(report["domains"], key=lambda d: -d["saved_bytes"]),
            lambda d: d["domain"],
            lambda d: [d["domain"]],
        )
        if report["domains"] and report["images"]:
            self.sharing(
                what,
                root,
                data,
                domain or max(report["domains"], key=lambda d: d["resident_bytes"])["domain"],
                label,
            )

    # Everything else.

    def accessible(self, what, browser):
        roles = {
            "button",
            "link",
            "searchbox",
            "combobox",
            "slider",
            "table",
            "checkbox",
            "dialog",
            "region",
        }
        name = lambda node: (node.get("name") or {}).get("value", "")
        for node in browser("Accessibility.getFullAXTree")["nodes"]:
            if not node.get("ignored") and node["role"]["value"] in roles:
                self.true(f"{what}: a {node['role']['value']} without a name", name(node).strip())
        low = browser.js(LOW_CONTRAST)
        self.equal(f"{what}: text of low contrast", low, [])

    def keyboard(self, browser, server):
        url = f"http://127.0.0.1:{server.server_port}/"
        browser.open(url)
        seen = []
        for _ in range(400):
            browser.key("Tab")
            now = browser.js(ACTIVE)
            if not now:
                break
            seen.append(now)
        self.true(
            "keyboard: focus is visible everywhere", all(it.endswith("|solid") for it in seen)
        )
        for wanted in ("full", "pause", "series", "chart", "matrix", "Private", "search", "Saved"):
            self.true(f"keyboard: reaches {wanted}", any(wanted in it for it in seen))
        # The fragment is written 200 ms after sorting. If that was due when Enter was pressed, the old
        # state took the place of the address that the link led to, and nothing opened.
        browser.open(url)
        browser.js(
            "setTimeout(() => {"
            "document.querySelector('#images-table thead button').click();"
            "document.querySelector('#images-table tbody a').focus();"
            "const end = performance.now() + 600; while (performance.now() < end);"
            "}, 10)"
        )
        time.sleep(0.1)
        browser.key("Enter")
        browser.wait("document.getElementById('drawer').open")
        # An image's files, a file's users, and back. Tab has left the page, so it is opened again.
        browser.open(url)
        browser.js("document.querySelector('#images-table tbody a').focus()")
        key = browser.js("document.activeElement.closest('tr').dataset.key")
        browser.key("Enter")
        browser.wait("document.querySelector('#files-table tr[data-key]')")
        domain, image = key.rsplit("/", 1)
        files = server.fixture.files(domain, image)
        root = Parser(browser.html()).root
        self.marked("files", root)
        self.table(
            "files",
            root,
            "files-table",
            files["files"][:50],
            lambda f: f["path"],
            lambda f: [f["path"]],
        )
        self.accessible("files", browser)
        browser.js(
            "[...document.querySelectorAll('#files-table thead button')]"
            ".find((it) => it.textContent === 'Path').click()"
        )
        first = files["files"] and server.fixture.files(domain, image, "path")["files"][0]["path"]
        browser.wait(
            f"document.querySelector('#files-table tr[data-key]').dataset.key === {first!r}"
        )
        browser.js("document.querySelector('#files-table tbody a').focus()")
        browser.key("Enter")
        browser.wait("document.querySelector('#users-table tr[data-key]')")
        root, users = Parser(browser.html()).root, server.fixture.users(domain, "")["users"]
        self.marked("users", root)
        label = labels(server.fixture.report())
        wanted = sorted(users, key=lambda u: (u["seconds_ago"], u["cgroup"]))[:50]
        self.table(
            "users",
            root,
            "users-table",
            wanted,
            lambda u: f"{u['cgroup']} {u['image']}",
            lambda u: [
                u["name"] or "",
                u["cgroup"].rpartition("/")[2],
                label[domain, u["image"]],
            ],
        )
        # The users have no domain of their own: the links led to the image "undefined/77c78b0caba3".
        self.equal(
            "users: links to images",
            [
                parse_qs(a.attrs["href"].lstrip("#"))["image"]
                for a in root.one("users-table").find(href=True)
            ],
            [[f"{domain}/{u['image']}"] for u in wanted],
        )
        link = browser.js("location.href")
        browser.key("Escape")
        browser.wait("!document.getElementById('drawer').open")
        self.true(
            "keyboard: closing the drawer gives the focus back",
            browser.js(
                f"document.activeElement.closest('#images-table tr')?.dataset.key === {key!r}"
            ),
        )
        browser.open(link)
        self.true(
            "a linked drawer opens",
            browser.js("document.querySelectorAll('#users-table tr[data-key]').length"),
        )
        # The chart.
        browser.open(url)
        browser.js("document.getElementById('chart').focus()")
        browser.key("Home")
        point = server.fixture.history()["points"][0]["saved_bytes"]
        self.equal(
            "keyboard: chart",
            browser.js("document.querySelector('#readout [data-bytes]').dataset.bytes"),
            str(point),
        )
        self.true(
            "keyboard: chart says it",
            size(point) in browser.js("document.getElementById('chart').ariaValueText"),
        )
        # Filter by typing; the state ends up in the fragment.
        browser.js("document.querySelector('#images-table input').focus()")
        for letter in "redis":
            browser.key(letter, text=letter)
        browser.wait("location.hash.includes('images.q=redis')")
        self.equal(
            "filter",
            browser.js("document.querySelectorAll('#images-table tr[data-key]').length"),
            sum(any("redis" in name for name in i["names"]) for i in server.fixture.images),
        )

    def refusals(self, browser, server):
        """Refusals are shown in the drawer, and a daemon without a first report in the banner."""
        url = f"http://127.0.0.1:{server.server_port}/"
        for state in (
            {"image": "default/" + "0" * 64},
            {"image": "<b>"},
            {"image": "default/x", "object": "<b>", "path": "<b>"},
        ):
            browser.open(f"{url}#{urlencode(state)}")
            self.true(
                f"refused: {state}",
                "no such thing" in browser.js("document.getElementById('drawer-note').textContent"),
            )
        server.status, server.error = 500, "no\u202e luck"
        browser.open(url, ready="document.querySelector('#banner strong')")
        banner = browser.js("document.getElementById('banner').textContent")
        self.true(
            f"no first report: {banner}",
            "no\\xe2\\x80\\xae luck (status 500). There are no figures yet" in banner,
        )
        server.status = 200
        browser.wait("document.querySelector('#ages .n')")

    def updates(self, browser, server):
        """New figures come in and the focus stays; errors are shown, and figures marked as old."""
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        browser.js("document.querySelector('#images-table tbody tr:nth-child(3) a').focus()")
        key = browser.js("document.activeElement.closest('tr').dataset.key")
        changed = fixtures.FIXTURES["medium"]()
        for image in changed.images:
            image["resident_bytes"] = image["resident_bytes"] * 7 % 500_000_003
        for container in changed.containers:
            del container["commons_bytes"]
        changed.unknown["openers"] = 1
        server.fixture = changed
        browser.wait(f"document.querySelector('#unknown [data-count]').dataset.count === '1'")
        for container in changed.containers:
            container["commons_bytes"] = None
        self.true(
            "update: the focus stays on its row",
            browser.js(f"document.activeElement.closest('tr')?.dataset.key === {key!r}"),
        )
        time.sleep(0.3)
        # The matrix is asked for less often.
        changed.sharing = fixtures.FIXTURES["medium"]().sharing
        self.page("update", browser.html(), changed)
        server.late = 400
        browser.wait("document.body.classList.contains('old')")
        self.true(
            "stuck: said",
            "its figures are not new"
            in browser.js("document.getElementById('banner').textContent"),
        )
        server.late = 2
        browser.wait("!document.body.classList.contains('old')")
        server.status, server.error = 503, "<b>store</b> is locked"
        browser.wait("document.body.classList.contains('old')")
        banner = browser.js("document.getElementById('banner').textContent")
        self.true(
            f"error: literally: {banner}",
            "reports an error: <b>store</b> is locked (status 503)." in banner
            and "figures on this page are old" in banner,
        )
        self.true(
            "error: announced",
            "<b>store</b>" in browser.js("document.getElementById('announce').textContent"),
        )
        self.true("error: in the title", browser.js("document.title").startswith("No answer"))
        self.accessible("error", browser)
        server.status = 200
        browser.wait("!document.body.classList.contains('old')")
        server.shutdown()
        server.server_close()
        browser.wait("document.body.classList.contains('old')")
        self.true(
            "gone: said",
            browser.js("document.getElementById('banner').textContent").startswith(
                "The daemon does not answer."
            ),
        )

    def rounding(self, browser):
        edges = [
            0,
            1,
            1023,
            1024,
            1280,
            1281,
            1792,
            1048575,
            1 << 20,
            5 << 18,
            1 << 50,
            (1 << 53) - 1,
        ]
        edges += [
            (1 << shift) // 20 * n + d
            for shift in (20, 30, 40)
            for n in range(1, 4000, 7)
            for d in (-1, 0, 1)
        ]
        got = browser.js(f"import('/ui.js').then((ui) => {edges}.map(ui.size))")
        for bytes, text in zip(edges, got):
            self.equal(f"size({bytes})", text, size(bytes))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--screenshots", metavar="DIR")
    args = parser.parse_args()
    checks, servers = (
        Checks(),
        {name: serve.start(make()) for name, make in fixtures.FIXTURES.items()},
    )
    url = lambda name, **state: (
        f"http://127.0.0.1:{servers[name].server_port}/" + (f"#{urlencode(state)}" if state else "")
    )
    data = {name: server.fixture for name, server in servers.items()}
    checks.page("dump-dom", dump_dom(url("medium")), data["medium"])
    browser = Browser()
    try:
        for name in servers:
            browser.look(1280, 800)
            browser.open(url(name))
            checks.page(name, browser.html(), data[name])
            for width, dark in ((1280, True), (640, False), (360, True)):
                browser.look(width, 800, dark)
                checks.true(
                    f"{name}: no sideways scrolling at {width}",
                    browser.js("document.documentElement.scrollWidth <= innerWidth"),
                )
                checks.accessible(f"{name} at {width}", browser)
            elements = browser.js("document.querySelectorAll('*').length")
            checks.true(f"{name}: {elements} elements", elements < 6000)
        browser.look(1280, 800)
        for domain in data["hostile"].domains:
            browser.open(url("hostile", domain=domain))
            checks.page(f"domain {domain}", browser.html(), data["hostile"], domain=domain)
        large = data["large"]
        by_used = sorted(large.containers, key=lambda c: (c["used_bytes"], c["cgroup"]))
        browser.open(
            url(
                "large",
                **{
                    "containers.sort": "used_bytes",
                    "containers.page": "40",
                    "images.sort": "-containers",
                    "images.page": "99",
                },
            )
        )
        images = sorted(large.images, key=lambda i: -i["containers"])
        shown = [
            row.attrs["data_key"]
            for row in Parser(browser.html()).root.one("images-table").find(data_key=True)
        ]
        position = {f"{i['domain']}/{i['image']}": i for i in images}
        checks.equal(
            "large: last page of images",
            sorted(position[k]["containers"] for k in shown),
            sorted(i["containers"] for i in images[250:]),
        )
        checks.page(
            "large: page 40",
            browser.html(),
            large,
            containers=by_used[1950:],
            images=[position[k] for k in shown],
        )
        checks.keyboard(browser, servers["medium"])
        checks.rounding(browser)
        checks.refusals(browser, servers["small"])
        checks.updates(browser, servers["medium"])
        if args.screenshots:
            servers["medium"] = serve.start(fixtures.FIXTURES["medium"]())
            servers["failing"] = serve.start(fixtures.FIXTURES["medium"]())
            pictures(browser, args.screenshots, url, servers)
        checks.equal(
            "requests to elsewhere",
            [it for it in browser.requests if not it.startswith(("http://127.0.0.1:", "about:"))],
            [],
        )
        checks.equal("errors and policy violations", browser.problems, [])
    finally:
        browser.close()
        report(checks)
    raise SystemExit(bool(checks.failed))


def report(checks):
    print(f"{checks.count:,} checks, {len(checks.failed)} failed")
    for failure in checks.failed[:40]:
        print("  " + failure)


def pictures(browser, folder, url, servers):
    os.makedirs(folder, exist_ok=True)
    image = servers["medium"].fixture.images[3]
    key = f"{image['domain']}/{image['image']}"
    views = {
        "medium": url("medium"),
        "large": url("large"),
        "hostile": url("hostile"),
        "empty": url("empty"),
        "files": url("medium", image=key),
        "users": url("large", image=key, object="0" * 64, path="/usr/lib/libc.so.6"),
        "old": url("failing"),
    }
    for name, address in views.items():
        for width, height, dark in (
            (1440, 2600, False),
            (1440, 2600, True),
            (390, 2600, False),
            (390, 2600, True),
        ):
            tall = height if name not in ("files", "users", "old") else 900
            browser.look(width, tall, dark)
            servers["failing"].status, servers["failing"].error = 200, "the store is locked by gc"
            browser.open(address)
            if name == "old":
                servers["failing"].status = 503
                browser.wait("document.body.classList.contains('old')")
            browser.screenshot(
                os.path.join(folder, f"{name}-{width}-{'dark' if dark else 'light'}.png")
            )


if __name__ == "__main__":
    main()
