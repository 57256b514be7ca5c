# SPDX-License-Identifier: Apache-2.0
"""Plans of random realistic jobs (jobs.py) are proven and can be simulated, and their cuts are those of their layouts
(lower_bounds.py). For small jobs a linear program finds the optimum (optimum.py): no plan is faster, no lower bound is
above it, few are far below. RESHARD_FULL: many more jobs. RESHARD_SMALL: fewer. distribution.py prints how far plans
are from their lower bounds."""

import os
import unittest

import jobs
import lower_bounds
import optimum
from commands import FolderTest
from distribution import Measured, bound_without_latencies

FULL, SMALL = "RESHARD_FULL" in os.environ, "RESHARD_SMALL" in os.environ


class Bounds(FolderTest):
    def test_realistic_jobs(self):
        kinds = set()
        for seed in range(200 if FULL else 3 if SMALL else 40):
            node, kind = jobs.job(seed)
            kinds.add(kind)
            with self.subTest(seed=seed):
                found = Measured(node, self.folder)
                self.assertGreater(found.seconds, 0)
                self.assertEqual(lower_bounds.differences(found.cuts, found.layout()), {})
        self.assertTrue(SMALL or kinds == set(jobs.KINDS))

    def test_optimum_is_between_bound_and_plan(self):
        compared = near = 0
        for seed in range(300 if FULL else 2 if SMALL else 40):
            with self.subTest(seed=seed):
                found = Measured(jobs.small_job(seed), self.folder)
                least, bound = optimum.optimum(found.layout()), bound_without_latencies(found)
                self.assertGreaterEqual(found.seconds, 0.999999 * least)
                self.assertGreaterEqual(found.seconds, 0.999999 * found.bound)
                self.assertLessEqual(bound, 1.000001 * least)
                self.assertEqual(lower_bounds.differences(found.cuts, found.layout()), {})
                compared += least > 0
                near += least > 0 and bound >= 0.95 * least
        self.assertGreater(compared, 0)
        self.assertGreaterEqual(near, 0.95 * compared)

    def test_no_rank_serves_the_others_alone(self):
        """One holder of a node or a rack forwards through those it serves; a replica that sends little serves other
        nodes: by fixed rules each of these plans takes 3 to 16 times its bound."""
        whole = {"holds": "b", "at": {"x": list(range(1, 8))}}
        layouts = {"split": {"params": {"a": {"holds": "a", "at": {"x": [0]}}, "b": whole}}, "all": {"params": "same"}}
        matrices = {"tensors": {name: [16384, 8192] for name in "ab"}, "layouts": layouts}
        columns = {"tensors": {"w": {"shape": [16384, 16384], "shard": {1: "tp"}}}}
        rows = {"tensors": {"w": {"shape": [16384, 16384], "shard": {0: "tp"}}}}
        for name, model, source, target in (
            ("h100x8", matrices, {"layout": "split", "mesh": {"x": 8}}, {"layout": "all", "mesh": {"dp": 8}}),
            ("gb200-nvl72", columns, {"mesh": {"dp": 2}}, {"mesh": {"tp": 2, "dp": 16}, "ranks": "2..33"}),
            ("ethernet-100g", rows, {"mesh": {"tp": 2, "dp": 10}}, {"mesh": {"tp": 2, "dp": 50}, "ranks": "20..119"}),
        ):
            with self.subTest(name):
                job = {"version": 1, "model": {"dtype": "bf16"} | model, "source": source, "target": target}
                job["options"] = {"topology": str(jobs.TOPOLOGIES / f"{name}.yaml")}
                self.assertLess(Measured(job, self.folder).ratio, 2)

    def test_known_optimum(self):
        """Four ranks of two nodes get what one rank has: 1 GB/s by NIC, and each NIC must bring a half."""
        matrix = {"dtype": "u8", "tensors": {"w": [1000, 1000]}}
        options = {
            "topology": {
                "ranks_per_node": 2,
                "link": {"rate": "4GB/s", "latency": "1us"},
                "nics": {"per_node": 2, "rate": "1GB/s", "latency": "1us"},
            }
        }
        job = {"version": 1, "model": matrix, "source": {"mesh": {}}, "options": options}
        found = Measured(job | {"target": {"mesh": {"dp": 4}, "ranks": "2..5"}, "world": 6}, self.folder)
        self.assertAlmostEqual(optimum.optimum(found.layout()), 5e-4)


if __name__ == "__main__":
    unittest.main()
