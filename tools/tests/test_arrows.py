"""tools/arrows finds arrows that were planted, and only those."""

import subprocess
import tempfile
import unittest
from pathlib import Path

ARROWS = Path(__file__).resolve().parent.parent / "arrows"

# Crate to its dependencies, and file to text, of a workspace in order.
CRATES = {
    "sys": [],
    "erofs": [],
    "store": ["sys"],
    "image": ["store", "erofs"],
    "node": ["image", "sys"],
    "cofolio": ["node"],
    "bench": ["node"],
}
FILES = {
    "image/src/lib.rs": "mod digest; mod layer; mod import; mod export; pub use import::Import;",
    "image/src/digest.rs": "pub struct Digest;",
    "image/src/layer/mod.rs": "mod tar; use crate::digest::Digest;",
    "image/src/layer/tar.rs": "use super::super::digest; use super::Layer; fn f<'a>(x: &'a str) {}",
    "image/src/import/mod.rs": "use crate::{digest::Digest, layer::{self, tar::{Reader}}};",
    "image/src/export.rs": "fn f() { crate::import::go(); } // crate::nothing",
    "node/src/lib.rs": "mod mount; mod ledger;",
    "node/src/mount/mod.rs": "use crate::ledger::Ledger;",
    "node/src/ledger.rs": "",
}


class Arrows(unittest.TestCase):
    def found(self, dependencies=(), files=(), crates=CRATES):
        """The output of tools/arrows with these dependencies and files added or replaced."""
        with tempfile.TemporaryDirectory() as top:
            top = Path(top)
            (top / "Cargo.toml").write_text('[workspace]\nresolver = "3"\nmembers = ["crates/*"]\n')
            for crate, below in crates.items():
                text = f'[package]\nname = "{self.package(crate)}"\nversion = "0.1.0"\nedition = "2024"\n[dependencies]\n'
                text += "".join(f'{self.package(b)} = {{ path = "../{b}" }}\n' for b in below)
                text += "".join(line + "\n" for name, line in dependencies if name == crate)
                (top / "crates" / crate / "src").mkdir(parents=True)
                (top / "crates" / crate / "src/lib.rs").write_text("")
                (top / "crates" / crate / "Cargo.toml").write_text(text)
            for name, text in {**FILES, **dict(files)}.items():
                if name.split("/")[0] in crates:
                    (top / "crates" / name).parent.mkdir(parents=True, exist_ok=True)
                    (top / "crates" / name).write_text(text)
            ran = subprocess.run([ARROWS, top], capture_output=True, text=True)
            self.assertEqual(ran.stderr, "")
            self.assertEqual(ran.returncode, 1 if ran.stdout else 0)
            return ran.stdout.splitlines()

    @staticmethod
    def package(crate):
        return crate if crate == "cofolio" else f"cofolio-{crate}"

    def test_a_workspace_in_order(self):
        self.assertEqual(self.found(), [])

    def test_between_crates(self):
        up = [("erofs", 'cofolio-store = { path = "../store" }')]
        self.assertEqual(self.found(up), ["crate erofs depends on store"])
        up = [("image", '[dev-dependencies]\ncofolio-node = { path = "../node" }')]
        self.assertEqual(self.found(up), ["crate image depends on node"])
        itself = [("store", '[dev-dependencies]\ncofolio-store = { path = "." }')]
        self.assertEqual(self.found(itself), [])
        self.assertEqual(self.found([("node", 'anyhow = "1"')]), ["crate node depends on anyhow, which is for programs"])
        self.assertEqual(self.found([("cofolio", 'anyhow = "1"')]), [])
        new = {**CRATES, "helper": []}
        self.assertEqual(self.found(crates=new), ["crate helper has no line in tools/arrows: say what it may depend on"])

    def test_async_below_the_daemon(self):
        line = ["crate node depends on tokio: async lives in daemon only"]
        self.assertEqual(self.found([("node", 'tokio = "1"')]), line)

    def test_between_floors(self):
        def image(name, text):
            return self.found(files=[(f"image/src/{name}", text)])

        line = ["image: layer uses import, which is above it: src/layer/tar.rs"]
        for text in (
            "use crate::import::Import;",
            "use crate::{\n    digest::Digest,\n    import::{Import, self},\n};",
            "fn f() { let x = crate::import::go('{', \"}\"); }",
            "use super::super::import::Import;",
            "mod inner { use super::super::super::import::Import; }",
            # By the name that the root re-exports.
            "use crate::Import;",
        ):
            self.assertEqual(image("layer/tar.rs", text)[:1], line, text)
        for text in (
            "// use crate::import::Import;",
            "/* crate::import */ const X: &str = r#\"crate::import::\"#;",
            # A module of its own that has this name.
            "use super::import::Import;",
            "mod inner { use super::super::import::Import; }",
            "#[cfg(test)]\nmod tests { use crate::import::Import; fn f() { {} } }",
        ):
            self.assertEqual(image("layer/tar.rs", text), [], text)
        self.assertEqual(image("layer/tests.rs", "use crate::import::Import;"), [])
        self.assertEqual(image("other.rs", ""), ["image: room other has no floor in tools/arrows"])

    def test_circles(self):
        circle = [("node/src/ledger.rs", "use crate::{mount::Mount};")]
        self.assertEqual(
            self.found(files=circle),
            [
                "node: a circle of ledger, mount",
                "node:   ledger uses mount: src/ledger.rs",
                "node:   mount uses ledger: src/mount/mod.rs",
            ],
        )
        # Rooms of one floor may use each other, one way.
        pair = [("image/src/limits.rs", "use crate::digest::Digest;")]
        self.assertEqual(self.found(files=pair), [])
        pair.append(("image/src/digest.rs", "use crate::limits::Limits;"))
        self.assertEqual(self.found(files=pair)[:1], ["image: a circle of digest, limits"])

    def test_before_there_is_a_crate_for_images(self):
        crates = {**CRATES, "node": ["sys"]}
        del crates["image"]
        self.assertEqual(self.found(crates=crates), [])


if __name__ == "__main__":
    unittest.main()
