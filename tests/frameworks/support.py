# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests with real frameworks: the Python module of a build tree, small models of the library, and their
checkpoints.

    scripts/frameworks.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/frameworks/NAME_test.py
"""

import functools
import json
import shutil
import tempfile
from pathlib import Path

from commands import ROOT, shared_folder
from module import importable

MODELS = ROOT / "examples" / "models"

BASE = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Nemotron-H.
MAMBA = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "mamba_num_heads": 16,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 32,
    "conv_kernel": 4,
    "chunk_size": 128,
    "expand": 2,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "use_conv_bias": True,
    "use_bias": False,
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "attention_bias": False,
}
#: Linear attention with two value heads for each key head.
GATED_DELTA_NET = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "full_attention_interval": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "rope_theta": 1000000,
    "partial_rotary_factor": 0.25,
    "mtp_num_hidden_layers": 1,
}
#: Latent attention with an indexer.
SPARSE = {
    "num_key_value_heads": 8,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "topk_group": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 64,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "hidden_act": "silu",
}
#: config.json of cut-down models, by the library's name. 1000 words, so that the vocabulary is padded.
CONFIGS = {
    "qwen3-8b": BASE
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "intermediate_size": 512,
        "hidden_act": "silu",
        "rope_theta": 1000000,
    },
    "llama3-8b": BASE
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": 512,
        "hidden_act": "silu",
        "rope_theta": 500000,
    },
    "qwen2.5-7b": BASE
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "intermediate_size": 512,
        "hidden_act": "silu",
        "rope_theta": 1000000,
    },
    "gpt-oss-120b": BASE
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "attention_bias": True,
        "hidden_act": "silu",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_theta": 150000,
    },
    "glm-4.5": BASE
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 1,
        "hidden_act": "silu",
        "rope_theta": 1000000,
    },
    "nemotron-h-8b": BASE | MAMBA | {"intermediate_size": 512, "hybrid_override_pattern": "M-M*"},
    "nemotron-3-nano-30b-a3b": BASE
    | MAMBA
    | {
        "num_hidden_layers": 6,
        "intermediate_size": 128,
        "hybrid_override_pattern": "MEME*E",
        "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 256,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_groups": 4,
    },
    "qwen3-30b-a3b": BASE
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rope_theta": 1000000,
    },
    "qwen3-next-80b-a3b": BASE
    | GATED_DELTA_NET
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "shared_expert_intermediate_size": 128,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
    "qwen3.5-9b": BASE
    | GATED_DELTA_NET
    | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "intermediate_size": 512},
    "qwen3.5-35b-a3b": BASE
    | GATED_DELTA_NET
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_key_value_heads": 2,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "shared_expert_intermediate_size": 128,
        "num_experts_per_tok": 2,
    },
    "mixtral-8x7b": BASE
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "hidden_act": "silu",
    },
    "deepseek-v3": BASE
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "num_nextn_predict_layers": 1,
        "hidden_act": "silu",
    },
    "gemma-3-27b": BASE
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "gemma-4-31b": BASE
    | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "intermediate_size": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_global_key_value_heads": 2,
        "global_head_dim": 64,
        "attention_k_eq_v": True,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 64,
        "num_kv_shared_layers": 0,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "ministral-3-8b": BASE
    | {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "intermediate_size": 512,
        "hidden_act": "silu",
        "sliding_window": None,
        "pad_token_id": 0,
    },
    "olmo-3-7b": BASE
    | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "hidden_act": "silu",
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "pad_token_id": 0,
    },
    "phi-3.5-mini": BASE
    | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "sliding_window": None,
        "pad_token_id": 0,
        "original_max_position_embeddings": 512,
    },
    "seed-oss-36b": BASE
    | {
        "architectures": ["SeedOssForCausalLM"],
        "model_type": "seed_oss",
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "hidden_act": "silu",
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "pad_token_id": 0,
    },
    "llama4-scout": BASE
    | {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "intermediate_size": 128,
        "intermediate_size_mlp": 256,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "hidden_act": "silu",
        "rope_theta": 500000,
        "use_qk_norm": True,
        "pad_token_id": 0,
        "attention_chunk_size": 128,
    },
    "minimax-m2": BASE
    | {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "rotary_dim": 16,
        "num_mtp_modules": 3,
        "hidden_act": "silu",
        "rope_theta": 5000000,
    },
    "deepseek-v3.2": BASE
    | SPARSE
    | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "n_group": 2},
    "glm-5": BASE | SPARSE | {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "n_group": 1},
}

#: Models whose published checkpoint has multi-token prediction, which live modules and what they save have not.
MTP = {"deepseek-v3", "deepseek-v3.2", "glm-4.5", "glm-5", "qwen3-next-80b-a3b", "qwen3.5-9b", "qwen3.5-35b-a3b"}
#: Models whose published checkpoint has other names than what the class for the language model alone saves.
OTHERWISE_SAVED = {"qwen3.5-9b", "qwen3.5-35b-a3b"}

#: Models that vLLM refuses on a CPU: experts without a gate, and sparse attention.
WITHOUT_VLLM = {"nemotron-3-nano-30b-a3b", "deepseek-v3.2", "glm-5"}

#: Cases of the tests with vLLM: the library's name of the model, and the config.json of a small one.
CASES = {name: (name, config) for name, config in CONFIGS.items() if name not in WITHOUT_VLLM} | {
    "deepseek-v3": (
        "deepseek-v3",
        CONFIGS["deepseek-v3"]
        | {  # vLLM's MLA on CPU supports ranks of 320, 512 and 576 in all
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
        },
    ),
    "qwen3-tied": ("qwen3-0.6b", CONFIGS["qwen3-8b"] | {"tie_word_embeddings": True}),
    "llama-1-kv-head": ("llama3-8b", CONFIGS["llama3-8b"] | {"num_key_value_heads": 1}),
}


@functools.cache
def _own_module():
    """Makes the reshard module importable in this process, until its end: what a process has imported serves all its
    test classes. Returns the temporary folder, which is deleted with this function's result, and the path in it."""
    folder = tempfile.TemporaryDirectory()
    return folder, importable(folder.name)


