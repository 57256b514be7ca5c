# SPDX-License-Identifier: Apache-2.0
"""Options of the commands: --relabel-target, --compress, --keep, --allow, --check-replicas; only, ignore, refresh and
transform in reports. RESHARD_BIN: the folder of the commands."""

import json
import os
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from commands import BIN, ROOT, FolderTest, run


class Options(FolderTest):
    def compile(self, job, *options, code=0, plan="plan"):
        self.write("job.yaml", job)
        done = self.call("reshard-compile job.yaml -o", plan, "--report=report.json", *options, code=code)
        self.stderr = done.stderr
        return self.json("report.json") if code == 0 else None

    def execute(self, *options, code=0, plan="plan"):
        return self.call("reshard-exec", plan, *options, code=code)


class Verify(Options):
    JOB = "{version: 1, model: {dtype: bf16, tensors: {a: [8], b: [8]}}, source: {mesh: {}}, target: {mesh: {}}}"

    def wrong_ir(self):
        """IR text whose first copy reads another tensor of the same shape."""
        self.write("job.yaml", self.JOB)
        ir = self.call("reshard-compile job.yaml --emit=ir").stdout
        wrong = ir.replace("in  b1 + 0", "in  b2 + 0")
        self.assertNotEqual(wrong, ir)
        self.write("wrong.rir", wrong)
        return self.folder / "wrong.rir"

    def test_a_plan_is_proven(self):
        for options in ((), ("--compress",), ("--jobs=3",)):
            with self.subTest(options):
                report = self.compile(self.JOB, *options)
                self.assertTrue(report["proven"])
                self.assertGreater(report["time_ms"]["passes"]["verify"], 0)
                self.assertEqual(self.stderr, "")
        self.execute("--synthesize", "--check")
        report = self.compile(self.JOB, "--no-verify")
        self.assertFalse(report["proven"])
        self.assertNotIn("verify", report["time_ms"]["passes"])

    def test_a_wrong_plan_is_not_written(self):
        wrong, plan = self.wrong_ir(), self.folder / "wrong"
        run("reshard-compile", wrong, "-o", plan, "--no-verify")
        before = plan.read_bytes()
        self.assertRegex(
            run("reshard-inspect", plan, "--verify", code=1).stderr, "error: the plan is wrong: .*must be tensor 'a'"
        )
        files = sorted(path.name for path in self.folder.iterdir())
        for output in (plan, self.folder / "new"):
            with self.subTest(output=output):
                error = self.call("reshard-compile", wrong, "-o", output, "--report=report", code=1).stderr
                self.assertRegex(
                    error,
                    "^reshard-compile: error: the plan is wrong, and was not written: target rank "
                    "0 param 'a' byte 0 must be tensor 'a'",
                )
                self.assertEqual(sorted(path.name for path in self.folder.iterdir()), files)
        self.assertEqual(plan.read_bytes(), before)
        done = subprocess.run([BIN / "reshard-compile", wrong, "-o", "/dev/stdout"], capture_output=True)
        self.assertEqual((done.returncode, done.stdout), (1, b""))

    def test_the_time_of_a_proof_is_limited(self):
        job = (
            (ROOT / "examples/kimi-k2-256-to-128.yaml")
            .read_text()
            .replace("model: models", f"model: {ROOT / 'examples/models'}")
        )
        self.assertFalse(self.compile(job, "--verify-seconds=0.0001")["proven"])
        self.assertEqual(
            self.stderr,
            "reshard-compile: warning: the plan is not proven: the proof did not finish "
            "within 0.0001 s (--verify-seconds)\n",
        )
        self.prints("right: all", "reshard-inspect plan --verify")
        self.assertTrue(self.compile(job, "--verify-seconds=600")["proven"])
        for options, error in (
            (
                ("--no-verify", "--verify-seconds=1"),
                "--verify-seconds limits the proof that --no-verify leaves out: expected only one",
            ),
            (
                ("--no-verify", "--emit=ir"),
                "--no-verify is about the proof of a plan: expected neither --emit nor --describe",
            ),
            (
                ("--verify-seconds=1", "--emit=layout"),
                "--verify-seconds is about the proof of a plan: expected neither",
            ),
            (("--verify-seconds=0",), "found '0', expected a number of seconds above 0"),
        ):
            with self.subTest(options):
                self.fails(error, "reshard-compile job.yaml -o p", *options)

    def test_the_plan_of_a_job(self):
        job = """
version: 1
model: {dtype: bf16, index: {layer: 2}, tensors: {"layers.{layer}.w": {shape: [64, 32], shard: {0: tp}}, norm: [32]}}
source: {mesh: {tp: 4}}
target: {mesh: {tp: 2}, ranks: [3, 1]}
"""
        inspect = "reshard-inspect plan --verify --job=job.yaml"
        for options in ((), ("--set", "model.dtype=fp32"), ("--relabel-target",)):
            with self.subTest(options):
                self.compile(job, *options)
                self.prints("right: all", inspect)
        self.compile(job, "--set", "model.dtype=fp32", "--omit-job")
        self.fails(
            "of the plan differs from 'layers.{layer}.w' of the job; the plan does not hold the --set", inspect, code=1
        )
        self.compile(job)
        self.write("job.yaml", "# a line more\n" + job)
        self.call(inspect)
        for before, after, expected in (
            ("[64, 32]", "[64, 64]", "tensor 'layers.{layer}.w' of the plan differs"),
            ("layer: 2", "layer: 3", "index variable 'layer' of the plan differs"),
            ("norm: [32]", "norm: [32], more: [2]", "the plan has 2 tensors, the job 3"),
            ("[3, 1]", "[1, 3]", "the target has other ranks"),
            ("shard: {0: tp}", "shard: {1: tp}", "source param 'layers.{layer}.w' of the plan differs"),
            ("source: {mesh: {tp: 4}}", "source: {mesh: {tp: 8}}", "a world of 4, the job of 8"),
        ):
            with self.subTest(after):
                self.write("job.yaml", job.replace(before, after))
                done = self.call(inspect, code=1)
                self.assertIn("error: the plan is not that of '", done.stderr)
                self.assertIn(expected, done.stderr)
                self.assertEqual(done.stdout, "")
        self.write("job.yaml", job.replace("tp", "xp", 1))
        self.fails("unknown axis", inspect)
        self.fails("--job needs --verify", "reshard-inspect plan --job=job.yaml")


