"""Image layouts, the command line, and that nothing is left behind."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import unittest

from support import CORPUS, Case, write

from imagepairs import builder, host, layer, oci
from imagepairs.recipes import RECIPES

EPOCH = 1_700_000_000


class Layout(Case):
    def build(self, name):
        """A layout of two layers, the second of which removes a file of the first."""
        root = self.path(name + "-root")
        layers, before = [], {}
        for step in range(2):
            write(os.path.join(root, f"file-{step}"), str(step) * 5000, time=EPOCH)
            if step == 1:
                os.unlink(os.path.join(root, "file-0"))
            layer.clamp(root, EPOCH)
            after, _ = layer.scan(root)
            blob = self.path(f"{name}-blob-{step}")
            part = layer.write(root, after, *layer.difference(before, after), EPOCH, blob)
            layers.append({**part, "blob": blob, "epoch": EPOCH, "created_by": f"step {step}"})
            before = after
        process = {"Env": ["A=b"], "Entrypoint": ["/init"], "Cmd": ["run"], "User": "redis"}
        digest = oci.write_layout(self.path(name), "redis:1.2-3", ("amd64", None), layers, process, {"label": "value"})
        return digest, layers

    def test_every_blob_is_what_its_descriptor_says(self):
        digest, layers = self.build("layout")

        def blob(descriptor):
            with open(self.path("layout/blobs/sha256", descriptor["digest"].split(":")[1]), "rb") as file:
                data = file.read()
            self.assertEqual(len(data), descriptor["size"])
            self.assertEqual("sha256:" + hashlib.sha256(data).hexdigest(), descriptor["digest"])
            return data

        with open(self.path("layout/index.json"), encoding="utf-8") as file:
            (descriptor,) = json.load(file)["manifests"]
        self.assertEqual(descriptor["digest"], digest)
        self.assertEqual(descriptor["annotations"], {"org.opencontainers.image.ref.name": "redis:1.2-3"})
        manifest = json.loads(blob(descriptor))
        config = json.loads(blob(manifest["config"]))
        self.assertEqual(len(manifest["layers"]), 2)
        for part in manifest["layers"]:
            blob(part)
        self.assertEqual(config["rootfs"]["diff_ids"], [part["diff_id"] for part in layers])
        self.assertEqual(sum(1 for line in config["history"] if not line.get("empty_layer")), 2)
        self.assertEqual(config["config"]["Labels"], {"label": "value"})
        self.assertEqual(config["config"]["Cmd"], ["run"])

    def test_the_same_image_has_the_same_digest(self):
        self.assertEqual(self.build("one")[0], self.build("two")[0])

    def test_skopeo_accepts_it(self):
        self.need_tool("skopeo")
        digest, layers = self.build("layout")
        output = subprocess.run(["skopeo", "inspect", "oci:" + self.path("layout")], check=True, capture_output=True, timeout=60).stdout
        image = json.loads(output)
        self.assertEqual((image["Digest"], image["Layers"]), (digest, [part["digest"] for part in layers]))
        # A copy reads every blob and checks it against the digests.
        command = ["skopeo", "--insecure-policy", "copy", "oci:" + self.path("layout"), "dir:" + self.path("copy")]
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    def test_versions_become_tags(self):
        self.assertEqual(oci.tag("5:7.0.15-1~deb12u7"), "7.0.15-1-deb12u7")
        self.assertEqual(oci.tag("1:10.11.18-0+deb12u1"), "10.11.18-0-deb12u1")
        self.assertEqual(oci.tag("10.1.25"), "10.1.25")


class CommandLine(Case):
    def run_build(self, *arguments, **more):
        env = {**os.environ, **more.pop("env", {})}
        command = [sys.executable, os.path.join(CORPUS, "build"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, **more)

    def plant(self, sources):
        """An apt configuration with these sources and nothing of the machine's."""
        write(self.path("sources.list"), sources)
        for directory in ("parts", "lists/partial"):
            os.makedirs(self.path(directory), exist_ok=True)
        config = f'Dir::Etc::sourcelist "{self.path("sources.list")}";\nDir::Etc::sourceparts "{self.path("parts")}";\n'
        write(self.path("apt.conf"), config + f'Dir::State::lists "{self.path("lists")}";\n')
        return {"APT_CONFIG": self.path("apt.conf")}

    def finish(self, name):
        """A pair that looks built."""
        for side in builder.SIDES:
            write(self.path("out", name, side, "index.json"), "{}")
        side = {"version": "1", "entries": 7, "bytes": 3 << 20}
        pair = {"pair": name, "format": builder.FORMAT, "release": "bookworm", "old": side, "new": dict(side, version="2")}
        write(self.path("out", name, "pair.json"), json.dumps(pair))

    def test_wrong_usage(self):
        for arguments in ([], ["mongodb"], ["--release", "potato", "redis"], ["--nonsense"]):
            result = self.run_build(*arguments)
            self.assertEqual(result.returncode, host.USAGE, result.stderr)
        self.assertIn("mongodb", self.run_build("mongodb").stderr)
        self.assertEqual(self.run_build("--help").returncode, 0)

    def test_lists_what_there_is(self):
        result = self.run_build("--list", env={"COFOLIO_CORPUS": self.path("out")})
        self.assertEqual(result.stdout.count("not built"), len(RECIPES))
        self.finish("redis")
        result = self.run_build("--list", env={"COFOLIO_CORPUS": self.path("out")})
        self.assertEqual(result.stdout.count("not built"), len(RECIPES) - 1)
        self.assertIn("7 entries, 3 MiB", result.stdout)
        listed = [json.loads(line) for line in self.run_build("--list", "--json", "--out", self.path("out")).stdout.splitlines()]
        self.assertEqual([pair["pair"] for pair in listed], list(RECIPES))

    def test_a_finished_pair_needs_nothing(self):
        self.finish("redis")
        result = self.run_build("--out", self.path("out"), "redis", env=self.plant(""))
        self.assertEqual((result.returncode, result.stdout), (0, self.path("out/redis") + "\n"), result.stderr)

    def test_half_a_pair_is_not_finished(self):
        self.finish("redis")
        os.unlink(self.path("out/redis/new/index.json"))
        self.assertIsNone(builder.Builder(self.path("out")).finished("redis"))
        self.finish("redis")
        self.assertIsNone(builder.Builder(self.path("out"), release="trixie").finished("redis"))

    def test_no_mirror(self):
        self.need_root()
        self.need_tool("apt-get")
        result = self.run_build("--out", self.path("out"), "redis", env=self.plant("deb http://ubuntu.example/ noble main\n"))
        self.assertEqual(result.returncode, host.UNAVAILABLE, result.stderr)
        self.assertIn("no Debian mirror in apt's configuration:\n    http://ubuntu.example noble main", result.stderr)
        self.assertEqual([name for name in os.listdir(self.path("out")) if name != ".cache"], [])

    def test_a_mirror_that_does_not_answer(self):
        self.need_root()
        self.need_tool("apt-get")
        if not os.path.exists("/usr/share/keyrings/debian-archive-keyring.gpg"):
            self.skip("needs debian-archive-keyring")
        sources = "deb file:/nonexistent/debian bookworm main\ndeb file:/nonexistent/security bookworm-security main\n"
        result = self.run_build("--out", self.path("out"), "redis", env=self.plant(sources))
        self.assertEqual(result.returncode, host.UNAVAILABLE, result.stderr)
        self.assertIn("cannot fetch the index of", result.stderr)

    def test_not_root(self):
        self.need_root()  # to become somebody else
        os.chmod(self.scratch, 0o777)
        if subprocess.run(["ls", CORPUS], user=65534, group=65534, extra_groups=[], capture_output=True).returncode != 0:
            self.skip(f"nobody cannot read {CORPUS}")
        python = "/usr/bin/python3"
        if not os.path.exists(python):
            self.skip(f"needs {python}")
        command = [python, os.path.join(CORPUS, "build"), "--out", self.path("out"), "redis"]
        result = subprocess.run(command, user=65534, group=65534, extra_groups=[], capture_output=True, text=True, timeout=60)
        self.assertEqual(result.returncode, host.NO_PRIVILEGE, result.stderr)
        self.assertIn("must be root", result.stderr)

    def test_too_little_disk(self):
        with self.assertRaises(host.Problem) as caught:
            host.need_space(self.scratch, 1 << 60)
        self.assertEqual(caught.exception.code, host.NO_SPACE)
        self.assertIn("MiB free", str(caught.exception))


