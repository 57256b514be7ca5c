# SPDX-License-Identifier: Apache-2.0
"""The largest jobs, without times: transfers, bytes of the plan, peak memory. Hostile sizes are refused quickly, and
long models are read. tests/bench/scale.cpp measures times. RESHARD_BIN: the folder of the commands."""

import os
import unittest

from commands import BIN, ROOT, FolderTest, limited

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
        """The report."""
        self.call("reshard-compile", job, "-o", "plan", "--report=report", *options)
        return self.json("report")

    def verify(self):
        proof = self.call("reshard-inspect plan --verify")
        self.assertIn("right: all", proof.stdout, proof.stderr)

    def below(self, report, mebibytes):
        """The compiler's peak; sanitizers use more memory."""
        if not SMALL:
            self.assertLessEqual(report["peak_rss_bytes"], mebibytes << 20)

    def refit(self, fsdp, dp, *options):
        """The report of a job from FSDP2 to engines of four ranks."""
        self.job(
            str(ROOT / "examples/models/qwen3-32b.yaml"),
            {"layout": "fsdp2", "mesh": {"fsdp": fsdp}},
            {"layout": "vllm", "mesh": {"tp": 4, "dp": dp}, "ranks": f"{fsdp}..{fsdp + 4 * dp - 1}"},
        )
        return self.compile("job.yaml", *options)

    def test_jobs(self):
        for job, (transfers, memory, size) in JOBS.items():
            if SMALL and transfers > 1_000_000:
                continue
            for nodes in ((), (f"--set=options.topology={ROOT / 'examples/topologies/h100x8.yaml'}",)):
                with self.subTest(job, nodes=bool(nodes)):
                    report = self.compile(ROOT / "examples" / f"{job}.yaml", *nodes, "--no-verify")
                    self.assertEqual(report["transfers"], transfers)
                    self.assertLessEqual(report["plan_bytes"], size << 20)
                    self.below(report, memory)
                    if FULL and not SMALL:
                        self.verify()

    def test_every_rank_sends_to_every_other(self):
        """The memory of many small messages, and their plan. The limits are a fifth and a tenth above the need: copies
        of the descriptors of flows, or transfers that are kept after they are descriptors, would exceed the first, and
        a list of operands for each send the second."""
        report = self.refit(256, 64, "--no-verify")  # the proof needs memory of its own
        self.assertEqual(report["transfers"], 26_313_088)
        self.assertLessEqual(report["plan_bytes"], 20 << 20)
        self.below(report, 112)

    def test_copies_cost_no_memory(self):
        """A million messages: the plan has a quarter of a gigabyte, and the compiler never holds it whole. The limit is
        a fifth above the need."""
        fsdp, dp = (256, 64) if SMALL else (1024, 256)
        report = self.refit(fsdp, dp, "--fold-copies=always", "--jobs=1", "--no-verify")
        self.assertEqual(report["copies"], {"source": 1, "target": dp})
        self.assertLessEqual(report["messages"], 1.01 * fsdp * 4 * dp)
        self.below(report, 76)
        if FULL or SMALL:
            self.verify()

    def test_a_long_model(self):
        lines = [
            f"    model.layers.{i // 20}.block.{i % 20}.weight: {{shape: [128, 64], shard: {{0: tp}}}}"
            for i in range(20_000)
        ]
        model = "\n  dtype: bf16\n  tensors:\n" + "\n".join(lines)
        self.job(model, "{mesh: {tp: 4}}", "{mesh: {tp: 8}}")
        report = self.compile("job.yaml")
        self.assertEqual((report["tensors"], report["transfers"]), (20_000, 160_000))

    def cpu(self, model, source="{mesh: {}}", target="{mesh: {}}", code=0, seconds=20):
        """Compiles a job within a limit of CPU seconds and returns its stderr. The limits are generous: an algorithm
        that is quadratic in the job's size takes minutes."""
        self.job(model, source, target)
        command = "reshard-compile job.yaml -o plan --jobs=1 --report=report"
        return limited(seconds, command, code=code, cwd=self.folder).stderr

    def test_time_is_proportional_to_the_job(self):
        n = 1 << (15 if SMALL else 17)
        for name, rule in (
            ("even", "tp"),
            ("sizes", {"axis": "tp", "sizes": [1, 3] * (n // 2)}),
            ("round robin", {"axis": "tp", "scheme": "round_robin"}),
        ):
            with self.subTest(name):
                model = {"dtype": "bf16", "tensors": {"w": {"shape": [2 * n, 4], "shard": {"0": rule}}}}
                self.cpu(model, {"mesh": {"tp": n}}, {"mesh": {"tp": n}})
                report = self.json("report")
                self.assertEqual(report["transfers"], n)
                self.below(report, 1024)
        for source, target in ((1, n // 2), (n // 2, 1)):
            with self.subTest("one rank and many", source=source):
                model = {"dtype": "bf16", "tensors": {"w": {"shape": [n, 4], "shard": {"0": "tp"}}}}
                self.cpu(model, {"mesh": {"tp": source}}, {"mesh": {"tp": target}})
        with self.subTest("more overlapping shards than can be compared"):
            strided = """{x: {params: {a: {holds: w, shard: {0: {axis: tp, cyclic: 1}}},
                                       b: {holds: w, shard: {0: {axis: tp, cyclic: 2}}}}},
                          y: {params: {a: {holds: w}}}}"""
            model = f"{{dtype: bf16, tensors: {{w: [{1 << 15}, 4]}}, layouts: {strided}}}"
            error = self.cpu(model, f"{{layout: x, mesh: {{tp: {1 << 13}}}}}", "{layout: y, mesh: {}}", code=2)
            self.assertIn("more than 2^24 pairs", error)

    def test_the_check_of_many_params_takes_time_for_each(self):
        tensors = {f"t{i}": [1] for i in range(4_000 if SMALL else 40_000)}
        self.cpu({"dtype": "u8", "tensors": tensors}, target="{mesh: {}, ranks: [1]}")
        done = limited(4, "reshard-exec plan --synthesize --check --threads=1", cwd=self.folder)
        self.assertIn("bytes right", done.stdout)

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
                    self.cpu(model, {"layout": source, "mesh": {"tp": 96}}, {"layout": target, "mesh": {"tp": ranks}})
                    self.prints("bytes right", "reshard-exec plan --synthesize --check --threads=2")
                    if target == "short last":
                        self.verify()

    def test_limits_of_a_job(self):
        tensors = {"dtype": "bf16", "tensors": {"w": {"shape": [8]}}}
        one = {"params": {"w": {"holds": "w"}}}
        many = {f"l{i}": {"extend": f"l{i - 1}"} for i in range(1, 20_000)}
        tied = {"w": {"shape": [8]}, **{f"t{i}": {"tied": "w"} for i in range(50_000)}}
        wide = {f"l{i}": {"extend": "l0"} for i in range(1, 1_000)}
        each = {"params": {f"w{i}": {"holds": "w"} for i in range(20_000)}}
        axes, whole = {f"a{i}": 1 for i in range(100_000)}, {"mesh": {}}
        for model, source, target, error in (
            (
                tensors,
                {"mesh": axes},
                whole,
                "the mesh and its views up to here have 100000 axes together, expected at most 1024",
            ),
            (
                tensors,
                {"mesh": {"tp": 1, "views": [{axis: 1} for axis in axes]}},
                whole,
                "the mesh and its views up to here have 1025 axes together",
            ),
            (
                tensors | {"layouts": {"l0": one | {"axes": list(axes)}}},
                whole,
                whole,
                "'axes' lists 100000 axes, expected at most 1024",
            ),
            (tensors | {"index": axes}, whole, whole, "'index' has 100000 entries, expected at most 1024"),
            (
                {"dtype": "bf16", "tensors": tied},
                whole,
                whole,
                "tensor 'w' is held by so many params on both sides that more than 2^22 pairs",
            ),
            (
                {"dtype": "bf16", "tensors": {"w": {"shape": [1 << 58]}}},
                whole,
                {"mesh": {}, "ranks": [1]},
                "more than 2^24 chunks of at most 64 MiB",
            ),
            (
                tensors | {"layouts": {"l0": one} | many},
                whole,
                whole,
                "'layouts' has 20000 entries, expected at most 1024",
            ),
            (
                tensors | {"layouts": {"l0": each} | wide},
                whole,
                whole,
                "the layouts have more than 524288 params together, including inherited ones",
            ),
        ):
            with self.subTest(error):
                self.assertIn(error, self.cpu(model, source, target, code=2, seconds=5))

    def test_more_messages_than_a_plan_numbers(self):
        n = 1 << 17
        layouts = "{sharded: {params: {w: {holds: w, shard: {0: fsdp}}}}, whole: {params: {w: {holds: w}}}}"
        error = self.cpu(
            f"{{dtype: bf16, tensors: {{w: [{n}]}}, layouts: {layouts}}}",
            f"{{layout: sharded, mesh: {{fsdp: {n}}}}}",
            f"{{layout: whole, mesh: {{dp: {n}}}, ranks: {n}..{2 * n - 1}}}",
            code=2,
        )
        self.assertIn(f"the ranks exchange {n * n} messages, expected at most 4294967295", error)

    def test_out_of_memory(self):
        """The error names the resource and the pass, instead of an exception."""
        mesh = f"{{mesh: {{tp: {1 << 17}}}}}"
        self.job(f"{{dtype: bf16, tensors: {{w: {{shape: [{1 << 17}], shard: {{0: tp}}}}}}}}", mesh, mesh)
        if SMALL:
            self.skipTest("sanitizers reserve memory of their own")
        limit = "bash -c 'ulimit -v 150000; exec \"$@\"' -"
        done = self.call(limit, BIN / "reshard-compile", "job.yaml", "-o", "plan", code=3)
        self.assertRegex(
            done.stderr,
            r"^reshard-compile: error: out of memory in '[a-z-]+': an allocation "
            r"failed at a peak of [0-9.]+ MiB resident memory\n$",
        )
        self.assertFalse((self.folder / "plan").exists())

    def test_hostile_sizes(self):
        grid = lambda layers, experts: (
            f"index: {{layer: {layers}, expert: {experts}}}, tensors: {{'w.{{layer}}.{{expert}}': {{shape: [4]}}}}"
        )
        most = "instances on a rank, expected at most 4194304"
        for model, source, error in (
            (grid(1000000, 1000000), "{}", f"has 1000000000000 {most}"),
            (grid(4096, 1025), "{}", f"has 4198400 {most}"),
            ("tensors: {w: [576460752303423489]}", "{}", "tensor 'w' has more than 2^60 bytes"),
            (
                "index: {layer: 4096}, tensors: {'w.{layer}': [281474976710656]}",
                "{}",
                "has more than 2^60 bytes over all its index values",
            ),
            (grid(10000000, 1), "{}", "'layer' is 10000000, expected 0 to 1048576"),
            ("tensors: {w: [4]}", "{tp: 1000000000}", "the size of axis 'tp' is 1000000000, expected 1 to 1048576"),
            ("tensors: {w: [4]}", "{a: 1000000, b: 1000000}", "1048576"),
        ):
            with self.subTest(error):
                self.job(f"{{dtype: bf16, {model}}}", f"{{mesh: {source}}}")
                self.fails(error, "reshard-compile job.yaml -o plan", timeout=10)
                self.assertFalse((self.folder / "plan").exists())

    def test_the_largest_jobs_load(self):
        for model in (
            "tensors: {w: [576460752303423488]}",
            "index: {layer: 2048}, tensors: {'w.{layer}': [281474976710656]}",
            "index: {layer: 4096, expert: 1024}, tensors: {'w.{layer}.{expert}': [4]}",
        ):
            with self.subTest(model):
                self.job(f"{{dtype: bf16, {model}}}")
                self.compile("job.yaml")
                self.call("reshard-inspect plan")


if __name__ == "__main__":
    unittest.main()
