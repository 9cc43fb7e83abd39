"""Layers: differences, whiteouts, hardlinks, and the same bytes whenever the tree is the same."""

import errno
import gzip
import hashlib
import os
import struct
import tarfile
import unittest

from support import Case, write

from imagepairs import host, layer

EPOCH = 1_700_000_000


class LayerCase(Case):
    def make(self, name, before, root):
        """Writes the layer from `before` (entries) to `root`; returns (description, blob, entries)."""
        after, _ = layer.scan(root)
        changed, removed = layer.difference(before, after)
        blob = self.path(name)
        return layer.write(root, after, changed, removed, EPOCH, blob), blob, after

    def names(self, blob):
        with tarfile.open(blob) as archive:
            return [member.name for member in archive]


class Difference(LayerCase):
    def setUp(self):
        super().setUp()
        self.root = self.path("root")
        write(self.path("root/etc/kept"), "kept", time=EPOCH)
        write(self.path("root/etc/changed"), "before", time=EPOCH)
        write(self.path("root/etc/gone"), "gone", time=EPOCH)
        write(self.path("root/gone-dir/deep/file"), "gone", time=EPOCH)
        write(self.path("root/was-dir/inside"), "gone", time=EPOCH)
        write(self.path("root/was-file"), "gone", time=EPOCH)
        write(self.path("root/bin/perl"), "perl", time=EPOCH)
        os.link(self.path("root/bin/perl"), self.path("root/bin/perl5"))
        os.symlink("kept", self.path("root/etc/link"))
        layer.clamp(self.root, EPOCH)

    def change(self):
        write(self.path("root/etc/changed"), "after!", time=EPOCH)
        os.unlink(self.path("root/etc/gone"))
        os.unlink(self.path("root/gone-dir/deep/file"))
        os.rmdir(self.path("root/gone-dir/deep"))
        os.rmdir(self.path("root/gone-dir"))
        os.unlink(self.path("root/was-dir/inside"))
        os.rmdir(self.path("root/was-dir"))
        write(self.path("root/was-dir"), "a file now", time=EPOCH)
        os.unlink(self.path("root/was-file"))
        write(self.path("root/was-file/inside"), "a directory now", time=EPOCH)
        write(self.path("root/new/deep/file"), "new", time=EPOCH)
        layer.clamp(self.root, EPOCH)

    def test_lists_what_changed_and_no_more(self):
        before, _ = layer.scan(self.root)
        self.change()
        _, blob, _ = self.make("blob", before, self.root)
        expected = [".wh.gone-dir", "etc", "etc/.wh.gone", "etc/changed", "new", "new/deep", "new/deep/file"]
        expected += ["was-dir", "was-file", "was-file/inside"]
        self.assertEqual(self.names(blob), expected)

    def test_the_layers_in_order_give_the_tree(self):
        _, first, before = self.make("first", {}, self.root)
        self.change()
        _, second, after = self.make("second", before, self.root)
        os.mkdir(self.path("copy"), 0o755)
        layer.unpack(first, self.path("copy"))
        self.assertEqual(layer.scan(self.path("copy"))[0], before)
        layer.unpack(second, self.path("copy"))
        self.assertEqual(layer.scan(self.path("copy"))[0], after)

    def test_nothing_changed_is_an_empty_layer(self):
        before, known = layer.scan(self.root)
        after, _ = layer.scan(self.root, known)
        self.assertEqual(layer.difference(before, after), ([], []))

    def test_a_hardlinked_file_is_written_whole(self):
        before, _ = layer.scan(self.root)
        os.link(self.path("root/bin/perl"), self.path("root/bin/perl5.36"))
        layer.clamp(self.root, EPOCH)
        _, blob, _ = self.make("blob", before, self.root)
        with tarfile.open(blob) as archive:
            members = {member.name: member for member in archive}
        self.assertEqual(sorted(members), ["bin", "bin/perl", "bin/perl5", "bin/perl5.36"])
        self.assertTrue(members["bin/perl"].isreg())
        self.assertEqual(members["bin/perl5"].linkname, "bin/perl")
        self.assertEqual(members["bin/perl5.36"].linkname, "bin/perl")

    def test_a_changed_mode_owner_or_time_is_a_change(self):
        before, _ = layer.scan(self.root)
        os.chmod(self.path("root/etc/kept"), 0o600)
        os.utime(self.path("root/bin/perl"), (EPOCH - 1, EPOCH - 1))
        after, _ = layer.scan(self.root)
        self.assertEqual(layer.difference(before, after)[0], ["bin", "bin/perl", "bin/perl5", "etc", "etc/kept"])

    def test_known_files_are_not_read_again_but_changed_ones_are(self):
        _, known = layer.scan(self.root)
        path = self.path("root/etc/changed")
        write(path, "beyond", time=EPOCH)  # same size and time: only the ctime tells
        after, _ = layer.scan(self.root, known)
        self.assertEqual(after["etc/changed"].digest, hashlib.sha256(b"beyond").hexdigest())


