# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/api.md under the real torchrun, and as actors of the real Ray.

    scripts/frameworks.sh && . build/frameworks/env.sh
    RESHARD_BIN=build/release $RESHARD_FRAMEWORKS_PYTHON tests/frameworks/launchers_test.py"""

import importlib.util
import sys
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "lib")]
import launchers  # noqa: E402
from commands import BIN, FolderTest, run  # noqa: E402


def lacks(package):
    return importlib.util.find_spec(package) is None, f"package {package} is missing: run scripts/frameworks.sh and build/frameworks/env.sh"


@unittest.skipUnless((BIN / "libreshard_ucx.so").exists(), "transport ucx was not built")
class Launchers(FolderTest):
    def check(self, *command):
        launchers.programs(self.folder)
        done = run(*command, env=launchers.environment(self.folder), cwd=self.folder)
        self.assertEqual(launchers.lines(done.stdout), launchers.OUTPUT, done.stderr)

    @unittest.skipIf(*lacks("torch"))
    def test_torchrun(self):
        port = launchers.free_port()
        self.check(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", f"--master-port={port}", "launched.py", launchers.JOB)

    @unittest.skipIf(*lacks("ray"))
    def test_ray(self):
        self.check(sys.executable, "actors.py", launchers.JOB)


if __name__ == "__main__":
    unittest.main()
