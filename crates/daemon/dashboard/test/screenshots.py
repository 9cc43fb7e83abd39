#!/usr/bin/env python3
"""Makes the pictures of the dashboard in `docs/` anew: `screenshots.py IMAGE…`.

Real figures: imports the images, which are OCI layout directories, into a store of its own, starts
two containers of each, one after another, and takes pictures of a `cofolio serve` that watches
them. Needs root, crun or runc, and Chromium. For the pictures that are
there:

    corpus/build redis nginx
    crates/daemon/dashboard/test/screenshots.py corpus/out/{redis,nginx}/{old,new}
"""

import argparse
import contextlib
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from browser import Browser

TOP = pathlib.Path(__file__).resolve().parents[4]
CONTAINERS_PER_IMAGE = 2
SIZE = (1080, 980)
BYTES_MAX = 150_000


def name_of(layout):
    """`corpus/out/redis/old` is `redis:old`."""
    return "%s:%s" % pathlib.Path(layout).resolve().parts[-2:]


@contextlib.contextmanager
def sandbox(program, work):
    """A function that runs `cofolio` with a store of its own. Nothing of it stays."""
    common = ["--store", f"{work}/store", "--run-dir", f"{work}/run", "--quiet"]

    def cofolio(*args):
        subprocess.run([program, *common, *args], check=True, stdout=subprocess.DEVNULL)

    try:
        yield cofolio, [program, *common]
    finally:
        listed = subprocess.run([program, *common, "ps", "--json"], capture_output=True, text=True)
        for container in json.loads(listed.stdout or "[]"):
            subprocess.run([program, *common, "stop", "--time", "0", container["name"]])
        subprocess.run(["chattr", "-R", "-i", f"{work}/store"], stderr=subprocess.DEVNULL)
        shutil.rmtree(work, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", nargs="+", metavar="IMAGE")
    parser.add_argument("--cofolio", default=str(TOP / "target/release/cofolio"), metavar="FILE")
    parser.add_argument("--minutes", type=float, default=12, help="how long the line gets")
    parser.add_argument("--out", type=pathlib.Path, default=TOP / "docs", metavar="DIR")
    args = parser.parse_args()
    # Not on a tmpfs, where containers cannot have their changes.
    work = tempfile.mkdtemp(dir="/var/tmp", prefix="cofolio-screenshots-")
    with sandbox(args.cofolio, work) as (cofolio, command), contextlib.ExitStack() as end:
        names = [name_of(layout) for layout in args.images]
        for layout, name in zip(args.images, names):
            cofolio("import", "--name", name, f"oci:{layout}")
        daemon = subprocess.Popen(
            [*command, "serve", "--listen", "127.0.0.1:0", "--period", "2"],
            stderr=subprocess.PIPE,
            text=True,
        )
        end.callback(daemon.wait)
        end.callback(daemon.terminate)
        url = next(line.split()[-1] for line in daemon.stderr if "listening at http" in line)
        starts = [(name, n) for n in range(CONTAINERS_PER_IMAGE) for name in names]
        for name, number in starts:
            container = f"{name.replace(':', '-')}-{number + 1}"
            # Writable: not every program runs without that.
            cofolio("run", "--detach", "--rw", "--name", container, name)
            time.sleep(args.minutes * 60 / len(starts))
        # All figures now: on a busy machine those of some containers may be old.
        socket = ["--unix-socket", f"{work}/run/cofolio.sock"]
        sample = ["curl", "--fail", "-sS", "-o", "/dev/null", "-X", "POST", *socket]
        subprocess.run([*sample, "http://localhost/v1/sample"], check=True)
        browser = Browser()
        end.callback(browser.close)
        for look in ("light", "dark"):
            browser.look(*SIZE, dark=look == "dark")
            # Without other processes of this machine that looked at a file.
            browser.open(f"{url}#containers.q=cofolio")
            browser.wait("document.querySelector('#matrix table')")
            path = args.out / f"dashboard-{look}.png"
            browser.screenshot(path)
            if path.stat().st_size > BYTES_MAX:
                sys.exit(f"{path} has more than {BYTES_MAX} bytes")
            print(path)


if __name__ == "__main__":
    main()
