# SPDX-License-Identifier: Apache-2.0
"""--memory: the peak of a conversion and its check stays below the limit for every pair of formats, in whole
rows, transposed, cast and quantized, for files of ranks, and of each of several processes. RESHARD_BIN: the
folder of the commands."""

import itertools
import json
import os
import shutil
import sys
import unittest

from commands import BIN, FolderTest, run
from mpi_test import MPIRUN

FORMATS = ("safetensors", "dcp-safetensors", "dcp", "megatron", "torch-save")
LIMIT = 64 << 20
BYTES = 176 << 20
#: As many bytes. The largest tensor alone is larger than the limit.
MODEL = {
    "dtype": "fp32",
    "index": {"layer": 6},
    "tensors": {"layers.{layer}.w": [2048, 2048], "embed": [10240, 2048]},
    "layouts": {
        "same": {"params": "same"},
        "ranks": {"params": "same", "shard": {"*": {0: "tp"}}},
        "transposed": {
            "params": {
                "layers.{layer}.w": {"concat": [{"permute": [1, 0], "of": "layers.{layer}.w"}]},
                "embed": {"holds": "embed"},
            }
        },
        "stacked": {
            "params": {"layers.w": {"stack": "layer", "holds": "layers.{layer}.w"}, "embed": {"holds": "embed"}}
        },
        "cast": {
            "params": {
                name: {"holds": name, "dtype": "bf16", "convert": "inf"} for name in ("layers.{layer}.w", "embed")
            }
        },
    },
}


