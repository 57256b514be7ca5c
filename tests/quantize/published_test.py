# SPDX-License-Identifier: Apache-2.0
"""Published quantized checkpoints as sources: gpt-oss (MXFP4), Kimi K2 Thinking (INT4 of compressed-tensors) and
DeepSeek-V3 (FP8), in small. Random codes and scales move to checkpoints in bf16 and to shards of vLLM; every element is
compared with NumPy. RESHARD_BIN: the folder of the commands."""

import unittest
from math import prod

import ml_dtypes
import numpy as np

import formats_reference as formats
import safetensors_io
from commands import ROOT, FolderTest

GPT_OSS = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 8, "experts": 3, "ffn": 96, "vocab": 40}
KIMI = {
    "layers": 3,
    "hidden": 64,
    "heads": 4,
    "experts": 4,
    "moe_ffn": 96,
    "first_dense": 1,
    "ffn": 20,
    "q_lora": 7,
    "kv_lora": 5,
    "nope": 4,
    "rope": 2,
    "v_dim": 3,
    "vocab": 40,
}
DEEPSEEK = KIMI | {"hidden": 160, "moe_ffn": 130, "ffn": 270, "q_lora": 129, "kv_lora": 130}
#: The key of docs/library.md.
FP8 = (
    ', quantize: {format: block_fp8, ignore: ["*embed_tokens.weight", "*.mlp.gate.weight", "*eh_proj.weight", '
    '"*head.weight"]}'
)
TYPES = {
    "bf16": ml_dtypes.bfloat16,
    "fp32": np.float32,
    "i32": np.int32,
    "i64": np.int64,
    "u8": np.uint8,
    "fp8_e4m3": np.uint8,
}


def arrays(path):
    return {
        name: np.frombuffer(data, TYPES[dtype]).reshape(shape)
        for name, (dtype, shape, data) in safetensors_io.read(path).items()
    }


def e2m1(codes, scales):
    """The bf16 elements of MXFP4: codes [.., rows, columns / 32, 16] and scales [.., rows, columns / 32]."""
    values = formats.E2M1_VALUES[formats.unpack_nvfp4(codes)]
    wide = values * np.ldexp(np.float32(1), scales.astype(np.int32) - 127)[..., None]
    return wide.reshape(*codes.shape[:-2], -1).astype(ml_dtypes.bfloat16)


