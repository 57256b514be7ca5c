# SPDX-License-Identifier: Apache-2.0
"""reshard-inspect --explain: the sources of a param, and the reason for each."""

import unittest

from commands import ROOT, FolderTest

JOB = """version: 1
model:
  dtype: fp32
  tensors: {"w": [8, 4], one: [4], own: [4]}
  layouts:
    train:
      axes: [tp, dp, pp]
      params: {w: {holds: w, shard: {0: tp}}, one: {holds: one, at: {dp: 1, tp: 0}}, own: {holds: own}}
    serve: {axes: [x], params: {all: {concat: [w], pad: {0: 9}}, one: {holds: one}, own: {holds: own}}}
source: {layout: train, mesh: {tp: 2, dp: 2}}
target: {layout: serve, mesh: {x: 2}, ranks: [3, 4]}
"""


class Explain(FolderTest):
    def setUp(self):
        super().setUp()
        self.write("job.yaml", JOB)
        self.call("reshard-compile job.yaml -o p")

    def explain(self, wanted, code=0):
        done = self.call(f"reshard-inspect p --explain={wanted}", code=code)
        return done.stderr if code else done.stdout

    def test_sources_and_reasons(self):
        lines = self.explain("all@4").splitlines()
        self.assertEqual(lines[0], "target rank 4: all fp32 [9, 4], 144 B")
        self.assertEqual(lines[-1], "  16 B zero padding")
        sources = [
            (int(line.split()[0]), int(line.split(":")[0].split()[-1]), reason)
            for line, reason in zip(lines[1:-1:2], lines[2:-1:2])
        ]
        self.assertEqual(sum(size for size, *_ in sources), 128)
        for _, rank, reason in sources:
            self.assertIn(f"    ranks {rank % 2}, {rank % 2 + 2} have the same; ", reason)
        self.assertLessEqual(len(lines), 10)
        self.assertIn("    no other rank has the same part of this param", self.explain("one@4"))
        self.assertIn("    the rank has them itself: a copy", self.explain("own@3"))
        self.assertIn("target rank 3: own", self.explain("own"))  # the first rank that has it

    def test_quantized_targets(self):
        (self.folder / "job.yaml").write_text("""version: 1
model: {dtype: bf16, tensors: {w: {shape: [64, 64], shard: {0: tp}}, none: {shape: [0, 64]}}}
source: {mesh: {tp: 2}}
target: {mesh: {tp: 1}, ranks: [2], quantize: {format: mxfp8, by: receiver}}
""")
        self.call("reshard-compile job.yaml -o p")
        text = self.explain("w")
        self.assertIn("from rank 0: w", text)
        self.assertIn("from rank 1: w", text)
        self.assertIn("it has no elements", self.explain("none"))

    def test_files(self):
        self.write(
            "job.yaml",
            JOB.replace(
                "target: {layout: serve, mesh: {x: 2}, ranks: [3, 4]}", "target: {layout: serve, storage: out}"
            ).replace("source: {layout: train, mesh: {tp: 2, dp: 2}}", "source: {layout: serve, storage: in}"),
        )
        self.call("reshard-compile job.yaml -o p")
        self.assertIn("from files, read by rank 0: one", self.explain("one"))

    def test_refusals(self):
        self.assertIn("no rank has a target param 'nothing'; --param=GLOB lists names", self.explain("nothing", 1))
        self.assertIn("rank 0 has no target param 'one'", self.explain("one@0", 1))
        self.assertIn("found rank '9', expected 0 to 4", self.explain("one@9", 2))
        self.fails("--explain is text", "reshard-inspect p --explain=one --format=json")

    def test_a_library_model(self):
        """At most ten lines, whatever the plan."""
        self.call("reshard-compile", ROOT / "examples/qwen3-0.6b-8-to-4.yaml", "-o", "p")
        lines = self.explain("model.embed_tokens.weight@11").splitlines()
        self.assertIn("ranks 5, 7 have the same; each of them sends 142.2 MiB in all", lines[2])
        self.assertLessEqual(len(lines), 10)


if __name__ == "__main__":
    unittest.main()
