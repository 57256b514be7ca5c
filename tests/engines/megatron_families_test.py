# SPDX-License-Identifier: Apache-2.0
"""Checkpoints (torch_dist) of small Megatron-Core models of each family of the library, with the specs of Transformer
Engine, whose modules megatron_modules.py has for the CPU. A model of two tensor parallel ranks and two stages,
whose experts are on two ranks of each stage, is saved; the checkpoint is converted to Hugging Face, where
transformers' model has the logits of the Megatron model; it is converted back, and `dist_checkpointing.load` reads
it into models of other parallelism with the bits of its own checkpoint. With `singleton_local_shards` the files of
Hugging Face have the same values.

    scripts/frameworks.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/engines/megatron_families_test.py"""

import json
import unittest

import torch
from safetensors.torch import load_file, save_file

import ranks
from megatron_test import MISSING, VOCABULARY, Model, stage
from support import MODELS

if not MISSING:
    import megatron_modules

    from megatron.core import parallel_state
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
    from megatron.core.models.mamba.mamba_model import MambaModel
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from megatron_checkpoint_test import on_rank_0, through, transformers_logits

EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
}
SIGMOID = {
    **EXPERTS,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 24,
    "moe_layer_freq": [0, 1, 1, 1],
    "mtp_num_layers": 1,
}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "qk_layernorm": True,
    "rope_type": "rope",
    "num_query_groups": 4,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
}
LINEAR = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "attention_output_gate": True,
    "layernorm_zero_centered_gamma": True,
    "qk_layernorm": True,
    "moe_shared_expert_gate": True,
    "moe_shared_expert_intermediate_size": 24,
    "mtp_num_layers": 1,
}
#: The common part of a config.json.
CONFIG = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000},
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "attention_bias": False,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 24,
}
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}


class Family(Model):
    """A model of a family: its settings in Megatron-Core beside the common ones, and its
    config.json for transformers."""

    model = model_type = ""
    megatron, config, more = {}, {}, {}  # more: further arguments of GPTModel
    left = ()  # globs of names, in Megatron-Core and in Hugging Face, whose values a function computes

    def configured(self, experts):
        latent = "q_lora_rank" in self.megatron
        return (MLATransformerConfig if latent else TransformerConfig)(**self.settings(experts) | self.megatron)

    def build(self, experts, tied, vocabulary):
        module = self.stage(self.configured(experts), vocabulary, tied).eval()
        with torch.no_grad():  # norms and biases are constant at first
            for param in module.parameters():
                if param.dim() == 1:
                    param.add_(0.1 * torch.randn(param.shape))
        return module

    def stage(self, config, vocabulary, tied):
        if config.experimental_attention_variant:
            spec = variants.get_transformer_block_with_experimental_attention_variant_spec(config)
        else:
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization="RMSNorm")
        ahead = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True) if config.mtp_num_layers else None
        return stage(config, vocabulary, tied, spec, mtp_block_spec=ahead, **self.more)

    def forward(self, labels=None):
        """The logits of this rank, or None before the last stage. Megatron-Core computes those of multi-token
        prediction, `ahead`, only with the loss."""
        self.use()
        self.ahead = None
        if not self.megatron.get("mtp_num_layers") or not parallel_state.is_pipeline_last_stage():
            return super().forward(labels)
        found = []
        with self.module.output_layer.register_forward_hook(
            lambda _, __, out: found.append(out[0].transpose(0, 1).clone())
        ):  # the loss overwrites it
            super().forward(self.tokens())
        self.ahead, logits = found
        return logits

    def complete(self, folder, other):
        """Sets the values that the files lack, in those of Hugging Face and in another model."""

    @classmethod
    def json(cls, **more):
        import transformers

        config = json.loads(
            transformers.AutoConfig.for_model(cls.model_type, **CONFIG | cls.config).to_json_string(use_diff=False)
        )
        return json.dumps(
            config
            | more
            | {"model_type": cls.model_type}
            | {key: value for key, value in cls.config.items() if key not in config}
        )

    @classmethod
    def yaml(cls):
        return f"extend: {MODELS}/{cls.model}.yaml\nconfig: config.json\ndtype: fp32\n"