def int4(packed, scales):
    """The bf16 elements of INT4: eight in a number, the first in the lowest bits."""
    values = (packed.view(np.uint32)[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).astype(np.float32) - 8
    return (values.reshape(len(packed), -1) * np.repeat(scales.astype(np.float32), 32, 1)).astype(ml_dtypes.bfloat16)


class Published(FolderTest):
    def setUp(self):
        super().setUp()
        self.random = np.random.default_rng(4)

    def compiled(self, target="layout: hf, storage: out", code=0, **numbers):
        """Compiles a job from the folder `in`. numbers: others of the model."""
        model = ROOT / f"examples/models/{self.model}.yaml"
        self.job(str(model), f"{{{self.source}}}", f"{{{target}, convert: rne}}")
        sets = [f"--set=model.let.{name}={value}" for name, value in (self.numbers | numbers).items()]
        return self.call("reshard-compile job.yaml -o plan", *sets, code=code)

    def moved(self, out, target="layout: hf, storage: out", code=0):
        """Compiles, runs and checks a job. Returns what the command printed."""
        self.compiled(target)
        done = self.call(f"reshard-exec plan --source=in --target={out} --check", code=code)
        return done.stdout + done.stderr

    def becomes(self, out, expected):
        """The values of Hugging Face's names, moved from `in`."""
        self.moved(out)
        self.same(arrays(self.folder / out / "model.safetensors"), expected)

    def store(self, tensors):
        """Writes `in`: (dtype, array) by name."""
        (self.folder / "in").mkdir(exist_ok=True)
        entries = {name: (dtype, list(array.shape), array.tobytes()) for name, (dtype, array) in tensors.items()}
        safetensors_io.write(self.folder / "in" / "model.safetensors", entries)

    def checkpoint(self, model, numbers, source):
        """Writes `in` with the names and shapes that the source of further jobs has, and random contents."""
        self.model, self.numbers, self.source = model, numbers, source
        self.compiled()
        self.call("reshard-exec plan --synthesize --source=in")
        path, tensors = self.folder / "in" / "model.safetensors", {}
        for name, (dtype, shape, _) in safetensors_io.read(path).items():
            if name.endswith("_shape"):
                rows, columns = safetensors_io.read(path)[name.replace("_shape", "_packed")][1]
                array = np.array([rows, 8 * columns], np.int64)
            elif dtype == "u8" and name.endswith("_scales"):
                array = self.random.integers(60, 190, shape, np.uint8)
            elif dtype == "fp8_e4m3":
                array = self.random.integers(0, 256, shape, np.uint8)
            elif dtype in ("u8", "i32"):
                array = (
                    self.random.integers(0, 256, (*shape, np.dtype(TYPES[dtype]).itemsize), np.uint8)
                    .view(TYPES[dtype])
                    .reshape(shape)
                )
            else:
                array = (self.random.normal(0, 1, shape) * np.exp2(self.random.integers(-9, 9, shape))).astype(
                    TYPES[dtype]
                )
            tensors[name] = (dtype, array)
        for tied, name in (
            (".embed_tokens.weight", "model.embed_tokens.weight"),
            (".shared_head.head.weight", "lm_head.weight"),
        ):
            tensors |= {each: tensors[name] for each in tensors if each.endswith(tied)}
        self.store(tensors)
        return tensors

    def same(self, found, expected):
        self.assertEqual(sorted(found), sorted(expected))
        for name, array in expected.items():
            self.assertEqual(found[name].shape, array.shape, name)
            nan = np.isnan(array.astype(np.float32))
            unlike = formats.bits(np.ascontiguousarray(found[name])) != formats.bits(np.ascontiguousarray(array))
            self.assertFalse((unlike & ~nan).any() or np.isnan(found[name][~nan].astype(np.float32)).any(), name)

    def test_gpt_oss(self):
        published = self.checkpoint("gpt-oss-120b", GPT_OSS, "layout: hf-mxfp4, storage: in")
        at = "model.layers.{}.mlp.experts.{}"
        self.assertEqual(
            {name: list(array.shape) for name, (_, array) in published.items() if ".layers.1.mlp.experts." in name},
            {
                at.format(1, name): shape
                for name, shape in (
                    ("gate_up_proj_blocks", [3, 192, 2, 16]),
                    ("gate_up_proj_scales", [3, 192, 2]),
                    ("gate_up_proj_bias", [3, 192]),
                    ("down_proj_blocks", [3, 64, 3, 16]),
                    ("down_proj_scales", [3, 64, 3]),
                    ("down_proj_bias", [3, 64]),
                )
            },
        )
        expected = {name: array for name, (dtype, array) in published.items() if dtype == "bf16"}
        for layer in range(2):
            for name in ("gate_up_proj", "down_proj"):
                blocks, scales = (published[f"{at.format(layer, name)}_{part}"][1] for part in ("blocks", "scales"))
                expected[at.format(layer, name)] = e2m1(blocks, scales).transpose(0, 2, 1)
        self.becomes("hf", expected)
        # vLLM at tp 2, its experts cut: in the middle of blocks of 32.
        self.moved("vllm", "layout: vllm, mesh: {tp: 2, views: [{etp: 2}]}")
        for rank in range(2):
            found = arrays(self.folder / "vllm" / f"rank-0000{rank}.safetensors")
            rows, half = slice(96 * rank, 96 * rank + 96), slice(48 * rank, 48 * rank + 48)
            for layer in range(2):
                weight = "model.layers.{}.mlp.experts.routed_experts.{}_weight"
                gate_up, down = (expected[at.format(layer, name)] for name in ("gate_up_proj", "down_proj"))
                self.same(
                    {key: found[weight.format(layer, key)] for key in ("w13", "w2")},
                    {"w13": gate_up.transpose(0, 2, 1)[:, rows], "w2": down.transpose(0, 2, 1)[:, :, half]},
                )
        # Written in the published form, the values are the same.
        self.moved("again", "layout: hf-mxfp4, storage: out")
        found = safetensors_io.read(self.folder / "again" / "model.safetensors")
        self.assertEqual(
            {name: entry[:2] for name, entry in found.items()},
            {name: (dtype, list(array.shape)) for name, (dtype, array) in published.items()},
        )
        (self.folder / "in").rename(self.folder / "first")
        (self.folder / "again").rename(self.folder / "in")
        self.becomes("hf-again", expected)

    def test_gpt_oss_is_refused(self):
        published = self.checkpoint("gpt-oss-120b", GPT_OSS, "layout: hf-mxfp4, storage: in")
        text = "down_proj' is quantized as mxfp4 but has 80 columns on a rank, expected a multiple of 32"
        self.assertIn(text, self.compiled(ffn=80, code=2).stderr)
        name = "model.layers.0.mlp.experts.down_proj_blocks"
        dtype, array = published[name]
        self.store(published | {name: (dtype, array.reshape(3, 64, 48))})
        self.assertIn(f"'{name}' has shape [3, 64, 48], expected [3, 64, 3, 16]", self.moved("out", code=2))
        del published["model.layers.1.mlp.experts.down_proj_scales"]
        self.store(published)
        self.assertIn("model.layers.1.mlp.experts.down_proj_scales", self.moved("out", code=2))
        self.assertFalse((self.folder / "out").exists())

    def test_kimi(self):
        published = self.checkpoint("kimi-k2", KIMI, "layout: hf-int4, storage: in")
        expert = "model.layers.2.mlp.experts.3.down_proj.weight"
        self.assertEqual(
            {name: (dtype, list(array.shape)) for name, (dtype, array) in published.items() if name.startswith(expert)},
            {
                expert + "_packed": ("i32", [64, 12]),
                expert + "_scale": ("bf16", [64, 3]),
                expert + "_shape": ("i64", [2]),
            },
        )
        packed = [name.removesuffix("_packed") for name in published if name.endswith("_packed")]
        self.assertEqual(len(packed), 2 * 4 * 3)
        self.assertTrue(all(".mlp.experts." in name for name in packed))
        expected = {
            name: array
            for name, (dtype, array) in published.items()
            if not name.endswith(("_packed", "_scale", "_shape"))
        }
        expected |= {name: int4(published[name + "_packed"][1], published[name + "_scale"][1]) for name in packed}
        self.becomes("hf", expected)
        # vLLM: the experts cut by tp 2, in the middle of blocks, and spread over two expert parallel ranks.
        at = "model.layers.2.mlp.experts.{}.{}.weight"
        whole = {
            name: np.stack([expected[at.format(e, name)] for e in range(4)])
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        for view in ("etp", "ep"):
            self.moved(view, f"layout: vllm, mesh: {{tp: 2, views: [{{{view}: 2}}]}}")
            for rank in range(2):
                found = arrays(self.folder / view / f"rank-0000{rank}.safetensors")
                rows, experts = (
                    (slice(48 * rank, 48 * rank + 48), slice(None))
                    if view == "etp"
                    else (slice(None), slice(2 * rank, 2 * rank + 2))
                )
                names = {
                    key: next(name for name in found if ".layers.2." in name and name.endswith(f".{key}_weight"))
                    for key in ("w13", "w2")
                }
                self.same(
                    {key: found[name] for key, name in names.items()},
                    {
                        "w13": np.concatenate([whole[name][experts, rows] for name in ("gate_proj", "up_proj")], 1),
                        "w2": whole["down_proj"][experts, :, rows],
                    },
                )
        # The names of the multimodal release.
        self.store({f"language_model.{name}": entry for name, entry in published.items()})
        self.model, self.source = "kimi-k2.5", "layout: hf-int4-multimodal, storage: in"
        self.becomes("multimodal", expected)

    def test_kimi_is_refused(self):
        published = self.checkpoint("kimi-k2", KIMI, "layout: hf-int4, storage: in")
        text = "down_proj.weight' is quantized as int4 but has 72 columns on a rank, expected a multiple of 32"
        self.assertIn(text, self.compiled(moe_ffn=72, code=2).stderr)
        int4, self.source = self.source, "layout: hf, storage: in"
        done = self.compiled("layout: hf-int4, storage: out", code=2)
        self.source = int4
        self.assertIn("with 'shape', which only a source can have", done.stderr)
        name = "model.layers.1.mlp.experts.0.up_proj.weight"
        for part, change, message in (
            ("_shape", ("i64", np.zeros(3, np.int64)), f"'{name}_shape' has shape [3], expected [2]"),
            ("_packed", ("i32", np.zeros((96, 9), np.int32)), f"'{name}_packed' has shape [96, 9], expected [96, 8]"),
            (
                "_scale",
                ("bf16", np.zeros((96, 1), ml_dtypes.bfloat16)),
                f"'{name}_scale' has shape [96, 1], expected [96, 2]",
            ),
        ):
            with self.subTest(part=part, message=message):
                self.store(published | {name + part: change})
                self.assertIn(message, self.moved("out", code=2))
                self.assertFalse((self.folder / "out").exists())

    def test_deepseek(self):
        published = self.checkpoint("deepseek-v3", DEEPSEEK, "layout: hf, storage: in" + FP8)
        codes = [name for name, (dtype, _) in published.items() if dtype == "fp8_e4m3"]
        # Every linear layer, short blocks too, but not the router, the embedding, the heads and eh_proj.
        self.assertEqual(published["model.layers.3.self_attn.kv_a_proj_with_mqa.weight_scale_inv"][1].shape, (2, 2))
        self.assertEqual(
            {name for name, (dtype, array) in published.items() if array.ndim == 2 and dtype == "bf16"},
            {
                "model.embed_tokens.weight",
                "lm_head.weight",
                *(f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2, 3)),
                *(f"model.layers.3.{name}.weight" for name in ("eh_proj", "embed_tokens", "shared_head.head")),
            },
        )
        expected = {
            name: array
            for name, (dtype, array) in published.items()
            if name not in codes and not name.endswith("_scale_inv")
        }
        for name in codes:
            rows, columns = published[name][1].shape
            scales = np.repeat(np.repeat(published[name + "_scale_inv"][1], 128, 0)[:rows], 128, 1)[:, :columns]
            expected[name] = (published[name][1].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales).astype(
                ml_dtypes.bfloat16
            )
        self.becomes("hf", expected)
        self.assertGreater(sum(prod(expected[name].shape) for name in codes), 500_000)


if __name__ == "__main__":
    unittest.main()
