"""What the host gives: errors with exit codes, commands, tools, disk space, private namespaces."""

import os
import re
import shutil
import subprocess
import sys
import tempfile

# Exit codes, after sysexits.h so that a caller can tell them apart.
USAGE = 64  # the caller's mistake
REFUSED = 65  # a pair that would not be one: both sides have the same version
UNAVAILABLE = 69  # no mirror in apt's configuration, no network, a registry that fails
FAILED = 70  # a tool failed
NO_SPACE = 73  # too little room on the disk
NO_PRIVILEGE = 77  # not root


class Problem(Exception):
    """An error that the user can act on; `code` is the exit code."""

    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


def say(text):
    """Progress, on stderr: stdout is for what a script would read."""
    print(text, file=sys.stderr, flush=True)


# Everything runs in this environment and no other, so that a build does not depend on the user's
# locale, time zone or umask. PYTHONHASHSEED: compiled Python files must come out the same twice.
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "DEBIAN_FRONTEND": "noninteractive",
    "PYTHONHASHSEED": "0",
}

# Passed on as they are: how this machine reaches its registries is the user's affair.
_PASSED_ON = re.compile(r"(https?|no)_proxy|(HTTPS?|NO)_PROXY|(PIP|MAVEN|SSL_CERT)_[A-Z_]+|APT_CONFIG|HOME")


def run(command, env=None, code=FAILED, what=None):
    """Runs `command` to its end and returns its stdout; anything but success is a Problem(`code`).

    The child gets a session of its own and is killed with it when we are interrupted, so that
    nothing goes on in the background after Ctrl-C.
    """
    environment = dict(ENVIRONMENT)
    environment.update({name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)})
    environment.update(env or {})
    with tempfile.TemporaryFile() as log:
        try:
            child = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                umask=0o022,
            )
        except FileNotFoundError:
            raise Problem(FAILED, f"{command[0]}: not installed") from None
        try:
            output = child.communicate()[0]
        except BaseException:
            os.killpg(child.pid, 9)
            child.wait()
            raise
        if child.returncode != 0:
            log.seek(0)
            lines = (output + log.read()).decode(errors="replace").splitlines()
            tail = "\n".join("    " + line for line in lines[-25:])
            raise Problem(code, f"{what or command[0]}: exit code {child.returncode}\n{tail}")
    return output.decode(errors="replace")


def need_root():
    if os.geteuid() != 0:
        raise Problem(NO_PRIVILEGE, "must be root: a Debian tree has files of many owners, and its packages' scripts run in a chroot")


def need_space(path, needed_bytes):
    free = shutil.disk_usage(path).free
    if free < needed_bytes:
        raise Problem(NO_SPACE, f"{path}: {free >> 20} MiB free, {needed_bytes >> 20} MiB needed")


def need_tool(tool, package):
    """Makes sure that `tool` can be run, by installing the Debian package that has it."""
    path = shutil.which(tool, path=ENVIRONMENT["PATH"])
    if path:
        return path
    say(f"installing {package} (for {tool})")
    install = ["apt-get", "install", "--yes", "--no-install-recommends", package]
    try:
        run(install, code=UNAVAILABLE)
    except Problem:  # most often because the lists are old or were never fetched
        run(["apt-get", "update"], code=UNAVAILABLE, what="apt-get update")
        run(install, code=UNAVAILABLE, what=f"apt-get install {package}")
    path = shutil.which(tool, path=ENVIRONMENT["PATH"])
    if not path:
        raise Problem(UNAVAILABLE, f"package {package} does not have {tool}")
    return path


# Mounts are made in a mount namespace of their own: they go with the last process in it, so that
# neither a failure nor a kill leaves one behind. The process namespace makes sure of that too for
# what a package's script may have left running.
_NAMESPACE = """
root=$1; binds=$2; shift 2
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755,size=1m dev "$root/dev"
mknod -m 666 "$root/dev/null" c 1 3; mknod -m 666 "$root/dev/zero" c 1 5
mknod -m 666 "$root/dev/full" c 1 7; mknod -m 666 "$root/dev/random" c 1 8
mknod -m 666 "$root/dev/urandom" c 1 9; mknod -m 666 "$root/dev/tty" c 5 0
ln -s /proc/self/fd "$root/dev/fd"; mkdir "$root/dev/shm"
mount -t tmpfs shm "$root/dev/shm"
while [ "$binds" -gt 0 ]; do mount --bind "$1" "$root$2"; shift 2; binds=$((binds - 1)); done
exec "$@"
"""


def run_beside(root, command, binds=(), env=None, code=FAILED, what=None):
    """Runs `command` (on the host's root) while `root` has /proc, /dev and `binds`.

    `binds` are pairs (host directory, directory in `root` that exists).
    """
    places = [place for bind in binds for place in bind]
    inner = ["sh", "-euc", _NAMESPACE, "sh", root, str(len(binds)), *places, *command]
    return run(private(inner), env=env, code=code, what=what or command[0])


def run_inside(root, command, binds=(), env=None):
    """Runs `command` in a chroot at `root`, without a network of its own choosing or daemons."""
    what = "in the image: " + " ".join(command)
    return run_beside(root, ["chroot", root, *command], binds, env, what=what[:200])


def private(command):
    """`command` in its own mount, process and IPC namespaces, killed when we are."""
    return ["unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", *command]


def remove_tree(path):
    """rm -rf, which refuses to go through a mount (there should be none)."""
    if not os.path.lexists(path):
        return
    real = os.path.realpath(path)
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            place = line.split(" ")[1]
            if place == real or place.startswith(real + "/"):
                raise Problem(FAILED, f"{path}: {place} is mounted, not removed")
    shutil.rmtree(path)
