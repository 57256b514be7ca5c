# SPDX-License-Identifier: Apache-2.0
"""File round trips: a Hugging Face checkpoint -> Megatron rank folder (vLLM's, if the model has no Megatron layout) ->
FSDP2 rank folder -> Hugging Face checkpoint, bit for bit, for a reduced model of every family; and a run in a quarter
of the model's size of memory. RESHARD_BIN: the folder of the commands; needs safetensors."""

import json
import os
import sys
import unittest
from pathlib import Path

from safetensors import safe_open

import library
from commands import BIN, FolderTest, run

# Small numbers that do not divide evenly wherever the layouts allow that: a vocabulary of 199, 5 FSDP ranks.
DENSE = {"layers": 3, "hidden": 24, "heads": 8, "kv_heads": 2, "head_dim": 6, "ffn": 20, "vocab": 199}
MAMBA = {"layers": 52, "m_heads": 4, "m_dim": 3, "groups": 2, "state": 4, "d_inner": 12, "bc": 8}
GATED_DELTA_NET = {"k_heads": 2, "v_heads": 4, "k_head_dim": 3, "v_head_dim": 5, "k_rows": 6, "v_rows": 20, "kernel": 4}
VISION = {
    "blocks": 2,
    "mergers": 2,
    "vision_hidden": 8,
    "vision_ffn": 6,
    "vision_heads": 2,
    "vision_out": 12,
    "positions": 5,
    "colors": 3,
    "patch": 2,
}
SPARSE = {
    **DENSE,
    "experts": 6,
    "moe_ffn": 10,
    "first_dense": 2,
    "q_lora": 7,
    "kv_lora": 5,
    "nope": 4,
    "rope": 2,
    "v_dim": 3,
    "index_heads": 3,
    "index_dim": 4,
    "mtp": 0,
}  # the engine's layout lacks multi-token prediction
ARCHITECTURES = {
    "llama3-8b": DENSE,
    "qwen2.5-7b": DENSE,
    "qwen3-0.6b": DENSE,
    "qwen3-30b-a3b": {**DENSE, "experts": 6, "moe_ffn": 10},
    "gemma-3-27b": DENSE,
    "gemma-4-31b": {**DENSE, "layers": 60, "global_dim": 10, "global_kv": 2},
    "glm-4.5": {**DENSE, "experts": 6, "moe_ffn": 10, "first_dense": 1},
    "ministral-3-8b": DENSE,
    "mixtral-8x7b": {**DENSE, "experts": 4, "moe_ffn": 10},
    "deepseek-v3": {
        **DENSE,
        "experts": 6,
        "moe_ffn": 10,
        "first_dense": 2,
        "q_lora": 7,
        "kv_lora": 5,
        "nope": 4,
        "rope": 2,
        "v_dim": 3,
    },
    "gpt-oss-120b": {**DENSE, "experts": 6},
    "qwen3-next-80b-a3b": {**DENSE, **GATED_DELTA_NET, "layers": 48, "experts": 4, "moe_ffn": 10, "shared_ffn": 6},
    "qwen3.5-9b": {**DENSE, **GATED_DELTA_NET, "layers": 32, "first_dense": 32},
    "qwen3.5-35b-a3b": {**DENSE, **GATED_DELTA_NET, "layers": 40, "experts": 4, "moe_ffn": 10, "shared_ffn": 6},
    "qwen3-vl-8b": {**DENSE, **VISION, "first_dense": 3},
    "qwen3-vl-30b-a3b": {**DENSE, **VISION, "experts": 4, "moe_ffn": 10},
    "kimi-linear-48b-a3b": {
        **DENSE,
        "layers": 27,
        "experts": 4,
        "moe_ffn": 10,
        "kv_lora": 5,
        "nope": 4,
        "rope": 2,
        "v_dim": 3,
        "l_heads": 2,
        "l_head_dim": 3,
        "rows": 6,
    },
    "llama4-scout": {**DENSE, "experts": 6},
    "minimax-m2": {**DENSE, "experts": 6, "moe_ffn": 10},
    "deepseek-v3.2": SPARSE,
    "glm-5": SPARSE,
    "nemotron-h-8b": {**DENSE, **MAMBA},
    "nemotron-3-nano-30b-a3b": {**DENSE, **MAMBA, "experts": 4, "moe_ffn": 10, "shared_ffn": 6},
    "olmo-3-7b": DENSE,
    "phi-3.5-mini": DENSE,
    "seed-oss-36b": DENSE,
}
HF = "{layout: hf, storage: unused%s}"
MEGATRON = (
    "{layout: megatron, mesh: {megatron: {tp: 2, pp: 2, dp: 2, ep: 2}}, place: {layer: {axis: pp, scheme: balanced}}%s}"
)
FSDP2 = "{layout: fsdp2, mesh: {fsdp: 5}%s}"
VLLM = "{layout: vllm, mesh: {tp: 2, pp: 2, dp: 2}%s}"
FSDP2_OF_8 = "{layout: fsdp2, mesh: {fsdp: 8}%s}"
VLLM_WITH_EXPERTS = "{layout: vllm, mesh: {tp: 2, pp: 2, dp: 2, views: [{ep: 2, pp: 2, dp: 2}]}%s}"
#: What models without a layout `megatron` go through instead. vLLM's layout of Gemma 4 lacks layer_scalar.
INSTEAD = {
    "gemma-4-31b": FSDP2_OF_8,
    "kimi-linear-48b-a3b": FSDP2_OF_8,
    "olmo-3-7b": VLLM,
    "llama4-scout": VLLM_WITH_EXPERTS,
    "minimax-m2": VLLM_WITH_EXPERTS,
    "deepseek-v3.2": VLLM_WITH_EXPERTS,
    "glm-5": VLLM_WITH_EXPERTS,
}
# Further keys of the endpoints, Megatron's or what is instead of it, and the others: files cannot have params with a
# transform, Megatron rounds A_log of Qwen3.5, and vLLM has some weights of the last three in fp32.
NORMS = (", ignore: '*.out_norm.weight'", ", ignore: '*.linear_attn.norm.weight'")
ROUNDED = ", convert: rne"
BF16 = ", dtype: bf16" + ROUNDED
KEYS = {
    "qwen3-next-80b-a3b": NORMS,
    "qwen3.5-9b": (NORMS[0], NORMS[1] + BF16),
    "qwen3.5-35b-a3b": (NORMS[0], NORMS[1] + BF16),
    "minimax-m2": ("", ROUNDED),
    "deepseek-v3.2": ("", ROUNDED),
    "glm-5": ("", ROUNDED),
}


