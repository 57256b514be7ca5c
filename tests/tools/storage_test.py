"""Checkpoints that every rank can reach: each byte is read once, or written once, the work is shared out evenly, and what several ranks want is
exchanged among them. RESHARD_BIN: the folder of the commands."""

import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

BIN = Path(os.environ["RESHARD_BIN"]).resolve()
MODEL = """
version: 1
model:
  dtype: bf16
  index: {layer: 3}
  tensors:
    embed: [3000, 64]
    layers.{layer}.w: {shape: [512, 256], shard: {0: tp}}
    layers.{layer}.norm: [256]
    head: [3000, 64]
"""
SIZE = 2 * (2 * 3000 * 64 + 3 * (512 * 256 + 256))


class Storage(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def compile(self, source, target, options=""):
        (self.folder / "job.yaml").write_text(f"{MODEL}source: {source}\ntarget: {target}\n{options}\n")
        done = subprocess.run([BIN / "reshard-compile", self.folder / "job.yaml", "-o", self.folder / "plan", "--verify-each", f"--report={self.folder / 'report'}"],
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.run_command("reshard-inspect", "--verify")
        return json.loads((self.folder / "report").read_text())

    def run_command(self, command, *options):
        done = subprocess.run([BIN / command, self.folder / "plan", *options], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_read_once(self):
        for mesh, copies, options in (("{tp: 2}", 2, ""), ("{tp: 2, dp: 4}", 8, ""), ("{tp: 4, dp: 4}", 16, "options: {topology: {ranks_per_node: 4}}"),
                                      ("{tp: 1, dp: 6}", 6, "options: {staging: 64KiB, topology: {ranks_per_node: 4, nics: {per_node: 2, rate: 1GB/s}}}")):
            with self.subTest(mesh, options=options):
                report = self.compile("{storage: files}", f"{{mesh: {mesh}}}", options)
                self.assertEqual(report["bytes"]["storage"], SIZE)
                self.assertEqual(report["bytes"]["storage"] + report["bytes"]["remote"], report["bytes"]["target"])
                self.assertEqual(report["bytes"]["passed_on"], report["bytes"]["remote"])
                self.assertLessEqual(report["balance"]["storage_max"], 1.01 * report["balance"]["storage_floor"] + (256 << 10))
                self.run_command("reshard-exec", "--synthesize", "--check")
                source, target = self.folder / "in", self.folder / "out"
                self.run_command("reshard-exec", "--synthesize", f"--source={source}")
                self.run_command("reshard-exec", f"--source={source}", f"--target={target}", "--check")
                for folder in (source, target):
                    subprocess.run(["rm", "-r", folder], check=True)

    def test_read_once_into_each_node(self):
        report = self.compile("{storage: files}", "{mesh: {tp: 1, dp: 8}}", "options: {topology: {ranks_per_node: 4}}")
        self.assertEqual(report["bytes"]["between_nodes"], SIZE)  # each byte read on one of two nodes goes to the other once

    def test_written_once(self):
        for mesh in ("{tp: 2, dp: 4}", "{tp: 1, dp: 6}"):
            with self.subTest(mesh):
                report = self.compile(f"{{mesh: {mesh}}}", "{storage: files}")
                self.assertEqual(report["bytes"]["storage"], SIZE)
                self.assertEqual(report["bytes"]["remote"], 0)
                self.assertLessEqual(report["balance"]["storage_max"], 1.01 * report["balance"]["storage_floor"] + 512)
                self.run_command("reshard-exec", "--synthesize", "--check")


if __name__ == "__main__":
    unittest.main()
