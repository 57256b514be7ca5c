# SPDX-License-Identifier: Apache-2.0
"""Plans on several simulated hosts: messages between them, shared memory inside them. All kinds of schedules must be
exact; a host whose link is down must be noticed in time. RESHARD_BIN: the folder of the commands."""

import os
import time
import unittest

import hosts
from commands import BIN, FolderTest
from launch import Launch

MISSING = hosts.Hosts.missing()
MODEL = """{dtype: bf16, index: {layer: 3}, tensors: {embed: [3000, 64], norm: {shape: [777], dtype: fp32},
  "l.{layer}.rows": {shape: [512, 256], shard: {0: tp}}, "l.{layer}.columns": {shape: [512, 256], shard: {1: tp}}}}"""


@unittest.skipIf("RESHARD_SMALL" in os.environ, "MPI is not built for sanitizers")
@unittest.skipIf(MISSING, f"several hosts cannot be simulated: {MISSING}")
class SeveralHosts(FolderTest):
    def compile(self, source, target, options="{}"):
        self.write("job.yaml", f"version: 1\nmodel: {MODEL}\nsource: {source}\ntarget: {target}\noptions: {options}\n")
        self.call("reshard-compile job.yaml -o plan")

    def start(self, made, ranks, *options):
        program = [BIN / "reshard-exec", self.folder / "plan", "--transport=mpi", "--synthesize", "--check", *options]
        launch = Launch(self.folder / f"run{ranks}-{made.count}", made.mpirun(ranks), ranks, program)
        self.addCleanup(launch.end)
        return launch

    def test_kinds_of_schedules(self):
        for count, ranks, source, target, options in (
            (
                2,
                6,
                "{mesh: {tp: 2, dp: 2}}",
                "{mesh: {tp: 4}, ranks: 2..5}",
                "{staging: 16KiB}",
            ),  # messages in both directions
            (3, 6, "{mesh: {tp: 2, dp: 2}}", "{mesh: {tp: 4}, ranks: 2..5}", "{}"),
            (
                2,
                8,
                "{mesh: {tp: 2}}",
                "{mesh: {tp: 1, dp: 6}, ranks: 2..7}",
                "{topology: {ranks_per_node: 4}}",
            ),  # a chain over hosts, forwarded inside them
            (
                4,
                8,
                "{mesh: {tp: 2}}",
                "{mesh: {tp: 2, dp: 3}, ranks: 2..7}",
                "{staging: 32KiB, topology: {ranks_per_node: 2}}",
            ),
        ):
            with self.subTest(count, source=source, target=target), hosts.Hosts(count, self.folder) as made:
                self.compile(source, target, options)
                launch = self.start(made, ranks, "--repeat=3", "--timeout=60", f"--report={self.folder / 'report'}")
                self.assertEqual(set(launch.wait(100).values()), {0}, launch.texts())
                self.assertEqual(launch.texts().count(" bytes right"), ranks)
                by = self.json("report")["bytes_by"]
                self.assertTrue(by["shared_memory"] > 0 and by["messages"] > 0 and by["messages_inside_host"] == 0, by)

    def test_a_host_whose_link_is_down_is_noticed(self):
        with hosts.Hosts(2, self.folder) as made:
            self.compile("{mesh: {tp: 2}}", "{mesh: {tp: 1, dp: 2}, ranks: 2..3}")
            launch = self.start(made, 4, "--repeat=1000000", "--timeout=3")
            launch.process(3)
            time.sleep(2)  # until the runs have started
            self.assertEqual(set(launch.wait(0).values()), {None})
            made.link(1, "down")
            self.assertEqual(set(launch.wait(3 + 4).values()), {3}, launch.texts())
            for rank in range(4):
                self.assertRegex(launch.read(f"out.{rank}"), r"timed out.*rank \d")
            self.assertNotIn("bytes right", launch.texts())


if __name__ == "__main__":
    unittest.main()
