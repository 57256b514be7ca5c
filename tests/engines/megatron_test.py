# SPDX-License-Identifier: Apache-2.0
"""reshard.integrations.megatron against live models of Megatron-Core on gloo ranks: swap() and ReshardCopyService,
between tensor, pipeline and expert parallelism. Elements are compared with Megatron-Core's own swap_model_weights,
experts with those of the other model, and logits with the source's after each of five optimizer steps.

    scripts/frameworks.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/engines/megatron_test.py"""

import contextlib
import logging
import unittest
import warnings

import ranks
from documents import examples
from ranks import refused, same

try:
    warnings.filterwarnings("ignore")
    import megatron_cpu  # noqa: F401

    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.resharding.refit import swap_model_weights
    from megatron.core.transformer.transformer_config import TransformerConfig

    class Stream:
        """A stream of Megatron-Core's own copy service, which it has for gloo too."""

        def wait_stream(self, _):
            pass

        synchronize = wait_event = record_event = lambda self, *_: None

    torch.cuda.Stream, torch.cuda.current_stream = Stream, Stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.cuda.synchronize = lambda *_: None

    MISSING = ranks.MISSING
    logging.disable(logging.WARNING)
except ImportError as error:
    MISSING = f"{error}: run scripts/frameworks.sh and build/frameworks/env.sh"

STEPS, VOCABULARY, LENGTH = 5, 128, 8


def stage(config, vocabulary, tied, spec=None, **more):
    """The GPTModel of this rank. spec: of its layers, without Transformer Engine by default."""
    return GPTModel(
        config,
        spec or get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm"),
        vocabulary,
        64,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=tied,
        **more,
    )


class Model:
    """A model in its own parallelism. Megatron-Core keeps process groups in globals; they are set while it is used."""

    def __init__(self, seed, tp=1, pp=1, ep=1, tied=False, experts=0, vocabulary=VOCABULARY):
        self.tp, self.pp, self.ep = tp, pp, ep
        key = (tp, pp, ep, bool(experts))
        if key not in Model.made:
            clear = dict.fromkeys(self.globals())
            vars(parallel_state).update(Model.initial or clear)
            Model.initial = Model.initial or self.globals()
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=1 if experts else None,
                create_gloo_process_groups=False,
            )
            Model.made[key] = self.globals()
        self.groups = Model.made[key]
        self.use()
        torch.manual_seed(seed)
        self.module = self.build(experts, tied, vocabulary)
        with torch.no_grad():  # each layer and each expert has values of its own
            for name, module in self.module.named_modules():
                if name.rpartition(".")[0].endswith("decoder.layers"):
                    for p in module.parameters():
                        p.mul_(1 + 0.01 * module.layer_number)
            for (_, expert, _), p in self.experts().items():
                p.mul_(1 + 0.1 * expert)
            for name, buffer in self.module.named_buffers():
                if name.endswith("expert_bias"):
                    buffer.copy_(torch.arange(len(buffer)) * 0.25 + seed)
        if tied and pp > 1 and (parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()):
            group = self.groups["_EMBEDDING_GROUP"]
            torch.distributed.broadcast(
                self.module.shared_embedding_or_output_weight().data,
                torch.distributed.get_process_group_ranks(group)[0],
                group=group,
            )

    def settings(self, experts):
        """Settings of Megatron-Core's configuration that models of every kind have."""
        return {
            "num_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 8,
            "ffn_hidden_size": 48,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "normalization": "RMSNorm",
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": 1 if experts else None,
            "pipeline_dtype": torch.float32,
            "params_dtype": torch.float32,
            "use_cpu_initialization": True,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "gradient_accumulation_fusion": False,
            "add_bias_linear": False,
        }

    def build(self, experts, tied, vocabulary):
        """The stage of this rank: Qwen2's architecture, or experts with a bias of the router."""
        more = (
            {
                "num_moe_experts": experts,
                "moe_ffn_hidden_size": 24,
                "moe_router_topk": 2,
                "moe_router_enable_expert_bias": True,
                "moe_router_score_function": "sigmoid",
            }
            if experts
            else {"add_qkv_bias": True}
        )
        config = TransformerConfig(**self.settings(experts) | more)
        return stage(config, vocabulary, tied)

    initial = None
    made = {}  # the process groups of each parallelism: many groups make a process slow

    @staticmethod
    def globals():
        return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}

    def experts(self):
        """{(layer, expert of the whole model, name): param} of this rank."""
        found = {}
        for name, module in self.module.named_modules():
            if name.endswith(".experts"):
                layer = self.module.get_submodule(name.rpartition(".mlp.")[0]).layer_number
                first = (
                    parallel_state.get_expert_model_parallel_rank() * len(module.local_experts) if self.ep > 1 else 0
                )
                found |= {
                    (layer, first + k, rest): p
                    for k, expert in enumerate(module.local_experts)
                    for rest, p in expert.named_parameters()
                }
        return found

    def use(self):
        vars(parallel_state).update(self.groups)
        return self

    @staticmethod
    def tokens():
        return torch.arange(LENGTH).mul(7).add(3).remainder(100).unsqueeze(0)

    def forward(self, labels=None):
        """The output of this rank, or None before the last stage."""
        self.use()
        tokens = self.tokens()
        mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
        rank, distance = torch.distributed.get_rank(), torch.distributed.get_world_size() // self.pp
        if not parallel_state.is_pipeline_first_stage():
            hidden = torch.empty(LENGTH, 1, 32)
            torch.distributed.recv(hidden, rank - distance)
            self.module.set_input_tensor(hidden)
        out = self.module(tokens, torch.arange(LENGTH).unsqueeze(0), mask, labels=labels)
        if not parallel_state.is_pipeline_last_stage():
            torch.distributed.send(out.detach().contiguous(), rank + distance)
            return None
        return out

    def logits(self):
        """The logits, on all ranks."""
        with torch.no_grad():
            return self.whole(self.forward())

    def whole(self, out):
        """Logits of the last stage's ranks, or None on the others, joined on all ranks."""
        if out is not None and self.tp > 1:
            shards = [torch.empty_like(out, memory_format=torch.contiguous_format) for _ in range(self.tp)]
            torch.distributed.all_gather(
                shards, out.contiguous(), group=parallel_state.get_tensor_model_parallel_group()
            )
            out = torch.cat(shards, dim=-1)
        every = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, out)
        return next(each for each in every if each is not None)[..., :VOCABULARY]

    def values(self):
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}


