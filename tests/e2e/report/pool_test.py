# SPDX-License-Identifier: Apache-2.0
"""Plans whose target is a pool of engine replicas: the ranks of replica 0, the same bytes for any number, sources that
only send, options that are refused. RESHARD_BIN: the folder of the commands."""

import re
import struct
import unittest

from commands import FolderTest

# One source rank whose NIC is the bottleneck, beside an idle rank that would be a relay.
JOB = """
version: 1
model: {dtype: bf16, tensors: {w: {shape: [4096, 4096], shard: {0: tp}}, n: [64]}}
source: {mesh: {tp: 1}}
target: {mesh: {tp: 2, dp: 2}, ranks: 4..7%s}
options: {topology: {ranks_per_node: 4}}
"""


class Pool(FolderTest):
    def compile(self, target, name="plan", *options, code=0):
        self.write("job.yaml", JOB % target)
        done = self.call("reshard-compile job.yaml -o", name, "--verify-each", *options, code=code)
        return done.stderr

    def steps(self, name="plan"):
        """The kinds of steps of each rank."""
        found = {}
        for line in self.call("reshard-compile job.yaml --emit=ir").stdout.splitlines():
            if rank := re.match(r"rank (\d+) arena", line):
                kinds = found[int(rank[1])] = set()
            elif step := re.match(r"  (\w+) round", line):
                kinds.add(step[1])
        return found

    def test_sources_only_send(self):
        self.compile("")
        self.assertIn("recv", self.steps()[1], "expected a relay, without which this test shows nothing")
        self.compile(", replicas: 4")
        found = self.steps()
        self.assertEqual(found[0], {"send"})
        self.assertEqual([found[rank] for rank in (1, 2, 3)], [set()] * 3)
        self.assertTrue(all("recv" in found[rank] for rank in range(4, 8)))
        self.assertTrue(any("send" in found[rank] for rank in range(4, 8)), "expected ranks of the target to forward")

    def test_replica_0_runs(self):
        self.compile(", replicas: 4")
        self.call("reshard-inspect plan --verify")
        done = self.call("reshard-exec plan --synthesize --check")
        self.assertIn("replica 0 of 4 engine replicas: a run does not pull", done.stdout)
        self.assertIn("bytes right", done.stdout)

    def test_default_ranks(self):
        for source, first in (("{mesh: {tp: 1}}", 1), ("{mesh: {tp: 2}, ranks: [5, 3]}", 6)):
            self.write(
                "job.yaml", JOB.replace("{mesh: {tp: 1}}", source).replace(", ranks: 4..7", "") % ", replicas: 2"
            )
            self.call("reshard-compile job.yaml -o plan")
            target = self.listing("plan")["endpoints"][1]
            self.assertEqual((target["first_rank"], target["last_rank"], target["replicas"]), (first, first + 3, 2))

    def test_the_number_changes_one_field(self):
        plans = []
        for replicas in (1, 64, 65536):
            self.compile(f", replicas: {replicas}", "plan", "--omit-job")
            self.prints(
                f"the ranks of replica 0 of {replicas} engine replica" + ("s" if replicas > 1 else ""),
                "reshard-inspect plan",
            )
            fingerprint = self.listing("plan")["fingerprint"]
            plan = (self.folder / "plan").read_bytes()
            index, manifest, size = struct.unpack_from("<QQQ", plan, 40)
            words = plan[manifest : manifest + size].replace(fingerprint.encode(), b"")
            plans.append((words, plan[index:]))
        for words, rest in plans[1:]:
            self.assertEqual(rest, plans[0][1], "index or segments differ")
            self.assertEqual(len(words), len(plans[0][0]))
            changed = [at for at in range(len(words)) if words[at] != plans[0][0][at]]
            self.assertLessEqual(max(changed) - min(changed), 3, "more than one number of the manifest differs")

    def test_difference(self):
        self.compile(", replicas: 2", "old")
        self.compile(", replicas: 3", "new")
        done = self.call("reshard-diff old new", code=1)
        self.assertRegex(done.stdout, r"replicas +2 +3  \+1 \(\+50\.0 %\)\n")

    def test_refused_options(self):
        self.compile("", "old")
        for option in ("--relabel-target", f"--keep={self.folder / 'old'}"):
            message = self.compile(", replicas: 2", "new", option, code=2)
            self.assertIn(option.split("=")[0] + " changes which rank has which part of the target", message)
            self.assertFalse((self.folder / "new").exists())


if __name__ == "__main__":
    unittest.main()
