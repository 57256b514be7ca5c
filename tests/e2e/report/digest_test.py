# SPDX-License-Identifier: Apache-2.0
"""reshard-digest: equal digests of one checkpoint in every format, of both sides of a plan through their layouts, and
of the same elements in Python; the tensor that differs is named."""

import json
import shutil
import unittest

import numpy as np
from safetensors.numpy import load_file, save_file

from commands import FolderTest
from torch_formats import Dcp

MODEL = """dtype: fp32
index: {layer: 2, expert: 4}
tensors:
  "l.{layer}.q": [8, 6]
  "l.{layer}.k": [4, 6]
  "l.{layer}.e.{expert}.up": [6, 5]
  norm: {shape: [7], dtype: bf16}
  scale: []
  mask: {shape: [3, 3], dtype: u8}
layouts:
  hf: {params: same}
  train:
    axes: [tp, ep]
    place: {expert: ep}
    params:
      "qk.{layer}": {interleave: {groups: 2, of: [q, k]}, shard: {0: tp}}
      "up.{layer}.{expert.local}": {holds: up, permute: [1, 0], shard: {1: tp}}
      norm: {holds: norm, pad: {0: 8}, shard: {0: tp}}
      scale: {holds: scale}
      mask: {holds: mask}
  serve:
    axes: [tp]
    params:
      "q.{layer}": {holds: q, shard: {1: {axis: tp, cyclic: 1}}}
      "k.{layer}": {holds: k, shard: {0: {axis: tp, unit: 2, replicate: true}}}
      "up.{layer}": {stack: expert, holds: up, shard: {1: tp}}
      norm: {holds: norm}
      scale: {holds: scale}
      mask: {holds: mask}
"""


def mixed(number):
    """As in kernels/tensor_digest_words.h."""
    mask = (1 << 64) - 1
    number = number + 0x9E3779B97F4A7C15 & mask
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & mask
    number = (number ^ number >> 27) * 0x94D049BB133111EB & mask
    return number ^ number >> 31