def dense(rank):
    """Five optimizer steps of tensor parallel ranks, a swap after each; the control is a model of another step."""
    from reshard.integrations import megatron

    source, target, peer = Model(1, tp=2), Model(2), Model(3)
    optimizer = torch.optim.AdamW(source.module.parameters(), lr=1e-2)
    labels, seen = torch.arange(LENGTH).mul(11).remainder(100).unsqueeze(0), None
    for _ in range(STEPS):
        source.forward(labels).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        megatron.swap(source.module, target.module, timeout=60)
        swap_model_weights(source.module, peer.module, "gloo")
        same(target.values(), peer.values())
        expected, found = source.logits(), target.logits()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert seen is None or not torch.allclose(seen, found, rtol=1e-4, atol=1e-5), "the optimizer changed nothing"
        seen = found
    gate = target.module.decoder.layers[
        0
    ].mlp.linear_fc1.weight.data  # the control: the order that a wrong stride gives
    gate.copy_(gate.view(4, 24, 32)[[0, 2, 1, 3]].reshape(gate.shape))
    assert not torch.allclose(target.logits(), seen, rtol=1e-4, atol=1e-5)


def layouts(rank):
    """Tensor and pipeline parallelism, against Megatron-Core's own swap."""
    from reshard.integrations import megatron

    for number, (source, target, tied) in enumerate(
        [
            ({"tp": 2, "pp": 2}, {"tp": 1, "pp": 4}, False),
            ({"tp": 1, "pp": 2}, {"tp": 2, "pp": 1}, False),
            ({"tp": 2}, {"tp": 2, "pp": 2}, False),
            ({"tp": 2}, {"pp": 2}, True),
            ({"pp": 4}, {"tp": 2, "pp": 2}, True),
        ]
    ):
        one, other = Model(number, tied=tied, **source), Model(100, tied=tied, **target)
        expected = one.logits()
        assert not torch.allclose(other.logits(), expected, rtol=1e-4, atol=1e-5)
        megatron.swap(one.module, other.module, timeout=60)
        torch.testing.assert_close(other.logits(), expected, rtol=1e-4, atol=1e-5)
        if not tied:  # Megatron-Core 0.16.1 refuses these
            peer = Model(200, **target)
            swap_model_weights(one.module, peer.module, "gloo")
            same(other.values(), peer.values())


