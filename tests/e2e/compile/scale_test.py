# SPDX-License-Identifier: Apache-2.0
"""The largest jobs, without times: transfers, bytes of the plan, peak memory. Hostile sizes are refused quickly, and
long models are read. tests/bench/scale.cpp measures times. RESHARD_BIN: the folder of the commands."""

import json
import os
import unittest

from commands import BIN, ROOT, FolderTest, limited, run

FULL = "RESHARD_FULL" in os.environ
SMALL = "RESHARD_SMALL" in os.environ  # sanitizers use more memory
# transfers, MiB of memory, MiB of the plan
JOBS = {
    "qwen3-30b-a3b-32-to-16": (25_400, 48, 1),
    "kimi-k2-256-to-128": (178_560, 128, 8),
    "kimi-k2-2048-to-1024": (1_428_480, 512, 64),
    "clusters/kimi-k2-16384-to-8192": (11_427_840, 4096, 512),
}


class Scale(FolderTest):
    def compile(self, job, *options):
        return run(
            "reshard-compile",
            job,
            "-o",
            self.folder / "plan",
            f"--report={self.folder / 'report'}",
            *options,
            code=None,
        )

    def test_jobs(self):
        for job, (transfers, memory, size) in JOBS.items():
            if SMALL and transfers > 1_000_000:
                continue
            for nodes in ((), (f"--set=options.topology={ROOT / 'examples/topologies/h100x8.yaml'}",)):
                with self.subTest(job, nodes=bool(nodes)):
                    done = self.compile(ROOT / "examples" / f"{job}.yaml", *nodes, "--no-verify")
                    self.assertEqual(done.returncode, 0, done.stderr)
                    report = json.loads((self.folder / "report").read_text())
                    self.assertEqual(report["transfers"], transfers)
                    self.assertLessEqual(report["plan_bytes"], size << 20)
                    if not SMALL:
                        self.assertLessEqual(report["peak_rss_bytes"], memory << 20)
                    if FULL and not SMALL:
                        proof = run("reshard-inspect", self.folder / "plan", "--verify")
                        self.assertIn("right: all", proof.stdout, proof.stderr)

    def test_every_rank_sends_to_every_other(self):
        """The memory of many small messages, and their plan. The limits are a fifth and a tenth above the need: copies
        of the descriptors of flows, or transfers that are kept after they are descriptors, would exceed the first, and
        a list of operands for each send the second."""
        job = self.folder / "job.yaml"
        job.write_text(
            json.dumps(
                {
                    "version": 1,
                    "model": str(ROOT / "examples/models/qwen3-32b.yaml"),
                    "source": {"layout": "fsdp2", "mesh": {"fsdp": 256}},
                    "target": {"layout": "vllm", "mesh": {"tp": 4, "dp": 64}, "ranks": "256..511"},
                }
            )
        )
        done = self.compile(job, "--no-verify")  # the proof needs memory of its own
        self.assertEqual(done.returncode, 0, done.stderr)
        report = json.loads((self.folder / "report").read_text())
        self.assertEqual(report["transfers"], 26_313_088)
        self.assertLessEqual(report["plan_bytes"], 20 << 20)
        if not SMALL:
            self.assertLessEqual(report["peak_rss_bytes"], 112 << 20)

    def test_copies_cost_no_memory(self):
        """A million messages: the plan has a quarter of a gigabyte, and the compiler never holds it whole. The limit is
        a fifth above the need."""
        fsdp, dp = (256, 64) if SMALL else (1024, 256)
        job = self.folder / "job.yaml"
        job.write_text(
            json.dumps(
                {
                    "version": 1,
                    "model": str(ROOT / "examples/models/qwen3-32b.yaml"),
                    "source": {"layout": "fsdp2", "mesh": {"fsdp": fsdp}},
                    "target": {"layout": "vllm", "mesh": {"tp": 4, "dp": dp}, "ranks": f"{fsdp}..{fsdp + 4 * dp - 1}"},
                }
            )
        )
        done = self.compile(job, "--fold-copies=always", "--jobs=1", "--no-verify")
        self.assertEqual(done.returncode, 0, done.stderr)
        report = json.loads((self.folder / "report").read_text())
        self.assertEqual(report["copies"], {"source": 1, "target": dp})
        self.assertLessEqual(report["messages"], 1.01 * fsdp * 4 * dp)
        if not SMALL:
            self.assertLessEqual(report["peak_rss_bytes"], 76 << 20)
        if FULL or SMALL:
            proof = run("reshard-inspect", self.folder / "plan", "--verify")
            self.assertIn("right: all", proof.stdout, proof.stderr)

    def test_a_long_model(self):
        lines = [
            f"    model.layers.{i // 20}.block.{i % 20}.weight: {{shape: [128, 64], shard: {{0: tp}}}}"
            for i in range(20_000)
        ]
        job = self.folder / "job.yaml"
        job.write_text(
            "version: 1\nmodel:\n  dtype: bf16\n  tensors:\n"
            + "\n".join(lines)
            + "\nsource: {mesh: {tp: 4}}\ntarget: {mesh: {tp: 8}}\n"
        )
        done = self.compile(job)
        self.assertEqual(done.returncode, 0, done.stderr)
        report = json.loads((self.folder / "report").read_text())
        self.assertEqual((report["tensors"], report["transfers"]), (20_000, 160_000))

    def cpu(self, job, code=0, seconds=20):
        """Compiles a job within a limit of CPU seconds and returns its stderr. The limits are generous: an algorithm
        that is quadratic in the job's size takes minutes."""
        path = self.folder / "job.yaml"
        path.write_text(json.dumps({"version": 1, "source": {"mesh": {}}, "target": {"mesh": {}}, **job}))
        return limited(
            seconds,
            "reshard-compile",
            path,
            "-o",
            self.folder / "plan",
            "--jobs=1",
            f"--report={self.folder / 'report'}",
            code=code,
        ).stderr

    def test_time_is_proportional_to_the_job(self):
        n = 1 << (15 if SMALL else 17)
        for name, rule in (
            ("even", "tp"),
            ("sizes", {"axis": "tp", "sizes": [1, 3] * (n // 2)}),
            ("round robin", {"axis": "tp", "scheme": "round_robin"}),
        ):
            with self.subTest(name):
                model = {"dtype": "bf16", "tensors": {"w": {"shape": [2 * n, 4], "shard": {"0": rule}}}}
                self.cpu({"model": model, "source": {"mesh": {"tp": n}}, "target": {"mesh": {"tp": n}}})
                report = json.loads((self.folder / "report").read_text())
                self.assertEqual(report["transfers"], n)
                if not SMALL:
                    self.assertLessEqual(report["peak_rss_bytes"], 1 << 30)
        for source, target in ((1, n // 2), (n // 2, 1)):
            with self.subTest("one rank and many", source=source):
                self.cpu(
                    {
                        "model": {"dtype": "bf16", "tensors": {"w": {"shape": [n, 4], "shard": {"0": "tp"}}}},
                        "source": {"mesh": {"tp": source}},
                        "target": {"mesh": {"tp": target}},
                    }
                )
        with self.subTest("more overlapping shards than can be compared"):
            strided = {
                "x": {
                    "params": {
                        "a": {"holds": "w", "shard": {"0": {"axis": "tp", "cyclic": 1}}},
                        "b": {"holds": "w", "shard": {"0": {"axis": "tp", "cyclic": 2}}},
                    }
                },
                "y": {"params": {"a": {"holds": "w"}}},
            }
            error = self.cpu(
                {
                    "model": {"dtype": "bf16", "tensors": {"w": {"shape": [1 << 15, 4]}}, "layouts": strided},
                    "source": {"layout": "x", "mesh": {"tp": 1 << 13}},
                    "target": {"layout": "y", "mesh": {}},
                },
                code=2,
            )
            self.assertIn("more than 2^24 pairs", error)

    def test_the_check_of_many_params_takes_time_for_each(self):
        tensors = {f"t{i}": [1] for i in range(4_000 if SMALL else 40_000)}
        self.cpu(
            {"model": {"dtype": "u8", "tensors": tensors}, "source": {"mesh": {}}, "target": {"mesh": {}, "ranks": [1]}}
        )
        self.assertIn(
            "bytes right",
            limited(4, "reshard-exec", self.folder / "plan", "--synthesize", "--check", "--threads=1").stdout,
        )

    def test_many_shards_are_intersected_correctly(self):
        """Enough shards of a dimension that overlaps are found through an index of blocks: runs the plan and checks
        every byte; verifies some plans."""
        sizes = {"axis": "tp", "sizes": [i % 3 * 5 + 5 for i in range(96)]}
        rules = {
            "even": "tp",
            "round robin": {"axis": "tp", "scheme": "round_robin"},
            "short last": {"axis": "tp", "cyclic": 7},
            "strided": {"axis": "tp", "stride": 2},
            "whole": None,
        }
        layouts = {
            name: {"params": {"p": {"holds": "w", **({"shard": {"0": rule}} if rule else {})}}}
            for name, rule in (*rules.items(), ("sizes", sizes))
        }
        layouts["twice"] = {
            "params": {
                "p": {"holds": "w", "shard": {"0": "tp"}},
                "q": {"holds": "w", "shard": {"0": rules["short last"]}},
            }
        }
        model = {"dtype": "bf16", "tensors": {"w": {"shape": [960, 2]}}, "layouts": layouts}
        for source in ("even", "round robin", "short last", "sizes", "twice"):
            for target, ranks in (("even", 80), ("round robin", 70), ("short last", 66), ("strided", 80), ("whole", 1)):
                with self.subTest(source=source, target=target):
                    self.cpu(
                        {
                            "model": model,
                            "source": {"layout": source, "mesh": {"tp": 96}},
                            "target": {"layout": target, "mesh": {"tp": ranks}},
                        }
                    )
                    done = run("reshard-exec", self.folder / "plan", "--synthesize", "--check", "--threads=2")
                    self.assertIn("bytes right", done.stdout)
                    if target == "short last":
                        proof = run("reshard-inspect", self.folder / "plan", "--verify")
                        self.assertIn("right: all", proof.stdout, proof.stderr)

    def test_limits_of_a_job(self):
        tensors = {"dtype": "bf16", "tensors": {"w": {"shape": [8]}}}
        one = {"params": {"w": {"holds": "w"}}}
        many = {f"l{i}": {"extend": f"l{i - 1}"} for i in range(1, 20_000)}
        tied = {"w": {"shape": [8]}, **{f"t{i}": {"tied": "w"} for i in range(50_000)}}
        wide = {f"l{i}": {"extend": "l0"} for i in range(1, 1_000)}
        for job, error in (
            (
                {"model": tensors, "source": {"mesh": {f"a{i}": 1 for i in range(100_000)}}},
                "the mesh and its views up to here have 100000 axes together, expected at most 1024",
            ),
            (
                {"model": tensors, "source": {"mesh": {"tp": 1, "views": [{f"a{i}": 1} for i in range(100_000)]}}},
                "the mesh and its views up to here have 1025 axes together",
            ),
            (
                {"model": {**tensors, "layouts": {"l0": {**one, "axes": [f"a{i}" for i in range(100_000)]}}}},
                "'axes' lists 100000 axes, expected at most 1024",
            ),
            (
                {"model": {**tensors, "index": {f"x{i}": 1 for i in range(100_000)}}},
                "'index' has 100000 entries, expected at most 1024",
            ),
            (
                {"model": {"dtype": "bf16", "tensors": tied}},
                "tensor 'w' is held by so many params on both sides that more than 2^22 pairs",
            ),
            (
                {
                    "model": {"dtype": "bf16", "tensors": {"w": {"shape": [1 << 58]}}},
                    "target": {"mesh": {}, "ranks": [1]},
                },
                "more than 2^24 chunks of at most 64 MiB",
            ),
            (
                {"model": {**tensors, "layouts": {"l0": one, **many}}},
                "'layouts' has 20000 entries, expected at most 1024",
            ),
            (
                {
                    "model": {
                        **tensors,
                        "layouts": {"l0": {"params": {f"w{i}": {"holds": "w"} for i in range(20_000)}}, **wide},
                    }
                },
                "the layouts have more than 524288 params together, including inherited ones",
            ),
        ):
            with self.subTest(error):
                self.assertIn(error, self.cpu(job, code=2, seconds=5))

    def test_more_messages_than_a_plan_numbers(self):
        n = 1 << 17
        layouts = {
            "sharded": {"params": {"w": {"holds": "w", "shard": {"0": "fsdp"}}}},
            "whole": {"params": {"w": {"holds": "w"}}},
        }
        error = self.cpu(
            {
                "model": {"dtype": "bf16", "tensors": {"w": [n]}, "layouts": layouts},
                "source": {"layout": "sharded", "mesh": {"fsdp": n}},
                "target": {"layout": "whole", "mesh": {"dp": n}, "ranks": f"{n}..{2 * n - 1}"},
            },
            code=2,
        )
        self.assertIn(f"the ranks exchange {n * n} messages, expected at most 4294967295", error)

    def test_out_of_memory(self):
        """The error names the resource and the pass, instead of an exception."""
        job = {
            "model": {"dtype": "bf16", "tensors": {"w": {"shape": [1 << 17], "shard": {"0": "tp"}}}},
            "source": {"mesh": {"tp": 1 << 17}},
            "target": {"mesh": {"tp": 1 << 17}},
        }
        path = self.folder / "job.yaml"
        path.write_text(json.dumps({"version": 1, **job}))
        if SMALL:
            self.skipTest("sanitizers reserve memory of their own")
        done = run(
            "bash",
            "-c",
            'ulimit -v 150000; exec "$@"',
            "-",
            BIN / "reshard-compile",
            path,
            "-o",
            self.folder / "plan",
            code=3,
        )
        self.assertRegex(
            done.stderr,
            r"^reshard-compile: error: out of memory in '[a-z-]+': an allocation "
            r"failed at a peak of [0-9.]+ MiB resident memory\n$",
        )
        self.assertFalse((self.folder / "plan").exists())

    def test_hostile_sizes(self):
        tensors = "tensors: {'w.{layer}.{expert}': {shape: [4]}}"
        for model, source, error in (
            (
                "index: {layer: 1000000, expert: 1000000}, " + tensors,
                "{}",
                "has 1000000000000 instances on a rank, expected at most 4194304",
            ),
            (
                "index: {layer: 4096, expert: 1025}, " + tensors,
                "{}",
                "has 4198400 instances on a rank, expected at most 4194304",
            ),
            ("tensors: {w: [576460752303423489]}", "{}", "tensor 'w' has more than 2^60 bytes"),
            (
                "index: {layer: 4096}, tensors: {'w.{layer}': [281474976710656]}",
                "{}",
                "has more than 2^60 bytes over all its index values",
            ),
            ("index: {layer: 10000000, expert: 1}, " + tensors, "{}", "'layer' is 10000000, expected 0 to 1048576"),
            ("tensors: {w: [4]}", "{tp: 1000000000}", "the size of axis 'tp' is 1000000000, expected 1 to 1048576"),
            ("tensors: {w: [4]}", "{a: 1000000, b: 1000000}", "1048576"),
        ):
            with self.subTest(error):
                job = self.folder / "job.yaml"
                job.write_text(
                    f"{{version: 1, model: {{dtype: bf16, {model}}}, source: {{mesh: {source}}}, target: {{mesh: "
                    f"{{}}}}}}\n"
                )
                done = run("reshard-compile", job, "-o", self.folder / "plan", code=2, timeout=10)
                self.assertIn(error, done.stderr)
                self.assertFalse((self.folder / "plan").exists())

    def test_the_largest_jobs_load(self):
        for model in (
            "tensors: {w: [576460752303423488]}",
            "index: {layer: 2048}, tensors: {'w.{layer}': [281474976710656]}",
            "index: {layer: 4096, expert: 1024}, tensors: {'w.{layer}.{expert}': [4]}",
        ):
            with self.subTest(model):
                job = self.folder / "job.yaml"
                job.write_text(
                    f"{{version: 1, model: {{dtype: bf16, {model}}}, source: {{mesh: {{}}}}, target: {{mesh: {{}}}}}}\n"
                )
                done = self.compile(job)
                self.assertEqual(done.returncode, 0, done.stderr)
                run("reshard-inspect", self.folder / "plan")


if __name__ == "__main__":
    unittest.main()
