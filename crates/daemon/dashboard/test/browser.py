"""A headless Chromium, driven over a pipe with the DevTools protocol.

It needs no package, and starts once for all checks.
"""

import base64
import fcntl
import json
import os
import subprocess
import tempfile
import time

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-extensions",
]


# A report has come, and what the drawer asked for.
READY = """document.querySelector('#ages .n')
    && !document.querySelector('#drawer[open] #drawer-note')?.textContent.startsWith('Asking')"""


def dump_dom(url, budget_ms=4000):
    with tempfile.TemporaryDirectory() as profile:
        command = [
            "chromium",
            *FLAGS,
            f"--user-data-dir={profile}",
            f"--virtual-time-budget={budget_ms}",
            "--dump-dom",
            url,
        ]
        return subprocess.run(
            command, check=True, capture_output=True, timeout=120, text=True
        ).stdout


class Browser:
    def __init__(self):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (theirs_in, self.out), (self.inp, theirs_out) = os.pipe(), os.pipe()
        # Chromium reads from 3 and writes to 4; first out of the way of those numbers.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 50) for fd in (theirs_in, theirs_out)]
        self.process = subprocess.Popen(
            [
                "chromium",
                *FLAGS,
                "--remote-debugging-pipe",
                f"--user-data-dir={self.profile.name}",
                "about:blank",
            ],
            close_fds=False,
            preexec_fn=lambda: (os.dup2(high[0], 3), os.dup2(high[1], 4)),
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        self.buffer, self.id, self.session = b"", 0, None
        self.requests, self.problems = [], []
        target = next(t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self("Target.attachToTarget", targetId=target["targetId"], flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self(f"{domain}.enable")
        # Keys reach the page even after Tab has left it.
        self("Emulation.setFocusEmulationEnabled", enabled=True)

    def __call__(self, method, **params):
        self.id += 1
        message = {"id": self.id, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.buffer:
                data = os.read(self.inp, 1 << 20)
                if not data:
                    raise RuntimeError("chromium ended")
                self.buffer += data
            line, self.buffer = self.buffer.split(b"\0", 1)
            answer = json.loads(line)
            if answer.get("id") == self.id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.event(answer)

    def event(self, it):
        if it.get("method") == "Network.requestWillBeSent":
            self.requests.append(it["params"]["request"]["url"])
        elif it.get("method") == "Runtime.exceptionThrown":
            details = it["params"]["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif it.get("method") == "Log.entryAdded" and it["params"]["entry"]["source"] in (
            "security",
            "javascript",
            "violation",
        ):
            self.problems.append(it["params"]["entry"]["text"])

    def js(self, expression):
        result = self(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    def wait(self, expression, seconds=20):
        end = time.time() + seconds
        while not self.js(f"Boolean({expression})"):
            if time.time() > end:
                raise RuntimeError(f"never: {expression}")
            time.sleep(0.1)

    def open(
        self,
        url,
        ready=READY,
    ):
        self("Page.navigate", url="about:blank")
        self("Page.navigate", url=url)
        self.wait(ready)
        time.sleep(0.3)

    def html(self):
        return self.js("document.documentElement.outerHTML")

    def key(self, key, code=None, text=None, modifiers=0):
        numbers = {
            "Tab": 9,
            "Enter": 13,
            "Escape": 27,
            "ArrowLeft": 37,
            "ArrowRight": 39,
            "Home": 36,
        }
        common = dict(
            key=key,
            code=code or key,
            windowsVirtualKeyCode=numbers.get(key, 0),
            modifiers=modifiers,
        )
        text = "\r" if key == "Enter" else text
        self("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self("Input.dispatchKeyEvent", type="keyUp", **common)

    def look(self, width, height, dark=False):
        self(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self(
            "Emulation.setEmulatedMedia",
            features=[
                {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
                {"name": "prefers-reduced-motion", "value": "reduce"},
            ],
        )

    def screenshot(self, path):
        with open(path, "wb") as file:
            file.write(base64.b64decode(self("Page.captureScreenshot", format="png")["data"]))

    def close(self):
        try:
            self.session = None
            self("Browser.close")
        except (RuntimeError, OSError):
            pass
        self.process.wait(timeout=20)
        self.profile.cleanup()