class Mixtral(Family):
    model, model_type = "mixtral-8x7b", "mixtral"
    megatron = {**EXPERTS, "moe_ffn_hidden_size": 48}
    config = {"num_local_experts": 4}


class Qwen3Moe(Family):
    model, model_type = "qwen3-30b-a3b", "qwen3_moe"
    megatron = {**EXPERTS, "qk_layernorm": True}
    config = {"num_experts": 4, "decoder_sparse_step": 1}


class Glm(Family):
    model, model_type = "glm-4.5", "glm4_moe"
    megatron = {**SIGMOID, "qk_layernorm": True, "add_qkv_bias": True}
    more = {"rotary_percent": 0.5}
    config = {
        **ROUTED,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5},
    }


class DeepSeek(Family):
    model, model_type = "deepseek-v3", "deepseek_v3"
    megatron = {**SIGMOID, **LATENT}
    config = {
        **ROUTED,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_group": 2,
        "topk_group": 1,
        "rope_interleave": True,
    }


class GptOss(Family):
    model, model_type = "gpt-oss-120b", "gpt_oss"
    megatron = {
        **EXPERTS,
        "moe_ffn_hidden_size": 48,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "softmax_type": "learnable",
        "window_size": (3, 0),
        "window_attn_skip_freq": 2,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
    }
    config = {"num_local_experts": 4, "attention_bias": True, "sliding_window": 4}

    def settings(self, experts):
        return super().settings(experts) | {"activation_func": quick_gelu}


class Qwen3Next(Family):
    model, model_type = "qwen3-next-80b-a3b", "qwen3_next"
    megatron = {**EXPERTS, **LINEAR}
    more = {"rotary_percent": 0.25}
    left = ("*.out_norm.weight", "*.linear_attn.norm.weight")
    config = {
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "full_attention_interval": 4,
        "decoder_sparse_step": 1,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25},
    }

    def norms(self):
        """{layer: the norm of linear attention's output} of this rank."""
        return {
            module.layer_number - 1: module.out_norm.weight
            for _, module in self.module.named_modules()
            if hasattr(module, "out_norm")
        }

    def complete(self, folder, other):
        """transform `minus_one` of the layout."""
        every = [None] * 4
        torch.distributed.all_gather_object(every, {layer: value.detach() for layer, value in self.norms().items()})
        found = {layer: value for each in every for layer, value in each.items()}
        assert sorted(found) == [0, 1, 2]
        with torch.no_grad():
            for layer, value in other.norms().items():
                value.copy_(found[layer])
        if torch.distributed.get_rank() == 0:
            path = folder / "hf/model.safetensors"
            save_file(
                load_file(path)
                | {f"model.layers.{layer}.linear_attn.norm.weight": value + 1 for layer, value in found.items()},
                path,
            )


class NemotronH(Family):
    model, model_type = "nemotron-h-8b", "nemotron_h"
    megatron = {
        "mamba_state_dim": 8,
        "mamba_head_dim": 8,
        "mamba_num_groups": 2,
        "mamba_num_heads": 4,
        "use_mamba_mem_eff_path": False,
        "gated_linear_unit": False,
        "activation_func": squared_relu,
    }
    config = {
        "hybrid_override_pattern": "M-M*",
        "ssm_state_size": 8,
        "mamba_head_dim": 8,
        "mamba_num_heads": 4,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 4,
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": 1e-5,
        "expand": 1,
        "mlp_bias": False,
        "use_bias": False,
        "mamba_proj_bias": False,
        "use_conv_bias": True,
    }
    pattern = "M-M*"

    def stage(self, config, vocabulary, tied):
        return MambaModel(
            config,
            mamba_stack_spec,
            vocabulary,
            64,
            hybrid_override_pattern=self.pattern,
            position_embedding_type="none",
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=tied,
        )