class Limit(FolderTest):
    def compile(self, source, target, layout="same", job=None, **more):
        """A job from a folder to another one; a folder's name is that of its format, and a suffix. job: further keys of
        it. more: of the target."""
        more = {"layout": layout, "storage": {"folder": target, "format": target.split(".")[0]}} | more
        path, plan = self.folder / "job.yaml", self.folder / "p.rplan"
        path.write_text(
            json.dumps(
                {
                    "version": 1,
                    "model": MODEL,
                    "source": {"layout": "same", "storage": {"folder": source, "format": source.split(".")[0]}},
                    "target": more,
                }
                | (job or {})
            )
        )
        run("reshard-compile", path, "-o", plan)
        return plan

    def check(self, report):
        if not os.environ.get("RESHARD_SMALL"):  # sanitizers need several times as much
            self.assertLess(json.loads(report.read_text())["peak_rss_bytes"], LIMIT)

    def convert(self, source, target, layout="same"):
        plan, report = self.compile(source, target, layout), self.folder / "report.json"
        done = run(
            "reshard-exec", plan, f"--memory={LIMIT}", "--check", f"--report={report}", "--allow=extra"
        )  # common.pt
        self.assertIn(f"all {BYTES // (2 if layout == 'cast' else 1)} bytes right", done.stdout)
        self.check(report)
        self.assertGreater(
            sum(path.stat().st_size for path in (self.folder / target).iterdir()),
            (1 if layout == "cast" else 2) * LIMIT,
        )

    def setUp(self):
        super().setUp()
        (self.folder / "job.yaml").write_text(
            json.dumps(
                {
                    "version": 1,
                    "model": MODEL,
                    **{side: {"layout": "same", "storage": side} for side in ("source", "target")},
                }
            )
        )
        run("reshard-compile", self.folder / "job.yaml", "-o", self.folder / "p.rplan")
        run("reshard-exec", self.folder / "p.rplan", "--synthesize", f"--source={self.folder / 'safetensors'}")

    def test_every_pair_of_formats(self):
        for format in FORMATS[1:]:
            self.convert("safetensors", format)
        for source, target in itertools.product(FORMATS, FORMATS):
            with self.subTest(source=source, target=target):
                self.convert(source, f"{target}.out")
                shutil.rmtree(self.folder / f"{target}.out")

    def test_transposed_and_cast(self):
        for format, layout in itertools.product(("safetensors", "dcp"), ("transposed", "cast")):
            with self.subTest(format=format, layout=layout):
                self.convert("safetensors", f"{format}.{layout}", layout)
                shutil.rmtree(self.folder / f"{format}.{layout}")

    def test_quantized(self):
        """The elements that wait for whole rows of blocks are part of the limit."""
        report = self.folder / "report.json"
        plan = self.compile("safetensors", "safetensors.fp8", quantize="block_fp8")
        error = run("reshard-exec", plan, f"--memory={LIMIT}", code=2).stderr
        self.assertIn(
            f"--memory: the arenas of this process need {BYTES} bytes, expected at most half of the limit of {LIMIT} "
            "bytes; compile the job with a smaller options.staging",
            error,
        )
        self.assertFalse((self.folder / "safetensors.fp8").exists())
        plan = self.compile(
            "safetensors", "safetensors.fp8", quantize="block_fp8", job={"options": {"staging": LIMIT // 4}}
        )
        codes, scales = BYTES // 4, 4 * (6 * 16 * 16 + 80 * 16)
        for threads in (2, 8):
            shutil.rmtree(self.folder / "safetensors.fp8", ignore_errors=True)
            done = run(
                "reshard-exec", plan, f"--memory={LIMIT}", "--check", f"--threads={threads}", f"--report={report}"
            )
            self.assertIn(f"all {codes + scales} bytes right", done.stdout)
            self.check(report)

    def test_dequantized(self):
        """The dequantized values of a param that stacks all layers are more than the limit."""
        fp8, report = (
            {"layout": "stacked", "quantize": {"format": "block_fp8", "only": "layers.w"}},
            self.folder / "report.json",
        )
        run("reshard-exec", self.compile("safetensors", "safetensors.fp8", **fp8), "--check")
        plan = self.compile("safetensors.fp8", "safetensors.wide", job={"source": fp8 | {"storage": "safetensors.fp8"}})
        for threads in (2, 8):
            shutil.rmtree(self.folder / "safetensors.wide", ignore_errors=True)
            done = run(
                "reshard-exec", plan, f"--memory={LIMIT}", "--check", f"--threads={threads}", f"--report={report}"
            )
            self.assertIn(f"all {BYTES} bytes right", done.stdout)
            self.check(report)

    def test_files_of_ranks(self):
        report = self.folder / "report.json"
        plan = self.compile("safetensors", "safetensors.ranks", "ranks", mesh={"tp": 2})
        self.assertIn(
            f"all {BYTES} bytes right",
            run("reshard-exec", plan, f"--memory={LIMIT}", "--check", f"--report={report}").stdout,
        )
        self.check(report)
        self.assertEqual(len(list((self.folder / "safetensors.ranks").iterdir())), 2)

    def test_several_processes(self):
        """Of each process. Its peak is that of the child of a small Python process."""
        plan = self.compile("safetensors", "dcp", job={"world": 2})
        program = (
            "import os, resource, subprocess, sys; code = subprocess.call(sys.argv[2:]); "
            "peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss; "
            "open(sys.argv[1] + str(peak) + '-' + str(os.getpid()), 'w').close(); sys.exit(code)"
        )
        run(
            "timeout",
            "-k10",
            100,
            "mpirun",
            "-n",
            2,
            sys.executable,
            "-S",
            "-c",
            program,
            self.folder / "peak-",
            BIN / "reshard-exec",
            plan,
            "--transport=mpi",
            f"--memory={LIMIT}",
            "--check",
            env=os.environ | MPIRUN,
        )
        peaks = [int(path.name.split("-")[1]) << 10 for path in self.folder.glob("peak-*")]
        self.assertEqual(len(peaks), 2)
        if not os.environ.get("RESHARD_SMALL"):
            self.assertLess(max(peaks), LIMIT)
        run("reshard-digest", self.folder / "safetensors", self.folder / "dcp")


if __name__ == "__main__":
    unittest.main()