def module_folder(case):
    """A temporary folder for all tests of a class, with the reshard module in folder/module: for setUpClass."""
    folder = shared_folder(case)
    (folder / "module").symlink_to(_own_module()[1])
    return folder


def model(folder, name, cases=None):
    """A folder with the config.json of a cut-down model and the library's model of it, model.yaml. cases: CASES, if
    `name` is one of them; None: `name` is one of CONFIGS."""
    library, config = cases[name] if cases else (name, CONFIGS[name])
    at = Path(folder) / name
    at.mkdir(parents=True)
    (at / "config.json").write_text(json.dumps(config))
    (at / "model.yaml").write_text(f"extend: {MODELS / (library + '.yaml')}\nconfig: config.json\n")
    return at


def config(name, path):
    """The transformers config of a config.json. Kimi K2's type is defined in its own code and uses DeepSeek-V3's
    classes."""
    import transformers

    values = json.loads(Path(path).read_text())
    if name == "kimi-k2":
        values["model_type"] = "deepseek_v3"
    return transformers.AutoConfig.for_model(**values)


def live(config, device="meta"):
    """The module of a config, in bf16."""
    import torch
    import transformers

    kind = (
        transformers.AutoModelForImageTextToText
        if hasattr(config, "vision_config")
        else transformers.AutoModelForCausalLM
    )
    with torch.device(device):
        return kind.from_config(config, dtype=torch.bfloat16)


def checkpoint(at, params, seed, copies=False):
    """Writes a checkpoint to `at` with random weights, large enough that each one affects generation. Returns the
    tensors. params: those of the layout `hf`. copies: of a tied model, whether the file has lm_head.weight, as some
    tools write it; save_pretrained does not."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, param in params.items():
        values = torch.randn(param.shape, generator=generator) * (
            0.5 if len(param.shape) < 2 else 2 * param.shape[-1] ** -0.5
        )
        if "norm" in name or name.endswith(".D"):
            values += 1
        elif name.endswith("A_log"):
            values += 1.5
        tensors[name] = values.to({"bf16": torch.bfloat16, "fp32": torch.float32}[param.dtype])
    at.mkdir()
    shutil.copy(at.parent / "config.json", at)
    tied = json.loads((at / "config.json").read_text()).get("tie_word_embeddings")
    if tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    saved = {name: tensor for name, tensor in tensors.items() if not tied or copies or name != "lm_head.weight"}
    save_file(saved, at / "model.safetensors", {"format": "pt"})
    return tensors