class Relabel(Options):
    JOB = """
version: 1
model: {dtype: bf16, tensors: {a: {shape: [64, 8], shard: {0: tp}}, b: {shape: [48, 8], shard: {1: tp}}}}
source: {mesh: {tp: 4}}
target: {mesh: {tp: 4}, ranks: [3, 1, 0, 2]}
"""

    def test_ranks_follow_the_bytes(self):
        before = self.compile(self.JOB)
        self.assertEqual(before["bytes"]["local"], before["bytes"]["target"] // 4)
        self.assertNotIn("relabel", before)
        after = self.compile(self.JOB, "--relabel-target", "--verify-each")
        self.assertEqual(
            after["relabel"], {"target": {"bytes_saved": before["bytes"]["remote"], "ranks": [0, 1, 2, 3]}}
        )
        self.assertEqual(after["bytes"]["remote"], 0)
        self.execute("--synthesize", "--check")
        # The remaining passes accept the printed IR after relabel.
        text = self.call("reshard-compile job.yaml --relabel-target --omit-job --print-ir-after=relabel -o x").stderr
        self.write("after.rir", text)
        self.call("reshard-compile after.rir -o y")
        self.assertEqual((self.folder / "x").read_bytes(), (self.folder / "y").read_bytes())

    def test_not_with_keep(self):
        self.compile(self.JOB)
        self.compile(self.JOB, "--relabel-target", "--keep=plan", code=2)
        self.assertIn("--relabel-target changes the assignment of ranks, but --keep pins it", self.stderr)


class From(Options):
    """A plan is compiled again from the job that it holds."""

    def again(self, *options, code=0, plan="plan", new="new", cwd=None):
        done = run(
            "reshard-compile", f"--from={self.folder / plan}", "-o", self.folder / new, *options, code=code, cwd=cwd
        )
        return done.stderr

    def same(self, one, other):
        self.assertEqual((self.folder / one).read_bytes(), (self.folder / other).read_bytes())

    def test_the_plan_alone_suffices(self):
        (self.folder / "job").mkdir()
        (self.folder / "elsewhere").mkdir()
        self.write("job/model.yaml", "dtype: bf16\ntensors: {w: {shape: [48, 8], shard: {0: tp}}}\n")
        self.write("topology.yaml", "ranks_per_node: 2\n")
        job = self.folder / "job" / "job.yaml"
        job.write_text(
            "version: 1\nmodel: model.yaml\nsource: {mesh: {tp: 4, dp: 4}}\ntarget: {mesh: {tp: 2}, ranks: [17, 16]}\n"
        )
        options = (
            "--relabel-target",
            f"--set=options.topology={self.folder / 'topology.yaml'}",
            "--set=source.mesh.dp=3",
        )
        self.call("reshard-compile", job, "-o", "plan", *options)
        run("reshard-compile job.yaml -o", self.folder / "moved", *options, cwd=self.folder / "job")
        self.same("plan", "moved")
        job.unlink()
        (self.folder / "job" / "model.yaml").unlink()
        (self.folder / "topology.yaml").unlink()
        self.again(cwd=self.folder / "elsewhere")
        self.same("plan", "new")

    def test_changes_are_added(self):
        self.compile(Relabel.JOB, "--set=source.mesh={tp: 2}", "--set=target.mesh={tp: 2}", "--set=target.ranks=2..3")
        self.compile(
            Relabel.JOB,
            "--set=source.mesh={tp: 2}",
            "--set=target.mesh={tp: 2}",
            "--set=target.ranks=2..3",
            "--set=target.ranks=[1, 2]",
            plan="direct",
        )
        self.again("--set=target.ranks=[1, 2]")
        self.same("direct", "new")
        self.again("--set=target.ranks=2..3", plan="new", new="back")
        self.call("reshard-exec back --synthesize --check")
        self.assertIn("'ranks' lists 8 ranks, expected 2", self.again("--set=target.ranks=2..9", code=2))

    def test_errors(self):
        self.compile(Relabel.JOB, "--omit-job")
        self.assertIn("does not hold its job", self.again(code=2))
        self.compile(Relabel.JOB)
        self.compile(Relabel.JOB, "--keep=plan", plan="kept")
        self.assertIn("does not hold its job", self.again(code=2, plan="kept"))
        self.assertIn("not a plan", self.again(code=2, plan="job.yaml"))
        self.call("reshard-compile job.yaml --from=plan -o new", code=2)
        before = (self.folder / "plan").read_bytes()
        self.assertIn("would overwrite", self.again(code=2, new="plan"))
        self.assertEqual((self.folder / "plan").read_bytes(), before)
        self.assertIn(
            "unknown axis", self.again("--set=source.mesh.xx=3", "--set=model.tensors.a.shard={0: yy}", code=2)
        )


class Compress(Options):
    """Compressed segments are those of the plan without compression."""

    JOB = (
        "{version: 1, model: {dtype: bf16, tensors: {a: {shape: [4032, 64], shard: {0: tp}}}}, source: {mesh: {tp: "
        "64}}, target: {mesh: {tp: 3}}}"
    )

    def test_all_commands_read_it(self):
        self.compile(self.JOB)
        self.compile(self.JOB, "--compress", plan="small")
        self.assertLess((self.folder / "small").stat().st_size, (self.folder / "plan").stat().st_size / 1.5)
        self.execute("--synthesize", "--check", plan="small")
        texts = [self.call("reshard-inspect", plan, "--rank=1").stdout for plan in ("plan", "small")]
        self.assertEqual(*texts)
        plain, small = (self.listing(plan) for plan in ("plan", "small"))
        self.assertEqual(plain["largest_segment"], small["largest_segment"])
        self.assertGreater(small["decompressed_bytes"], 1.5 * small["plan_bytes"])
        self.prints(" compressed from ", "reshard-inspect small")
        self.prints("the segments of 0 of 64 ranks differ", "reshard-diff plan small", code=1)
        self.compile(self.JOB, "--keep=small", "--compress", plan="kept")
        self.execute("--synthesize", "--check", plan="kept")
        self.call("reshard-compile --from=small -o again")
        self.assertEqual((self.folder / "again").read_bytes(), (self.folder / "plan").read_bytes())

    def test_without_libzstd(self):
        self.compile(self.JOB, "--compress")
        (self.folder / "lib").mkdir()
        (self.folder / "lib/libzstd.so.1").touch()  # found first, and no library
        self.fails(
            "the compressed segment of rank 0: found no libzstd.so.1; install the package libzstd1 (Debian, "
            "Ubuntu) or libzstd",
            "reshard-exec plan --synthesize",
            code=3,
            env=os.environ | {"LD_LIBRARY_PATH": str(self.folder / "lib")},
        )


class Keep(Options):
    """Megatron's roster row: rank 0 -> ranks 1, 2, then also 3."""

    JOB = """
version: 1
model:
  dtype: bf16
  tensors: {a: {shape: [64, 8], shard: {0: tp}}, b: {shape: [30]}, c: {shape: [48, 8], shard: {1: tp}}}
source: {mesh: {tp: %d, dp: 2}}
target: {mesh: {tp: 2, dp: %d}, ranks: 8..%d}
world: 40
"""

    def test_existing_ranks_keep_their_segments_over_epochs(self):
        for staging in ([], ["--set=options.staging=1024"]):
            self.compile(self.JOB % (4, 1, 9), *staging, plan="1")
            for step, (dp, before) in enumerate(((2, "1"), (4, "2"), (8, "3")), 2):
                report = self.compile(
                    self.JOB % (4, dp, 7 + 2 * dp), "--verify-each", f"--keep={before}", *staging, plan=str(step)
                )
                # All ranks except the new ones and the 8 sources, which send to the new ones.
                self.assertEqual(report["pinned_segments"], 40 - 8 - dp, staging)
                self.execute("--synthesize", "--check", plan=str(step))

    def test_choices_change_without_keep(self):
        self.compile(self.JOB % (4, 1, 9), plan="1")
        self.compile(self.JOB % (4, 2, 11), plan="2")
        self.compile(self.JOB % (4, 2, 11), "--keep=1", plan="3")
        self.assertNotEqual((self.folder / "2").read_bytes(), (self.folder / "3").read_bytes())

    def test_files_that_are_not_plans_are_refused(self):
        self.write("old", "not a plan")
        self.compile(self.JOB % (4, 1, 9), "--keep=old", code=2)
        self.assertFalse((self.folder / "plan").exists())


class FoldCopies(Options):
    """Copies of a job are planned as one, and every rank of every copy receives its bytes."""

    JOB = """
version: 1
model:
  dtype: bf16
  tensors: {a: [64, 8], b: [30], c: [48, 8]}
  layouts:
    fsdp:
      params:
        a: {holds: a, shard: {0: {axis: fsdp, scheme: chunk}}}
        b: {holds: b, shard: {0: {axis: fsdp, scheme: chunk}}}
        c: {holds: c, shard: {0: {axis: fsdp, scheme: chunk}}}
    tp: {params: {a: {holds: a, shard: {0: tp}}, b: {holds: b}, c: {holds: c, shard: {1: tp}}}}
source: %s
target: {layout: tp, mesh: {tp: 2, dp: %d}, ranks: %d..%d}
"""
    REPLICATED = JOB % (
        "{layout: tp, mesh: {tp: 4, dp: 6}}",
        4,
        24,
        31,
    )  # two copies of the source, each with three replicas
    SHARDED = JOB % ("{layout: fsdp, mesh: {fsdp: 6}}", 5, 6, 15)

    def test_every_copy_is_right(self):
        for job, copies in ((self.REPLICATED, {"source": 2, "target": 2}), (self.SHARDED, {"source": 1, "target": 5})):
            for options in ((), ("--set=options.staging=8KiB",)):
                with self.subTest(copies=copies, options=options):
                    report = self.compile(job, "--fold-copies=always", *options)
                    self.assertEqual(report["copies"], copies)
                    self.execute("--synthesize", "--check")
                    self.compile(job, "--fold-copies=always", "--verify-each", "--jobs=3", *options, plan="each")
                    self.assertEqual((self.folder / "plan").read_bytes(), (self.folder / "each").read_bytes())
                    other = self.compile(job, "--fold-copies=never", *options, plan="never")
                    self.assertEqual(other["copies"], {"source": 1, "target": 1})
                    for key in ("transfers", "bytes", "lower_bounds"):
                        self.assertEqual(report[key], other[key])
                    for key in ("egress_bound", "ingress_max"):
                        self.assertEqual(report["balance"][key], other["balance"][key])

    def test_the_text_of_the_ir_says_it(self):
        self.compile(self.SHARDED, "--fold-copies=always", "--omit-job")
        self.compile(self.SHARDED, "--fold-copies=always", "--emit=ir", plan="ir.rir")
        text = (self.folder / "ir.rir").read_text()
        self.assertIn("\nfold-copies\n", text)
        self.call("reshard-compile ir.rir -o again")
        self.assertEqual((self.folder / "plan").read_bytes(), (self.folder / "again").read_bytes())
        self.write("bad.rir", text.replace("ranks-per-node 0", "ranks-per-node 2"))
        self.fails("folds copies, but it has only one", "reshard-compile bad.rir -o bad")

    def test_large_jobs_fold_by_default(self):
        for ranks, copies in ((1022, 1), (1024, 504)):
            with self.subTest(ranks=ranks):
                report = self.compile(self.JOB % ("{layout: fsdp, mesh: {fsdp: 16}}", (ranks - 16) // 2, 16, ranks - 1))
                self.assertEqual(report["copies"]["target"], copies)

    def test_keep_needs_a_plan_that_does_not_fold(self):
        self.compile(self.SHARDED, "--fold-copies=always", plan="old")
        self.compile(self.JOB % ("{layout: fsdp, mesh: {fsdp: 6}}", 6, 6, 17), "--keep=old", code=2)
        self.assertIn("expected a plan compiled with --fold-copies=never", self.stderr)
        self.assertFalse((self.folder / "plan").exists())
        self.compile(self.SHARDED, "--fold-copies=never", plan="old")
        self.compile(self.JOB % ("{layout: fsdp, mesh: {fsdp: 6}}", 6, 6, 17), "--keep=old", "--fold-copies=always")
        self.execute("--synthesize", "--check")


class Allow(Options):
    def test_missing_params_are_omitted_and_listed(self):
        job = """
version: 1
model:
  dtype: bf16
  tensors: {a: [8], b: [8]}
  layouts: {train: {params: {a: {holds: a}}}, serve: {params: {x: {holds: a}, y: {concat: [a, b]}}}}
source: {layout: train, mesh: {}}
target: {layout: serve, mesh: {}}
"""
        self.compile(job, code=2)
        self.assertIn("which no param of the source holds", self.stderr)
        report = self.compile(job, "--allow=missing")
        self.assertEqual(report["omitted"], {"target": ["y"]})
        self.assertIn(
            "warning: target param 'y' holds tensor 'b', which no param of the source holds; the param is omitted",
            self.stderr,
        )
        self.execute("--synthesize", "--check")

    GAP = """
version: 1
model:
  dtype: bf16
  tensors: {a: [8]}
  layouts:
    train: {params: {a: {holds: a, shard: {0: {axis: tp, map: [[0, 1], [4, 5]]}}}}}
    serve: {params: {a: {holds: a, shard: {0: {axis: tp, map: [[%s]]}}}}}
source: {layout: train, mesh: {tp: 2}}
target: {layout: serve, mesh: {tp: 1}}
"""

    def test_gaps_that_no_target_needs(self):
        self.compile(self.GAP % "0, 5", code=2)
        self.assertIn("part of tensor 'a' is on no source rank", self.stderr)
        self.compile(self.GAP % "0, 5", "--allow=gap")
        self.execute("--synthesize", "--check")
        self.compile(self.GAP % "0, 3", "--allow=gap", code=2)
        self.assertIn("needs 2 elements", self.stderr)

    def test_unknown_axes_have_size_1(self):
        job = (
            "version: 1\nmodel: {dtype: bf16, tensors: {a: {shape: [8], shard: {0: tq}}}}\nsource: {mesh: {tp: 2}}\n"
            "target: {mesh: {}}\n"
        )
        self.compile(job, code=2)
        self.compile(job, "--allow=axis")
        self.assertIn("warning: unknown axis 'tq'", self.stderr)

    def test_unknown_names_are_refused(self):
        self.compile(self.GAP % "0", "--allow=gap,everything", code=2)
        self.assertIn("expected axis, gap or missing", self.stderr)


class Chosen(Options):
    def test_only_and_ignore_are_listed(self):
        job = """
version: 1
model: {dtype: bf16, index: {layer: 2}, tensors: {"l.{layer}.a": [8], "l.{layer}.b": [8], c: [8]}}
source: {mesh: {}, ignore: c}
target: {mesh: {}, only: ["l.*"], ignore: "*.b"}
"""
        report = self.compile(job)
        self.assertEqual(report["omitted"], {"source": ["c"], "target": ["l.{layer}.b", "c"]})
        self.assertEqual(report["bytes"]["target"], 32)


class Replicas(Options):
    JOB = """
version: 1
model: {dtype: bf16, tensors: {a: {shape: [8], shard: {0: tp}}, b: [4]}}
source: {mesh: {tp: 2, dp: 2}%s}
target: {mesh: {tp: 4}}
"""

    def change(self, rank, tensor):
        path = self.folder / "source" / f"rank-{rank:05d}.safetensors"
        raw = bytearray(path.read_bytes())
        size = int.from_bytes(raw[:8], "little")
        begin = json.loads(raw[8 : 8 + size])[tensor]["data_offsets"][0]
        raw[8 + size + begin + 2] ^= 1  # element 1
        path.write_bytes(raw)

    def test_different_replicas_are_named(self):
        self.compile(self.JOB % "")
        source, target = "--source=source", "--target=target"
        self.execute("--synthesize", source)
        compared = "of the source were not compared: --check-replicas compares them"
        self.assertNotIn(compared, self.execute(source, "--target=good", "--check-replicas", "--check").stdout)
        self.assertIn(compared, self.execute(source, "--target=other", "--check").stdout)
        self.change(3, "a")
        self.change(1, "b")
        done = self.execute(source, target, "--check-replicas", code=1)
        self.assertIn(
            "rank 3 param 'a' differs from rank 1 param 'a': tensor 'a', the first different element is 5", done.stderr
        )
        self.assertIn(
            "rank 1 param 'b' differs from rank 0 param 'b': tensor 'b', the first different element is 1", done.stderr
        )
        self.assertNotIn("rank 2", done.stderr)
        self.assertFalse((self.folder / "target").exists())

    def test_authority_selects_replicas(self):
        self.compile(self.JOB % "")
        source = "--source=source"
        self.execute("--synthesize", source)
        self.execute(source, "--target=good")
        self.change(2, "a")
        self.change(3, "b")
        self.compile(self.JOB % ", authority: {dp: 0}")
        self.execute(source, "--target=ruled")
        for path in (self.folder / "good").iterdir():
            self.assertEqual(path.read_bytes(), (self.folder / "ruled" / path.name).read_bytes())


class MixedForms(Options):
    """A tensor that the source holds in two storage forms."""

    JOB = """
version: 1
model:
  dtype: bf16
  index: {layer: 2}
  tensors: {"a.{layer}": [64, 64]}
  layouts:
    mixed:
      params:
        "x.{layer}": {holds: "a.{layer}", at: {dp: 0}, %s}
        "y.{layer}": {holds: "a.{layer}", at: {dp: 1}, %s}
    plain: {params: same}
source: {layout: mixed, mesh: {dp: 2}%s}
target: {layout: plain, mesh: {dp: 2}}
"""
    WARNING = (
        "%s: warning: source param 'y.{layer}' holds tensor 'a.{layer}' %s, and 'x.{layer}' holds it %s: "
        "their values differ in general, and "
        "a target rank may read either; 'ignore' of the source omits one of them\n"
    )

    def test_two_forms_are_a_warning(self):
        for one, other, first, second in (
            ("quantize: mxfp8", "quantize: none", "quantized as mxfp8", "unquantized"),
            ("quantize: none", "quantize: mxfp8", "unquantized", "quantized as mxfp8"),
            ("quantize: mxfp8", "quantize: block_fp8", "quantized as mxfp8", "quantized as block_fp8"),
        ):
            with self.subTest(one=one, other=other):
                self.compile(self.JOB % (one, other, ""))
                self.assertIn(self.WARNING % ("job.yaml:11:9", second, first), self.stderr)
                self.assertIn("job.yaml:10:9: note: the other one is here\n", self.stderr)
                self.assertEqual(self.stderr.count("warning"), 1)
                done = self.execute("--synthesize", "--check-replicas")
                self.assertIn("not compared with each other", done.stdout)
                self.assertNotIn("all equal", done.stdout)

    def test_one_form_or_different_elements_do_not_warn(self):
        where = "where: {layer: %d}, quantize: %s"
        for one, other, more in (
            ("quantize: mxfp8", "quantize: mxfp8", ""),
            ("quantize: mxfp8", "quantize: none", ", authority: {dp: 0}"),
            ("quantize: mxfp8", "quantize: none", ", ignore: 'y.*'"),
            (where % (0, "mxfp8"), where % (1, "none"), ""),
        ):
            with self.subTest(one=one, other=other, more=more):
                self.compile(self.JOB % (one, other, more))
                self.assertNotIn("differ in general", self.stderr)

    def test_a_source_without_replicas_is_not_reported_equal(self):
        self.compile("version: 1\nmodel: {dtype: bf16, tensors: {a: [8]}}\nsource: {mesh: {}}\ntarget: {mesh: {}}\n")
        done = self.execute("--synthesize", "--check-replicas")
        self.assertIn("the source has no replicas", done.stdout)
        self.assertNotIn("all equal", done.stdout)


class Difference(Options):
    def test_ranks_are_counted_in_the_larger_world(self):
        job = (
            "version: 1\nmodel: {dtype: bf16, tensors: {a: {shape: [64], shard: {0: tp}}}}\nsource: {mesh: {tp: 2}}\n"
            "target: {mesh: {tp: %d}}\n"
        )
        self.compile(job % 8, plan="wide")
        self.compile(job % 4, plan="narrow")
        for plans in (("wide", "narrow"), ("narrow", "wide")):
            self.prints("the segments of 8 of 8 ranks differ\n", "reshard-diff", *plans, code=1)


class Patterns(Options):
    def test_a_kind_missing_in_the_config_is_a_warning(self):
        self.write("config.json", '{"kinds": "MM*", "list": ["full", "full", "full"]}')
        job = (
            "version: 1\nmodel: {config: config.json, dtype: bf16, index: {layer: 3}, tensors: {b: [8], 'a.{layer}': "
            "{shape: [8], where: {layer: {pattern: %s, is: %s}}}}}\n"
            "source: {mesh: {}}\ntarget: {mesh: {}}\n"
        )
        for pattern, kind in (("$kinds", "X"), ("$list", "ful")):
            self.compile(job % (pattern, kind))
            self.assertIn(f"warning: kind '{kind}' does not occur in the pattern", self.stderr)
        self.compile(job % ("$kinds", "M"))
        self.assertEqual(self.stderr, "")


class ScaleNames(Options):
    def test_every_name_in_braces_is_the_param_name(self):
        self.compile(
            "version: 1\nmodel: {dtype: bf16, tensors: {a: [64, 64]}}\nsource: {mesh: {}}\n"
            "target: {mesh: {}, quantize: {format: mxfp8, scale: '{name}/{name}_sf'}}\n"
        )
        self.prints("a/a_sf", "reshard-inspect plan --param=*")


class Inspection(Options):
    NVFP4 = (
        "version: 1\nmodel: {dtype: bf16, tensors: {a: {shape: [64, 96], shard: {0: tp}}, 'b[0]': {shape: [8]}, b0: "
        "{shape: [8]}}}\nsource: {mesh: {tp: 2}}\n"
        "target: {mesh: {tp: 1}, ranks: 2..2, quantize: nvfp4}\n"
    )

    def inspect(self, *options, code=0):
        return self.call("reshard-inspect plan", *options, code=code)

    def test_one_report_at_a_time(self):
        self.compile(self.NVFP4)
        self.write("t.yaml", "ranks_per_node: 3\n")
        self.assertIn("right", self.inspect("--verify").stdout)
        for options in (
            ("--verify", "--rank=0"),
            ("--verify", "--simulate=t.yaml"),
            ("--verify", "--param=*"),
            ("--rank=0", "--param=*"),
        ):
            done = self.inspect(*options, code=2)
            self.assertEqual(
                (done.stdout, done.stderr),
                (
                    "",
                    "reshard-inspect: error: found 2 of --rank, --param, --explain, --simulate and --verify, "
                    "expected at most one\n",
                ),
            )

    def test_every_kind_of_step_has_its_name(self):
        self.compile(self.NVFP4)
        kinds = {
            step["kind"]
            for rank in range(3)
            for step in json.loads(self.inspect(f"--rank={rank}", "--format=json").stdout)["steps"]
        }
        self.assertEqual(kinds, {"send", "recv", "reduce"})
        text = self.inspect("--rank=2").stdout
        self.assertIn("rank 2: 7 buffers, arena", text)
        self.assertIn(" reduce 8 B\n", text)
        self.assertIn("1 mesh rank, ", self.inspect().stdout)

    def test_bytes_by_rank_add_up_for_each_param(self):
        for quantize in (
            "nvfp4",
            "mxfp8",
            "{format: mxfp8, scale_layout: swizzled}",
            "block_fp8",
            "{format: block_fp8, by: receiver}",
        ):
            self.compile(self.NVFP4.replace("nvfp4", quantize))
            params = json.loads(self.inspect("--param=a*", "--format=json").stdout)
            self.assertGreaterEqual(len(params), 2)
            for param in params:
                self.assertEqual(sum(param["from"].values()), param["bytes"], param)
                self.assertEqual(set(param["from"].values()), {param["bytes"] // 2}, param)

    def test_globs_are_those_of_yaml(self):
        job = (
            "version: 1\nmodel: {dtype: bf16, tensors: {a.up: [8], 'b[0]': [8], b0: [8], 'c\\d': [8]}}\n"
            "source: {mesh: {}}\ntarget: {mesh: {}%s}\n"
        )
        every = ["a.up", "b0", "b[0]", "c\\d"]
        for glob, expected in (
            ("*", every),
            ("b[0]", ["b[0]"]),
            ("b?", ["b0"]),
            ("b*", ["b0", "b[0]"]),
            ("?.*", ["a.up"]),
            ("*0*", ["b0", "b[0]"]),
            ("c\\d", ["c\\d"]),
            ("a.up", ["a.up"]),
            ("B0", []),
            ("b[[]0]", []),
            ("b[0-9]", []),
            ("\\*", []),
            ("{a,b}*", []),
        ):
            with self.subTest(glob=glob):
                self.compile(job % "")
                found = self.inspect(f"--param={glob}", "--format=json", code=0 if expected else 1).stdout
                self.assertEqual(sorted(one["name"] for one in json.loads(found)) if expected else [], expected)
                report = self.compile(job % f", only: '{glob}'", code=0 if expected else 2)
                if expected:
                    self.assertEqual(sorted(set(every) - set(report["omitted"].get("target", []))), expected)


class Refresh(Options):
    def test_hooks_are_reported(self):
        self.compile(
            "version: 1\nmodel: {dtype: bf16, tensors: {a: [8]}, layouts: {t: {params: same}, "
            "s: {params: {a: {holds: a, refresh: absorb}}}}}\nsource: {layout: t, mesh: {}}\n"
            "target: {layout: s, mesh: {}}\n"
        )
        self.execute("--synthesize", "--check", "--report=run.json")
        self.assertEqual(self.json("run.json")["refresh"], ["absorb"])

    def test_transforms_need_a_caller(self):
        self.compile(
            "version: 1\nmodel: {dtype: bf16, tensors: {a: [8]}, layouts: {t: {params: same}, "
            "s: {params: {a: {holds: a, transform: pack}}}}}\nsource: {layout: t, mesh: {}}\n"
            "target: {layout: s, mesh: {}}\n"
        )
        self.execute("--synthesize", "--check", "--report=run.json")
        self.assertEqual(self.json("run.json")["transform"], ["pack"])
        for options in ((f"--source={self.folder}", "--target=new"), ("--synthesize", "--source=new")):
            done = self.call("reshard-exec plan", *options, code=None)
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertEqual(
                done.stderr,
                "reshard-exec: error: the plan uses the transform 'pack', a function "
                "of the caller: expected --synthesize without --source, and --device=cpu\n",
            )
        self.assertFalse((self.folder / "new").exists())

    def test_a_terminated_run_leaves_no_output(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                run(
                    "reshard-compile",
                    ROOT / "examples/quickstart.yaml",
                    "--set",
                    "model.index.layer=1",
                    "-o",
                    folder / "plan",
                )
                run("reshard-exec", folder / "plan", "--synthesize", f"--source={folder / 'source'}")
                process = subprocess.Popen(
                    [
                        BIN / "reshard-exec",
                        folder / "plan",
                        f"--source={folder / 'source'}",
                        f"--target={folder / 'target'}",
                        "--repeat=1000000",
                    ],
                    stdout=subprocess.DEVNULL,
                )
                begun = f"target.partial-{process.pid}-*"
                while process.poll() is None and not list(folder.glob(begun)):
                    time.sleep(0.005)
                process.send_signal(number)
                self.assertEqual(process.wait(20), -number)
                self.assertEqual(sorted(path.name for path in folder.iterdir()), ["plan", "source"])


if __name__ == "__main__":
    unittest.main()
