# SPDX-License-Identifier: Apache-2.0
"""reshard.torch against real PyTorch modules on gloo ranks: FSDP2, HSDP, tensor parallel, both together and plain, of
transformers' models. Every element and the logits are compared after each of five optimizer steps.

    scripts/frameworks.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/engines/torch_test.py"""

import contextlib
import io
import logging
import os
import time
import unittest

import ranks
from documents import example
from ranks import refused, same

try:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    MISSING = ranks.MISSING
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(
        logging.ERROR
    )  # its warnings are about full_tensor()
except ImportError as error:
    MISSING = f"{error}: run scripts/frameworks.sh and build/frameworks/env.sh"

STEPS = 5
TOKENS = [[5, 17, 3, 60, 41, 8, 9, 2]]


def llama(seed, **more):
    """A small model of transformers, the same on each rank."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=67,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        **more,
    )
    return transformers.LlamaForCausalLM(config).float()


def fsdp(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model, mesh):
    plan = {
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def whole(model):
    """The unsharded values of all params, by name."""
    with torch.no_grad():
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for name, p in model.named_parameters()
        }


def logits(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits


def train(model, optimizer, batch):
    loss = model(torch.tensor(TOKENS).roll(batch), labels=torch.tensor(TOKENS)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def loop(batch, source, target):
    """Five steps of the optimizer on a batch, a refit after each. Values and logits equal those of a plain model with
    the source's values; a model with q and k exchanged differs."""
    import reshard.torch

    optimizer = torch.optim.AdamW(source.parameters(), lr=1e-2)
    seen, executors = None, set()
    for _ in range(STEPS):
        train(source, optimizer, batch)
        reshard.torch.refit(source, target, timeout=60)
        executors.add(id(reshard.torch.session_of(source, target).executor))
        expected = whole(source)
        same(whole(target), expected)
        plain = llama(99)
        plain.load_state_dict(expected)
        torch.testing.assert_close(logits(target), logits(plain), rtol=1e-4, atol=1e-5)
        assert seen is None or not torch.equal(seen, logits(plain)), "the optimizer changed nothing"
        seen = logits(plain)
    assert len(executors) == 1, "the executor was opened again"
    for layer in plain.model.layers:  # the control
        layer.self_attn.k_proj.weight.data.copy_(layer.self_attn.q_proj.weight.data[:16].flip(0))
    assert not torch.allclose(seen, logits(plain), rtol=1e-4, atol=1e-5)