def checkpoint(folder):
    """{tensor: (dtype, shape, bytes)}, with dtype and shape read by the safetensors package."""
    result = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for name in file.keys():
                view = file.get_slice(name)
                result[name] = (view.get_dtype(), tuple(view.get_shape()))
        header = int.from_bytes(path.read_bytes()[:8], "little")
        raw = path.read_bytes()
        for name, entry in json.loads(raw[8 : 8 + header]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                result[name] += (raw[8 + header + begin : 8 + header + end],)
    return result


class RoundTrip(FolderTest):
    def convert(self, model, numbers, source, target, reads, writes):
        """Compiles and runs a job from files to files."""
        path, plan = self.folder / "job.yaml", self.folder / "job.rplan"
        path.write_text(library.job(model, source, target))
        sets = [f"--set=model.let.{name}={value}" for name, value in numbers.items()]
        run("reshard-compile", path, "-o", plan, *sets)
        run("reshard-exec", plan, f"--source={reads}", f"--target={writes}", "--check")
        return plan

    def test_every_architecture(self):
        for model, numbers in ARCHITECTURES.items():
            with self.subTest(model=model):
                at = self.folder / model
                at.mkdir()
                keys = KEYS.get(model, ("", ""))
                ranks = INSTEAD.get(model, MEGATRON) % keys[0]
                hf, fsdp2 = HF % keys[1], FSDP2 % keys[1]
                path, plan = self.folder / "job.yaml", self.folder / "first.rplan"
                path.write_text(library.job(model, hf, ranks))
                run("reshard-compile", path, "-o", plan, *[f"--set=model.let.{n}={v}" for n, v in numbers.items()])
                run("reshard-exec", plan, "--synthesize", f"--source={at / 'hf'}")
                self.convert(model, numbers, hf, ranks, at / "hf", at / "ranks")
                self.convert(model, numbers, ranks, fsdp2, at / "ranks", at / "fsdp2")
                self.convert(model, numbers, fsdp2, hf, at / "fsdp2", at / "again")
                before, after = checkpoint(at / "hf"), checkpoint(at / "again")
                self.assertGreater(len(before), 10)
                self.assertEqual(sorted(before), sorted(after))
                for name in before:
                    self.assertEqual(before[name], after[name], name)
                self.describe(at)
                self.assertEqual(len(list((at / "ranks").iterdir())), 8)
                self.assertEqual(len(list((at / "fsdp2").iterdir())), 5)

    def describe(self, at):
        """--describe writes a model with all tensors of the checkpoint, and no others."""
        run("reshard-compile", f"--describe={at / 'hf'}", "-o", at / "described.yaml")
        path, plan = self.folder / "job.yaml", self.folder / "described.rplan"
        path.write_text(
            f"version: 1\nmodel: {at / 'described.yaml'}\nsource: {{storage: {at / 'hf'}}}\ntarget: {{mesh: {{}}}}\n"
        )
        run("reshard-compile", path, "-o", plan)
        run("reshard-exec", plan, f"--target={at / 'described'}", "--check")
        self.assertEqual(checkpoint(at / "described"), checkpoint(at / "hf"))

    def test_larger_than_memory(self):
        """The resident bytes of the files stay below a quarter of the model's size."""
        if os.environ.get("RESHARD_SMALL"):
            self.skipTest("sanitizers need additional memory")
        full = os.environ.get("RESHARD_FULL") == "1"
        numbers = {"layers": 8 if full else 2, "vocab": 32768}
        path, plan = self.folder / "job.yaml", self.folder / "job.rplan"
        path.write_text(
            library.job("llama3-8b", "{layout: hf, storage: unused}", "{layout: megatron, mesh: {megatron: {tp: 4}}}")
        )
        run("reshard-compile", path, "-o", plan, *[f"--set=model.let.{n}={v}" for n, v in numbers.items()])
        quarter = None
        for arguments in (
            ["--synthesize", f"--source={self.folder / 'hf'}"],
            [f"--source={self.folder / 'hf'}", f"--target={self.folder / 'megatron'}"],
        ):
            size = (
                sum(p.stat().st_size for p in (self.folder / "hf").glob("*"))
                if (self.folder / "hf").exists()
                else 1 << 30
            )
            quarter = size // 4
            command = [str(BIN / "reshard-exec"), str(plan), *arguments, f"--memory={quarter}"]
            # The kernel limits anonymous memory (RLIMIT_DATA); the resident bytes of files are measured.
            script = (
                "import resource, subprocess, sys\nlimit = int(sys.argv[1])\n"
                "done = subprocess.run(sys.argv[2:], preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, "
                "(limit, limit)))\n"
                "print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)\n"
                "sys.exit(done.returncode)"
            )
            done = run(sys.executable, "-c", script, quarter, *command)
            peak = int(done.stdout.split("peak")[-1])
        self.assertGreater(size, 1 << 30)
        self.assertLess(peak, quarter)
        self.assertEqual(len(list((self.folder / "megatron").iterdir())), 4)


if __name__ == "__main__":
    unittest.main()
