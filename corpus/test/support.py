"""What the tests have in common: the path, a scratch directory, skips that say why."""

import os
import shutil
import sys
import tempfile
import unittest

CORPUS = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.dont_write_bytecode = True
sys.path.insert(0, CORPUS)


class Case(unittest.TestCase):
    """A test with a directory of its own, `self.scratch`."""

    def setUp(self):
        self.scratch = tempfile.mkdtemp(prefix="cofolio-corpus-")
        self.addCleanup(shutil.rmtree, self.scratch)

    def path(self, *parts):
        return os.path.join(self.scratch, *parts)

    def skip(self, reason):
        # unittest has not ended its line of dots.
        print(f"\nSKIP {self.id()}: {reason}", file=sys.stderr)
        self.skipTest(reason)

    def need_root(self):
        if os.geteuid() != 0:
            self.skip("needs root")

    def need_tool(self, tool):
        if not shutil.which(tool):
            self.skip(f"needs {tool}")


def write(path, content=b"", mode=None, time=None):
    """Makes a file with the directories above it."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
    if mode is not None:
        os.chmod(path, mode)
    if time is not None:
        os.utime(path, (time, time))
