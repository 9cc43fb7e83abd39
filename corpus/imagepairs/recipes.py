"""The six pairs: which layers each side has, and what runs in the container.

A step makes one layer. Its `inputs` are all that its content depends on: steps with the same
inputs on the same parents are built once and shared by all images that have them.
"""

import glob
import os
import sys
from dataclasses import dataclass, field

from . import debian, host

_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Base:
    """A minimal Debian: what debian:*-slim is."""

    archive: debian.Archive

    def inputs(self):
        return ["base", self.archive.release, self.archive.side, self.archive.digest(), *debian.SLIM]

    def created_by(self):
        archives = "main" if self.archive.side == "old" else "main, updates, security"
        return f"mmdebstrap --variant=minbase {self.archive.release} # {archives}; docs, man and locales left out"

    def apply(self, root):
        os.rmdir(root)
        self.archive.bootstrap(root)


@dataclass
class Run:
    """Packages and commands, as a RUN line of a Dockerfile: a list installs, a text is sh's."""

    archive: debian.Archive
    actions: list

    def inputs(self):
        return ["run", self.archive.digest(), self.actions]

    def created_by(self):
        install = "apt-get install -y --no-install-recommends "
        parts = [install + " ".join(action) if isinstance(action, list) else action for action in self.actions]
        return "RUN " + " && ".join(parts)

    def apply(self, root):
        for action in self.actions:
            if isinstance(action, list):
                self.archive.install(root, action)
            else:
                host.run_inside(root, ["sh", "-euc", action])


@dataclass
class Script:
    """One executable text file."""

    path: str
    text: str

    def inputs(self):
        return ["script", self.path, self.text]

    def created_by(self):
        return f"COPY {os.path.basename(self.path)} {self.path}"

    def apply(self, root):
        path = os.path.join(root, self.path.lstrip("/"))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.text)
        os.chmod(path, 0o755)


@dataclass
class Tomcat:
    """Apache Tomcat's binary distribution, from the Maven repository that mvn is set up for."""

    version: str
    cache: str

    def inputs(self):
        return ["tomcat", self.version]

    def created_by(self):
        return f"RUN # org.apache.tomcat:tomcat:{self.version}:tar.gz to /usr/local/tomcat, webapps to webapps.dist"

    def apply(self, root):
        archive = os.path.join(self.cache, f"tomcat-{self.version}.tar.gz")
        if not os.path.exists(archive):
            mvn = host.need_tool("mvn", "maven")
            plugin = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"
            artifact = f"-Dartifact=org.apache.tomcat:tomcat:{self.version}:tar.gz"
            host.run(
                [mvn, "--quiet", "--batch-mode", "--strict-checksums", plugin, artifact]
                + [f"-DoutputDirectory={self.cache}"],
                code=host.UNAVAILABLE,
                what=f"mvn dependency:copy of tomcat {self.version}",
            )
        home = os.path.join(root, "usr/local/tomcat")
        os.mkdir(home)
        host.run(["tar", "-xzf", archive, "-C", home, "--strip-components=1", "--no-same-owner"])
        # As the official image: no applications until somebody adds them, no files for Windows.
        os.rename(os.path.join(home, "webapps"), os.path.join(home, "webapps.dist"))
        os.mkdir(os.path.join(home, "webapps"))
        for path in glob.glob(os.path.join(home, "bin/*.bat")):
            os.unlink(path)


# The wheels for CPython 3.9, the Python of Debian 11.
_TENSORFLOW = {
    "2.11.0": "276a44210d956701899dc78ad0aa116a0071f22fb0bcc1ea6bb59f7646b08d11",
    "2.11.1": "9ddd5c61f68d8125c985370de96a24a80aee5e3f1604efacec7e1c34ca72de24",
}


# Compiled by hash (PEP 552) and not by time: the compiled files then are a function of the sources,
# the same in both images where these are, and are not compiled again at every start. In one process:
# what a file's compiled form shares between its constants depends on what the process compiled before
# it, so several workers give another result each time. -f: a module that a .pth file loads has been
# compiled, by time, when this begins. Some packages have templates that no Python
# 3.9 can compile (exit code 1); pip passes them over too.
_COMPILE = (
    "python3 -m compileall -f -q -j1 --invalidation-mode=unchecked-hash"
    " /usr/local/lib/python3.9/dist-packages >/dev/null || test $? = 1"
)


