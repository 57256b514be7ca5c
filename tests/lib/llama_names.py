# SPDX-License-Identifier: Apache-2.0
"""A dense model without biases in the names of Hugging Face and of Megatron-Core's checkpoints, with PyTorch instead of
reshard. `heads`, `groups`: how many heads the queries and the keys have; `head`: their length."""

import torch


def split(weights, heads, groups, head):
    """The names and tensors of Hugging Face, of Megatron-Core's."""
    named = {
        "model.embed_tokens.weight": weights["embedding.word_embeddings.weight"],
        "lm_head.weight": weights["output_layer.weight"],
        "model.norm.weight": weights["decoder.final_layernorm.weight"],
    }
    for layer in range(len(weights["decoder.layers.mlp.linear_fc1.weight"])):
        part = {
            name.removeprefix("decoder.layers."): value[layer]
            for name, value in weights.items()
            if name.startswith("decoder.layers.")
        }
        qkv = part["self_attention.linear_qkv.weight"].view(groups, heads // groups + 2, head, -1)
        q, k, v = (rows.reshape(-1, rows.shape[-1]) for rows in torch.split(qkv, [heads // groups, 1, 1], dim=1))
        gate, up = part["mlp.linear_fc1.weight"].chunk(2)
        for name, value in (
            ("self_attn.q_proj", q),
            ("self_attn.k_proj", k),
            ("self_attn.v_proj", v),
            ("mlp.gate_proj", gate),
            ("mlp.up_proj", up),
            ("self_attn.o_proj", part["self_attention.linear_proj.weight"]),
            ("mlp.down_proj", part["mlp.linear_fc2.weight"]),
            ("input_layernorm", part["self_attention.linear_qkv.layer_norm_weight"]),
            ("post_attention_layernorm", part["mlp.linear_fc1.layer_norm_weight"]),
        ):
            named[f"model.layers.{layer}.{name}.weight"] = value.contiguous()
    return named


def joined(weights, heads, groups, head):
    """The names and tensors of Megatron-Core, of Hugging Face's."""
    count = sum(name.endswith("input_layernorm.weight") for name in weights)
    at = lambda name: [weights[f"model.layers.{layer}.{name}.weight"] for layer in range(count)]
    qkv = [
        torch.cat(
            [q.view(groups, heads // groups, head, -1), k.view(groups, 1, head, -1), v.view(groups, 1, head, -1)], dim=1
        ).flatten(0, 2)
        for q, k, v in zip(at("self_attn.q_proj"), at("self_attn.k_proj"), at("self_attn.v_proj"))
    ]
    stacked = {
        "self_attention.linear_qkv.weight": qkv,
        "mlp.linear_fc1.weight": [torch.cat(pair) for pair in zip(at("mlp.gate_proj"), at("mlp.up_proj"))],
        "self_attention.linear_proj.weight": at("self_attn.o_proj"),
        "mlp.linear_fc2.weight": at("mlp.down_proj"),
        "self_attention.linear_qkv.layer_norm_weight": at("input_layernorm"),
        "mlp.linear_fc1.layer_norm_weight": at("post_attention_layernorm"),
    }
    return {f"decoder.layers.{name}": torch.stack(values) for name, values in stacked.items()} | {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "output_layer.weight": weights["lm_head.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
