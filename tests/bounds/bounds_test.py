# SPDX-License-Identifier: Apache-2.0
"""Plans of random realistic jobs (jobs.py) are proven and can be simulated; no plan of a small job is faster than the
optimum that a linear program finds (optimum.py). RESHARD_FULL: many more jobs. RESHARD_SMALL: fewer. distribution.py
prints how far plans are from their lower bounds."""

import os
import unittest

import jobs
import optimum
from commands import FolderTest
from distribution import Measured

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
        self.assertTrue(SMALL or kinds == set(jobs.KINDS))

    def test_no_plan_beats_the_optimum(self):
        compared = 0
        for seed in range(60 if FULL else 2 if SMALL else 20):
            with self.subTest(seed=seed):
                found = Measured(jobs.small_job(seed), self.folder)
                least = optimum.optimum(found.layout())
                self.assertGreaterEqual(found.seconds, 0.999999 * least)
                compared += least > 0
        self.assertGreater(compared, 0)

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
