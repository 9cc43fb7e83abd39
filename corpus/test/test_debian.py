"""Where the mirror comes from, and which versions make a pair. Nothing here uses the network."""

import os
import unittest

from support import Case, write

from imagepairs import builder, debian, host
from imagepairs.recipes import RECIPES


def targets(*lines):
    return "\n".join(lines) + "\n"


class Mirror(Case):
    def refused(self, listing, *words):
        with self.assertRaises(host.Problem) as caught:
            debian.parse_targets(listing)
        self.assertEqual(caught.exception.code, host.UNAVAILABLE)
        for word in words:
            self.assertIn(word, str(caught.exception))

    def test_main_and_security_have_a_uri_each(self):
        listing = targets(
            "bookworm|main|http://mirror.example/debian/",
            "bookworm-updates|main|http://mirror.example/debian/",
            "bookworm-security|main|http://security.example/debian-security/",
        )
        self.assertEqual(
            debian.parse_targets(listing), debian.Mirror("http://mirror.example/debian", "http://security.example/debian-security")
        )

    def test_others_that_name_a_suite_after_a_release_are_passed_over(self):
        listing = targets(
            "nodistro|main|https://node.example/node_20.x/",
            "cloud-sdk-bookworm|main|https://cloud.example/apt/",
            "bookworm|stable|https://docker.example/linux/debian/",
            "bookworm-pgdg|main|https://postgres.example/apt/",
            "bookworm|main|cdrom:[Debian]/",
            "stable|main|file:/srv/debian/",
            "bullseye-security|main|mirror+file:/etc/apt/security.list/",
        )
        self.assertEqual(debian.parse_targets(listing), debian.Mirror("file:/srv/debian", "mirror+file:/etc/apt/security.list"))

    def test_the_first_of_several_is_taken(self):
        listing = targets("bookworm|main|a:1", "bookworm|main|a:2", "buster/updates|main|s:1", "bookworm-security|main|s:2")
        self.assertEqual(debian.parse_targets(listing), debian.Mirror("a:1", "s:1"))

    def test_what_is_missing_is_named(self):
        self.refused("", "no Debian mirror", "no archive at all")
        self.refused(targets("noble|main|http://ubuntu.example/"), "no Debian mirror", "http://ubuntu.example noble main")
        self.refused(targets("bookworm|main|http://mirror.example/"), "no Debian security archive")
        self.refused(targets("bookworm-security|main|http://s.example/"), "no Debian mirror")

    def test_apt_reads_both_kinds_of_sources(self):
        """The real apt-get on planted sources: the format of its answer is not ours to define."""
        self.need_tool("apt-get")
        write(self.path("sources.list"), "# main only\ndeb [arch=amd64] http://mirror.example/debian bookworm main contrib\ndeb-src http://mirror.example/debian bookworm main\n")
        deb822 = "Types: deb deb-src\nURIs: http://security.example/debian-security\nSuites: bookworm-security\nComponents: main\n\n"
        deb822 += "Types: deb\nURIs: http://other.example/debian\nSuites: bookworm\nComponents: main\nEnabled: no\n"
        write(self.path("parts/security.sources"), deb822)
        os.makedirs(self.path("lists/partial"))
        config = f'Dir::Etc::sourcelist "{self.path("sources.list")}";\nDir::Etc::sourceparts "{self.path("parts")}";\n'
        config += f'Dir::State::lists "{self.path("lists")}";\nAPT::Architecture "amd64";\n'
        write(self.path("apt.conf"), config)
        mirror = debian.find_mirror({"APT_CONFIG": self.path("apt.conf")})
        self.assertEqual(mirror, debian.Mirror("http://mirror.example/debian", "http://security.example/debian-security"))

    def test_the_old_side_knows_main_only(self):
        mirror = debian.Mirror("m:/debian", "s:/debian-security")
        old, new = mirror.sources("bookworm", "old"), mirror.sources("bookworm", "new")
        self.assertEqual([line.split("] ")[1] for line in old], ["m:/debian bookworm main"])
        expected = ["m:/debian bookworm main", "m:/debian bookworm-updates main", "s:/debian-security bookworm-security main"]
        self.assertEqual([line.split("] ")[1] for line in new], expected)
        for line in old + new:
            self.assertIn(f"[signed-by={debian.KEYRING}]", line)


class FakeArchive:
    """The index of one side, without a mirror."""

    def __init__(self, versions):
        self.versions = versions

    def version(self, package):
        return self.versions.get(package)

    newest_of = debian.Archive.newest_of


class Versions(Case):
    """`archives` are {(release, side): {package: version}}."""

    def choose(self, name, archives, release=None):
        made = builder.Builder(self.scratch, release=release)
        made.archives = {key: FakeArchive(versions) for key, versions in archives.items()}
        made.mirror = debian.Mirror("m:", "s:")
        for key in [(release, side) for release in debian.RELEASES for side in builder.SIDES]:
            made.archives.setdefault(key, FakeArchive({}))
        return made._choose(RECIPES[name])

    def test_a_release_whose_versions_differ_is_chosen(self):
        same = {("trixie", "old"): {"redis-server": "5:8.0-1"}, ("trixie", "new"): {"redis-server": "5:8.0-1"}}
        differ = {("bullseye", "old"): {"redis-server": "5:6.0-1"}, ("bullseye", "new"): {"redis-server": "5:6.0-1+deb11u9"}}
        chosen = self.choose("redis", {**same, **differ})
        self.assertEqual(chosen, ("bullseye", "redis-server", {"old": "5:6.0-1", "new": "5:6.0-1+deb11u9"}))

    def test_the_same_version_on_both_sides_is_refused(self):
        same = {(release, side): {"nginx": "1.22-9"} for release in debian.RELEASES for side in builder.SIDES}
        for release in (None, "bookworm"):
            with self.assertRaises(host.Problem) as caught:
                self.choose("nginx", same, release)
            self.assertEqual(caught.exception.code, host.REFUSED)
            self.assertIn("nginx is 1.22-9 in bookworm's main archive and in its security archive: not a pair", str(caught.exception))
        self.assertEqual(len(str(caught.exception).splitlines()), 1, "a release that was asked for is the only one tried")

    def test_a_release_without_the_package_is_refused(self):
        with self.assertRaises(host.Problem) as caught:
            self.choose("mysql", {})
        self.assertEqual(caught.exception.code, host.REFUSED)
        self.assertIn("bookworm has no package mariadb-server", str(caught.exception))

    def test_pairs_of_given_versions_need_no_index(self):
        self.assertEqual(self.choose("tensorflow", {}, "trixie"), ("bullseye", None, {"old": "2.11.0", "new": "2.11.1"}))
        self.assertEqual(self.choose("tomcat", {}, "trixie"), ("trixie", None, {"old": "10.1.25", "new": "10.1.26"}))


class Installed(Case):
    def test_only_installed_packages_count(self):
        status = "Package: a\nStatus: install ok installed\nVersion: 1:2-3\nDescription: x\n Version: 9\n\n"
        status += "Package: b\nStatus: deinstall ok config-files\nVersion: 7\n\n"
        write(self.path("var/lib/dpkg/status"), status)
        self.assertEqual(debian.installed(self.scratch), {"a": "1:2-3"})


if __name__ == "__main__":
    unittest.main()