class Gemma3(Family):
    """Megatron-Bridge's own provider of the model: it sets the layer spec, the embedding and the two rotary embeddings.
    Its window_size in 0.3.1 does not count a query's own key, as transformers' sliding_window does."""

    model, model_type = "gemma-3-27b", "gemma3_text"
    megatron = {
        "qk_layernorm": True,
        "interleaved_attn_pattern": (1, 1),
        "window_size": 3,
        "softmax_scale": 8**-0.5,
        "layernorm_epsilon": 1e-5,
        "bf16": False,
        "seq_length": 64,
    }
    config = {
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 4,
        "query_pre_attn_scalar": 8,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
            "full_attention": {"rope_type": "default", "rope_theta": 1000000},
        },
    }

    def configured(self, experts):
        provider = megatron_modules.bridge("models.gemma.gemma3_provider").Gemma3ModelProvider
        own = {
            "activation_func": provider.activation_func,
            "normalization": provider.normalization,
            "attention_backend": AttnBackend.auto,
        }
        return provider(**self.settings(experts) | own | self.megatron)

    def stage(self, config, vocabulary, tied):
        config.vocab_size = vocabulary
        config.finalize()
        return config.provide(parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage())


class VisionLanguage(MegatronModule):
    """The two modules of Megatron-Bridge's Qwen3VLModel, which cannot be imported without a GPU: on the first stage the
    vision tower of transformers, and the language model. Tokens of images are not computed."""

    def __init__(self, language_model, vision):
        super().__init__(config=language_model.config)
        self.language_model = language_model
        if vision is not None:
            self.vision_model = vision

    def forward(self, *args, **more):
        return self.language_model(*args, **more)

    def set_input_tensor(self, tensor):
        self.language_model.set_input_tensor(tensor)


class Qwen3Vl(Family):
    model, model_type = "qwen3-vl-8b", "qwen3_vl"
    megatron = {"qk_layernorm": True}
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
        "in_channels": 3,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
    }
    config = {
        "text_config": {
            **CONFIG,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000, "mrope_section": [2, 1, 1]},
        },
        "vision_config": vision,
    }

    def stage(self, config, vocabulary, tied):
        from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen

        vision = (
            qwen.Qwen3VLVisionModel(qwen.Qwen3VLVisionConfig(**self.vision))
            if parallel_state.is_pipeline_first_stage()
            else None
        )
        return VisionLanguage(super().stage(config, vocabulary, tied), vision)


class Nemotron3(NemotronH):
    model = "nemotron-3-nano-30b-a3b"
    megatron = {**NemotronH.megatron, **EXPERTS, **SIGMOID, "moe_layer_freq": 1, "mtp_num_layers": None}
    config = {
        **NemotronH.config,
        **ROUTED,
        "hybrid_override_pattern": "MEE*",
        "moe_shared_expert_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
    }
    pattern = "MEE*"