@dataclass
class TensorFlow:
    """TensorFlow from PyPI; what it depends on is pinned, and the same for every version of it."""

    version: str
    cache: str
    requirements: str = field(init=False)

    def __post_init__(self):
        pins = os.path.join(os.path.dirname(os.path.dirname(__file__)), "tensorflow-requirements.txt")
        with open(pins, encoding="utf-8") as file:
            self.requirements = file.read()
        self.requirements += f"tensorflow=={self.version} --hash=sha256:{_TENSORFLOW[self.version]}\n"

    def inputs(self):
        return ["tensorflow", self.requirements, _COMPILE]

    def created_by(self):
        return f"RUN pip install --require-hashes tensorflow=={self.version} && python3 -m compileall # by hash"

    def apply(self, root):
        wheels = os.path.join(self.cache, f"tensorflow-{self.version}")
        os.makedirs(wheels, exist_ok=True)
        with open(os.path.join(wheels, "requirements.txt"), "w", encoding="utf-8") as file:
            file.write(self.requirements)
        command = [*_pip(), "download", "--quiet", "--dest", wheels, "--no-deps", "--require-hashes"]
        command += ["--only-binary=:all:", "--implementation=cp", "--python-version=3.9", "--abi=cp39", "--abi=abi3", "--abi=none"]
        for platform in ("manylinux_2_17", "manylinux2014", "manylinux2010", "manylinux1"):
            command += ["--platform", platform + "_x86_64"]
        command += ["--requirement", os.path.join(wheels, "requirements.txt")]
        host.run(command, code=host.UNAVAILABLE, what=f"pip download of tensorflow {self.version}")
        install = ["python3", "-m", "pip", "install", "--quiet", "--no-index", "--find-links=/mnt", "--no-deps"]
        install += ["--require-hashes", "--no-compile", "--no-cache-dir", "--requirement=/mnt/requirements.txt"]
        host.run_inside(root, install, binds=[(wheels, "/mnt")])
        host.run_inside(root, ["sh", "-c", _COMPILE])


def _pip():
    """A pip of the host's: this Python's own, else Debian's."""
    try:
        import pip  # noqa: F401

        return [sys.executable, "-m", "pip"]
    except ImportError:
        return [host.need_tool("pip3", "python3-pip")]


@dataclass
class Recipe:
    """A pair. `package` is what must differ in version; None where `versions` are given."""

    name: str
    what: str
    space: int  # bytes on the disk while building, more than seen
    steps: callable  # (archive, side, cache, package) -> steps after the base
    process: dict  # of the image config: Entrypoint, Cmd, Env, User, ExposedPorts, …
    check: list  # a command that must work in the finished tree
    package: str = None  # a pattern of newest_of if it has a group
    versions: dict = None
    release: str = None  # the only release it can be built on


def _process(cmd, env=(), **more):
    return {"Env": [_PATH, *env], "Cmd": cmd, **more}


_POSTGRES_START = """#!/bin/sh
# Makes the database cluster at the first start, then runs what is asked for.
set -e
if [ "$1" = postgres ] && [ ! -s "$PGDATA/PG_VERSION" ]; then
    initdb --username=postgres --auth=trust --encoding=UTF8 --locale=C.UTF-8 --pgdata="$PGDATA"
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
fi
exec "$@"
"""

_MYSQL_START = """#!/bin/sh
# Makes the data directory at the first start, then runs what is asked for.
set -e
if [ "$1" = mariadbd ] && [ ! -d /var/lib/mysql/mysql ]; then
    # --force: also where names do not resolve, as in a container without a network.
    mariadb-install-db --datadir=/var/lib/mysql --auth-root-authentication-method=normal --force --skip-test-db
fi
exec "$@"
"""

_ENTRYPOINT = "/usr/local/bin/docker-entrypoint.sh"


def _redis(archive, side, cache, package):
    actions = [["redis-server", "redis-tools"], "install -d -o redis -g redis /data"]
    return [Run(archive, actions)]


def _nginx(archive, side, cache, package):
    modules = ["geoip", "image-filter", "xslt-filter"]  # as the official image has
    actions = [
        ["nginx", *("libnginx-mod-http-" + module for module in modules), "ca-certificates", "curl"],
        "ln -sf /dev/stdout /var/log/nginx/access.log",
        "ln -sf /dev/stderr /var/log/nginx/error.log",
    ]
    return [Run(archive, actions)]


def _postgres(archive, side, cache, package):
    version = package.split("-")[-1]
    actions = [
        ["postgresql-common"],
        "sed -i 's/^#*create_main_cluster.*/create_main_cluster = false/' /etc/postgresql-common/createcluster.conf",
        [package, "libnss-wrapper", "xz-utils", "zstd"],
        f"ln -s /usr/lib/postgresql/{version}/bin/* /usr/local/bin/",
        f"sed -i \"s/^#listen_addresses = 'localhost'/listen_addresses = '*'/\" /usr/share/postgresql/{version}/postgresql.conf.sample",
        "install -d -o postgres -g postgres -m 1777 /var/lib/postgresql/data",
    ]
    return [Run(archive, actions), Script(_ENTRYPOINT, _POSTGRES_START)]


