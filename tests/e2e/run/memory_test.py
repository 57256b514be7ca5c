# SPDX-License-Identifier: Apache-2.0
"""--memory: the peak of a conversion and its check stays below the limit for every pair of formats, in whole
rows, transposed, cast and quantized, for files of ranks, and of each of several processes. RESHARD_BIN: the
folder of the commands."""

import itertools
import os
import shutil
import sys
import unittest

from commands import FolderTest, mpirun, words_of

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
        stored = lambda folder: {"folder": folder, "format": folder.split(".")[0]}
        source = {"layout": "same", "storage": stored(source)}
        keys = {"model": MODEL, "source": source, "target": {"layout": layout, "storage": stored(target)} | more}
        self.job(**keys | (job or {}))
        self.call("reshard-compile job.yaml -o p.rplan")

    def limited(self, wanted, *options):
        """Runs the plan within the limit: so many bytes are right."""
        command = f"reshard-exec p.rplan --memory={LIMIT} --check --report=report.json"
        self.prints(f"all {wanted} bytes right", command, *options)
        if not os.environ.get("RESHARD_SMALL"):  # sanitizers need several times as much
            self.assertLess(self.json("report.json")["peak_rss_bytes"], LIMIT)

    def convert(self, source, target, layout="same"):
        self.compile(source, target, layout)
        self.limited(BYTES // (2 if layout == "cast" else 1), "--allow=extra")  # common.pt
        self.assertGreater(
            sum(path.stat().st_size for path in (self.folder / target).iterdir()),
            (1 if layout == "cast" else 2) * LIMIT,
        )

    def setUp(self):
        super().setUp()
        self.job(MODEL, *({"layout": "same", "storage": side} for side in ("source", "target")))
        self.call("reshard-compile job.yaml -o p.rplan")
        self.call("reshard-exec p.rplan --synthesize --source=safetensors")

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
        self.compile("safetensors", "safetensors.fp8", quantize="block_fp8")
        self.fails(
            f"--memory: the arenas of this process need {BYTES} bytes, expected at most half of the limit of {LIMIT} "
            "bytes; compile the job with a smaller options.staging",
            f"reshard-exec p.rplan --memory={LIMIT}",
        )
        self.assertFalse((self.folder / "safetensors.fp8").exists())
        job = {"options": {"staging": LIMIT // 4}}
        self.compile("safetensors", "safetensors.fp8", quantize="block_fp8", job=job)
        codes, scales = BYTES // 4, 4 * (6 * 16 * 16 + 80 * 16)
        for threads in (2, 8):
            shutil.rmtree(self.folder / "safetensors.fp8", ignore_errors=True)
            self.limited(codes + scales, f"--threads={threads}")

    def test_dequantized(self):
        """The dequantized values of a param that stacks all layers are more than the limit."""
        fp8 = {"layout": "stacked", "quantize": {"format": "block_fp8", "only": "layers.w"}}
        self.compile("safetensors", "safetensors.fp8", **fp8)
        self.call("reshard-exec p.rplan --check")
        self.compile("safetensors.fp8", "safetensors.wide", job={"source": fp8 | {"storage": "safetensors.fp8"}})
        for threads in (2, 8):
            shutil.rmtree(self.folder / "safetensors.wide", ignore_errors=True)
            self.limited(BYTES, f"--threads={threads}")

    def test_files_of_ranks(self):
        self.compile("safetensors", "safetensors.ranks", "ranks", mesh={"tp": 2})
        self.limited(BYTES)
        self.assertEqual(len(list((self.folder / "safetensors.ranks").iterdir())), 2)

    def test_several_processes(self):
        """Of each process. Its peak is that of the child of a small Python process."""
        self.compile("safetensors", "dcp", job={"world": 2})
        program = (
            "import os, resource, subprocess, sys; code = subprocess.call(sys.argv[2:]); "
            "peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss; "
            "open(sys.argv[1] + str(peak) + '-' + str(os.getpid()), 'w').close(); sys.exit(code)"
        )
        run = f"reshard-exec p.rplan --transport=mpi --memory={LIMIT} --check"
        mpirun(2, sys.executable, "-S", "-c", program, "peak-", *words_of(run), cwd=self.folder)
        peaks = [int(path.name.split("-")[1]) << 10 for path in self.folder.glob("peak-*")]
        self.assertEqual(len(peaks), 2)
        if not os.environ.get("RESHARD_SMALL"):
            self.assertLess(max(peaks), LIMIT)
        self.call("reshard-digest safetensors dcp")


if __name__ == "__main__":
    unittest.main()
