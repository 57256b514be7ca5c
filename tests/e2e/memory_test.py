# SPDX-License-Identifier: Apache-2.0
"""--memory: the peak of a conversion and its check stays below the limit for every pair of formats, in whole rows, transposed and cast.
RESHARD_BIN: the folder of the commands."""

import itertools
import json
import os
import shutil
import sys
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "lib")]
from commands import FolderTest, run  # noqa: E402

FORMATS = ("safetensors", "dcp-safetensors", "dcp", "megatron", "torch-save")
LIMIT = 64 << 20
BYTES = 176 << 20
#: As many bytes. The largest tensor alone is larger than the limit.
MODEL = {"dtype": "fp32", "index": {"layer": 6}, "tensors": {"layers.{layer}.w": [2048, 2048], "embed": [10240, 2048]},
         "layouts": {"same": {"params": "same"},
                     "transposed": {"params": {"layers.{layer}.w": {"concat": [{"permute": [1, 0], "of": "layers.{layer}.w"}]}, "embed": {"holds": "embed"}}},
                     "cast": {"params": {name: {"holds": name, "dtype": "bf16", "convert": "rne"} for name in ("layers.{layer}.w", "embed")}}}}


class Limit(FolderTest):
    def convert(self, source, target, layout="same"):
        """From a folder to another one; a folder's name is that of its format, and a suffix."""
        job, plan, report = (self.folder / name for name in ("job.yaml", "p.rplan", "report.json"))
        job.write_text(json.dumps({"version": 1, "model": MODEL, "source": {"layout": "same", "storage": {"folder": source, "format": source.split(".")[0]}},
                                   "target": {"layout": layout, "storage": {"folder": target, "format": target.split(".")[0]}}}))
        run("reshard-compile", job, "-o", plan)
        done = run("reshard-exec", plan, f"--memory={LIMIT}", "--check", f"--report={report}", "--allow=extra")  # common.pt
        self.assertIn(f"all {BYTES // (2 if layout == 'cast' else 1)} bytes right", done.stdout)
        if not os.environ.get("RESHARD_SMALL"):  # sanitizers need several times as much
            self.assertLess(json.loads(report.read_text())["peak_rss_bytes"], LIMIT)
        self.assertGreater(sum(path.stat().st_size for path in (self.folder / target).iterdir()), (1 if layout == "cast" else 2) * LIMIT)

    def setUp(self):
        super().setUp()
        (self.folder / "job.yaml").write_text(json.dumps({"version": 1, "model": MODEL, **{side: {"layout": "same", "storage": side} for side in ("source", "target")}}))
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


if __name__ == "__main__":
    unittest.main()