class Cleanliness(Case):
    def mounts(self):
        with open("/proc/self/mounts", encoding="utf-8") as file:
            return [line for line in file if self.scratch in line]

    def tree(self):
        for name in ("root/proc", "root/dev", "root/mnt", "shared"):
            os.makedirs(self.path(name))
        write(self.path("shared/file"))

    def test_mounts_are_there_for_the_command_and_for_nobody_else(self):
        self.need_root()
        self.tree()
        root = self.path("root")
        command = ["sh", "-ec", f"test -c {root}/dev/null; test -d {root}/proc/self; ls {root}/mnt"]
        self.assertEqual(host.run_beside(root, command, [(self.path("shared"), "/mnt")]), "file\n")
        self.assertEqual(self.mounts(), [])
        self.assertEqual(os.listdir(os.path.join(root, "dev")), [])

    def test_a_failing_command_is_told_with_its_last_words(self):
        with self.assertRaises(host.Problem) as caught:
            host.run(["sh", "-c", "echo out; echo last words >&2; exit 3"], code=host.UNAVAILABLE, what="the step")
        self.assertEqual(caught.exception.code, host.UNAVAILABLE)
        self.assertIn("the step: exit code 3", str(caught.exception))
        self.assertIn("last words", str(caught.exception))
        with self.assertRaises(host.Problem):
            host.run(["/nonexistent/command"])

    def test_a_signal_ends_everything(self):
        """A build that is told to stop leaves no process, no mount and no half-made tree."""
        self.need_root()
        self.tree()
        script = f"""
import os, signal, sys
sys.path.insert(0, {CORPUS!r})
from imagepairs import builder, host
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
with builder.Builder({self.path("out")!r})._locked(), builder.Builder({self.path("out")!r})._workspace() as work:
    host.run_beside({self.path("root")!r}, ["sh", "-c", "echo > {self.path("started")}; exec sleep 7654"])
"""
        child = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 30
            while not os.path.exists(self.path("started")):
                self.assertLess(time.monotonic(), deadline, "the command does not start")
                time.sleep(0.02)
            while not (sleepers := self.descendants(child.pid, "sleep")):  # sh has yet to exec it
                self.assertLess(time.monotonic(), deadline, "the command does not run")
                time.sleep(0.02)
            (sleeper,) = sleepers
            child.send_signal(signal.SIGTERM)
            self.assertEqual(child.wait(30), 143)
        finally:
            child.kill()
            child.wait()
        deadline = time.monotonic() + 10
        while os.path.exists(f"/proc/{sleeper}/exe"):
            self.assertLess(time.monotonic(), deadline, "the command still runs")
            time.sleep(0.02)
        self.assertEqual(self.mounts(), [])
        self.assertEqual(os.listdir(self.path("out")), [".cache"])

    def descendants(self, pid, name):
        """The processes below `pid` that are called `name`."""
        found, pending = [], [str(pid)]
        while pending:
            parent = pending.pop()
            for entry in filter(str.isdigit, os.listdir("/proc")):
                try:
                    with open(f"/proc/{entry}/stat", encoding="utf-8") as file:
                        fields = file.read().rsplit(") ", 1)
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if fields[1].split()[1] == parent:
                    pending.append(entry)
                    if fields[0].split("(", 1)[1] == name:
                        found.append(int(entry))
        return found

    def test_what_a_killed_build_left_is_cleared_away(self):
        write(self.path("out/.work-dead/root/etc/passwd"))
        with builder.Builder(self.path("out"))._locked():
            self.assertEqual(os.listdir(self.path("out")), [".cache"])

    def test_a_tree_with_a_mount_in_it_is_not_removed(self):
        self.need_root()
        write(self.path("root/kept/file"))
        os.mkdir(self.path("root/mnt"))
        script = f"import sys; sys.path.insert(0, {CORPUS!r})\nfrom imagepairs import host\nhost.remove_tree({self.path('root')!r})"
        mount = 'mount --bind "$1/root/kept" "$1/root/mnt"; exec "$2" -B -c "$3"'
        command = ["unshare", "--mount", "sh", "-ec", mount, "sh", self.scratch, sys.executable, script]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        self.assertIn("is mounted, not removed", result.stderr)
        self.assertTrue(os.path.exists(self.path("root/kept/file")))


if __name__ == "__main__":
    unittest.main()
