# SPDX-License-Identifier: Apache-2.0
"""The examples, end to end from the command line: each compiles, its IR and its plan verify, and the plan does not
depend on the number of threads. Those that fit in memory are run and checked; quickstart, qwen3-0.6b and (with
RESHARD_FULL) a 4-layer llama3-8b also run from files. RESHARD_BIN: the folder of the commands. RESHARD_SMALL:
smaller models, for builds with sanitizers."""

import json
import os
import tempfile
import unittest
from pathlib import Path

from commands import ROOT, FolderTest, run

SMALL = "RESHARD_SMALL" in os.environ
FULL = "RESHARD_FULL" in os.environ and not SMALL
CUT = ("--set", "model.let.layers=2", "--set", "model.let.vocab=4096") if SMALL else ()
JOBS = sorted(path.stem for path in (ROOT / "examples").glob("*.yaml"))

# Expected transfers: one for each tensor, source rank and target rank.
TRANSFERS = {
    "quickstart": 192,  # 8 layers x (8 + 8 + 8)
    "qwen3-30b-a3b-32-to-16": 25400,
    "kimi-k2-256-to-128": 178560,
    "kimi-k2-2048-to-1024": 1428480,
}


class Examples(FolderTest):
    def compile(self, job: str, *options: str, name: str = "plan") -> dict:
        report = self.folder / f"{name}.json"
        self.call(
            "reshard-compile", ROOT / f"examples/{job}.yaml", "-o", f"{name}.rplan", f"--report={report}", *options
        )
        return json.loads(report.read_text())

    def test_examples_exist(self) -> None:
        self.assertGreaterEqual(len(JOBS), 7)
        self.assertLessEqual(set(TRANSFERS), set(JOBS))

    def test_compile(self) -> None:
        for job in JOBS:
            with self.subTest(job):
                report = self.compile(job, "--verify-each")
                summary = self.listing("plan.rplan")
                self.assertLessEqual(summary["manifest_bytes"], 1 << 20)
                moved = report["bytes"]
                self.assertEqual(
                    moved["target"], moved["local"] + moved["remote"] + moved["storage"] + moved["padding"]
                )
                if report["bytes"]["storage"] == 0:
                    self.assertEqual(report["balance"]["ingress_max"], report["balance"]["ingress_bound"])
                self.assertGreaterEqual(report["balance"]["egress_max"], report["balance"]["egress_bound"])
                self.assertEqual(report["coalesce"]["messages"]["after"], report["messages"])
                self.assertGreaterEqual(report["coalesce"]["messages"]["before"], 0 if moved["remote"] == 0 else 1)
                self.assertEqual(report["transfers"], TRANSFERS.get(job, report["transfers"]))
                if job.startswith("kimi") and not os.environ.get("RESHARD_SMALL"):
                    self.assertLess(report["peak_rss_bytes"], 1 << 30)  # sanitizers need several times as much

    def test_plans_verify(self) -> None:
        for job in JOBS:
            if job.startswith("kimi") and not (FULL and job == "kimi-k2-256-to-128"):
                continue
            with self.subTest(job):
                self.compile(job)
                self.call("reshard-inspect plan.rplan --verify")

    def test_the_same_plan_with_any_number_of_threads(self) -> None:
        for job in ("qwen3-30b-a3b-32-to-16", "kimi-k2-256-to-128"):
            digests = {self.compile(job, f"--jobs={jobs}")["digest"] for jobs in (1, 2, 16)}
            self.assertEqual(len(digests), 1)

    def test_run_in_memory(self) -> None:
        short = CUT or (() if FULL else ("--set", "model.let.layers=4"))
        for job, options in (("quickstart", ()), ("qwen3-0.6b-8-to-4", CUT), ("qwen3-0.6b-hf-to-4", short)):
            with self.subTest(job):
                self.compile(job, *options)
                self.call(f"reshard-exec plan.rplan --synthesize --check --report={self.folder}/exec.json")
                report = self.json("exec.json")
                self.assertEqual(report["mismatches"], 0)
                self.assertEqual(report["checked_bytes"], 2 * report["runs"][0]["bytes"])

    def test_run_from_files(self) -> None:
        jobs = [
            ("quickstart", ()),
            (
                "qwen3-0.6b-hf-to-4",
                CUT or ("--set", "model.let.layers=4", *(() if FULL else ("--set", "model.let.vocab=16384"))),
            ),
        ]
        if FULL:
            jobs += [("qwen3-0.6b-8-to-4", ()), ("llama3-8b-16-to-8", ("--set", "model.let.layers=4"))]
        for job, options in jobs:
            with self.subTest(job), tempfile.TemporaryDirectory() as folder:
                self.compile(job, *options)
                source, target = Path(folder) / "source", Path(folder) / "target"
                self.call(f"reshard-exec plan.rplan --synthesize --source={source}")
                before = {path.name: path.stat().st_mtime_ns for path in source.iterdir()}
                self.call(f"reshard-exec plan.rplan --source={source} --target={target} --check")
                self.assertEqual(before, {path.name: path.stat().st_mtime_ns for path in source.iterdir()})
                self.fails("already exists", f"reshard-exec plan.rplan --source={source} --target={target}")

    def test_wrong_files_are_refused_and_leave_no_output(self) -> None:
        self.compile("quickstart")
        source, target = self.folder / "source", self.folder / "target"
        self.call(f"reshard-exec plan.rplan --synthesize --source={source}")
        first = source / "rank-00000.safetensors"
        good = first.read_bytes()

        def refused(expected: str) -> None:
            self.fails(expected, f"reshard-exec plan.rplan --source={source} --target={target}")
            self.assertEqual({"source", "plan.rplan", "plan.json"}, {path.name for path in self.folder.iterdir()})

        for damaged, expected in (
            (good[:-1], "data_offsets lie outside"),
            (good[:5], "truncated"),
            (good + b"x", "its tensors"),
            (good.replace(b'"BF16"', b'"F16 "', 1), "unknown dtype"),
            (good.replace(b"layers.0.up.weight", b"layers.9.up.weight", 1), "has no tensor 'layers.0.up.weight'"),
            (good.replace(b'"shape":[1024,1024]', b'"shape":[2048,512] ', 1), "expected [1024, 1024]"),
            (b"\xff" * 8 + good[8:], "the header should have"),
            (good[:8] + b"[" + good[9:], "damaged header"),
        ):
            first.write_bytes(damaged)
            refused(expected)
        first.unlink()
        refused("has no file 'rank-00000.safetensors'")
        first.write_bytes(good)
        (source / "rank-00008.safetensors").write_bytes(good)
        refused("contains 'rank-00008.safetensors'")

    def test_diff(self) -> None:
        self.compile("quickstart", name="a")
        self.compile("quickstart", name="b")
        self.compile("quickstart", "--set", "model.let.ffn=8192", name="c")
        plans = [self.folder / f"{name}.rplan" for name in "abc"]
        self.assertIn("equal", run("reshard-diff", plans[0], plans[1]).stdout)
        changed = json.loads(run("reshard-diff", plans[0], plans[2], "--format=json", code=1).stdout)
        self.assertIn("target layers.{layer}.up.weight", changed["params"]["changed"])
        self.assertNotIn("target layers.{layer}.norm.weight", changed["params"]["changed"])
        run("reshard-diff", plans[0], plans[2], "--fail-on=remote_bytes_ratio > 3")
        text = run(
            "reshard-diff", plans[0], plans[2], "--fail-on=remote_bytes_ratio > 1.5 and rounds_delta == 0", code=1
        ).stdout
        self.assertRegex(
            text,
            r"\nfailed: remote_bytes_ratio > 1.5 and rounds_delta == 0: remote_bytes_ratio = "
            r"[\d.]+, rounds_delta = 0\n",
        )
        self.assertRegex(text, r"\nremote_bytes +[\d.]+ MiB +[\d.]+ MiB  \+[\d.]+ MiB \(\+[\d.]+ %\)\n")
        conditions = ("--fail-on=world > 1000 or rounds_delta == 0", "--format=json")
        self.assertEqual(
            json.loads(run("reshard-diff", plans[0], plans[2], *conditions, code=1).stdout)["held"],
            [{"condition": "rounds_delta == 0", "values": {"rounds_delta": 0.0}}],
        )
        run("reshard-diff", plans[0], plans[2], "--fail-on=(world > 1) and not (remote_bytes_ratio > 3)", code=1)
        self.assertIn(
            "unknown name 'remote'", run("reshard-diff", plans[0], plans[2], "--fail-on=remote > 1", code=2).stderr
        )
        self.assertIn("| remote_bytes |", run("reshard-diff", plans[0], plans[2], "--format=markdown", code=1).stdout)

    def test_inspect(self) -> None:
        self.compile("quickstart")
        plan = self.folder / "plan.rplan"
        params = json.loads(run("reshard-inspect", plan, "--param=layers.3.up*", "--format=json").stdout)
        self.assertEqual([one["rank"] for one in params], list(range(8)))
        self.assertEqual(params[0]["from"], {"rank 0": params[0]["bytes"]})
        rank = json.loads(run("reshard-inspect", plan, "--rank=1", "--format=json").stdout)
        self.assertIn("send", {step["kind"] for step in rank["steps"]} | {"send"})
        self.assertEqual(
            sum(step["bytes"] for step in rank["steps"] if step["kind"] in ("recv", "copy")), 8 * (2 * 2**20 + 2048)
        )
        run("reshard-inspect", plan, "--rank=8", code=2)
        run("reshard-inspect", plan, "--param=nothing", code=1)

    def test_usage(self) -> None:
        for command in ("compile", "exec", "inspect", "diff"):
            self.assertIn("--version", run(f"reshard-{command} --help").stdout)
            self.assertIn("reshard-", run(f"reshard-{command} --version").stdout)
            run(f"reshard-{command} --nonsense", code=2)
        self.assertIn("did you mean '--repeat'", run("reshard-exec x --repaet=2", code=2).stderr)
        self.compile("quickstart")
        plan = self.folder / "plan.rplan"
        self.assertIn("expected 'cuda'", run("reshard-exec", plan, "--synthesize", "--transport=nccl", code=2).stderr)
        self.assertIn("deadline", run("reshard-exec", plan, "--synthesize", "--timeout=0.000001", code=3).stderr)


if __name__ == "__main__":
    unittest.main()