class Reproducible(LayerCase):
    def tree(self, name, order):
        for entry in order:
            write(self.path(name, entry), entry * 100, mode=0o640)
        for entry in order:
            os.chmod(os.path.dirname(self.path(name, entry)), 0o755)
        layer.clamp(self.path(name), EPOCH)
        return self.path(name)

    def test_the_same_tree_gives_the_same_bytes(self):
        names = ["a/b/c", "a.b", "a/b.c", "z", "a/\u00e9"]
        one, blob_one, _ = self.make("one.tar.gz", {}, self.tree("one", names))
        two, blob_two, _ = self.make("two.tar.gz", {}, self.tree("two", reversed(names)))
        self.assertEqual(one, two)
        with open(blob_one, "rb") as first, open(blob_two, "rb") as second:
            data = first.read()
            self.assertEqual(data, second.read())
        self.assertEqual(data[3:9], bytes(6), "no name, no time, no extra flags in the gzip header")
        self.assertEqual(one["digest"], "sha256:" + hashlib.sha256(data).hexdigest())
        self.assertEqual(one["diff_id"], "sha256:" + hashlib.sha256(gzip.decompress(data)).hexdigest())
        self.assertEqual((one["size"], one["unpacked"]), (len(data), len(gzip.decompress(data))))

    def test_one_changed_byte_changes_the_digest(self):
        one, _, _ = self.make("one.tar.gz", {}, self.tree("one", ["a", "b"]))
        root = self.tree("two", ["a", "b"])
        with open(os.path.join(root, "a"), "r+b") as file:
            file.write(b"x")
        layer.clamp(root, EPOCH)
        two, _, _ = self.make("two.tar.gz", {}, root)
        self.assertNotEqual(one["diff_id"], two["diff_id"])

    def test_directories_come_before_what_is_in_them(self):
        names = self.names(self.make("blob", {}, self.tree("one", ["a/b/c", "a-b", "a.b/x", "a/b.c"]))[1])
        for name in names:
            parent = os.path.dirname(name)
            self.assertTrue(not parent or names.index(parent) < names.index(name), names)

    def test_extended_attributes_of_any_bytes_survive(self):
        # A version 2 capability of all bits has bytes that are not UTF-8.
        value = struct.pack("<IIIII", 0x02000001, 0xFFFFFFFF, 0, 0xFF, 0)
        names = {"user.any": bytes(range(256))}
        if os.geteuid() == 0:
            names["security.capability"] = value
        root = self.tree("one", ["file"])
        try:
            for name, content in names.items():
                os.setxattr(os.path.join(root, "file"), name, content)
        except OSError as error:
            if error.errno == errno.ENOTSUP:
                self.skip(f"{self.scratch} has no {name}")
            raise
        _, blob, before = self.make("blob", {}, root)
        os.mkdir(self.path("copy"))
        layer.unpack(blob, self.path("copy"))
        self.assertEqual(layer.scan(self.path("copy"))[0], before)
        self.assertEqual(dict(before["file"].xattrs), names)

    def test_a_sparse_looking_and_a_long_name_survive(self):
        root = self.path("root")
        write(os.path.join(root, "d" * 120, "f" * 200), bytes(1 << 20), time=EPOCH)
        layer.clamp(root, EPOCH)
        _, blob, before = self.make("blob", {}, root)
        os.mkdir(self.path("copy"))
        layer.unpack(blob, self.path("copy"))
        self.assertEqual(layer.scan(self.path("copy"))[0], before)

    def test_devices_and_fifos_survive(self):
        self.need_root()
        root = self.path("root")
        os.mkdir(root)
        os.mknod(os.path.join(root, "null"), 0o020666, os.makedev(1, 3))
        os.mkfifo(os.path.join(root, "pipe"))
        layer.clamp(root, EPOCH)
        _, blob, before = self.make("blob", {}, root)
        os.mkdir(self.path("copy"))
        layer.unpack(blob, self.path("copy"))
        self.assertEqual(layer.scan(self.path("copy"))[0], before)
        self.assertEqual(before["null"].device, os.makedev(1, 3))


