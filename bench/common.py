"""What the benchmarks that run `cofolio-bench` on every image pair of the corpus have in common."""

import argparse
import contextlib
import datetime
import hashlib
import itertools
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile

TOP = pathlib.Path(__file__).resolve().parent.parent


def host():
    """What the machine is, not what it is called."""
    kib = next(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("MemTotal:"))
    return f"{platform.machine()}-{os.cpu_count()}cpu-{round(kib / (1 << 20))}g"


def archive_name(directory, name):
    """What a run is archived as. An earlier one stays: whoever repeats one until it meets its goal leaves a trace."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not (directory / f"{name}.json").exists())


def output(*command):
    return subprocess.run(command, cwd=TOP, check=True, capture_output=True, text=True).stdout.strip()


def mib(size):
    return f"{size / (1 << 20):.1f}"


def head():
    """The commit of this checkout. With "-dirty" if there are changes but archived figures."""
    changes = output("git", "status", "--porcelain", "--untracked-files=no", "--", ":!bench/runs")
    return output("git", "rev-parse", "--short=12", "HEAD") + ("-dirty" if changes else "")


class Checkout:
    """A checkout as it was when this was made: a measurement of two states is of no commit."""

    def __init__(self, top=TOP):
        self.top = top
        self.state = self.now()

    def now(self):
        """The commit, and a digest of what differs from it. Archived figures do not count."""
        parts = [output("git", "-C", str(self.top), *command.split(), "--", ":!bench/runs")
                 for command in ("rev-parse HEAD", "diff HEAD", "status --porcelain")]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def ensure_committed(self):
        if output("git", "-C", str(self.top), "diff", "HEAD", "--", ":!bench/runs"):
            sys.exit("the checkout has changes, so what is measured would be of no commit")

    def ensure_unchanged(self):
        if self.now() != self.state:
            sys.exit("the checkout changed meanwhile, so what was measured is of no commit")


def commit_of(binary):
    """The commit that a binary is of: one of this checkout is built first."""
    if binary.resolve().parent == (TOP / "target/release").resolve():
        checkout = Checkout()
        subprocess.run(["cargo", "build", "--quiet", "--release", "--workspace", "--bins"], cwd=TOP, check=True)
        checkout.ensure_unchanged()
        return head()
    return f"unknown ({binary.name} was given)"


def parser(name, doc):
    """Options that all of them have. `doc` is the script's own."""
    summary, _, details = doc.partition("\n\n")
    parser = argparse.ArgumentParser(prog=f"bench/{name}", description=summary, epilog=details,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", metavar="PAIR")
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind (default 3)")
    parser.add_argument("--work", default="/var/tmp/cofolio-bench", help="where images are unpacked and kept")
    parser.add_argument("--cofolio", type=pathlib.Path, default=TOP / "target/release/cofolio", help="the binary (default: target/release/cofolio)")
    parser.add_argument("--out", type=pathlib.Path, help="where to archive (default: bench/runs/<date>-<host>)")
    return parser


@contextlib.contextmanager
def filesystem(directory):
    """Mounts an ext4 of its own on a directory: what is cached of its block device is then ours alone, and where it puts
    inodes does not depend on what the machine's filesystem went through."""
    os.makedirs(directory, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=pathlib.Path(directory).parent, suffix=".ext4") as image:
        image.truncate(40 << 30)
        output("mkfs.ext4", "-q", "-b", "4096", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", image.name)
        # Direct I/O, or the file below the device would cache everything a second time. The device keeps the file.
        loop = output("losetup", "--find", "--show", "--direct-io=on", "--sector-size", "4096", image.name)
    try:
        output("mount", loop, directory)
        try:
            yield
        finally:
            output("umount", directory)
    finally:
        output("losetup", "--detach", loop)


class Archive:
    """Where results go, and what they are of."""

    def __init__(self, options, name, known):
        self.name = name
        self.cofolio = options.cofolio.resolve()
        self.bench = self.cofolio.with_name("cofolio-bench")
        self.corpus = pathlib.Path(os.environ.get("COFOLIO_CORPUS") or TOP / "corpus/out").resolve()
        self.pairs = options.pairs or [pair for pair in known if (self.corpus / pair / "new").is_dir()]
        if not self.pairs:
            sys.exit(f"bench/{name}-all: no image pairs in {self.corpus}; `make corpus` builds them")
        self.out = options.out or TOP / "bench/runs" / f"{datetime.date.today()}-{host()}"
        self.out.mkdir(parents=True, exist_ok=True)
        self.commit = commit_of(self.cofolio)

    def path(self, what):
        return self.out / f"{self.name}-{what}.json"

    def measure(self, pair, arguments, what=None):
        """Runs `cofolio-bench NAME` on a pair and archives its result, as of `what` where a pair has several; gives
        whether it was content."""
        what = what or pair
        with tempfile.TemporaryDirectory() as scratch:
            result = os.path.join(scratch, f"{self.name}-{what}.json")
            command = [str(self.bench), self.name, f"{pair}/old", f"{pair}/new", "--json", result, *map(str, arguments)]
            print(f"\n== {what}", flush=True)
            # From the corpus' own directory: the archive is then free of this machine's paths.
            done = subprocess.run(command, cwd=self.corpus)
            if not os.path.exists(result):
                return False
            with open(result) as file:
                report = json.load(file)
        report["commit"] = self.commit
        description = self.corpus / pair / "pair.json"
        if description.exists():
            sides = json.loads(description.read_text())
            report["versions"] = [sides[side]["version"] for side in ("old", "new")]
        self.path(what).write_text(json.dumps(report, indent=1) + "\n")
        return done.returncode == 0

    def reports(self, known):
        """All that is archived there, so that one can be measured again alone."""
        return {what: json.loads(self.path(what).read_text()) for what in known if self.path(what).exists()}


def made_by(script, reports):
    """Who made them, and on what machine: the head of a table."""
    any_report = next(iter(reports.values()))
    machine = any_report["machine"]
    commits = ", ".join(sorted({report["commit"][:18] for report in reports.values()}))
    return [
        f"- made by: `{script}` of commit {commits}, {any_report['tool']}",
        f"- machine: {machine['cpu']}, {machine['cpus']} CPUs, {machine['memory'] >> 30} GiB, Linux {machine['kernel']}, "
        f"{machine['filesystem']}, memory cgroup {machine['memory_cgroup']}",
    ]
