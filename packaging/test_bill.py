#!/usr/bin/env python3
"""The bill of materials against what SPDX 2.3 requires, Cargo.lock and the licences of deny.toml."""
import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib
import unittest

TOP = pathlib.Path(__file__).resolve().parent.parent


def made(what, **environment):
    return subprocess.run([TOP / "packaging/bill", what], check=True, stdout=subprocess.PIPE, text=True,
                          env={**os.environ, **environment}).stdout


class Bill(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.bill = json.loads(made("sbom"))
        cls.packages = {package["SPDXID"]: package for package in cls.bill["packages"]}

    def test_what_the_standard_requires_is_there(self):
        # SPDX 2.3, clauses 6, 7 and 11.
        bill = self.bill
        self.assertEqual([bill["spdxVersion"], bill["dataLicense"], bill["SPDXID"]], ["SPDX-2.3", "CC0-1.0", "SPDXRef-DOCUMENT"])
        self.assertTrue(bill["name"])
        self.assertRegex(bill["documentNamespace"], r"^[a-z]+:[^#]+$")
        self.assertRegex(bill["creationInfo"]["created"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
        self.assertTrue(all(re.match(r"(Tool|Organization|Person): .", creator) for creator in bill["creationInfo"]["creators"]))
        self.assertEqual(len(self.packages), len(bill["packages"]), "identifiers are unique")
        for package in bill["packages"]:
            self.assertRegex(package["SPDXID"], r"^SPDXRef-[A-Za-z0-9.-]+$")
            self.assertTrue(package["name"] and package["versionInfo"] and package["downloadLocation"])
            self.assertIs(package["filesAnalyzed"], False)
            for checksum in package.get("checksums", []):
                self.assertEqual(checksum["algorithm"], "SHA256")
                self.assertRegex(checksum["checksumValue"], r"^[0-9a-f]{64}$")
        for relation in bill["relationships"]:
            self.assertIn(relation["relationshipType"], ("DESCRIBES", "DEPENDS_ON", "BUILD_DEPENDENCY_OF"))
            for end in (relation["spdxElementId"], relation["relatedSpdxElement"]):
                self.assertTrue(end == "SPDXRef-DOCUMENT" or end in self.packages, end)

    def test_it_is_what_cargo_builds(self):
        lock = tomllib.loads((TOP / "Cargo.lock").read_text())["package"]
        known = {(package["name"], package["version"]): package.get("checksum") for package in lock}
        for package in self.bill["packages"]:
            key = package["name"], package["versionInfo"]
            self.assertIn(key, known)
            self.assertEqual([sum["checksumValue"] for sum in package.get("checksums", [])], [known[key]] if known[key] else [], key)
        names = {package["name"] for package in self.bill["packages"]}
        self.assertLessEqual({"cofolio", "cofolio-erofs", "rustls", "ring", "zstd-sys"}, names)
        # Tests need them, and `cargo metadata` counts them in.
        self.assertFalse({"png", "miniz_oxide"} & names)

    def test_every_licence_is_one_that_deny_toml_allows(self):
        allowed = set(tomllib.loads((TOP / "deny.toml").read_text())["licenses"]["allow"])
        for package in self.bill["packages"]:
            # Of alternatives one that is allowed is enough; of what is joined with AND all are needed.
            for part in re.split(r" AND ", package["licenseDeclared"]):
                self.assertTrue(set(part.strip("()").split(" OR ")) & allowed, (package["name"], package["licenseDeclared"]))

    def test_the_same_source_gives_the_same_bytes(self):
        self.assertEqual(made("sbom", SOURCE_DATE_EPOCH="1"), made("sbom", SOURCE_DATE_EPOCH="1"))

    def test_every_crate_has_its_notice(self):
        notices = made("notices")
        for package in self.bill["packages"]:
            if "externalRefs" in package:
                self.assertIn(f"{package['name']} {package['versionInfo']}", notices)


if __name__ == "__main__":
    sys.exit(unittest.main())
