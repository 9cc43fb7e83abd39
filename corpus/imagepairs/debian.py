"""Debian: the mirror that this machine uses, what its archives hold, trees installed from them.

An image's OLD side is installed from a release's main archive alone (the last point release), its
NEW side from main, updates and security: the two states in which a Debian based image really is
found. Packages are verified by apt, against Debian's archive keys and no others.
"""

import hashlib
import os
import re
from dataclasses import dataclass

from . import host

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

# Releases whose main archive and whose security archive may be on the machine's mirror, newest
# first. The machine's own goes before all of them.
RELEASES = ("trixie", "bookworm", "bullseye")

# Names under which an archive of Debian itself may stand in apt's sources.
_SUITES = RELEASES + ("buster", "forky", "duke", "sid", "stable", "oldstable", "oldoldstable", "testing", "unstable")

# What debian:*-slim leaves out and keeps (debuerreotype's .slimify-excludes and -includes).
SLIM = (
    "path-exclude=/usr/share/doc/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/linda/*",
    "path-exclude=/usr/share/lintian/overrides/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/man/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-include=/usr/share/locale/locale.alias",
)


# Run in a tree by its Python: compiles again what py3compile compiled, all in one process and in
# order. What a compiled file shares between its constants depends on what else the process had
# loaded and compiled, and py3compile's workers give another result each time. The standard library
# is loaded from its sources meanwhile (pycache_prefix), for the same reason.
_RECOMPILE = """
import glob, os, py_compile, sys
ending = f".{sys.implementation.cache_tag}.pyc"
for compiled in sorted(glob.glob("/usr/lib/python3*/**/__pycache__/*" + ending, recursive=True)):
    directory, name = os.path.split(compiled)
    source = os.path.join(os.path.dirname(directory), name[: -len(ending)] + ".py")
    if os.path.exists(source):
        py_compile.compile(source, compiled, doraise=True)
"""


@dataclass(frozen=True)
class Mirror:
    """Where Debian's archives are, as this machine's apt knows them."""

    main: str  # URI of the main archive, with the -updates suites
    security: str  # URI of the security archive

    def sources(self, release, side):
        """One-line apt sources of one side of a pair."""
        lines = [(self.main, release)]
        if side == "new":
            lines += [(self.main, release + "-updates"), (self.security, release + "-security")]
        return [f"deb [signed-by={KEYRING}] {uri} {suite} main" for uri, suite in lines]


def find_mirror(env=None):
    """The mirror in apt's configuration; a Problem(UNAVAILABLE) where there is none.

    `env` is added to apt's environment (APT_CONFIG, to plant a configuration).
    """
    # --no-release-info: also before the first `apt-get update`. apt reads one-line and deb822
    # sources alike, so there is no second parser of them here.
    listing = ["apt-get", "indextargets", "--no-release-info"]
    listing += ["--format", "$(RELEASE)|$(COMPONENT)|$(REPO_URI)", "Created-By: Packages"]
    return parse_targets(host.run(listing, env, host.UNAVAILABLE, "apt-get indextargets"))


def parse_targets(listing):
    """Finds Debian's main and security archive in lines `suite|component|URI`."""
    main = security = None
    seen = []
    for line in listing.splitlines():
        if line.count("|") != 2:
            continue
        suite, component, uri = line.split("|")
        uri = uri.rstrip("/")
        seen.append(f"{uri} {suite} {component}")
        if component != "main" or uri.startswith("cdrom:"):
            continue
        # Third parties name suites after releases too, but with a suffix or a component of their
        # own; and what slips through here is stopped by the signature.
        if suite in _SUITES:
            main = main or uri
        elif suite.endswith("-security") and suite[: -len("-security")] in _SUITES:
            security = security or uri
        elif suite.endswith("/updates") and suite[: -len("/updates")] in _SUITES:
            security = security or uri  # as it was called before Debian 11
    if main and security:
        return Mirror(main, security)
    missing = "Debian mirror" if not main else "Debian security archive"
    text = "".join(f"\n    {source}" for source in dict.fromkeys(seen)) or " it names no archive at all"
    raise host.Problem(host.UNAVAILABLE, f"no {missing} in apt's configuration:{text}")


