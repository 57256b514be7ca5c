# SPDX-License-Identifier: Apache-2.0
"""Runs a job end to end: compiles it, moves it from files to files, and compares every element of every target with
the oracle."""

import json
import os
import tempfile
from pathlib import Path

import run as property_run
from commands import BIN, FolderTest, run
from oracle import Job


class Case(FolderTest):
    def moved(self, job, seed=1):
        """Moves a job, compares every target element, and returns the compiler's report."""
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
            work = Path(folder)
            (work / "job.yaml").write_text(json.dumps(job, indent=1))
            parsed = Job(str(work / "job.yaml"))
            held = parsed.check()
            self.assertTrue(
                any(h.labels.size for endpoint in held[1:] for mesh_rank in endpoint for h in mesh_rank.values()),
                "moves nothing",
            )
            self.assertEqual(property_run.run_job(parsed, held, work, BIN, seed, BIN), "")
            run("reshard-compile", work / "job.yaml", "-o", work / "again.rplan", f"--report={work / 'report.json'}")
            report = json.loads((work / "report.json").read_text())
            report["plan"] = (work / "again.rplan").read_bytes()
            return report

    def refused(self, job, *words):
        """The compiler refuses the job, with an error text that contains all these words."""
        path = self.folder / "job.yaml"
        path.write_text(json.dumps(job, indent=1))
        done = run("reshard-compile", path, "-o", self.folder / "plan", code=2)
        for word in words:
            self.assertIn(word, done.stderr)
        self.assertFalse((self.folder / "plan").exists())
