# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/api.md under the real torchrun, and as actors of the real Ray; reshard-convert under torchrun,
as in docs/checkpoints.md.

scripts/frameworks.sh && . build/frameworks/env.sh
. build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/frameworks/launchers_test.py"""

import importlib.util
import sys
import unittest

import launchers
from commands import BIN, FolderTest


def lacks(package):
    return importlib.util.find_spec(
        package
    ) is None, f"package {package} is missing: run scripts/frameworks.sh and build/frameworks/env.sh"


@unittest.skipUnless((BIN / "libreshard_ucx.so").exists(), "transport ucx was not built")
class Launchers(FolderTest):
    def check(self, *command):
        launchers.programs(self.folder)
        done = self.call(*command, env=launchers.environment(self.folder))
        self.assertEqual(launchers.lines(done.stdout), launchers.OUTPUT, done.stderr)

    @unittest.skipIf(*lacks("torch"))
    def test_torchrun(self):
        port = launchers.free_port()
        self.check(
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=4",
            f"--master-port={port}",
            "launched.py",
            launchers.JOB,
        )

    @unittest.skipIf(*lacks("torch"))
    def test_convert_under_torchrun(self):
        """Four processes share out a conversion; the file equals that of one."""
        import torch
        from safetensors.torch import load_file, save_file

        environment = launchers.environment(self.folder)
        command = self.folder / "reshard-convert"
        command.write_text(f"#!{sys.executable}\nfrom reshard.commands import convert\nconvert()\n")
        command.chmod(0o755)
        tensors = {f"layers.{i}.weight": torch.randn(300, 1000) for i in range(9)}
        (self.folder / "step-1000").mkdir()
        save_file(tensors, self.folder / "step-1000/model.safetensors")
        self.call(command, "step-1000", "dcp", "--to=dcp", env=environment)
        self.prints(
            "target: 9 tensors, 2700000 elements; 10800000 bytes, of which 0 are padding, were compared with the "
            "source and are right",
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=4",
            f"--master-port={launchers.free_port()}",
            "--no-python",
            command,
            "dcp",
            "out",
            "--to=safetensors",
            "--processes=4",
            "--transport=ucx",
            "--rendezvous=env://",
            "--timeout=120",
            env=environment,
        )
        found = load_file(self.folder / "out/model.safetensors")
        self.assertEqual(found.keys(), tensors.keys())
        for name, tensor in tensors.items():
            self.assertTrue(torch.equal(found[name], tensor), name)

    @unittest.skipIf(*lacks("ray"))
    def test_ray(self):
        self.check(sys.executable, "actors.py", launchers.JOB)


if __name__ == "__main__":
    unittest.main()