def own_release():
    """The codename of this machine's Debian, or None."""
    try:
        with open("/etc/os-release", encoding="utf-8") as file:
            match = re.search(r'^VERSION_CODENAME="?([a-z]+)"?$', file.read(), re.MULTILINE)
    except FileNotFoundError:
        return None
    return match.group(1) if match and match.group(1) in RELEASES else None


def acquire_options():
    """This machine's apt options of how to reach archives (proxies, retries, checks of dates)."""
    kept = []
    for line in host.run(["apt-config", "dump", "--no-empty", "Acquire"]).splitlines():
        if not re.match(r"Acquire::(IndexTargets|CompressionTypes|Changelogs|cdrom|Languages|GzipIndexes)\b", line):
            kept.append(line)
    return "\n".join(kept) + "\n"


class Archive:
    """What one side of one release holds: its indices, fetched once per run."""

    def __init__(self, mirror, release, side, cache):
        self.release, self.side = release, side
        self.directory = os.path.join(cache, "apt", f"{release}-{side}")
        self.debs = os.path.join(cache, "debs")
        self.sources = mirror.sources(release, side)
        for name in ("lists/partial", "debs/partial", "empty"):
            os.makedirs(os.path.join(self.directory, name), exist_ok=True)
        os.makedirs(os.path.join(self.debs, "partial"), exist_ok=True)
        self._write("sources.list", "\n".join(self.sources) + "\n")
        self._write("status", "")
        self.config = self._configure("apt.conf", self.directory, os.path.join(self.directory, "status"))
        host.run(
            ["apt-get", "update", "--quiet", "-oAPT::Update::Error-Mode=any"],
            env={"APT_CONFIG": self.config},
            code=host.UNAVAILABLE,
            what=f"cannot fetch the index of {release} ({'main' if side == 'old' else 'main and security'})",
        )

    def _write(self, name, text):
        path = os.path.join(self.directory, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def _configure(self, name, root, status, extra=""):
        """An apt configuration for `root` that has nothing of this machine's but how to fetch."""
        return self._write(
            name,
            f'Dir "{root}";\n'
            f'Dir::State::lists "{self.directory}/lists";\n'
            f'Dir::State::status "{status}";\n'
            f'Dir::Etc::sourcelist "{self.directory}/sources.list";\n'
            f'Dir::Etc::sourceparts "{self.directory}/empty";\n'
            f'Dir::Etc::trusted "{KEYRING}";\n'
            f'Dir::Etc::trustedparts "{self.directory}/empty";\n'
            f'Dir::Etc::netrc "/etc/apt/auth.conf";\n'
            f'Dir::Etc::netrcparts "/etc/apt/auth.conf.d";\n'
            # The caches belong to root, and apt's own user cannot get there.
            'APT::Sandbox::User "root";\n'
            'APT::Install-Recommends "false";\n'
            'APT::Get::Assume-Yes "true";\n'
            'Acquire::Languages "none";\n' + extra + acquire_options(),
        )

    def digest(self):
        """Names the state of the archives: a hash of their signed indices."""
        lists = os.path.join(self.directory, "lists")
        indices = sorted(name for name in os.listdir(lists) if name.endswith("Release"))
        digest = hashlib.sha256()
        for name in indices:
            with open(os.path.join(lists, name), "rb") as file:
                digest.update(hashlib.sha256(file.read()).digest())
        return digest.hexdigest()

    def version(self, package):
        """The version that would be installed, or None."""
        text = host.run(["apt-cache", "policy", package], env={"APT_CONFIG": self.config})
        match = re.search(r"^  Candidate: (\S+)$", text, re.MULTILINE)
        return match.group(1) if match and match.group(1) != "(none)" else None

    def newest_of(self, pattern):
        """The name of the package, with a number in it as in `postgresql-15`, that is newest."""
        names = host.run(["apt-cache", "pkgnames"], env={"APT_CONFIG": self.config}).split()
        numbered = [(int(match.group(1)), match.group(0)) for name in names if (match := re.fullmatch(pattern, name))]
        return max(numbered)[1] if numbered else None

    def bootstrap(self, root):
        """Makes a minimal system in `root`, which must not exist, as debian:*-slim is one."""
        mmdebstrap = host.need_tool("mmdebstrap", "mmdebstrap")
        options = [option for line in SLIM for option in ("--dpkgopt", line)]
        # Debian 12 and later are merged without the usrmerge package (and Perl, which it needs).
        merged = "/usr/share/mmdebstrap/hooks/maybe-merged-usr"
        if os.path.isdir(merged):
            options += ["--hook-dir", merged]
        apt = self._write("acquire.conf", acquire_options())
        host.run(
            host.private([mmdebstrap, "--mode=root", "--variant=minbase", "--format=directory"])
            + ["--aptopt", apt, *options, self.release, root, *self.sources],
            what=f"mmdebstrap {self.release}",
        )
        os.unlink(os.path.join(root, "etc/apt/apt.conf.d/99mmdebstrap"))
        configuration = os.path.join(root, "etc/dpkg/dpkg.cfg.d")
        os.rename(os.path.join(configuration, "99mmdebstrap"), os.path.join(configuration, "docker"))
        # Device nodes are the runtime's to make; the official images have none either.
        devices = os.path.join(root, "dev")
        host.remove_tree(devices)
        os.mkdir(devices, 0o755)

    def install(self, root, packages):
        """Installs `packages` into `root` with what they depend on."""
        policy = os.path.join(root, "usr/sbin/policy-rc.d")
        with open(policy, "w", encoding="utf-8") as file:
            file.write("#!/bin/sh\nexit 101\n")  # no daemon is started by its package
        os.chmod(policy, 0o755)
        for section in (1, 7):  # alternatives want to put links there, though the pages are left out
            os.makedirs(os.path.join(root, f"usr/share/man/man{section}"), exist_ok=True)
        archives = os.path.join(root, "var/cache/apt/archives")
        os.makedirs(archives, exist_ok=True)
        status = os.path.join(root, "var/lib/dpkg/status")
        extra = f'DPkg::Chroot-Directory "{root}";\nDir::Cache::archives "{archives}/";\nDpkg::Use-Pty "false";\n'
        config = self._configure("install.conf", root, status, extra)
        # apt runs outside and dpkg in the chroot, so that the tree needs neither the mirror's
        # address nor a resolver nor certificates.
        host.run_beside(
            root,
            ["apt-get", "install", *packages],
            binds=[(self.debs, "/var/cache/apt/archives")],
            env={"APT_CONFIG": config},
            code=host.FAILED,
            what="apt-get install " + " ".join(packages),
        )
        if os.path.exists(os.path.join(root, "usr/bin/python3")):
            host.run_inside(root, ["python3", "-s", "-S", "-B", "-X", "pycache_prefix=/nonexistent", "-c", _RECOMPILE])


def installed(root):
    """{package: version} of what dpkg has installed in `root`."""
    packages = {}
    with open(os.path.join(root, "var/lib/dpkg/status"), encoding="utf-8") as file:
        for paragraph in file.read().split("\n\n"):
            fields = dict(re.findall(r"^(Package|Status|Version): (.*)$", paragraph, re.MULTILINE))
            if fields.get("Status", "").endswith(" installed"):
                packages[fields["Package"]] = fields["Version"]
    return packages


def go_architecture():
    """This machine's architecture as OCI images call it: (architecture, variant or None)."""
    name = host.run(["dpkg", "--print-architecture"]).strip()
    known = {"armhf": ("arm", "v7"), "arm64": ("arm64", "v8"), "i386": ("386", None), "ppc64el": ("ppc64le", None)}
    return known.get(name, (name, None))
