#!/usr/bin/env python3
"""Serves the dashboard with made-up figures: `serve.py large`.

The headers are those that the daemon has to send: the dashboard must work under them.
"""

import argparse
import json
import pathlib
import re
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import fixtures

ROOT = pathlib.Path(__file__).resolve().parent.parent
STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    **{
        f"/{name}.js": (f"{name}.js", "text/javascript")
        for name in ("accounts", "app", "chart", "matrix", "table", "ui")
    },
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path in STATIC:
            name, kind = STATIC[url.path]
            return self.answer(200, kind, (ROOT / name).read_bytes())
        status, body = self.server.status, {"error": self.server.error}
        if status == 200:
            status, body = self.api(url.path, query)
        self.answer(status, "application/json", json.dumps(body).encode())

    def api(self, path, query):
        data = self.server.fixture
        if path == "/v1/report":
            return 200, data.report()
        if path == "/v1/machines":
            return 200, data.machine_report()
        if path == "/v1/history":
            return 200, data.history()
        if path == "/v1/sharing" and query.get("domain") in data.domains:
            return 200, data.sharing(query["domain"])
        parts = [unquote(part) for part in path.split("/")]
        if re.fullmatch(r"/v1/images/[^/]+/[0-9a-f]{64}/files", path) and any(
            i["image"] == parts[4] for i in data.images
        ):
            return 200, data.files(
                parts[3], parts[4], query.get("sort", "resident"), int(query.get("limit", 1000))
            )
        if re.fullmatch(r"/v1/objects/[^/]+/[0-9a-f]{64}/users", path):
            return 200, data.users(parts[3], parts[4])
        return 404, {"error": f"no such thing: {path}"}

    def answer(self, status, kind, body):
        self.send_response_only(status)
        # Fixtures are always as old as the server says; a real daemon sends the real date.
        self.send_header("Date", formatdate(fixtures.NOW + self.server.late, usegmt=True))
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def start(fixture, port=0):
    """A server on its own thread. Its attributes may change while it runs."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.fixture, server.status, server.error, server.late = fixture, 200, "", 2
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fixture", nargs="?", default="medium", choices=fixtures.FIXTURES)
    parser.add_argument("--port", type=int, default=8017)
    args = parser.parse_args()
    server = start(fixtures.FIXTURES[args.fixture](), args.port)
    print(f"http://127.0.0.1:{server.server_port}/")
    while True:
        time.sleep(3600)
