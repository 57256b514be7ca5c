# SPDX-License-Identifier: Apache-2.0
"""The workflow of docs/ci.md that compares the plans of a pull request with those of its base: its script runs
in a local repository."""

import os
import subprocess
import unittest

import yaml

from commands import BIN, ROOT, FolderTest

JOB = """version: 1
model: {dtype: bf16, tensors: {a: {shape: [64, 8], shard: {0: tp}}}}
source: {mesh: {tp: 4}}
target: {mesh: {tp: 2}, ranks: 4..5}
"""


def workflow():
    text = (ROOT / "docs/ci.md").read_text()
    return yaml.safe_load(text[text.index("name: Plans") :].split("```")[0])


class PullRequest(FolderTest):
    def setUp(self):
        super().setUp()
        self.repository = self.folder / "repository"
        (self.repository / "jobs").mkdir(parents=True)
        self.git("init", "-q", "-b", "main")
        self.write("same", JOB)
        self.write("larger", JOB)
        self.write("broken", JOB)
        self.write("gone", JOB)
        self.base = self.commit()

    def git(self, *words):
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        return subprocess.run(
            ["git", *identity, *words], cwd=self.repository, check=True, capture_output=True, text=True
        ).stdout.strip()

    def write(self, name, text):
        (self.repository / "jobs" / f"{name}.yaml").write_text(text)

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "x")
        return self.git("rev-parse", "HEAD")

    def run_step(self):
        """The comment that the workflow makes, and its status."""
        step = next(step for step in workflow()["jobs"]["diff"]["steps"] if step.get("id") == "diff")
        self.assertEqual(step["env"], {"BASE": "${{ github.event.pull_request.base.sha }}"})
        output = self.folder / "output"
        environment = os.environ | {
            "BASE": self.base,
            "GITHUB_OUTPUT": str(output),
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }
        subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=self.repository,
            env=environment,
            check=True,
            capture_output=True,
            timeout=120,
        )
        return (self.repository / "diff.md").read_text(), output.read_text()

    def test_a_pull_request(self):
        self.write("larger", JOB.replace("tp: 2}, ranks: 4..5", "tp: 2, dp: 2}, ranks: 4..7"))
        self.write("broken", JOB.replace("tp: 4", "tp: 5"))
        self.write("more", JOB)
        (self.repository / "jobs/gone.yaml").unlink()
        self.commit()
        comment, status = self.run_step()
        parts = {part.split("\n")[0]: part for part in comment.split("### ")[1:]}
        self.assertEqual(
            sorted(parts),
            sorted(
                [f"jobs/{name}.yaml" for name in ("broken", "larger", "more", "same")] + ["jobs/gone.yaml: removed"]
            ),
        )
        self.assertRegex(parts["jobs/broken.yaml"], r"(?s)\A[^\n]*\n~~~~~~\n.*error: .*\n~~~~~~\n\Z")
        self.assertIn("A new job.", parts["jobs/more.yaml"])
        self.assertIn("|", parts["jobs/larger.yaml"])
        self.assertIn("| remote_bytes | 1.0 KiB | 2.0 KiB | +1.0 KiB (+100.0 %) |", parts["jobs/larger.yaml"])
        self.assertIn("\n**Failed:** `remote_bytes_ratio > 1.05`: remote_bytes_ratio = 2\n", parts["jobs/larger.yaml"])
        self.assertNotIn("error", parts["jobs/same.yaml"])
        self.assertEqual(status, "status=1\n")

    def test_nothing_changed(self):
        comment, status = self.run_step()
        self.assertEqual(comment.count("###"), 4)
        self.assertEqual(status, "status=0\n")


if __name__ == "__main__":
    unittest.main()
