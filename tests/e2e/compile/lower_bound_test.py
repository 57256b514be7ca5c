# SPDX-License-Identifier: Apache-2.0
"""Compares plans on the shipped topologies with their lower bounds, which lower_bounds.py computes from the layouts
alone: the simulated time is within 1.10 × the bound (for some jobs within less: LIMITS), arenas are within their
limits, and relays save time. RESHARD_BIN: the folder of the commands."""

import hashlib
import json
import os
import random
import unittest

import generate
import lower_bounds
from commands import ROOT, FolderTest, run

TOPOLOGIES = ROOT / "examples" / "topologies"
# A changed topology changes every figure. Then measure docs/performance.md again and update the hashes.
HASHES = {
    "h100x8": "eae3aff6d2a9a466",
    "h200x8": "5063c1859e95fba9",
    "gb200-nvl72": "0a1d07e1e4bca6b9",
    "gb200-nvl64": "1747509fcbd2c611",
    "ethernet-100g": "fb1697aa5a3e4e0e",
}
JOBS = {
    "kimi-k2-256-to-128": "h100x8",
    "llama3-8b-16-to-8": "h100x8",
    "clusters/deepseek-v3-256-to-128": "h100x8",
    "clusters/llama3-70b-48-to-128": "h100x8",
    "clusters/qwen3-30b-a3b-16-to-30": "h100x8",
    "clusters/qwen3-235b-a22b-64-to-64": "gb200-nvl72",
    "clusters/m2n-deepseek-v3-128-to-128": "gb200-nvl64",
    "clusters/m2n-qwen3-235b-a22b-64-to-64": "gb200-nvl64",
}
# Simulated time / lower bound; 1.10 for the other jobs.
LIMITS = {job: 1.03 for job in JOBS if "m2n" in job}
if os.environ.get("RESHARD_FULL") != "1":
    del JOBS["clusters/m2n-deepseek-v3-128-to-128"]  # half a minute
if os.environ.get("RESHARD_SMALL"):
    JOBS = {job: JOBS[job] for job in ("llama3-8b-16-to-8", "clusters/qwen3-30b-a3b-16-to-30")}


