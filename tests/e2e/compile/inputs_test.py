# SPDX-License-Identifier: Apache-2.0
"""Inputs that are not regular files, and file size limits: the commands report an error and leave no output.
RESHARD_BIN: the folder of the commands."""

import os
import resource
import unittest

from commands import BIN, FolderTest, run

JOB = """
version: 1
model: {dtype: bf16, tensors: {a: {shape: [512, 512], shard: {0: tp}}}}
source: {mesh: {tp: 2}}
target: {mesh: {tp: 1}}
"""


class Inputs(FolderTest):
    def setUp(self):
        super().setUp()
        self.write("job.yaml", JOB)

    def run_command(self, command, *options, code=0, **how):
        """Runs a command. The deadline ends a command that blocks on a FIFO without a writer."""
        return run(command, *options, code=code, cwd=self.folder, timeout=60, **how)

    def make_source(self):
        self.run_command("reshard-compile", "job.yaml", "-o", "plan")
        self.run_command("reshard-exec", "plan", "--synthesize", "--source=source")

    def test_a_pipe_for_tensors(self):
        self.make_source()
        (self.folder / "source/rank-00000.safetensors").unlink()
        os.mkfifo(self.folder / "source/rank-00000.safetensors")
        done = self.run_command("reshard-exec", "plan", "--source=source", "--target=target", code=2)
        self.assertIn("'source/rank-00000.safetensors' is not a regular file", done.stderr)
        self.assertFalse((self.folder / "target").exists())

    def test_a_pipe_for_a_description(self):
        os.mkfifo(self.folder / "pipe")
        os.mkfifo(self.folder / "pipe.rir")
        for name in ("pipe", "pipe.rir"):
            done = self.run_command("reshard-compile", name, "-o", "plan", code=2)
            self.assertIn(f"cannot read '{name}': it is not a regular file", done.stderr)
        self.write("job.yaml", JOB.replace("{dtype: bf16, tensors: {a: {shape: [512, 512], shard: {0: tp}}}}", "pipe"))
        self.assertIn(
            "cannot read 'pipe': it is not a regular file",
            self.run_command("reshard-compile", "job.yaml", "-o", "plan", code=2).stderr,
        )
        self.run_command("reshard-compile", ".", "-o", "plan", code=2)

    def test_pipes_that_are_handed_over(self):
        self.run_command("reshard-compile", "/dev/stdin", "-o", "standard", input=JOB)
        self.run_command("reshard-compile", "job.yaml", "-o", "plan")
        self.run_command("bash", "-c", f"{BIN}/reshard-compile <(cat job.yaml) -o substituted")
        for name in ("standard", "substituted"):
            self.assertIn(
                "the segments of 0 of 2 ranks differ", self.run_command("reshard-diff", "plan", name, code=1).stdout
            )  # manifests name the job

    def test_a_limit_on_the_size_of_files(self):
        """Python ignores SIGXFSZ, but restores the default in its children."""
        self.make_source()
        limited = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))}
        before = sorted(self.folder.iterdir())
        done = self.run_command("reshard-exec", "plan", "--source=source", "--target=target", code=3, **limited)
        self.assertRegex(done.stderr, "cannot reserve [0-9]+ bytes for '.*': File too large")
        self.assertEqual(sorted(self.folder.iterdir()), before)
        limited = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, 1_000))}
        done = self.run_command("reshard-compile", "job.yaml", "-o", "other", code=3, **limited)
        self.assertIn("cannot write 'other': File too large", done.stderr)
        self.assertEqual(sorted(self.folder.iterdir()), before)


if __name__ == "__main__":
    unittest.main()
