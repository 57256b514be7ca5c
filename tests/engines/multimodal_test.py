# SPDX-License-Identifier: Apache-2.0
"""Multimodal releases: the library's layouts against vLLM's, SGLang's and transformers' own classes, recorded without
memory, and against the bytes that vLLM's loader puts into real tensors.

    scripts/trainers_env.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/engines/multimodal_test.py"""

import contextlib
import dataclasses
import json
import re
import unittest

import torch

import support
from documents import trainers
from vllm_loaders_test import moved

trainers()
TEXT = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "intermediate_size": 512,
}
ROPE = {
    "rope_theta": 1000000,
    "rope_scaling": {"rope_type": "default", "mrope_section": [8, 4, 4], "mrope_interleaved": True},
}
YARN = {
    "type": "yarn",
    "factor": 32.0,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
QWEN_VISION = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "out_hidden_size": 256,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
#: config.json of small models, by the library's name.
CONFIGS = {
    "qwen3-vl-8b": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "vision_config": QWEN_VISION,
        "text_config": TEXT | ROPE | {"model_type": "qwen3_vl_text", "hidden_act": "silu"},
    },
    "qwen3-vl-30b-a3b": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "vision_config": QWEN_VISION | {"model_type": "qwen3_vl_moe"},
        "text_config": TEXT
        | ROPE
        | {
            "model_type": "qwen3_vl_moe_text",
            "hidden_act": "silu",
            "moe_intermediate_size": 96,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
        },
    },
    "gemma-3-27b": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": True,
        "vision_config": VISION | {"model_type": "siglip_vision_model"},
        "text_config": TEXT
        | {
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 32,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "pad_token_id": 0,
        },
    },
    "ministral-3-8b": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "spatial_merge_size": 2,
        "tie_word_embeddings": False,
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 16},
        "text_config": TEXT
        | {"model_type": "ministral3", "hidden_act": "silu", "sliding_window": None, "pad_token_id": 0},
    },
    "gemma-4-31b": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "tie_word_embeddings": True,
        "audio_config": None,
        "vision_config": VISION
        | {"model_type": "gemma4_vision", "num_key_value_heads": 4, "head_dim": 16, "position_embedding_size": 64},
        "text_config": support.CONFIGS["gemma-4-31b"],
    },
    "llama4-scout": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "tie_word_embeddings": False,
        "vision_config": VISION
        | {
            "model_type": "llama4_vision_model",
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
        "text_config": support.CONFIGS["llama4-scout"] | {"model_type": "llama4_text"},
    },
    "kimi-k2.5": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "tie_word_embeddings": False,
        "projection_hidden_size": 64,
        "vision_config": VISION
        | {
            "model_type": "kimi_k25_vision",
            "vt_hidden_size": 64,
            "vt_num_hidden_layers": 2,
            "vt_num_attention_heads": 4,
            "vt_intermediate_size": 128,
        },
        "text_config": support.CASES["deepseek-v3"][1]
        | {"model_type": "deepseek_v3", "num_nextn_predict_layers": 0, "rope_theta": 50000, "rope_scaling": YARN},
    },
}
#: Models of which the library describes the language model alone, and the name under which vLLM's module has it.
LANGUAGE = {"gemma-3-27b", "gemma-4-31b", "kimi-k2.5", "llama4-scout", "ministral-3-8b"}
#: The library has no layout of SGLang for these.
WITHOUT_SGLANG = {"gemma-4-31b", "llama4-scout"}
PREFIX = "language_model."


