#!/usr/bin/env python3
"""Checks the dashboard of a running daemon in a headless Chromium: `live.py http://127.0.0.1:PORT`.

Every number on the page must equal the API's. The daemon must not take new figures all the time.
`--screenshot FILE` also takes a picture.
"""

import argparse
import json
import urllib.request

from browser import Browser
from check import Checks, report


class Daemon:
    """What the API says, in the form of the fixtures. An answer is asked for once."""

    late_seconds = 0

    def __init__(self, url):
        self.url = url
        self.answers = {}

    def get(self, path):
        if path not in self.answers:
            with urllib.request.urlopen(self.url + path, timeout=60) as answer:
                self.answers[path] = json.load(answer)
        return self.answers[path]

    def report(self):
        return self.get("/v1/report")

    def machine_report(self):
        return self.get("/v1/machines")

    def history(self):
        return self.get("/v1/history")

    def sharing(self, domain):
        return self.get(f"/v1/sharing?domain={domain}")


def while_nothing_changes(browser, url):
    """The page and what the API says before and after it. A daemon that has just been started may still
    publish the report of its first round."""
    for _ in range(20):
        before, after = Daemon(url), Daemon(url)
        before.report()
        browser.open(url + "/")
        html = browser.html()
        for domain in before.report()["domains"]:
            before.sharing(domain["domain"])
        before.history()
        before.machine_report()
        if after.report() == before.report():
            return html, before
    raise RuntimeError("the daemon takes new figures all the time")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--screenshot", metavar="FILE")
    args = parser.parse_args()
    checks, browser = Checks(), Browser()
    try:
        browser.look(1280, 1400)
        html, daemon = while_nothing_changes(browser, args.url)
        checks.page("live", html, daemon)
        checks.accessible("live", browser)
        checks.equal("errors and policy violations", browser.problems, [])
        if args.screenshot:
            browser.screenshot(args.screenshot)
    finally:
        browser.close()
        report(checks)
    raise SystemExit(bool(checks.failed))


if __name__ == "__main__":
    main()