class LowerBounds(FolderTest):
    def plan(self, job, *options, topology=None, simulate=True):
        """The compiler's report of a job, and the simulation of its plan."""
        topology = TOPOLOGIES / f"{topology or JOBS[job]}.yaml"
        plan, report = self.folder / "plan.rplan", self.folder / "report.json"
        run(
            "reshard-compile",
            ROOT / "examples" / f"{job}.yaml",
            f"--set=options.topology={topology}",
            "-o",
            plan,
            f"--report={report}",
            *options,
        )
        simulated = (
            json.loads(run("reshard-inspect", plan, f"--simulate={topology}", "--format=json").stdout)
            if simulate
            else None
        )
        return json.loads(report.read_text()), simulated

    def test_topologies_are_unchanged(self):
        found = {path.stem: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in TOPOLOGIES.glob("*.yaml")}
        self.assertEqual(found, HASHES)
        for path in TOPOLOGIES.glob("*.yaml"):
            self.assertIn("[1]", path.read_text(), "a topology must cite its sources")

    def test_near_the_lower_bound(self):
        """Also with staging limits."""
        for job, topology in JOBS.items():
            with self.subTest(job):
                report, simulated = self.plan(job)
                layout = run(
                    "reshard-compile",
                    ROOT / "examples" / f"{job}.yaml",
                    f"--set=options.topology={TOPOLOGIES / topology}.yaml",
                    "--emit=layout",
                ).stdout
                self.assertEqual(lower_bounds.differences(report["lower_bounds"], layout), {})
                moved = lower_bounds.remote_bytes(layout)
                self.assertEqual(report["bytes"]["remote"], moved["remote"])
                self.assertEqual(report["bytes"]["between_nodes"], moved["between_nodes"])
                self.assertEqual(report["bytes"]["between_nodes_bound"], moved["between_nodes"])
                balance = report["balance"]
                self.assertLessEqual(balance["egress_max"], 1.01 * balance["egress_bound"])
                self.assertGreaterEqual(simulated["ratio"], 1)
                self.assertLessEqual(simulated["ratio"], LIMITS.get(job, 1.10))
                self.assertAlmostEqual(max(simulated["lower_bound_terms"].values()), simulated["lower_bound"])
                self.check_staging(job, simulated)

    def test_linear_program(self):
        """Compares the egress bounds of random jobs with a linear program, with and without the locality rule."""
        compared = 0
        for seed in range(80 if os.environ.get("RESHARD_SMALL") else 400):
            node, _, _ = generate.generate(random.Random(seed), generate.CELLS[seed * 37 % len(generate.CELLS)])
            targets = node["target"] if isinstance(node["target"], list) else [node["target"]]
            if any({"storage", "authority"} & set(endpoint) for endpoint in (node["source"], *targets)):
                continue
            per_node = (0, 2, 64)[seed % 3]
            node["options"] = {"topology": {"ranks_per_node": per_node}} if per_node else {}
            job, report = self.folder / "job.yaml", self.folder / "report.json"
            job.write_text(json.dumps(node))
            compiled = self.call("reshard-compile", job, "-o", "plan", f"--report={report}", code=None)
            if compiled.returncode == 2:
                continue  # an invalid job
            local, any_replica = lower_bounds.busiest_sender(run("reshard-compile", job, "--emit=layout").stdout)
            counts = json.loads(report.read_text())
            balance = counts["balance"]
            with self.subTest(seed=seed):
                self.assertLessEqual(abs(balance["egress_bound_without_relays"] - any_replica), 1)
                if local is not None and counts["bytes"]["relayed"] == 0:  # else the pass reroute has chosen the routes
                    self.assertLessEqual(abs(balance["egress_bound"] - local), 1)
                    compared += local > 0
        self.assertGreater(compared, 10)

    def test_relays(self):
        job = "clusters/llama3-70b-48-to-128"
        if job not in JOBS:
            self.skipTest("RESHARD_SMALL")
        report, simulated = self.plan(job)
        without = report["balance"]["egress_bound_without_relays"] / 50e9  # seconds of the busiest NIC in the optimum
        self.assertGreaterEqual(without / simulated["seconds"], 2.2)
        self.assertGreater(report["bytes"]["relayed"], report["bytes"]["target"] / 2)
        self.prints("right: all", "reshard-inspect plan.rplan --verify")

    def test_few_replicas_in_a_large_node(self):
        """The experts of one DeepSeek-V3 layer, on 16 ranks of a node of 64: the other 48 ranks relay three quarters of
        the bytes."""
        job, topology = self.folder / "job.yaml", self.folder / "topology.yaml"
        topology.write_text("ranks_per_node: 64\n")
        job.write_text(
            "version: 1\n"
            "model:\n"
            "  index: {expert: 256}\n"
            "  place: {expert: ep}\n"
            "  tensors:\n"
            "    'e.{expert}.up': {shape: [2048, 7168], dtype: fp8_e4m3}\n"
            "    'e.{expert}.up_scale': {shape: [16, 56], dtype: fp32}\n"
            "    'e.{expert}.down': {shape: [7168, 2048], dtype: fp8_e4m3}\n"
            "    'e.{expert}.down_scale': {shape: [56, 16], dtype: fp32}\n"
            "source: {mesh: {ep: 16}}\ntarget: {mesh: {ep: 64}, ranks: 64..127}\n"
        )
        plan, report = self.folder / "plan.rplan", self.folder / "report.json"
        for limit in (0, 64 << 20, 256 << 20):
            with self.subTest(limit=limit):
                run(
                    "reshard-compile",
                    job,
                    f"--set=options.topology={topology}",
                    *([f"--set=options.staging={limit}"] if limit else []),
                    "-o",
                    plan,
                    f"--report={report}",
                )
                simulated = json.loads(run("reshard-inspect", plan, f"--simulate={topology}", "--format=json").stdout)
                self.assertGreaterEqual(simulated["ratio"], 1)
                self.assertLessEqual(simulated["ratio"], 1.10)
                self.assertLessEqual(json.loads(report.read_text())["staging"]["max"], limit or 300 << 20)
                self.assertIn("right: all", run("reshard-inspect", plan, "--verify").stdout)

    def test_relays_of_the_sender(self):
        """Moves column shards over relays, in one phase and in several, by threads."""
        job = self.folder / "job.yaml"
        job.write_text(
            "version: 1\nmodel: {dtype: bf16, tensors: {w: {shape: [4096, 8192], shard: {1: tp}}, v: {shape: [8192, "
            "999], shard: {0: tp}}}}\n"
            "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 8}, ranks: 8..15}\noptions: {topology: {ranks_per_node: 8}}\n"
        )
        for staging in ([], ["--set=options.staging=24MiB"]):
            with self.subTest(staging):
                self.call("reshard-compile", job, *staging, "--verify-each", "-o", "plan")
                self.assertEqual(
                    int.from_bytes((self.folder / "plan").read_bytes()[16:24], "little") & 16, 16, "kFeatureRelays"
                )
                self.prints("right: all", "reshard-inspect plan --verify")
                self.prints("bytes right", "reshard-exec plan --synthesize --check")

    def test_one_nic_for_eight_ranks(self):
        for job, limit in (("clusters/qwen3-30b-a3b-16-to-30", 1.15), ("clusters/llama3-70b-48-to-128", 1.02)):
            _, simulated = self.plan(job, topology="ethernet-100g")
            self.assertLessEqual(simulated["ratio"], limit)

    def test_chains(self):
        """Moves tensors in stripes along chains of nodes of two ranks, by threads, with and without a staging limit."""
        for staging in ("", "staging: 16MiB, "):
            with self.subTest(staging):
                job = self.folder / "job.yaml"
                job.write_text(
                    "version: 1\nmodel: {dtype: bf16, tensors: {w: {shape: [4096, 2048], shard: {1: tp}}, v: [2048, "
                    "2048]}}\n"
                    "source: {mesh: {tp: 2}}\ntarget: {mesh: {tp: 1, dp: 8}, ranks: 2..9}\n"
                    f"options: {{{staging}topology: {{ranks_per_node: 2}}}}\n"
                )
                text = run("reshard-compile", job, "--emit=ir", "--verify-each").stdout
                self.assertGreaterEqual(
                    max(line.count("->") for line in text.splitlines() if line.startswith("route")), 4
                )
                self.call("reshard-compile", job, "-o", "plan")
                self.call("reshard-inspect plan --verify")
                self.prints("bytes right", "reshard-exec plan --synthesize --check")

    def check_staging(self, job, unlimited):
        """With a limit, the arenas are within it, and the time is within 1.10 of that without one. Other suites prove
        plans with limits."""
        for limit in (64 << 20, 256 << 20, 1 << 30):
            with self.subTest(job, limit=limit):
                report, simulated = self.plan(
                    job, f"--set=options.staging={limit}", "--no-verify", simulate=limit >= 256 << 20
                )
                self.assertLessEqual(report["staging"]["max"], limit)
                if simulated:
                    self.assertLessEqual(simulated["seconds"], 1.10 * unlimited["seconds"])


if __name__ == "__main__":
    unittest.main()