class Multimodal(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = support.module_folder(cls)

    @staticmethod
    def suffix(name):
        """The end of the names of the layouts."""
        return "-multimodal" if name in LANGUAGE else ""

    def model(self, name):
        """(folder with config.json, the library's model of it, {name: (dtype, shape)} of the checkpoint as far as the
        library describes it)."""
        from reshard_record.compiled import compile_layout

        at = self.folder / name
        at.mkdir(exist_ok=True)
        config = {"tie_word_embeddings": False, "torch_dtype": "bfloat16"} | CONFIGS[name]
        (at / "config.json").write_text(json.dumps(config))
        (at / "text.json").write_text(
            json.dumps(config["text_config"] | {"tie_word_embeddings": config["tie_word_embeddings"]})
        )
        numbers = "text.json" if name in LANGUAGE else "config.json"
        (at / "model.yaml").write_text(f"extend: {support.MODELS / (name + '.yaml')}\nconfig: {numbers}\n")
        library = f"extend: {support.MODELS / (name + '.yaml')}\nconfig: {at / numbers}\n"
        params = compile_layout(library, "hf" + self.suffix(name), "{}").target.params(0)
        tied = config["tie_word_embeddings"]
        return (
            at,
            library,
            {
                tensor: (param.dtype, param.shape)
                for tensor, param in params.items()
                if not (tied and tensor.endswith("lm_head.weight"))
            },
        )

    def engine(self, name, meshes):
        """Compares the library's layouts with an engine's loader."""
        from reshard.integrations.vllm import OWN_BUFFERS
        from reshard_record import record, sglang, vllm
        from reshard_record.compiled import compare, compile_layout
        from reshard_record.engine import Engine, params_of

        count, recordings = 0, {"vllm": vllm, "sglang": sglang}[name].recordings
        for model in sorted(set(CONFIGS) - (WITHOUT_SGLANG if name == "sglang" else set())):
            at, library, checkpoint = self.model(model)
            for tp, pp, experts in meshes + ([(2, 1, True)] if "a3b" in model else []):
                if pp > 1 and (name, model) == ("sglang", "gemma-3-27b"):
                    continue  # SGLang's class has no pipeline stages
                with self.subTest(engine=name, model=model, tp=tp, pp=pp, ep=experts):
                    shape = Engine(tp, pp, experts)
                    if (
                        model == "llama4-scout"
                    ):  # its vision tower computes values in its constructor, which needs memory
                        found = [
                            record(
                                load=module.load_weights,
                                params=params_of(module, OWN_BUFFERS),
                                checkpoint=checkpoint,
                                mesh=shape.mesh,
                                rank=rank,
                            )
                            for rank, module in vllm.modules(at, shape, contextlib.nullcontext)
                        ]
                    else:
                        found = list(recordings(at, shape, checkpoint))
                    if model in LANGUAGE:
                        found = [
                            dataclasses.replace(
                                one,
                                params={
                                    param: value for param, value in one.params.items() if param.startswith(PREFIX)
                                },
                            )
                            for one in found
                        ]
                    self.assertGreater(min(len(one.params) for one in found), 10)
                    mesh = f"{{tp: {tp}, pp: {pp}, views: [{{{'ep' if experts else 'etp'}: {tp}, pp: {pp}}}]}}"
                    lines = compare(
                        compile_layout(library, name + self.suffix(model), mesh, source="hf" + self.suffix(model)),
                        found,
                    )
                    if pp > 1:  # vLLM creates some params on stages that do not use them (docs/library.md)
                        lines = [
                            line
                            for line in lines
                            if not re.search(r"(embed_tokens|\.norm|lm_head)\.weight: only in the recording", line)
                        ]
                    self.assertEqual(lines[:6], [])
                    count += sum(len(one.params) for one in found)
        print(f"{name}: {count} params in all models")

    def test_vllm(self):
        self.engine("vllm", [(1, 1, False), (2, 1, False), (4, 1, False), (1, 2, False)])

    def test_sglang(self):
        self.engine("sglang", [(1, 1, False), (2, 1, False), (1, 2, False)])

    def test_transformers(self):
        """The layout fsdp2 on one rank is the module that from_pretrained makes of the checkpoint."""
        from reshard_record import transformers as live
        from reshard_record.compiled import compare, compile_layout

        for name in sorted(set(CONFIGS) - LANGUAGE):
            with self.subTest(model=name):
                at, library, checkpoint = self.model(name)
                recorded = live.recording(at, checkpoint=checkpoint)
                self.assertEqual(compare(compile_layout(library, "fsdp2", "{fsdp: 1}"), [recorded])[:6], [])

    def test_saved(self):
        """What transformers saves has the names and shapes of the layout hf; with experts, those of the live module."""
        import transformers
        from safetensors import safe_open

        from reshard_record.compiled import compile_layout

        for name in sorted(set(CONFIGS) - {"kimi-k2.5"}):  # transformers 5.19 saves its layers as `blocks`
            with self.subTest(model=name):
                at, library, checkpoint = self.model(name)
                if "a3b" in name:
                    checkpoint = {
                        tensor: (param.dtype, param.shape)
                        for tensor, param in compile_layout(library, "fsdp2", "{fsdp: 1}").target.params(0).items()
                    }
                config = transformers.AutoConfig.from_pretrained(at)
                transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(
                    at / "saved"
                )
                with safe_open(at / "saved/model.safetensors", "pt") as file:
                    found = {
                        tensor: (file.get_slice(tensor).get_dtype(), tuple(file.get_slice(tensor).get_shape()))
                        for tensor in file.keys()
                    }
                if name in LANGUAGE:
                    found = {
                        tensor: value for tensor, value in found.items() if tensor in checkpoint or "language" in tensor
                    }
                self.assertEqual(sorted(set(found) ^ set(checkpoint))[:8], [])
                self.assertEqual(
                    {tensor: shape for tensor, (_, shape) in found.items()},
                    {tensor: shape for tensor, (_, shape) in checkpoint.items()},
                )

    def test_bytes(self):
        """vLLM's loader puts these bytes into real tensors."""
        import reshard
        from reshard_record import vllm
        from reshard_record.engine import Engine

        for name in sorted(set(CONFIGS) - LANGUAGE):
            with self.subTest(model=name):
                at, _, checkpoint = self.model(name)
                (at / "job.yaml").write_text(
                    "version: 1\nmodel: model.yaml\nsource: {layout: hf, mesh: {}}\n"
                    "target: {layout: vllm, mesh: {tp: 2, pp: 1, views: [{etp: 2, pp: 1}]}, ranks: 1..2}\n"
                )
                tensors = {tensor: torch.randn(shape).to(torch.bfloat16) for tensor, (_, shape) in checkpoint.items()}
                found = moved(reshard.compile(at / "job.yaml"), tensors)
                for rank, module in vllm.modules(at, Engine(2), contextlib.nullcontext):
                    with torch.no_grad():
                        module.load_weights((tensor, value.clone()) for tensor, value in tensors.items())
                    loaded = dict(module.named_parameters())
                    self.assertEqual(sorted(loaded), sorted(found[rank]))
                    self.assertEqual(
                        [param for param in loaded if not torch.equal(loaded[param], found[rank][param])], []
                    )


if __name__ == "__main__":
    unittest.main()