def vocabulary(rank):
    """The padding of the vocabulary differs."""
    from reshard.integrations import megatron

    one, other = Model(1, tp=2), Model(2, tp=2, pp=2, vocabulary=160)
    megatron.swap(one.module, other.module, timeout=60)
    torch.testing.assert_close(other.logits(), one.logits(), rtol=1e-4, atol=1e-5)
    weight = dict(other.module.named_parameters()).get("embedding.word_embeddings.weight")
    if weight is not None:
        assert rank % 2 == 0 or not weight[128 - 80 :].any(), "padding is not zero"


def experts(rank):
    """Expert parallelism, with sequential experts, which Megatron-Core 0.16.1 does not renumber; the router's bias."""
    from reshard.integrations import megatron

    for source, target in [
        ({"ep": 2}, {"ep": 4}),
        ({"ep": 4}, {"tp": 2, "ep": 2}),
        ({"tp": 2, "ep": 2, "pp": 2}, {"ep": 1}),
    ]:
        one, other = Model(1, experts=4, **source), Model(2, experts=4, **target)
        megatron.swap(one.module, other.module, timeout=60)
        every = [None] * 4
        torch.distributed.all_gather_object(every, {key: p.detach() for key, p in one.use().experts().items()})
        expected = {key: p for each in every for key, p in each.items()}
        assert len(expected) == 4 * 4 * 2, len(expected)
        found = other.use().experts()
        assert len(found) == len(expected) // (other.ep * other.pp)
        same(found, {key: expected[key] for key in found})
        for name, buffer in other.module.named_buffers():
            if name.endswith("expert_bias"):
                assert torch.equal(buffer, torch.arange(4) * 0.25 + 1), name


def copy_service(rank):
    """Megatron-Core's plan over our transport: three refits, one executor; a message that only one side submits."""
    from reshard.integrations import megatron

    source, target, peer = Model(1, tp=2), Model(2, pp=2), Model(3, pp=2)
    service, executors = megatron.ReshardCopyService(timeout=60), set()
    for _ in range(3):
        with torch.no_grad():
            for p in source.module.parameters():
                p.mul_(1.5)
        swap_model_weights(source.module, target.module, service)
        swap_model_weights(source.module, peer.module, "gloo")
        same(target.values(), peer.values())
        executors.add(id(service._session.executor))
    assert len(executors) == 1, "the executor was opened again"
    if rank == 1:
        service.submit_send(torch.zeros(3), 0)
    refused("message 0 from rank 1 to rank 0: found 12 bytes submitted to send and none to receive", service.run)
    service.close()


def errors(rank):
    """Errors are raised on all ranks."""
    from reshard.integrations import megatron

    one, other = Model(1, tp=2), Model(2, tied=True)
    for left, text in (((), "'output_layer.weight' of the source"), (("decoder.layers.9.*",), "'decoder.layers.9.*'")):
        refused(text, lambda left=left: megatron.swap(one.module, other.module, left=left, timeout=30))
    megatron.swap(one.module, other.module, left=["output_layer.*"], timeout=30)


def document(rank):
    """The programs of docs/integrations.md, with a step that scales the weights."""
    one, other = Model(1, tp=2), Model(2, pp=2)

    def train(module):
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(1.25)

    names = {"steps": 2, "train": train, "trainer": one.module, "engine": other.module}
    for program in examples("Megatron-Core", "python"):
        train(one.module)
        assert not torch.allclose(other.logits(), one.logits(), rtol=1e-4, atol=1e-5)
        exec(program, names)
        torch.testing.assert_close(other.logits(), one.logits(), rtol=1e-4, atol=1e-5)
    names["service"].close()


@unittest.skipIf(MISSING, MISSING)
class MegatronTest(ranks.RanksTest):
    def test_two_ranks(self):
        self.ranks(2, dense, copy_service, errors, document)

    def test_four_ranks(self):
        self.ranks(4, layouts, vocabulary, experts)


if __name__ == "__main__":
    unittest.main()