def digest(array):
    data = np.ascontiguousarray(array).tobytes()
    sums = [0, 0]
    for word in range(-(-len(data) // 4)):
        value, keys = int.from_bytes(data[4 * word : 4 * word + 4], "little"), mixed(word % 1024)
        for each, key in enumerate((keys & 0xFFFFFFFF, keys >> 32)):
            sums[each] += value * key * (mixed((1 << 64) - 1 - (2 * (word // 1024) + each)) | 1)
    return "".join(f"{each % (1 << 64):016x}" for each in sums)


class Digest(FolderTest):
    def setUp(self):
        super().setUp()
        self.write("model.yaml", MODEL)
        random = np.random.default_rng(3)
        self.values = {
            f"l.{i}.{name}": random.standard_normal(shape).astype(np.float32)
            for i in range(2)
            for name, shape in [("q", (8, 6)), ("k", (4, 6)), *((f"e.{e}.up", (6, 5)) for e in range(4))]
        }
        self.values |= {"scale": np.array(2.5, np.float32), "mask": random.integers(0, 255, (3, 3), np.uint8)}
        import ml_dtypes  # bf16 of safetensors.numpy

        self.values["norm"] = random.standard_normal(7).astype(ml_dtypes.bfloat16)
        self.save_checkpoint("hf", self.values)

    def move(self, source, target):
        """Compiles and runs a job with the model. Returns its plan."""
        plan = self.folder / f"{len(list(self.folder.iterdir()))}.rplan"
        self.write("job.yaml", f"version: 1\nmodel: model.yaml\nsource: {source}\ntarget: {target}\n")
        self.call("reshard-compile job.yaml -o", plan)
        self.call("reshard-exec", plan, "--check")
        return plan

    def digests(self, *arguments):
        return json.loads(self.call("reshard-digest", *arguments, "--format=json").stdout)

    def test_formats(self):
        wanted = self.digests("hf")
        self.assertEqual(sorted(wanted), sorted(self.values))
        for name, array in self.values.items():
            self.assertEqual((wanted[name]["shape"], wanted[name]["digest"]), (list(array.shape), digest(array)), name)
        for format in ("dcp", "dcp-safetensors", "megatron", "torch-save"):
            with self.subTest(format=format):
                self.move(
                    "{layout: hf, storage: hf}", f"{{layout: hf, storage: {{folder: {format}, format: {format}}}}}"
                )
                self.assertEqual(self.digests(format), wanted)
                self.assertEqual(self.call("reshard-digest hf", format).stdout, f"equal: {len(wanted)} tensors\n")

    def test_layouts(self):
        """Of the files of 4 ranks and of 2 ranks, through the layouts."""
        train = "{layout: train, mesh: {tp: 2, ep: 2}, storage: train}"
        plan = self.move("{layout: hf, storage: hf}", train)
        wanted = self.digests("hf")
        self.assertEqual(self.digests(f"--plan={plan}", "--side=target", "train"), wanted)
        served = self.move(train, "{layout: serve, mesh: {tp: 2}, storage: serve}")
        self.assertEqual(self.digests(f"--plan={served}", "--side=source", "train"), wanted)
        self.assertEqual(self.digests(f"--plan={served}", "--side=target", "serve"), wanted)
        self.prints("equal", f"reshard-digest --plan={served} train serve")
        # One value, on the last rank.
        path = self.folder / "serve/rank-00001.safetensors"
        tensors = load_file(path)
        tensors["up.1"][2, 1, 3] += 1
        save_file(tensors, path)
        done = self.call(f"reshard-digest --plan={served} train serve", code=1)
        self.assertEqual([line.split(":")[0] for line in done.stdout.splitlines()], ["l.1.e.2.up"])
        self.assertIn("1 tensor of 'train' and 'serve' differ", done.stderr)

    def test_params_of_some_ranks(self):
        """On the last stage, not on the first rank of their class; parts of tensors have no digest."""
        (self.folder / "stages.yaml").write_text("""version: 1
model:
  dtype: fp32
  tensors: {head: [4, 2], a: [4, 6], b: [3]}
  layouts:
    train:
      axes: [tp, pp]
      params: {head: {holds: head, shard: {0: tp}, at: {pp: last}}, a: {holds: a, at: {pp: first}}, b: {holds: b}}
    serve: {params: {head: {holds: head}, a: {pieces: [{shape: [2, 6], of: [{of: a, size: [2, 6]}]}]}}}
source: {layout: train, mesh: {tp: 2, pp: 2}, storage: staged}
target: {layout: serve, mesh: {tp: 1}, storage: moved}
""")
        self.call("reshard-compile stages.yaml -o p")
        self.call("reshard-exec p --synthesize --source=staged")
        self.call("reshard-exec p --check")
        self.assertEqual(
            sorted(self.digests(f"--plan={self.folder / 'p'}", "--side=source", "staged")), ["a", "b", "head"]
        )
        done = self.call("reshard-digest --plan=p staged moved")
        self.assertEqual(done.stdout, "equal: 1 tensor\n")
        self.assertIn("'moved' has 12 elements of tensor 'a' of 24, so it has no digest", done.stderr)
        path = self.folder / "moved/rank-00000.safetensors"
        save_file(load_file(path) | {"more": np.zeros(2, np.float32)}, path)
        self.assertIn(
            "that the plan does not use, among them 'more'",
            self.call("reshard-digest --plan=p --side=target moved").stderr,
        )

    def test_several_targets(self):
        self.write(
            "job.yaml",
            "version: 1\nmodel: model.yaml\nsource: {layout: hf, storage: hf}\n"
            "target: [{layout: hf, storage: one}, {layout: serve, mesh: {tp: 2}, storage: two}]\n",
        )
        self.call("reshard-compile job.yaml -o p")
        self.call("reshard-exec p --target=both")
        self.assertEqual(
            self.digests(f"--plan={self.folder / 'p'}", "--side=target.1", "both/target.1"), self.digests("hf")
        )
        self.fails("its sides are source, target.0, target.1", "reshard-digest --plan=p hf two")

    def test_differences(self):
        other = {name: array.copy() for name, array in self.values.items()}
        other["l.0.q"][[0, 1]] = other["l.0.q"][[1, 0]]  # two rows exchanged
        other["scale"] = other["scale"].astype(np.float16)
        other["mask"] = other["mask"].reshape(9)
        other["new"] = other.pop("l.1.k")
        self.save_checkpoint("other", other)
        lines = self.call("reshard-digest hf other", code=1).stdout.splitlines()
        self.assertEqual(
            [line.split(" ")[:2] for line in lines],
            [["l.0.q:", "digest"], ["l.1.k:", "only"], ["mask:", "shape"], ["scale:", "dtype"], ["new:", "only"]],
        )

    def test_names_of_a_trainer(self):
        """dcp.save({"model": ..., "optimizer": ...}) puts a prefix before the names; torch.compile puts wrappers into
        them."""
        wanted = {
            "model.layers.0.up": np.ones((2, 3), np.float32),
            "model.layers.1.up": np.zeros(4, np.float32),
            "lm_head.weight": np.arange(5, dtype=np.float32),
        }
        self.save_checkpoint("plain", wanted)
        checkpoint = Dcp(self.folder / "step")
        for name, array in wanted.items():
            checkpoint.chunk(f"model.{name}", array.shape, (0,) * array.ndim, array)
            checkpoint.chunk(f"optimizer.state.{name}.exp_avg", array.shape, (0,) * array.ndim, array)
        checkpoint.write()
        hint = ', --model compares the model of dcp.save({"model": ...}) alone\n'
        for first, second, rule in (("step", "plain", "model.="), ("plain", "step", "=model.")):
            self.fails(
                f"differ, most by name: --rename={rule} renames those of '{first}'{hint}",
                "reshard-digest",
                first,
                second,
                code=1,
            )
            done = self.call("reshard-digest", first, second, "--model")
            self.assertEqual(done.stdout, "equal: 3 tensors\n")
            self.assertIn(
                "note: left out: 3 tensors beside the model: optimizer.state.lm_head.weight.exp_avg, "
                "optimizer.state.model.layers.*.up.exp_avg (2)\n",
                done.stderr,
            )
        self.assertEqual(self.call("reshard-digest step step --model").stdout, "equal: 3 tensors\n")
        self.assertEqual(self.call("reshard-digest plain plain --model").stdout, "equal: 3 tensors\n")
        self.assertEqual(self.digests("step", "--model"), self.digests("plain"))
        lines = self.call("reshard-digest step plain --rename=model.=", code=1).stdout.splitlines()
        self.assertEqual(
            [line.split(":")[0] for line in lines], [f"optimizer.state.{name}.exp_avg" for name in sorted(wanted)]
        )
        self.save_checkpoint(
            "compiled", {f"_orig_mod.{name.replace('.1.', '.1._orig_mod.')}": array for name, array in wanted.items()}
        )
        options = ("--rename=_orig_mod.=", "--rename=*._orig_mod.*=*.*")
        self.assertEqual(self.call("reshard-digest compiled plain", *options).stdout, "equal: 3 tensors\n")
        self.fails(
            "--rename=none=: 'none' begins no name of the tensors of 'plain'", "reshard-digest plain --rename=none="
        )
        changed = wanted | {"lm_head.weight": np.arange(5, dtype=np.float32) + 1}
        self.save_checkpoint("plain", changed)
        done = self.call("reshard-digest step plain --model", code=1)
        self.assertEqual([line.split(":")[0] for line in done.stdout.splitlines()], ["lm_head.weight"])

    def test_refusals(self):
        plan = self.move("{layout: hf, storage: hf}", "{layout: hf, storage: out}")
        for arguments, text in (
            (["nothing"], "nothing"),
            ([f"--plan={plan}", "hf"], "need --side=source or --side=target"),
            (["--side=source", "hf"], "--side needs --plan"),
            ([f"--plan={plan}", "hf", "out", "--model"], "expected neither --rename nor --model"),
            (["hf", "hf", "hf"], "expected 1 to 2"),
            ([f"--plan={self.folder / 'hf'}", "--side=source", "hf"], "hf"),
        ):
            with self.subTest(arguments=arguments):
                self.fails(text, "reshard-digest", *arguments)
        shutil.rmtree(self.folder / "out")
        self.fails("out", f"reshard-digest --plan={plan} hf out")


if __name__ == "__main__":
    unittest.main()
