"""Turns recipes into pairs of image layouts, with every layer and download cached."""

import fcntl
import hashlib
import json
import os
import tempfile
import time
from contextlib import contextmanager

from . import debian, host, layer, oci
from .recipes import RECIPES, Base

# Part of every layer's cache key: raise it when the code makes other layers of the same inputs.
FORMAT = 1

SIDES = ("old", "new")


class Builder:
    """Builds pairs into one output directory, which it has for itself while it exists.

    <out>/<pair>/{old,new}    image layouts
    <out>/<pair>/pair.json    what they are
    <out>/.cache/             layers, packages, indices, wheels; may be removed at any time
    <out>/.work-*/            what is being built; removed at the end, also of a failure
    """

    def __init__(self, out, rebuild=False, release=None):
        self.out, self.rebuild, self.release = os.path.abspath(out), rebuild, release
        self.cache = os.path.join(self.out, ".cache")
        self.built = {}  # layers made by this run, by key: even --rebuild makes each only once
        self.archives = {}
        self.mirror = None

    @contextmanager
    def _locked(self):
        """Keeps a second builder out, and clears away what a killed one left."""
        os.makedirs(os.path.join(self.cache, "layers"), exist_ok=True)
        os.makedirs(os.path.join(self.cache, "downloads"), exist_ok=True)
        with open(os.path.join(self.cache, "lock"), "w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                host.say(f"waiting for another build in {self.out}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            for name in os.listdir(self.out):
                if name.startswith(".work-"):
                    host.remove_tree(os.path.join(self.out, name))
            yield

    @contextmanager
    def _workspace(self):
        path = tempfile.mkdtemp(prefix=".work-", dir=self.out)
        try:
            yield path
        finally:
            host.remove_tree(path)

    def finished(self, name):
        """The pair.json of a pair that is built, complete and on the release asked for, or None."""
        directory = os.path.join(self.out, name)
        try:
            with open(os.path.join(directory, "pair.json"), encoding="utf-8") as file:
                pair = json.load(file)
        except FileNotFoundError:
            return None
        complete = all(os.path.exists(os.path.join(directory, side, "index.json")) for side in SIDES)
        release = RECIPES[name].release or self.release or pair["release"]
        return pair if complete and pair["format"] == FORMAT and pair["release"] == release else None

    def _archive(self, release, side):
        """The index of one side; fetched once in a run, so that all pairs are made of one state."""
        if self.mirror is None:
            self.mirror = debian.find_mirror()
            if not os.path.exists(debian.KEYRING):
                raise host.Problem(host.UNAVAILABLE, f"{debian.KEYRING}: missing, install debian-archive-keyring")
        if (release, side) not in self.archives:
            self.archives[release, side] = debian.Archive(self.mirror, release, side, self.cache)
        return self.archives[release, side]

    def _choose(self, recipe):
        """The release to build on, the package that makes the pair, and its versions."""
        own = debian.own_release()
        candidates = [recipe.release or self.release] if recipe.release or self.release else []
        if not candidates:
            candidates = ([own] if own else []) + [name for name in debian.RELEASES if name != own]
        if not recipe.package:
            return candidates[0], None, recipe.versions
        refused = []
        for release in candidates:
            old, new = (self._archive(release, side) for side in SIDES)
            package = old.newest_of(recipe.package) if "(" in recipe.package else recipe.package
            versions = {"old": package and old.version(package), "new": package and new.version(package)}
            try:
                check_versions(recipe.name, release, package or recipe.package, versions)
                return release, package, versions
            except host.Problem as problem:
                refused.append(str(problem))
        raise host.Problem(host.REFUSED, "\n".join(refused))

    def build(self, name):
        """Builds the pair `name` if that is needed; returns its pair.json."""
        if not self.rebuild and (pair := self.finished(name)):
            host.say(f"{name}: {pair['old']['version']} and {pair['new']['version']}, built before")
            return pair
        host.need_root()
        with self._locked():
            # Whoever had the lock before us may have built it.
            if not self.rebuild and (pair := self.finished(name)):
                return pair
            return self._build(RECIPES[name])

    def _build(self, recipe):
        name = recipe.name
        architecture = oci_architecture(recipe)
        host.need_space(self.out, recipe.space)
        release, package, versions = self._choose(recipe)
        host.say(f"{name}: {release}, {versions['old']} and {versions['new']}")
        pair = {"pair": name, "what": recipe.what, "release": release, "format": FORMAT}
        with self._workspace() as work:
            for side in SIDES:
                # Where the application is not Debian's, both sides stand on the same Debian: images
                # of two versions that were made on the same day.
                archive = self._archive(release, side if package else "new")
                steps = [Base(archive), *recipe.steps(archive, side, os.path.join(self.cache, "downloads"), package)]
                layers = self._layers(work, steps, recipe.check, f"{name} {side}")
                version = versions[side]
                labels = {
                    "org.opencontainers.image.title": name,
                    "org.opencontainers.image.version": version,
                    "org.opencontainers.image.description": recipe.what,
                    "cofolio.corpus.release": release,
                    "cofolio.corpus.side": side,
                }
                reference = f"{name}:{oci.tag(version)}"
                layout = os.path.join(work, "pair", side)
                manifest = oci.write_layout(layout, reference, architecture, layers, recipe.process, labels)
                pair[side] = describe(reference, version, manifest, layers)
            old, new = ([part["digest"] for part in pair[side]["layers"]] for side in SIDES)
            pair["shared_layers"] = len(set(old) & set(new))
            with open(os.path.join(work, "pair/pair.json"), "w", encoding="utf-8") as file:
                json.dump(pair, file, indent=1)
            self._publish(os.path.join(work, "pair"), name)
        return pair

    def _publish(self, path, name):
        target = os.path.join(self.out, name)
        os.chmod(path, 0o755)
        if os.path.exists(target):
            os.rename(target, path + "-before")  # removed with the workspace
        os.rename(path, target)

    def _layers(self, work, steps, check, what):
        """The layers of `steps`, from the cache as far as they are there."""
        keys, key = [], ""
        for step in steps:
            key = hashlib.sha256(json.dumps([FORMAT, key, step.inputs()]).encode()).hexdigest()
            keys.append(key)
        done = []
        for key in keys:
            if not (found := self._cached(key)):
                break
            done.append(found)
        if len(done) == len(steps):
            return done
        root = os.path.join(work, "root")
        host.remove_tree(root)
        os.mkdir(root, 0o755)
        for part in done:
            layer.unpack(part["blob"], root)
        before, known = layer.scan(root)
        for step, key in list(zip(steps, keys))[len(done) :]:
            start = time.time()
            step.apply(root)
            epoch = max(layer.newest(root, int(start)), done[-1]["epoch"] if done else 0)
            layer.tidy(root, epoch)
            layer.clamp(root, epoch)
            after, known = layer.scan(root, known)
            changed, removed = layer.difference(before, after)
            blob = os.path.join(work, "blob")
            written = layer.write(root, after, changed, removed, epoch, blob)
            before = after
            written.update(
                epoch=epoch,
                created_by=step.created_by(),
                packages=debian.installed(root),
                tree_entries=len(after),
                tree_bytes=sum({entry.links or path: entry.size for path, entry in after.items()}.values()),
                build_seconds=round(time.time() - start, 1),
            )
            if step is steps[-1]:
                written["check"] = host.run_inside(root, check).strip()
            host.say(f"  {what}: {written['created_by'][:70]} ({written['entries']} entries, {written['size'] >> 20} MiB, {written['build_seconds']} s)")
            done.append(self._keep(key, written, blob))
        host.remove_tree(root)
        return done

    def _cached(self, key):
        path = os.path.join(self.cache, "layers", key)
        if key in self.built:
            return self.built[key]
        if self.rebuild or not os.path.exists(path + ".json"):
            return None
        with open(path + ".json", encoding="utf-8") as file:
            return dict(json.load(file), blob=path + ".tar.gz")

    def _keep(self, key, written, blob):
        """Puts a layer in the cache: first the blob and then, as its seal, the description."""
        path = os.path.join(self.cache, "layers", key)
        if os.path.exists(path + ".json"):
            with open(path + ".json", encoding="utf-8") as file:
                same = json.load(file)["diff_id"] == written["diff_id"]
            host.say("    the same as before" if same else "    NOT the same as before")
        os.rename(blob, path + ".tar.gz")
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(written, file, indent=1)
        os.rename(path + ".new", path + ".json")
        self.built[key] = dict(written, blob=path + ".tar.gz")
        return self.built[key]


def check_versions(name, release, package, versions):
    """Refuses what is not a pair: an application that is missing, or the same on both sides."""
    for side in SIDES:
        if not versions[side]:
            raise host.Problem(host.REFUSED, f"{name}: {release} has no package {package}")
    if versions["old"] == versions["new"]:
        text = f"{name}: {package} is {versions['old']} in {release}'s main archive and in its security archive: not a pair"
        raise host.Problem(host.REFUSED, text)


def oci_architecture(recipe):
    """The platform of the images, this machine's."""
    architecture = debian.go_architecture()
    if recipe.name == "tensorflow" and architecture[0] != "amd64":
        raise host.Problem(host.UNAVAILABLE, f"tensorflow: there are no wheels of 2.11 for {architecture[0]}")
    return architecture


def describe(reference, version, manifest, layers):
    """One side's part of pair.json."""
    keys = ("digest", "diff_id", "size", "unpacked", "entries", "created_by", "build_seconds")
    top = layers[-1]
    return {
        "version": version,
        "reference": reference,
        "manifest": manifest,
        "created": oci.timestamp(top["epoch"]),
        "entries": top["tree_entries"],
        "bytes": top["tree_bytes"],
        "check": top["check"],
        "layers": [{key: part[key] for key in keys} for part in layers],
        "packages": top["packages"],
    }