def fsdp_to_tensor_parallel(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    loop(rank, fsdp(llama(1), mesh), tensor_parallel(llama(2), mesh))


def hsdp_to_tensor_parallel(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    loop(rank, fsdp(llama(1), mesh), tensor_parallel(llama(2), mesh["shard"]))


def plain_to_fsdp_and_back(rank):
    import reshard.torch

    mesh = init_device_mesh("cpu", (4,))
    source, sharded, back = llama(1), fsdp(llama(2), mesh), llama(3)
    for step in range(2):
        with torch.no_grad():
            for p in source.parameters():
                p.add_(step)
        reshard.torch.refit(source, sharded, timeout=60)
        reshard.torch.refit(sharded, back, timeout=60)
        same(whole(sharded), whole(source))
        same(whole(back), whole(source))


def two_dimensions(rank):
    """FSDP2 over tensor parallelism: strided shards; to FSDP2 over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    source = fsdp(tensor_parallel(llama(1), mesh["tp"]), mesh["dp"])
    assert any("_Strided" in type(p).__name__ for each in source.parameters() for p in each.placements)
    loop(rank // 2, source, fsdp(llama(2), init_device_mesh("cpu", (4,))))  # the ranks of tp have the same batch


def uneven(rank):
    """Lengths that no axis divides, more ranks than rows, scalars, buffers, and dtypes of several widths."""
    import reshard.torch

    class Odd(torch.nn.Module):
        def __init__(self, seed, mesh, *placements):
            super().__init__()
            torch.manual_seed(seed)
            for name, shape in {"a": (13, 7), "b": (3,), "c": (5, 1, 9), "d": (0, 4)}.items():
                value = torch.randn(shape)
                spread = [p if not isinstance(p, Shard) or p.dim < len(shape) else Replicate() for p in placements]
                setattr(self, name, torch.nn.Parameter(distribute_tensor(value, mesh, spread) if mesh else value))
            self.scale = torch.nn.Parameter(torch.randn(()))
            self.register_buffer("count", torch.arange(5) + seed)
            self.register_buffer("cache", torch.full((2,), float(seed)), persistent=False)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    line = init_device_mesh("cpu", (4,))
    cases = [
        (None,),
        (line, Shard(0)),
        (line, Shard(1)),
        (mesh, Shard(0), Shard(0)),
        (mesh, Shard(0), Shard(1)),
        (mesh, Shard(1), Replicate()),
        (mesh, Replicate(), Shard(0)),
    ]
    for number, source in enumerate(cases):
        target = cases[(number + 3) % len(cases)]
        one, other = Odd(number, *source), Odd(100, *target)
        reshard.torch.refit(one, other, timeout=60)
        same(whole(other), whole(one))
        assert torch.equal(other.count, one.count)
        assert other.cache[0] == 100, "a buffer that is not saved was moved"


def other_ranks(rank):
    """Source and target on different ranks; the dtype of the target is narrower."""
    import reshard.torch

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("side", "x"))["x"]
    source = fsdp(llama(1), mesh) if rank < 2 else None
    target = tensor_parallel(llama(2).bfloat16(), mesh) if rank >= 2 else None
    reshard.torch.refit(source, target, convert="rne", timeout=60)
    if target:
        same(whole(target), {name: value.bfloat16() for name, value in whole(llama(1)).items()})


def tied(rank):
    """Tied on both sides, in another order of names; tied on one side only."""
    import reshard.torch

    class Tied(torch.nn.Module):
        def __init__(self, seed, ties, names=("embed", "head")):
            super().__init__()
            torch.manual_seed(seed)
            first = torch.nn.Parameter(torch.randn(6, 4))
            setattr(self, names[0], first)
            setattr(self, names[1], first if ties else torch.nn.Parameter(torch.randn(6, 4)))

    source, target, untied = Tied(1, True), Tied(2, True, ("head", "embed")), Tied(3, False)
    reshard.torch.refit(source, target, timeout=60)
    assert torch.equal(source.embed, target.embed) and target.embed is target.head
    reshard.torch.refit(source, untied, timeout=60)
    assert torch.equal(untied.head, source.head) and torch.equal(untied.embed, source.embed)
    refused(
        "different tensors for them: 'embed', 'head'", lambda: reshard.torch.refit(Tied(4, False), target, timeout=60)
    )


def errors(rank):
    """Each error is raised on all ranks, and the next call works."""
    import reshard.torch

    def linear(**more):
        module = torch.nn.Linear(4, 6)
        for name, shape in more.items():
            module.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
        return module

    source, target = linear(), linear()
    mine = linear(extra=3) if rank == 1 else target  # the failure of one rank
    refused("'extra'", lambda: reshard.torch.refit(source, mine, timeout=20))
    reshard.torch.refit(source, linear(extra=3), left=["ext*"], timeout=20)
    refused("'nothing'", lambda: reshard.torch.refit(source, target, left=["nothing"], timeout=20))
    refused("'value' of the source", lambda: reshard.torch.refit(linear(value=2), target, timeout=20))
    refused("expected [6, 4]", lambda: reshard.torch.refit(source, torch.nn.Linear(5, 6), timeout=20))
    refused("convert: rne", lambda: reshard.torch.refit(source, torch.nn.Linear(4, 6).bfloat16(), timeout=20))
    refused(
        "dtype complex64" if rank == 2 else "rank 2: Error: param 'weight': dtype complex64",
        lambda: reshard.torch.refit(
            torch.nn.Linear(4, 6, dtype=torch.complex64) if rank == 2 else source, target, timeout=20
        ),
    )
    broken = linear()
    if rank == 3:  # of the right shape, but not contiguous: binding fails on this rank only
        broken.weight = torch.nn.Parameter(torch.zeros(4, 6).t())
    refused("found strides [1, 6]", lambda: reshard.torch.refit(source, broken, timeout=20))
    reshard.torch.refit(source, target, timeout=20)
    assert torch.equal(source.weight, target.weight)
    target.weight.data = torch.zeros(6, 4)  # on all ranks: the executor is opened again
    reshard.torch.refit(source, target, timeout=20)
    assert torch.equal(source.weight, target.weight)
    if rank == 2:  # on one rank
        target.weight.data = torch.zeros(6, 4)
    reshard.torch.refit(source, target, timeout=20)
    assert torch.equal(source.weight, target.weight)


def late(rank):
    """A rank that calls too late: the others raise TimeoutError in time, and name it; it raises the same when it calls.
    The next call works."""
    import reshard.torch

    source, target = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    call = "ranks [2] of 4 did not call in time", lambda: reshard.torch.refit(source, target, timeout=5)
    if rank != 2:
        begun = time.monotonic()
        assert isinstance(refused(*call), TimeoutError) and time.monotonic() - begun < 8
    torch.distributed.barrier()
    if rank == 2:
        assert isinstance(refused(*call), TimeoutError)
    reshard.torch.refit(source, target, timeout=30)
    assert torch.equal(source.weight, target.weight)


def killed(rank, folder):
    """A rank ends between two refits: the others raise an error in time, and the module keeps its values."""
    import reshard.torch

    mesh = init_device_mesh("cpu", (4,))
    source, target = fsdp(llama(1), mesh), llama(2)
    reshard.torch.refit(source, target, timeout=10)
    expected = {name: p.clone() for name, p in target.named_parameters()}
    if rank == 3:
        os._exit(0)
    begun = time.monotonic()
    refused(
        "ranks [3] of 4 did not call in time", lambda: reshard.torch.refit(source, target, timeout=10)
    )  # rank 0 answers after 9 s
    assert time.monotonic() - begun < 15
    same(dict(target.named_parameters()), expected)
    (folder / f"survived-{rank}").touch()


def document(rank):
    """The program of docs/integrations.md."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example("PyTorch", "python"), {})
    assert printed.getvalue() == "0 0.0\n1 1.0\n2 2.0\n", printed.getvalue()


@unittest.skipIf(MISSING, MISSING)
class TorchTest(ranks.RanksTest):
    def test_two_ranks(self):
        self.ranks(2, fsdp_to_tensor_parallel, document)

    def test_four_ranks(self):
        self.ranks(
            4, errors, late, uneven, other_ranks, tied, plain_to_fsdp_and_back, hsdp_to_tensor_parallel, two_dimensions
        )

    def test_a_killed_rank(self):
        found = ranks.run(killed, self.folder, 4, self.folder)
        survived = sorted(path.name for path in self.folder.glob("survived-*"))
        self.assertEqual(survived, ["survived-0", "survived-1", "survived-2"], "\n".join(found.values()))

    def test_one_process(self):
        import reshard.torch

        source, target = llama(1), llama(2)
        expected = logits(source)
        self.assertFalse(torch.equal(logits(target), expected))
        reshard.torch.refit(source, target)
        same(whole(target), whole(source))
        self.assertTrue(torch.equal(logits(target), expected))

    def test_trainer_of_vllm(self):
        """Its tensors are params and persistent buffers, such as the router's bias of DeepSeek-V3;
        tied names are sent once."""
        from reshard.integrations.vllm_trainer import shards_of

        module = torch.nn.Linear(4, 6)
        module.tied = module.weight
        module.register_buffer("router_bias", torch.zeros(2))
        module.register_buffer("cache", torch.zeros(2), persistent=False)
        shards = shards_of(module, dict.fromkeys(("weight", "bias", "router_bias")))
        self.assertEqual(
            {name: tensor.data_ptr() for name, tensor in shards.items()},
            {
                "weight": module.weight.data_ptr(),
                "bias": module.bias.data_ptr(),
                "router_bias": module.router_bias.data_ptr(),
            },
        )
        self.assertEqual(
            list(shards_of(module, dict.fromkeys(("weight", "tied", "bias")), ["router_bias"])),
            ["weight", "bias", "tied"],
        )

    def test_bind_module(self):
        import reshard
        import reshard.torch

        job = self.folder / "job.yaml"
        job.write_text(
            "version: 1\nmodel: {dtype: fp32, tensors: {weight: {shape: [6, 4], shard: {0: tp}}, bias: [6]}}\n"
            "source: {mesh: {tp: 1}}\ntarget: {mesh: {tp: 1}, ranks: 1..1}\n"
        )
        plan = reshard.compile(job)

        def bind(module, **more):
            with reshard.Executor(plan) as executor:
                return reshard.torch.bind_module(executor, module, "source", 0, **more)

        class Head(torch.nn.Linear):
            """Linear with a further param, a further name of `weight`, and two buffers."""

            def __init__(self, extra=True):
                super().__init__(4, 6)
                self.tied = self.weight
                self.register_buffer("table", torch.zeros(2), persistent=False)
                if extra:
                    self.register_buffer("steps", torch.zeros(2))

        self.assertEqual(bind(torch.nn.Linear(4, 6)), {})
        self.assertEqual(bind(Head(extra=False)), {"tied": "weight"})
        self.assertEqual(bind(Head(), left=["steps"]), {"tied": "weight"})
        for module, more, text in (
            (Head(), {}, "source rank 0 param 'steps': the module has it, but not the plan"),
            (torch.nn.Linear(4, 6, bias=False), {}, "source rank 0 param 'bias': the plan has it, but not the module"),
            (torch.nn.Linear(4, 6), {"left": ["stepz"]}, "left: 'stepz' matches no param or buffer"),
            (torch.nn.Linear(4, 6), {"left": ["bias"]}, "source rank 0 param 'bias': found in left and in the plan"),
            (torch.nn.Linear(4, 7), {}, "found shape [7, 4], expected [6, 4]"),
            (torch.nn.Linear(4, 6).bfloat16(), {}, "found dtype bf16, expected fp32"),
            (torch.nn.Linear(4, 6, device="meta"), {}, "found device meta, which has no memory"),
        ):
            with self.subTest(text=text), self.assertRaises(reshard.BindError) as raised:
                bind(module, **more)
            self.assertIn(text, str(raised.exception))


if __name__ == "__main__":
    unittest.main()
