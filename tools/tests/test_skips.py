"""tools/skips excuses the skips that are expected on a machine, and no others."""

import importlib.machinery
import importlib.util
import re
import sys
import unittest
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent.parent
loader = importlib.machinery.SourceFileLoader("skips", str(TOP / "tools/skips"))
skips = importlib.util.module_from_spec(importlib.util.spec_from_loader("skips", loader))
sys.dont_write_bytecode = True
loader.exec_module(skips)

LOG = """\
test one ... ok
SKIP one: this kernel has no wings
SKIP one: this kernel has no wings
SKIP two on xfs: no such program
"""


class Skips(unittest.TestCase):
    def compare(self, *lines, strict=False, log=LOG):
        """The failures and remarks of this log, first lines only."""
        numbered = [skips.Line(number, line) for number, line in enumerate(lines, 1)]
        failures, remarks = skips.compare(log, numbered, strict)
        return [text.split("\n")[0] for text in failures], remarks

    def test_expected_ones_pass(self):
        lines = ("always | one: * no wings | wings are rare", "no-program:no-such-program | two on *: * | it is rare")
        self.assertEqual(self.compare(*lines), ([], []))
        # With STRICT=1 the program has to be there.
        self.assertEqual(self.compare(*lines, strict=True), (["SKIP two on xfs: no such program"], []))

    def test_others_fail(self):
        one, two = "SKIP one: this kernel has no wings", "SKIP two on xfs: no such program"
        self.assertEqual(self.compare(), ([one, two], []))
        # It is listed with a condition that does not hold, and for another reason.
        self.assertEqual(self.compare("no-program:sh | one: * | x", "always | two*: no other program | x")[0], [one, two])
        both = "no-program:sh and always | one: * | x"
        self.assertEqual(self.compare(both, "always | two*: * | x")[0], [one])

    def test_stale_lines_are_named(self):
        lines = ("always | one: * | x", "always | two*: * | x", "always | three: * | x", "no-program:sh | four: * | x")
        failures, remarks = self.compare(*lines)
        self.assertEqual((failures, len(remarks)), ([], 1))
        self.assertIn("line 3", remarks[0])
        self.assertEqual(len(self.compare(*lines, strict=True)[0]), 1)

    def test_every_condition_can_be_asked(self):
        lines = skips.expected(skips.LIST)
        self.assertTrue(lines)
        for line in lines:
            self.assertIn(line.holds(), (True, False), line.text)
            self.assertTrue(line.why, line.text)

    def test_listed_tests_exist(self):
        """Where a condition is rare, nobody would notice that its test was renamed."""
        sources = [*TOP.glob("crates/**/*.rs"), *TOP.glob("corpus/test/*.py"), *TOP.glob("bench/*"), *TOP.glob("tools/*")]
        text = "\n".join(path.read_text() for path in sources if path.is_file() and path != skips.LIST)
        text += "\n".join(path.name for path in TOP.glob("tests/vm/scenarios/*")) + (TOP / "packaging/test").read_text()
        for line in skips.expected(skips.LIST):
            name = re.match(r"[\w./-]*", line.pattern.split(":")[0])[0]
            self.assertIn(name.rsplit(".", 1)[-1], text, line.text)


if __name__ == "__main__":
    unittest.main()
