# SPDX-License-Identifier: Apache-2.0
"""vLLM's own model classes in pipeline stages: each stage has the params of the layout `vllm`, with the same names and
shapes. The classes are built on PyTorch's meta device, one stage after the other, with fake process groups.

    scripts/frameworks.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/frameworks/stages_test.py"""

import json
import sys
import tempfile
import types
import unittest
from pathlib import Path

import library
from commands import BIN
from layout_text import endpoints

try:
    import torch
    import vllm.distributed.parallel_state as parallel_state
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    MISSING = ""
except ImportError as error:
    MISSING = f"{error}: run scripts/frameworks.sh and build/frameworks/env.sh"

BASE = {
    "hidden_size": 256,
    "num_hidden_layers": 7,
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
    "intermediate_size": 512,
    "hidden_act": "silu",
    "rope_theta": 10000,
}
ROUTED = {"moe_intermediate_size": 128, "num_experts_per_tok": 2, "norm_topk_prob": True}
SHARED = {
    **ROUTED,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}
#: config.json of cut-down models, by the library's name.
CONFIGS = {
    "llama3-8b": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2.5-7b": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3-0.6b": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **ROUTED,
        "num_experts": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "glm-4.5": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **SHARED,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 1,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **SHARED,
        "first_k_dense_replace": 2,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "num_key_value_heads": 8,
    },
    "gpt-oss-120b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "attention_bias": True,
        "rope_theta": 150000,
        "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
    },
    "nemotron-h-8b": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M*M-M",
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
    },
}
#: Created on stages that do not use them (docs/library.md).
UNUSED = (
    "model.embed_tokens.weight",
    "model.embedding.weight",
    "model.norm.weight",
    "model.norm_f.weight",
    "lm_head.weight",
)
STAGES = (2, 3, 4)


def group(rank, size):
    """The attributes of a process group that the constructors read."""
    ranks = types.SimpleNamespace(rank=lambda: rank, size=lambda: size)
    return types.SimpleNamespace(
        rank_in_group=rank,
        world_size=size,
        is_first_rank=rank == 0,
        is_last_rank=rank == size - 1,
        rank=rank,
        local_rank=0,
        ranks=list(range(size)),
        device_group=ranks,
        cpu_group=ranks,
        unique_name="stand-in",
        device=torch.device("cpu"),
    )


def live(config, stage, stages):
    """{name: shape} of a stage."""
    for name in ("_WORLD", "_TP", "_DP", "_EP", "_PCP", "_DCP", "_EPLB"):
        if hasattr(parallel_state, name):
            setattr(parallel_state, name, group(0, 1))
    parallel_state._PP = group(stage, stages)
    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config), torch.device("meta"):
        return {name: list(param.shape) for name, param in initialize_model(config).named_parameters()}


@unittest.skipIf(MISSING, MISSING)
class Stages(unittest.TestCase):
    def test_names_and_shapes(self):
        count = 0
        for model, more in CONFIGS.items():
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "config.json").write_text(json.dumps(BASE | more))
                config = EngineArgs(
                    model=folder, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16"
                ).create_engine_config()
                pools = ", ".join(f"{{layout: vllm, mesh: {{pp: {stages}}}}}" for stages in STAGES)
                plan = endpoints(
                    BIN,
                    library.job(model, "{layout: hf, mesh: {}}", f"[{pools}]"),
                    folder,
                    [f"model.config={folder}/config.json"],
                )
                for number, stages in enumerate(STAGES):
                    for stage in range(stages):
                        with self.subTest(model=model, stages=stages, stage=stage):
                            found = live(config, stage, stages)
                            wanted = {
                                name: shape for name, (shape, _) in plan[f"target.{number}"].params(stage).items()
                            }
                            self.assertEqual(sorted(set(wanted) - set(found))[:4], [], "vLLM lacks these")
                            other = [name for name in found if name not in wanted and name not in UNUSED]
                            self.assertEqual(other[:4], [], "the layout lacks these")
                            self.assertEqual({name: found[name] for name in wanted if found[name] != wanted[name]}, {})
                            count += len(wanted)
        self.assertGreater(count, 1000)
        print(f"{count} params of {len(CONFIGS)} models")


if __name__ == "__main__":
    if MISSING:
        print(f"SKIPPED: {MISSING}", file=sys.stderr)
    unittest.main()