def _mysql(archive, side, cache, package):
    tools = ["ca-certificates", "gpg", "pwgen", "socat", "tzdata", "xz-utils", "zstd"]  # as the official image has
    # What its administrators add. It makes an image of 10 k entries, with both Perl and Python.
    tools += ["mydumper", "percona-toolkit", "python3-pymysql"]
    actions = [
        ["mariadb-server", "mariadb-backup", *tools],
        # The package makes a database; the image's user shall make one of his own.
        "rm -rf /var/lib/mysql /etc/mysql/debian.cnf",
        "install -d -o mysql -g mysql -m 1777 /var/lib/mysql /run/mysqld",
        "sed -i '/^bind-address/s/^/#/' /etc/mysql/mariadb.conf.d/50-server.cnf",
    ]
    return [Run(archive, actions), Script(_ENTRYPOINT, _MYSQL_START)]


def _tomcat(archive, side, cache, package):
    java = archive.newest_of(r"openjdk-(\d+)-jre-headless")
    return [Run(archive, [[java, "ca-certificates"]]), Tomcat({"old": "10.1.25", "new": "10.1.26"}[side], cache)]


def _tensorflow(archive, side, cache, package):
    return [Run(archive, [["python3", "python3-pip"]]), TensorFlow({"old": "2.11.0", "new": "2.11.1"}[side], cache)]


_COMPUTE = "import tensorflow as tf; print(tf.__version__, tf.reduce_sum(tf.ones([3])).numpy())"

GIB = 1 << 30

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "redis",
            "Redis of a Debian release, from its main archive and with security updates",
            2 * GIB,
            _redis,
            _process(
                ["redis-server", "--protected-mode", "no"],
                User="redis",
                WorkingDir="/data",
                ExposedPorts={"6379/tcp": {}},
                Volumes={"/data": {}},
            ),
            ["redis-server", "--version"],
            package="redis-server",
        ),
        Recipe(
            "nginx",
            "nginx of a Debian release, from its main archive and with security updates",
            2 * GIB,
            _nginx,
            _process(["nginx", "-g", "daemon off;"], ExposedPorts={"80/tcp": {}}, StopSignal="SIGQUIT"),
            ["sh", "-c", "nginx -v 2>&1 && nginx -t 2>&1"],
            package="nginx",
        ),
        Recipe(
            "postgres",
            "PostgreSQL of a Debian release, from its main archive and with security updates",
            2 * GIB,
            _postgres,
            _process(
                ["postgres"],
                ["PGDATA=/var/lib/postgresql/data"],
                Entrypoint=[_ENTRYPOINT],
                User="postgres",
                ExposedPorts={"5432/tcp": {}},
                StopSignal="SIGINT",
                Volumes={"/var/lib/postgresql/data": {}},
            ),
            ["postgres", "--version"],
            package=r"postgresql-(\d+)",
        ),
        Recipe(
            "mysql",
            "MariaDB of a Debian release, from its main archive and with security updates",
            3 * GIB,
            _mysql,
            _process(
                ["mariadbd"],
                Entrypoint=[_ENTRYPOINT],
                User="mysql",
                ExposedPorts={"3306/tcp": {}},
                Volumes={"/var/lib/mysql": {}},
            ),
            ["mariadbd", "--version"],
            package="mariadb-server",
        ),
        Recipe(
            "tomcat",
            "Apache Tomcat 10.1.25 and 10.1.26 on one Debian and its Java",
            3 * GIB,
            _tomcat,
            _process(
                ["catalina.sh", "run"],
                ["CATALINA_HOME=/usr/local/tomcat"],
                WorkingDir="/usr/local/tomcat",
                ExposedPorts={"8080/tcp": {}},
            ),
            ["/usr/local/tomcat/bin/version.sh"],
            versions={"old": "10.1.25", "new": "10.1.26"},
        ),
        Recipe(
            "tensorflow",
            "TensorFlow 2.11.0 and 2.11.1 on one Debian 11 and its Python 3.9",
            8 * GIB,
            _tensorflow,
            _process(["python3"]),
            ["python3", "-c", _COMPUTE],
            versions={"old": "2.11.0", "new": "2.11.1"},
            release="bullseye",
        ),
    )
}
# Only these search /usr/local/tomcat/bin as well.
RECIPES["tomcat"].process["Env"][0] = _PATH.replace("PATH=", "PATH=/usr/local/tomcat/bin:")
