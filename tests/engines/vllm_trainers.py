# SPDX-License-Identifier: Apache-2.0
"""Trainers of a small model whose ranks are processes of torch.distributed: transformers (plain, or FSDP2 on several
ranks) and Megatron-Core (tensor parallel). All ranks call each method."""

import json
import re

import torch
from safetensors.torch import load_file


class FSDP2:
    """A module of transformers with the weights of checkpoint A, sharded by FSDP2 if there are several ranks."""

    def __init__(self, at, rank, ranks):
        from transformers import AutoModelForCausalLM

        torch.manual_seed(rank)  # each rank has its own batches
        self.rank = rank
        self.source = f"{{layout: fsdp2, mesh: {{fsdp: {ranks}}}}}"
        self.whole = "{layout: fsdp2, mesh: {}}"  # the layout of ``gathered``
        self.module = AutoModelForCausalLM.from_pretrained(at / "A", dtype=torch.bfloat16)
        if ranks > 1:
            from torch.distributed.fsdp import fully_shard

            mesh = torch.distributed.init_device_mesh("cpu", (ranks,))
            for layer in self.module.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.module, mesh=mesh)

    def backward(self, tokens):
        self.module(input_ids=tokens, labels=tokens).loss.backward()

    def gathered(self):
        """Whole tensors by name, as PyTorch gathers them."""
        return {
            name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for name, tensor in self.module.state_dict().items()
        }


class Megatron:
    """A GPTModel of Megatron-Core, tensor parallel over all ranks, with the weights of checkpoint A. For Qwen3."""

    def __init__(self, at, rank, ranks):
        import megatron_cpu  # noqa: F401

        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        torch.manual_seed(0)  # all ranks have the same batches
        self.at, self.rank, self.ranks = at, rank, ranks
        self.source = f"{{layout: megatron-local, mesh: {{tp: {ranks}}}}}"
        self.whole = "{layout: hf, mesh: {}}"
        self.numbers = numbers = json.loads((at / "config.json").read_text())
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks, create_gloo_process_groups=False)
        config = TransformerConfig(
            num_layers=numbers["num_hidden_layers"],
            hidden_size=numbers["hidden_size"],
            num_attention_heads=numbers["num_attention_heads"],
            num_query_groups=numbers["num_key_value_heads"],
            kv_channels=numbers["head_dim"],
            ffn_hidden_size=numbers["intermediate_size"],
            layernorm_epsilon=numbers["rms_norm_eps"],
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            normalization="RMSNorm",
            qk_layernorm=True,
            add_bias_linear=False,
            tensor_model_parallel_size=ranks,
            params_dtype=torch.bfloat16,
            use_cpu_initialization=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            apply_rope_fusion=False,
        )
        self.module = GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm"),
            -(-numbers["vocab_size"] // (128 * ranks)) * 128 * ranks,
            numbers["max_position_embeddings"],
            position_embedding_type="rope",
            rotary_base=numbers["rope_theta"],
            share_embeddings_and_output_weights=False,
        ).bfloat16()
        self._load()

    def _load(self):
        import reshard

        job = self.at / f"megatron.{self.rank}.yaml"
        job.write_text(f"version: 1\nmodel: model.yaml\nsource: {{layout: hf, mesh: {{}}}}\ntarget: {self.source}\n")
        plan, params = reshard.compile(job), {name: param.detach() for name, param in self.module.named_parameters()}
        with reshard.Executor(plan, threads=1) as executor:
            executor.bind(load_file(self.at / "A" / "model.safetensors"), "source", 0)
            for rank in range(self.ranks):
                executor.bind(
                    params if rank == self.rank else {name: torch.empty_like(param) for name, param in params.items()},
                    "target",
                    rank,
                )
            executor.prepare()
            executor.run(timeout=60)
        found = self.gathered()
        for name, tensor in load_file(self.at / "A" / "model.safetensors").items():
            assert torch.equal(found[name], tensor), name

    def _forward(self, tokens, labels=None):
        length = tokens.shape[1]
        mask = torch.ones(1, 1, length, length).tril() < 0.5
        return self.module(tokens, torch.arange(length).expand_as(tokens), mask, labels=labels)

    def backward(self, tokens):
        self._forward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).mean().backward()
        for name, param in self.module.named_parameters():
            if re.search("[qk]_layernorm", name):  # each rank has the gradient of its own heads
                torch.distributed.all_reduce(param.grad)

    def gathered(self):
        """Whole tensors by their names in a checkpoint: Megatron-Core's conventions, written out independently of the
        library's layouts."""
        kv_heads, width, found = self.numbers["num_key_value_heads"], self.numbers["head_dim"], {}
        heads = self.numbers["num_attention_heads"] // kv_heads
        for name, param in self.module.named_parameters():
            shards = [param.detach()]
            if getattr(param, "tensor_model_parallel", False):
                shards = [torch.empty_like(param) for _ in range(self.ranks)]
                torch.distributed.all_gather(shards, param.detach().contiguous())
            tensor = torch.cat(shards, dim=param.partition_dim) if len(shards) > 1 else shards[0]
            layer = "model.layers." + name.split(".")[2] if name.startswith("decoder.layers.") else ""
            if name.endswith("linear_qkv.weight"):
                groups = tensor.view(kv_heads, heads + 2, width, -1)
                for letter, part in zip(
                    "qkv", (groups[:, :heads], groups[:, heads], groups[:, heads + 1]), strict=True
                ):
                    found[f"{layer}.self_attn.{letter}_proj.weight"] = part.reshape(-1, tensor.shape[1])
            elif name.endswith("linear_fc1.weight"):
                for number, half in enumerate(("gate", "up")):
                    found[f"{layer}.mlp.{half}_proj.weight"] = torch.cat([shard.chunk(2)[number] for shard in shards])
            else:
                found[layer + _renamed(name)] = (
                    tensor[: self.numbers["vocab_size"]] if not layer and tensor.dim() == 2 else tensor
                )
        return found

    def distance(self, checkpoint):
        """The greatest difference between the module's logits and those of transformers with this checkpoint, relative
        to the greatest logit. Both compute in fp32; the module has other params afterwards."""
        from transformers import AutoModelForCausalLM

        tokens = torch.randint(0, self.numbers["vocab_size"], (2, 16))
        self.module.float()
        with torch.no_grad():
            mine = self._forward(tokens)
            shards = [torch.empty_like(mine) for _ in range(self.ranks)]
            torch.distributed.all_gather(shards, mine.contiguous())
            logits = torch.cat(shards, dim=-1)[..., : self.numbers["vocab_size"]]
            expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)(input_ids=tokens).logits
        return float((logits - expected).abs().max() / expected.abs().max())


def _renamed(name):
    """The name in a checkpoint, after that of the layer, of a param that a checkpoint has as it is."""
    outside = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    inside = {
        "input_layernorm": "input_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "self_attention.linear_proj": "self_attn.o_proj",
        "self_attention.q_layernorm": "self_attn.q_norm",
        "self_attention.k_layernorm": "self_attn.k_norm",
        "mlp.linear_fc2": "mlp.down_proj",
    }
    if name in outside:
        return outside[name]
    return "." + inside[name.split(".", 3)[3].removesuffix(".weight")] + ".weight"


KINDS = {"fsdp2": FSDP2, "megatron": Megatron}