def check(rank, family, layout, **more):
    """Through Hugging Face and back; the logits of transformers' model and of Megatron-Core's in another parallelism.
    Returns the saved model and the folder."""
    experts, tied = family.megatron.get("num_moe_experts", 0), family.config.get("tie_word_embeddings", False)
    source = family(1, tp=2, pp=2, ep=2 if experts else 1, experts=experts, tied=tied)
    expected = source.logits()
    other, third = (
        family(2, pp=4, experts=experts, tied=tied),
        family(3, pp=2, ep=2, experts=experts) if experts else family(3, tied=tied),
    )
    folder = through(rank, family.yaml(), layout, source, [other, third], family.json(), family.left, **more)
    source.complete(folder, other)
    torch.testing.assert_close(other.logits(), expected, rtol=1e-5, atol=1e-5)
    found = on_rank_0(rank, lambda: transformers_logits(folder / "hf", family.json()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    return source, folder


def check_singleton(rank, family, recognized=True):
    """Not homogeneous, and with singleton_local_shards: the values of Hugging Face are the same, those of
    multi-token prediction too."""
    source, folder = check(rank, family, "megatron-checkpoint-layers")
    _, apart = check(rank, family, "megatron-checkpoint-singleton", recognized=recognized)
    left = (
        {"lm_head.weight"} if recognized and family.config.get("tie_word_embeddings") else set()
    )  # reshard-convert writes tied weights once

    def same():
        wanted = load_file(folder / "hf/model.safetensors")
        ranks.same(
            load_file(apart / "hf/model.safetensors"),
            {name: value for name, value in wanted.items() if name not in left},
        )

    on_rank_0(rank, same)
    return source, folder


def ahead(folder, config):
    """The logits of multi-token prediction, which transformers lacks: its decoder layers, with the weights of the
    checkpoint, as DeepSeek-V3's report joins them. `config`: with one layer more, the one of multi-token prediction."""
    import transformers

    (folder / "config.json").write_text(config)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    *layers, last = model.model.layers
    name, weights, tokens = f"model.layers.{len(layers)}.", load_file(folder / "model.safetensors"), Model.tokens()
    positions = torch.arange(tokens.shape[1]).unsqueeze(0)
    mask = torch.full((1, 1, tokens.shape[1], tokens.shape[1]), float("-inf")).triu(1)

    def norm(x, weight):
        return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-5)

    def apply(layer, x):
        return layer(
            x, attention_mask=mask, position_ids=positions, position_embeddings=model.model.rotary_emb(x, positions)
        )

    with torch.no_grad():
        hidden = model.model.embed_tokens(tokens)
        for layer in layers:
            hidden = apply(layer, hidden)
        following = tokens.roll(-1)
        following[0, -1] = 0
        both = [
            norm(model.model.embed_tokens(following), weights[name + "enorm.weight"]),
            norm(model.model.norm(hidden), weights[name + "hnorm.weight"]),
        ]
        hidden = apply(last, torch.cat(both, dim=-1) @ weights[name + "eh_proj.weight"].T)
        return model.lm_head(norm(hidden, weights[name + "shared_head.norm.weight"]))


def check_ahead(rank, family):
    source, folder = check_singleton(rank, family)
    expected = source.use().whole(source.ahead)
    found = on_rank_0(rank, lambda: ahead(folder / "hf", family.json(num_hidden_layers=5)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def mixtral(rank):
    check(rank, Mixtral, "megatron-checkpoint")
    check_singleton(rank, Mixtral)


def qwen3_moe(rank):
    check(rank, Qwen3Moe, "megatron-checkpoint")
    check_singleton(rank, Qwen3Moe)


def gemma_3(rank):
    check(rank, Gemma3, "megatron-checkpoint")
    check_singleton(rank, Gemma3)


def gpt_oss(rank):
    check(rank, GptOss, "megatron-checkpoint")
    check_singleton(rank, GptOss)


def glm(rank):
    check_ahead(rank, Glm)


def deepseek(rank):
    check_ahead(rank, DeepSeek)


def qwen3_next(rank):
    check_singleton(rank, Qwen3Next, recognized=False)  # it leaves params out


def qwen3_vl(rank):
    check(rank, Qwen3Vl, "megatron-checkpoint")
    check_singleton(rank, Qwen3Vl)


def nemotron_h(rank):
    check_singleton(rank, NemotronH, recognized=False)  # both layouts are the same


def nemotron_3(rank):
    check_singleton(rank, Nemotron3)


@unittest.skipIf(MISSING, MISSING)
class MegatronFamiliesTest(ranks.RanksTest):
    def test_families(self):
        self.ranks(4, mixtral, qwen3_moe, glm, deepseek, gemma_3, gpt_oss, qwen3_next, qwen3_vl, nemotron_h, nemotron_3)


if __name__ == "__main__":
    unittest.main()