class Tidy(Case):
    def test_the_epoch_is_the_newest_time_before_the_build(self):
        write(self.path("old"), time=EPOCH - 100)
        write(self.path("packaged"), time=EPOCH)
        write(self.path("installed"), time=EPOCH + 5000)
        os.utime(self.scratch, (EPOCH + 1, EPOCH + 1))
        self.assertEqual(layer.newest(self.scratch, EPOCH + 4000), EPOCH)
        layer.clamp(self.scratch, EPOCH)
        entries, _ = layer.scan(self.scratch)
        self.assertEqual({path: entry.mtime for path, entry in entries.items()}, {"old": EPOCH - 100, "packaged": EPOCH, "installed": EPOCH})

    def test_what_differs_each_time_goes(self):
        gone = ["var/log/dpkg.log", "var/lib/apt/lists/x_Packages", "var/cache/apt/archives/x.deb", "etc/machine-id"]
        gone += ["var/cache/ldconfig/aux-cache", "etc/ssl/private/ssl-cert-snakeoil.key", "tmp/x", "etc/apt/sources.list", "etc/shadow-"]
        for name in gone + ["etc/passwd", "usr/bin/true", "var/lib/dpkg/status"]:
            write(self.path(name))
        os.makedirs(self.path("var/log/nginx"))
        os.symlink("/dev/stdout", self.path("var/log/nginx/access.log"))
        os.makedirs(self.path("etc/ssl/certs"))
        os.symlink("ssl-cert-snakeoil.pem", self.path("etc/ssl/certs/0a1b2c3d.0"))
        os.symlink("other.pem", self.path("etc/ssl/certs/0a1b2c3e.0"))
        layer.tidy(self.scratch, EPOCH)
        for name in gone + ["etc/ssl/certs/0a1b2c3d.0"]:
            self.assertFalse(os.path.lexists(self.path(name)), name)
        for name in ["etc/passwd", "usr/bin/true", "var/lib/dpkg/status", "var/log/nginx/access.log", "etc/ssl/certs/0a1b2c3e.0", "tmp"]:
            self.assertTrue(os.path.lexists(self.path(name)), name)

    def test_password_days_are_not_later_than_the_epoch(self):
        write(self.path("etc/shadow"), "root:*:19000:0:99999:7:::\nredis:!:29999::::::\nodd:!:::::::\n")
        layer.tidy(self.scratch, EPOCH)
        with open(self.path("etc/shadow"), encoding="utf-8") as file:
            self.assertEqual(file.read(), f"root:*:19000:0:99999:7:::\nredis:!:{EPOCH // 86400}::::::\nodd:!:::::::\n")

    def keystore(self, certificates):
        body = struct.pack(">IIi", 0xFEEDFEED, 2, len(certificates))
        for alias, time_ms, content in certificates:
            body += struct.pack(">IH", 2, len(alias)) + alias + struct.pack(">q", time_ms)
            body += struct.pack(">H", 5) + b"X.509" + struct.pack(">I", len(content)) + content
        return body + hashlib.sha1("changeit".encode("utf-16-be") + b"Mighty Aphrodite" + body).digest()

    def test_a_java_keystore_does_not_hold_the_time(self):
        path = self.path("etc/ssl/certs/java/cacerts")
        write(path, self.keystore([(b"b", 5, b"BBBB"), (b"a", 6, b"AA")]))
        layer.tidy(self.scratch, EPOCH)
        with open(path, "rb") as file:
            self.assertEqual(file.read(), self.keystore([(b"a", EPOCH * 1000, b"AA"), (b"b", EPOCH * 1000, b"BBBB")]))

    def test_a_keystore_that_is_not_understood_is_not_touched(self):
        path = self.path("etc/ssl/certs/java/cacerts")
        good = self.keystore([(b"a", 6, b"AA")])
        for bad in (good[:-1] + b"!", b"\0" * 40, good.replace(b"\0\0\0\2\0\1a", b"\0\0\0\1\0\1a")):
            write(path, bad)
            with self.assertRaises(host.Problem):
                layer.tidy(self.scratch, EPOCH)
            with open(path, "rb") as file:
                self.assertEqual(file.read(), bad)


if __name__ == "__main__":
    unittest.main()
