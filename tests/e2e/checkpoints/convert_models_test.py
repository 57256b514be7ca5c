# SPDX-License-Identifier: Apache-2.0
"""reshard-convert without YAML, from the command line: models of the library that are found by a config.json, layouts
that are recognized by the names of tensors, the optimizer's state, files of ranks, quantized exports; what does not fit
is refused. With RESHARD_FULL=1 further architectures, and every model of the library in every layout of checkpoints."""

import argparse
import json
import os
import re
import shlex
import unittest
from pathlib import Path
from random import Random

import ml_dtypes
import numpy as np
import yaml
from safetensors.numpy import load_file, save_file

from commands import ROOT, job_of, run
from conversions import ConvertTest
from module import importable
from torch_formats import Dcp

FULL = bool(os.environ.get("RESHARD_FULL"))
#: Small models of architectures that the library has.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": 72,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
EXPERTS = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_experts": 4,
}
GLM = LLAMA | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "attention_bias": True,
    "use_qk_norm": True,
}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_nextn_predict_layers": 1,
}
#: Published quantized checkpoints, scaled down: the model, its config, and the source of a job as
#: docs/library.md states it.
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 72,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "num_local_experts": 2,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
KIMI = DEEPSEEK | {
    "moe_intermediate_size": 64,
    "num_nextn_predict_layers": 0,
    "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
}
FP8 = DEEPSEEK | {
    "hidden_size": 160,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
QUANTIZED = {
    "mxfp4": ("gpt-oss-120b", GPT_OSS, {"layout": "hf-mxfp4"}),
    "int4": ("kimi-k2", KIMI, {"layout": "hf-int4"}),
    "int4 multimodal": ("kimi-k2.5", KIMI, {"layout": "hf-int4-multimodal"}),
    "block_fp8": (
        "deepseek-v3",
        FP8,
        {
            "layout": "hf",
            "quantize": {
                "format": "block_fp8",
                "ignore": ["*embed_tokens.weight", "*.mlp.gate.weight", "*eh_proj.weight", "*head.weight"],
            },
        },
    ),
}


def rounded(array: np.ndarray) -> np.ndarray:
    """The values that bf16 has, as fp32."""
    with np.errstate(invalid="ignore"):  # NaN
        return array.astype(ml_dtypes.bfloat16).astype(np.float32)


class Models(ConvertTest):
    def synthesized(
        self, folder: str, config: dict, model: str, source: object, target: object, **more: object
    ) -> None:
        """A checkpoint of random values, FOLDER/made, of a model with a config; and beside it the config, the job and
        its plan. more: further keys of the model."""
        (self.folder / folder).mkdir()
        self.write(f"{folder}/config.json", json.dumps(config))
        of = {"extend": str(ROOT / f"examples/models/{model}.yaml"), "config": "config.json"} | more
        job = job_of(of, source, target)
        self.write(f"{folder}/job.yaml", json.dumps(job))
        self.call("reshard-compile", f"{folder}/job.yaml", "-o", f"{folder}/p.rplan")
        self.call("reshard-exec", f"{folder}/p.rplan", "--synthesize", f"--source={folder}/made")

    def save(self, folder: str, config: dict, model: str, layout: str = "hf", **more: object) -> dict[str, np.ndarray]:
        """A checkpoint of random values in a layout, with its config.json, as safetensors. more:
        further keys of the model."""
        source, target = {"layout": layout, "storage": "."}, {"layout": layout, "mesh": {}}
        self.synthesized(folder, config, model, source, target, dtype="fp32", **more)
        path = self.folder / folder
        (path / "made/model.safetensors").rename(path / "model.safetensors")
        for made in (path / "made", path / "job.yaml", path / "p.rplan"):
            made.rmdir() if made.is_dir() else made.unlink()
        return load_file(path / "model.safetensors")

    def test_there_and_back(self):
        """From one framework to the next, each recognized by its names, with the numbers of the config, and back: all
        tensors are the same."""
        for name, config, model in (
            ("experts", EXPERTS, "qwen3-30b-a3b"),
            *([("llama", LLAMA, "llama3-8b")] if FULL else []),
        ):
            wanted = self.save(name, config, model)
            self.converts("layouts: hf to megatron-checkpoint\n", name, f"{name}-megatron", "--to=megatron")
            numbers = f"--config={name}/config.json"
            self.convert(f"{name}-megatron {name}-dcp --to=fsdp2", numbers, "--leave=common.pt")
            text = self.convert(f"{name}-dcp {name}-hf", numbers).stdout
            self.assertIn("layouts: fsdp2-checkpoint to hf\n", text)
            size = sum(array.size for array in wanted.values())
            self.assertTrue(
                text.endswith(
                    f"target: {len(wanted)} tensors, {size} elements; {4 * size} bytes, of which 0 are padding, "
                    "were compared with the source and are right\n"
                ),
                text,
            )
            self.check(f"{name}-hf", wanted)
            self.assertEqual(self.json(f"{name}-hf/config.json"), config)

    def test_uneven_stages(self):
        """--mesh divides the layers evenly. The note says how the job states other stages, and that job compiles."""
        self.save("hf-model", LLAMA | {"num_hidden_layers": 3}, "llama3-8b")
        self.cannot_convert(
            "'place: {layer: {axis: pp, first: N}}' beside it for N layers in the first stage",
            "hf-model out --to=megatron --mesh=tp=1,pp=2",
        )
        job = yaml.safe_load(self.convert("hf-model out --to=megatron --mesh=tp=1 --plan").stdout)
        job["target"] |= {"mesh": {"tp": 1, "pp": 2}, "place": {"layer": {"axis": "pp", "first": 1}}}
        self.write("job.yaml", yaml.safe_dump(job))
        self.call("reshard-compile job.yaml -o job.rplan")
        self.call("reshard-exec job.rplan")

    @unittest.skipUnless(FULL, "RESHARD_FULL=1")
    def test_layers_that_are_not_alike(self):
        """DeepSeek-V3: Megatron-Core's checkpoint has tensors for each layer, or for each expert too. A checkpoint of
        transformers has no multi-token prediction."""
        wanted = self.save("hf-model", DEEPSEEK, "deepseek-v3")
        self.converts("layouts: hf to megatron-checkpoint-layers\n", "hf-model megatron --to=megatron")
        self.convert("megatron out --config=hf-model/config.json --allow=extra")
        self.check("out", wanted)
        self.convert("hf-model singleton --to=megatron --target-layout=megatron-checkpoint-singleton")
        self.converts(
            "layouts: megatron-checkpoint-singleton to hf\n",
            "singleton joined --config=hf-model/config.json --allow=extra",
        )
        self.check("joined", wanted)
        wanted = {name: array for name, array in wanted.items() if ".layers.2." not in name}
        self.save_checkpoint("hf-model", wanted)
        self.convert("hf-model without --to=megatron")
        self.converts("without multi-token prediction", "without again --config=hf-model/config.json --allow=extra")
        self.check("again", wanted)

    def test_tied(self):
        """The library's Llama is not tied; the config says that this one is. A DCP checkpoint has both
        names, Hugging Face's one."""
        wanted = self.save(
            "hf-model",
            LLAMA | {"tie_word_embeddings": True},
            "llama3-8b",
            tensors={"lm_head.weight": {"tied": "model.embed_tokens.weight"}},
        )
        del wanted["lm_head.weight"]
        self.save_checkpoint("hf-model", wanted)
        self.convert("hf-model dcp --to=fsdp2")
        self.prints("model.lm_head.weight", "reshard-inspect dcp")
        self.converts("compared, all equal", "dcp out --config=hf-model/config.json")  # the two names
        self.check("out", wanted)
        # Both names with other values: the target has those of one, and the command says that the
        # source contradicts itself.
        self.write("two/config.json", (self.folder / "hf-model/config.json").read_text())
        self.save_checkpoint("two", wanted | {"lm_head.weight": np.ones_like(wanted["model.embed_tokens.weight"])})
        self.cannot_convert("model.embed_tokens.weight", "two contradiction", code=1)
        self.cannot_convert("names are missing: lm_head.weight", f"hf-model wrong --config={self.config(LLAMA)}")

    def test_a_language_model_of_a_multimodal_one(self):
        """The config.json of Gemma 3 has the numbers of its language model in `text_config`, and lacks some; TARGET's
        is that of the language model."""
        text = {
            "model_type": "gemma3_text",
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "vocab_size": 96,
            "head_dim": 16,
        }
        config = {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "text_config": text,
            "vision_config": {"hidden_size": 8},
        }
        wanted = self.save("multimodal", config, "gemma-3-27b", "hf-multimodal")
        del wanted["language_model.lm_head.weight"]  # tied, as in the releases
        self.save_checkpoint("multimodal", wanted)
        # 4 heads of 16, transformers' default
        self.assertEqual(wanted["language_model.model.layers.1.self_attn.k_proj.weight"].shape, (64, 64))
        shown = self.convert("multimodal out").stdout
        self.assertIn("model: as gemma-3-27b, with the numbers of", shown)
        self.assertIn("config.json: the 'text_config' of SOURCE's", shown)
        self.check("out", {name.removeprefix("language_model."): array for name, array in wanted.items()})
        self.assertEqual(
            self.json("out/config.json"), {"architectures": ["Gemma3ForCausalLM"], "torch_dtype": "float32"} | text
        )
        self.convert("multimodal named --model=gemma-3-27b --config=multimodal/config.json")
        self.assertEqual((self.folder / "named/config.json").read_text(), (self.folder / "out/config.json").read_text())
        del text["hidden_size"]
        self.cannot_convert(
            "has no key 'hidden_size', and its 'text_config' has none",
            f"multimodal none --config={self.config(config)}",
        )

    def equal_digests(self, one: str, other: str, tensors: int) -> None:
        self.assertEqual(self.call("reshard-digest", one, other).stdout, f"equal: {tensors} tensors\n")

    def config(self, values: dict) -> Path:
        self.write("config-of-test.json", json.dumps(values))
        return self.folder / "config-of-test.json"

    def test_the_optimizer_has_no_state_of_a_buffer(self):
        """The bias of a router, which frameworks save with the weights alone."""
        states = {"exp_avg": "fp32", "exp_avg_sq": "fp32"}
        wanted = self.save("saved", GLM, "glm-4.5", "fsdp2-checkpoint", optimizer=states)
        bias = "model.layers.1.mlp.gate.e_score_correction_bias"
        self.assertIn(f"model.{bias}", wanted)
        self.assertNotIn(f"optimizer.state.{bias}.exp_avg", wanted)
        self.convert("saved out --to=fsdp2 --optimizer")
        self.equal_digests("saved", "out", len(wanted))

    def test_optimizer(self):
        states = {"exp_avg": "fp32", "exp_avg_sq": "fp32", "step": {"dtype": "fp32", "shape": []}}
        self.save("saved", LLAMA, "llama3-8b", "fsdp2-checkpoint", optimizer=states)
        self.convert("saved step-10 --to=dcp")
        numbers = "--config=saved/config.json"
        for options, error in (
            ("", "--optimizer converts the optimizer's state; --allow=extra leaves them out"),
            (
                "--to=megatron --mesh=tp=2 --optimizer",
                "layout megatron has no names for the optimizer's state; the layouts of --to=fsdp2 and --to=megatron "
                "have, without --mesh",
            ),
            (
                "--to=sglang --mesh=tp=2,dp=2 --allow=extra",
                "the tensors are those of model llama3-405b in layout fsdp2-checkpoint, but the job is not valid: ",
            ),
            ("--to=hf --optimizer", "layout hf has no names for the optimizer's state"),
            (
                "--to=megatron --optimizer",
                "layout megatron-checkpoint has no names for the state step; --allow=extra leaves it out",
            ),
        ):
            self.cannot_convert(error, f"step-10 out {numbers} {options}")
        text = self.convert(f"step-10 megatron {numbers} --to=megatron --optimizer --allow=extra --dtype=bf16").stdout
        self.assertIn("with exp_avg, exp_avg_sq, param\nmaster weights: of TARGET, the weights of SOURCE\n", text)
        self.assertIn("left out: 21 tensors of the optimizer's state: step (21)\n", text)
        text = self.call("reshard-inspect megatron").stdout
        for name, dtype in (("optimizer.state.exp_avg.", "fp32"), ("optimizer.state.param.", "fp32"), ("", "bf16")):
            self.assertRegex(text, rf"(?m)^ *{name}decoder.layers.mlp.linear_fc2.weight  {dtype}")
        back = f"megatron back {numbers} --to=fsdp2 --optimizer --leave=common.pt"
        self.cannot_convert(
            "the optimizer of TARGET has no master weights, so that those of 'megatron' become its weights; "
            "--allow=extra leaves out the weights decoder.",
            back,
        )
        self.converts("weights: of TARGET, the master weights of SOURCE\n", f"{back} --allow=extra")
        self.convert("back back-hf --to=safetensors")
        wanted = load_file(self.folder / "saved/model.safetensors")
        # With all bits of the weights.
        self.check("back-hf", {name: array for name, array in wanted.items() if not name.endswith(".step")})
        # Without the optimizer.
        self.convert(f"megatron rounded {numbers} --to=fsdp2 --leave=common.pt --allow=extra")
        self.convert("rounded rounded-hf --to=safetensors --dtype=fp32")
        self.check("rounded-hf", {name: rounded(array) for name, array in wanted.items() if "optimizer" not in name})
        for layout in ("megatron-checkpoint-layers", *(["megatron-checkpoint-singleton"] if FULL else [])):
            with self.subTest(layout=layout):
                to = f"{numbers} --to=megatron --target-layout={layout} --optimizer"
                self.convert(f"step-10 {layout} {to} --allow=extra")
                self.converts("common.pt: names the layout of SOURCE", f"megatron from-{layout} {to}")
                self.convert(f"{layout} {layout}-back {numbers} --to=fsdp2 --optimizer --leave=common.pt --allow=extra")
                self.equal_digests("back", f"{layout}-back", len(wanted) * 3 // 4)
        if not FULL:
            return
        self.convert("step-10 again", numbers, "--to=fsdp2", "--optimizer")
        self.equal_digests("step-10", "again", len(wanted))

    def test_what_is_left_out(self):
        """Weights, the optimizer's state and objects apart, by their patterns."""
        saved = self.save("saved", LLAMA, "llama3-8b", "fsdp2-checkpoint", optimizer={"exp_avg": "fp32"})
        checkpoint = Dcp(self.folder / "step-10")
        biases = {
            f"model.model.layers.{layer}.self_attn.{name}_proj.bias": np.ones(8, np.float32)
            for layer in range(2)
            for name in "qk"
        }
        amax = {
            f"optimizer.state.model.layers.{layer}.input_layernorm.weight.amax": np.ones(1, np.float32)
            for layer in range(2)
        }
        checkpoint.whole(saved | biases | amax)
        for name in ("step", *(f"optimizer.param_groups.{number}.lr" for number in range(9))):
            checkpoint.object(name, b"N.")
        checkpoint.write()
        numbers = "--config=saved/config.json"
        error = self.convert("step-10 out", numbers, code=2).stderr
        self.assertIn(
            f"has {len(saved) // 2 + 6} tensors that layout fsdp2-checkpoint of model llama3-405b with the numbers of ",
            error,
        )
        self.assertIn(
            "does not have: model.model.layers.*.self_attn.k_proj.bias (2), "
            "model.model.layers.*.self_attn.q_proj.bias (2), optimizer.state.",
            error,
        )
        text = self.convert("step-10 out", numbers, "--allow=extra", "--report=r.json").stdout
        self.assertRegex(
            text,
            r"\nleft out: 4 tensors that are weights that layout fsdp2-checkpoint of model "
            r"llama3-405b with the numbers of \S+ does not have: "
            r"model\.model\.layers\.\*\.self_attn\.k_proj\.bias \(2\), "
            r"model\.model\.layers\.\*\.self_attn\.q_proj\.bias \(2\)\n"
            rf"left out: {len(saved) // 2 + 2} tensors of the optimizer's state: exp_avg "
            rf"\({len(saved) // 2}\), "
            r"optimizer\.state\.model\.layers\.\*\.input_layernorm\.weight\.amax \(2\)\n",
        )
        self.assertRegex(
            text,
            rf"\n  left out +{len(saved) // 2 + 6} tensors of the source: "
            r"model\.model\.layers\.\*\.self_attn\.k_proj\.bias \(2\), ",
        )
        self.assertRegex(text, r"\n  left out +10 objects of the source: optimizer\.param_groups\.\*\.lr \(9\), step\n")
        report = self.json("r.json")
        self.assertEqual(len(report["omitted"]), len(saved) // 2 + 6)
        self.assertEqual(len(report["omitted_objects"]), 10)

    def test_names_that_no_layout_has(self):
        """The error shows what the files have and the option that mends it, and with that option the conversion is
        right."""
        wanted = self.save("hf-model", LLAMA, "llama3-8b")
        one = "*._orig_mod.*=*.*"
        cases = (
            ("compiled", lambda name: f"_orig_mod.{name}", ["_orig_mod.="]),
            ("parallel", lambda name: f"module.{name}", ["module.="]),
            ("adapted", lambda name: f"base_model.model.{name}", ["base_model.model.="]),
            ("bare", lambda name: name.removeprefix("model."), ["=model.", "lm_head.=lm_head."]),
            ("one-layer", lambda name: name.replace("layers.1.", "layers.1._orig_mod."), [one]),
            (
                "both",
                lambda name: "_orig_mod." + name.replace("layers.1.", "layers.1._orig_mod."),
                ["_orig_mod.=", one],
            ),
        )
        for folder, change, rules in cases if FULL else cases[::2] + cases[-1:]:
            with self.subTest(folder):
                self.save_checkpoint(folder, {change(name): array for name, array in wanted.items()})
                self.write(f"{folder}/config.json", json.dumps(LLAMA))
                error = self.convert(folder, "none", code=2).stderr
                options = " ".join(shlex.quote(f"--rename={rule}") for rule in rules)
                self.assertRegex(error, rf"\n  {re.escape(options)} makes (them|the names) those of layout hf\n")
                self.assertIn(f"the files have {len(wanted)} tensors", error)
                if all(rule.endswith("=") for rule in rules):
                    self.assertIn(
                        f", whose names all begin with '{rules[0][:-1]}'; {len(wanted)} of them are in none "
                        f"of these layouts: {rules[0][:-1]}lm_head.weight,",
                        error,
                    )
                self.convert(folder, f"{folder}-out", *shlex.split(options))
                self.check(f"{folder}-out", wanted)
        self.convert("compiled megatron --to=megatron --rename=_orig_mod.=")
        self.convert("megatron back --config=hf-model/config.json --leave=common.pt")
        self.check("back", wanted)
        self.save_checkpoint("other", {f"h.{i}.w": np.ones(3, np.float32) for i in range(3)})
        error = self.convert("other none --config=hf-model/config.json", code=2).stderr
        self.assertIn("; 3 of them are in none of these layouts: h.*.w (3)\n", error)
        self.assertNotIn("--rename", error)

    def test_errors_name_options(self):
        self.save("hf-model", LLAMA, "llama3-8b")
        self.write("model.yaml", "dtype: fp32\ntensors: {w: [4, 4], v: [x]}\nlayouts: {hf: {params: same}}\n")
        for options, error in (
            ("--dtype=fp17", "--dtype=fp17: "),
            ("--to=vllm --mesh=tp=3", "dense.yaml:"),
            ("--only=*.none", "--only: '*.none'"),
            ("--ignore=*.none", "--ignore: '*.none'"),
            ("--quantize=fp3", "--quantize=fp3: "),
            ("--quantize=block_fp8 --unquantized=*.none", "--quantize=block_fp8: '*.none'"),
            ("--to=megatron --chunk=1XB", "--chunk=1XB: "),
            ("--model=model.yaml --source-layout=hf --target-layout=hf", "model.yaml:2:"),
        ):
            with self.subTest(options=options):
                text = self.cannot_convert(error, f"hf-model out {options}")
                self.assertTrue(text.startswith("reshard-convert: error: "), text)
                if not error.startswith("model.yaml"):
                    self.write("kept.yaml", self.convert(f"hf-model out {options} --plan", code=None).stdout)
                    self.fails("error: ", "reshard-compile kept.yaml -o p")
        self.cannot_convert(
            "cannot be converted to hf with --switch=none=3:\n  hf: unknown switch 'none' of layout 'hf'",
            "hf-model out --switch=none=3",
        )

    def test_an_optimizer_of_less_precision(self):
        """Moments keep their dtypes, as Megatron-Core's --exp-avg-dtype and PyTorch's optimizers of
        bf16 weights have them."""
        self.save("saved", LLAMA, "llama3-8b", "fsdp2-checkpoint", optimizer={"exp_avg": "bf16", "exp_avg_sq": "fp16"})
        self.convert("saved megatron --to=megatron --optimizer")
        text = self.call("reshard-inspect megatron").stdout
        for state, dtype in (("exp_avg", "bf16"), ("exp_avg_sq", "fp16"), ("param", "fp32")):
            self.assertRegex(
                text, rf"(?m)^ *optimizer\.state\.{state}\.decoder\.layers\.mlp\.linear_fc2\.weight  {dtype}"
            )
        self.convert("megatron back --config=saved/config.json --to=fsdp2 --optimizer --allow=extra --leave=common.pt")
        self.assertRegex(self.call("reshard-digest saved back").stdout, r"^equal: \d+ tensors\n$")

    @unittest.skipUnless(FULL, "RESHARD_FULL=1")
    def test_files_of_ranks(self):
        """One file for each rank of an engine or a trainer, with the shards of the library's layouts."""
        wanted = self.save("hf-model", EXPERTS, "qwen3-30b-a3b")
        expert = lambda layer, number, what: wanted[f"model.layers.{layer}.mlp.experts.{number}.{what}_proj.weight"]
        both = lambda numbers, rows: np.stack(
            [np.concatenate([expert(0, e, "gate")[rows], expert(0, e, "up")[rows]]) for e in numbers]
        )
        last = "model.layers.1.mlp.experts.3.down_proj.weight"
        experts = "model.layers.0.mlp.experts.routed_experts.w13_weight"
        padded = np.concatenate([wanted["model.embed_tokens.weight"][64:], np.zeros((56, 32), np.float32)])
        # Of the last rank: what it holds under a name.
        for to, mesh, ranks, name, part in (
            ("vllm", "tp=2", 2, experts, both(range(4), slice(8, 16))),
            ("vllm", "tp=2,ep=2", 2, experts, both((2, 3), slice(None))),
            ("sglang", "tp=2", 2, "model.embed_tokens.weight", padded),
            ("fsdp2", "fsdp=2", 2, "model.norm.weight", wanted["model.norm.weight"][16:]),
            ("megatron", "tp=2,pp=1,ep=2", 2, "decoder.layers.0.mlp.experts.linear_fc2.weight1", expert(0, 3, "down")),
            ("megatron", "tp=1,pp=2,dp=2", 4, "decoder.layers.0.mlp.experts.linear_fc2.weight3", wanted[last]),
            ("megatron", "tp=1,pp=2,dp=2,ep=2", 4, "decoder.layers.0.mlp.experts.linear_fc2.weight1", wanted[last]),
        ):
            with self.subTest(to=to, mesh=mesh):
                out = f"{to}-{mesh}"
                self.convert("hf-model", out, f"--to={to}", f"--mesh={mesh}")
                self.assertEqual(self.names(out), [f"rank-0000{rank}.safetensors" for rank in range(ranks)])
                np.testing.assert_array_equal(
                    load_file(self.folder / out / f"rank-0000{ranks - 1}.safetensors")[name], part
                )

    def test_quantized(self):
        self.save("hf-model", LLAMA, "llama3-8b")
        (self.folder / "hf-model/tokenizer.json").symlink_to("nowhere")
        self.cannot_convert("tokenizer.json' is a broken link", "hf-model out --copy=hf-model")
        self.assertFalse((self.folder / "out").exists())
        (self.folder / "hf-model/tokenizer.json").unlink()
        self.write("hf-model/tokenizer.json", "{}")
        self.convert(
            "hf-model out --quantize=block_fp8 --unquantized=*embed_tokens* --unquantized=lm_head* --dtype=bf16",
            "--copy=hf-model",
        )
        config = self.json("out/config.json")
        self.assertEqual(
            config["quantization_config"],
            {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": ["model.embed_tokens", "lm_head"],
            },
        )
        self.assertEqual((config["dtype"], (self.folder / "out/tokenizer.json").read_text()), ("bfloat16", "{}"))
        text = self.call("reshard-inspect out").stdout
        for line in (
            "mlp.down_proj.weight  fp8_e4m3 [32, 48]",
            "mlp.down_proj.weight_scale_inv  fp32 [1, 1]",
            "embed_tokens.weight  bf16",
            "norm.weight  bf16",
        ):
            self.assertIn(line, text)
        more = "hf-model more --quantize=block_fp8 --plan"
        self.assertNotIn("staging", self.convert(f"{more} --memory=4GiB").stdout)  # the compiler's default is less
        for memory, options, staging in (
            ("64MiB", "", 16 << 20),
            ("80000000", "", 20_000_000),
            ("1GB", "--to=vllm --mesh=tp=2", 250_000_000),
        ):
            self.converts(
                f"\noptions:\n  staging: {staging}  # --memory={memory}\n", f"{more} --memory={memory} {options}"
            )
        self.cannot_convert(
            "note: the staging limit is a quarter of --memory=256", "hf-model more --quantize=block_fp8 --memory=256"
        )
        self.assertNotIn("--memory", self.convert("hf-model more --dtype=fp17 --memory=64MiB", code=2).stderr)
        if FULL:
            self.converts(
                "config.json does not say that matrices are mxfp8", "hf-model mx --quantize=mxfp8 --ignore=*down*"
            )

    def test_quantized_sources(self):
        """They are recognized, and become what a job makes of them."""
        for name, (model, config, source) in QUANTIZED.items():
            with self.subTest(format=name):
                path = self.folder / name
                target = {"layout": "hf", "storage": "out", "convert": "rne"}
                self.synthesized(name, config, model, source | {"storage": "."}, target)
                (path / "made").rename(path / "published")
                run("reshard-exec", path / "p.rplan", f"--source={path / 'published'}", f"--target={path / 'expected'}")
                options, prefix = [f"--config={path / 'config.json'}"], ""
                if "multimodal" in name:
                    options, prefix = [*options, f"--model={model}"], "language_model."
                    self.add_vision(path / "published")
                    self.cannot_convert(
                        "vision_tower.patch_embed.proj.weight", path / "published", path / "found", *options
                    )
                    options.append("--allow=extra")
                self.converts(
                    f"layouts: {source['layout']} to hf\nquantized: in "
                    f"{name.split()[0]}, except for {prefix}lm_head.weight, {prefix}model.embed_tokens.weight, "
                    f"{prefix}model.layers.",
                    path / "published",
                    path / "found",
                    *options,
                )
                self.assertRegex(run("reshard-digest", path / "expected", path / "found").stdout, "^equal: ")
                self.assertEqual(
                    self.json(f"{name}/found/config.json"),
                    {key: value for key, value in config.items() if key != "quantization_config"}
                    | {"dtype" if "dtype" in config else "torch_dtype": "bfloat16"},
                )
                if FULL:
                    self.convert(path / "published", path / "megatron", "--to=megatron", *{*options, "--allow=extra"})
        self.refuse_scales(self.folder / "block_fp8")

    def add_vision(self, folder: Path) -> None:
        """A second file, with a tensor of a vision tower."""
        save_file({"vision_tower.patch_embed.proj.weight": np.ones((4, 3), np.float32)}, folder / "vision.safetensors")
        (folder / "model.safetensors").rename(folder / "language.safetensors")
        names = {
            name: f"{part}.safetensors"
            for part in ("language", "vision")
            for name in self.listing(folder / f"{part}.safetensors")["tensors"]
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))

    def refuse_scales(self, folder: Path) -> None:
        """Scales that are missing, of other blocks or under other names: changes of the file's header
        that keep its length."""
        path, name = folder / "published/model.safetensors", "model.layers.0.self_attn.o_proj.weight"
        contents = path.read_bytes()
        begin = contents.index(f'"{name}_scale_inv"'.encode())
        shape = contents.index(b"[2,1]", begin)
        cases = (
            (
                contents.replace(f"{name}_scale_inv".encode(), f"{name}_scale_xyz".encode()),
                f"'model.layers.1.self_attn.o_proj.weight' has scales, but '{name}' has none",
            ),
            (contents[:shape] + b"[1,2]" + contents[shape + 5 :], f"'{name}_scale_inv' is [1, 2], expected [2, 1]"),
            (
                contents.replace(b"_scale_inv", b"_scale_xyz"),
                "has fp8_e4m3 without scales of a known form: model.layers.",
            ),
        )
        for changed, error in cases:
            path.write_bytes(changed)
            self.cannot_convert(
                error, folder / "published", "none", f"--config={folder / 'config.json'}", "--allow=extra"
            )

    @unittest.skipUnless(FULL, "RESHARD_FULL=1")
    def test_two_dtypes(self):
        wanted = self.save("hf-model", LLAMA, "llama3-8b")
        wanted["model.norm.weight"] = np.arange(32, dtype=np.float16)  # two bytes: exact in fp32
        self.save_checkpoint("hf-model", wanted)
        self.convert("hf-model out")
        self.check("out", wanted | {"model.norm.weight": wanted["model.norm.weight"].astype(np.float32)})
        for name in wanted:
            wanted[name] = wanted[name].astype(np.float32 if name == "model.norm.weight" else np.float16)
        self.save_checkpoint("hf-model", wanted)
        self.cannot_convert(
            "note: the floats of 'hf-model' are fp16 and fp32: --dtype=DTYPE rounds them to one dtype", "hf-model none"
        )
        self.convert("hf-model rounded --dtype=fp16")
        self.check("rounded", {name: array.astype(np.float16) for name, array in wanted.items()})

    @unittest.skipUnless(FULL, "RESHARD_FULL=1")
    def test_the_job_of_a_model(self):
        self.save("hf-model", LLAMA, "llama3-8b")
        self.write("job.yaml", self.convert("hf-model out --to=fsdp2 --plan").stdout)
        self.call("reshard-compile job.yaml -o p.rplan")
        self.convert("hf-model out --to=fsdp2")
        self.call("reshard-exec p.rplan --target=again")
        self.equal_digests("out", "again", 21)

    def test_random_configs(self):
        """A config.json with other values, of other types, without some keys: it is converted, or one error says why
        not, in bounded time."""
        self.save("hf-model", LLAMA, "llama3-8b")
        random = Random(5)
        values = (None, True, -1, 0, 1, 3, 2**31, 2**63, 10**30, 1.5, float("nan"), "", "x", "\x1b[31m", "\ud800")
        values += ([], [1], {}, {"a": []}, [[]], "fp16", "bfloat16")
        every = ("", "--to=megatron", "--model=llama3-8b --source-layout=hf", "--to=vllm --mesh=tp=2", "--dtype=bf16")
        for number in range(200 if FULL else 20):
            config = dict(LLAMA)
            keys = sorted([*config, "rope_scaling", "quantization_config", "text_config", "layer_types"])
            for key in random.sample(keys, random.randint(1, 2)):
                if random.random() < 0.2:
                    config.pop(key, None)
                else:
                    config[key] = random.choice(values)
            options = random.choice(every)
            with self.subTest(number=number, config=config, options=options):
                done = self.convert(f"hf-model out --config={self.config(config)} {options} --plan", code=None)
                self.assertIn(done.returncode, (0, 2), done.stderr)
                if done.returncode:
                    self.assertTrue(done.stderr.startswith("reshard-convert: error: "), done.stderr)
                    self.assertNotRegex(done.stderr.replace("\n", ""), r"[\x00-\x1f\x7f-\x9f]")

    def test_wrong_configs(self):
        """What does not fit is refused, with --allow=extra too."""
        self.save("hf-model", LLAMA, "llama3-8b")
        cases = (
            (
                LLAMA | {"architectures": ["BertModel"], "model_type": "bert"},
                "the library has no model for 'BertModel' or 'bert'; known: DeepseekV32ForCausalLM,",
            ),
            ({}, "the library has no model for a config without architectures and model_type"),
            (
                LLAMA | {"num_hidden_layers": 1},
                "has 9 tensors that layout hf of model llama3-405b with the numbers of ",
            ),
            (
                LLAMA | {"num_hidden_layers": 3},
                "\n  hf: 9 of 30 names are missing: model.layers.2.input_layernorm.weight",
            ),
            (
                LLAMA | {"num_key_value_heads": 4},
                "\n  hf: 'model.layers.0.self_attn.k_proj.weight' is [16, 32], expected [32, 32], and 3 more",
            ),
            (EXPERTS, "\n  hf: 30 of 45 names are missing"),
            (
                LLAMA | {"architectures": ["Qwen3ForCausalLM"]},
                "\n  hf: 4 of 25 names are missing: model.layers.0.self_attn.q_norm.weight",
            ),
            (LLAMA | {"vocab_size": None}, "expected an integer, a boolean or an array"),
        )
        for values, error in cases if FULL else cases[::2]:
            with self.subTest(error=error):
                self.cannot_convert(error, f"hf-model out --to=megatron --config={self.config(values)} --allow=extra")
                self.assertFalse((self.folder / "out").exists())
        self.cannot_convert("is [72, 32], expected [151936, 1024]", "hf-model out --model=qwen3-0.6b")
        self.cannot_convert("unknown layout 'none'", "hf-model out --source-layout=none")
        self.cannot_convert("unknown layout 'none'", "hf-model out --target-layout=none")

    def test_ambiguous(self):
        """One name and one shape, but transposed in one of the layouts."""
        (self.folder / "model.yaml").write_text("""
dtype: fp32
tensors: {w: [4, 4]}
layouts:
  hf: {params: same}
  fsdp2: {params: {w: {holds: w, permute: [1, 0]}}}
  out: {params: {v: {holds: w}}}
""")
        array = np.arange(16, dtype=np.float32).reshape(4, 4)
        self.save_checkpoint("hf", {"w": array})
        self.cannot_convert(
            "the tensors fit several models or layouts, which differ: model in layout hf, model in "
            "layout fsdp2; --model=NAME or --source-layout=NAME chooses one",
            "hf out --model=model.yaml --target-layout=out",
        )
        self.convert("hf out --model=model.yaml --target-layout=out --source-layout=fsdp2")
        self.check("out", {"v": array.T})

    @unittest.skipUnless(FULL, "RESHARD_FULL=1")
    def test_the_library(self):
        """Every model in every layout of checkpoints is recognized by the names, the shapes and its config."""
        importable(self.module)
        from reshard import convert, recognition

        recognized = 0
        for name, path, _ in recognition._library():
            config = path.with_name(name + ".config.json")
            arguments = [str(self.folder), str(self.folder / "out"), "--to=hf", f"--config={config}"]
            options = argparse.Namespace(**vars(convert._parser().parse_args(arguments)))
            for layout, switches in recognition._SOURCES:
                try:
                    shapes = recognition.model_named(name, None).holds(layout, switches)
                except convert.CompileError:
                    continue  # the model has no such layout
                if name == "qwen3-vl-30b-a3b" and switches:
                    continue  # its fsdp2 is that of transformers 5
                with self.subTest(model=name, layout=layout):
                    found = convert._conversion(
                        options,
                        {"tensors": {each: {"dtype": "bf16", "shape": shape} for each, shape in shapes.items()}},
                    )
                    self.assertEqual(len(found.converted), len(shapes))
                    recognized += 1
        self.assertGreater(recognized, 215)


if __name__ == "__main__":
    unittest.main()
