# SPDX-License-Identifier: Apache-2.0
"""One process of an engine: vllm_worker.py FOLDER RESULT MODEL…, under RANK and WORLD_SIZE. For each model: a new
engine that loads checkpoint B; an engine that loads A and is refitted in place to B, before vLLM repacks params for
its kernels; and the values of the fixed params without their part of the layout. Writes JSON."""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams, _custom_ops
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

import reshard

FOLDER = Path(sys.argv[1])

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PROMPTS = [[5, 17, 400, 23, 999], [1, 2, 3], [777, 42, 8, 8, 8, 300], [640, 11, 90, 512]]
LEFT = {
    "gpt-oss-120b": "*.w2_bias",
    "glm-4.5": "*.mlp.gate.weight",
    "nemotron-h-8b": "*.mixer.A",
}  # params that older layouts lacked

group_name = (
    _CPUSHMDistributed.make_group_name
)  # the name of the shared memory, which all such engines of a host would share
_CPUSHMDistributed.make_group_name = staticmethod(
    lambda communicator: os.environ["MASTER_PORT"] + group_name(communicator).replace("/", "")
)
_custom_ops._supports_onednn = False  # it would free fp32 weights and store them elsewhere


def snapshot(live):
    return {name: tensor.detach().clone() for name, tensor in live.items()}


def unequal(one, other):
    """Names whose bytes differ, or that only one side has."""
    return sorted(
        name
        for name in {*one, *other}
        if name not in one
        or name not in other
        or one[name].dtype != other[name].dtype
        or one[name].shape != other[name].shape
        or not torch.equal(one[name], other[name])
    )


def refit(at, live, more=""):
    """Moves checkpoint B into the live tensors. Rank 0 reads the checkpoint; the engine's ranks follow. Ranks of other
    processes get separate memory here."""
    job = at / f"refit{RANK}.yaml"
    mesh = f"{{tp: {WORLD}, views: [{{etp: {WORLD}}}]}}"
    job.write_text(
        f"version: 1\nmodel: model.yaml\nsource: {{layout: hf, mesh: {{}}}}\n"
        f"target: {{layout: vllm, mesh: {mesh}, ranks: 1..{WORLD}{more}}}\n"
    )
    plan = reshard.compile(job)
    with reshard.Executor(plan, threads=1) as executor:
        executor.bind(load_file(at / "B" / "model.safetensors"), "source", 0)
        others = {}
        for rank in range(WORLD):
            params = {
                name: param for name, param in plan.params(1 + rank, "target").items() if not param.transform
            }  # these are never bound
            if rank != RANK:
                others = {name: torch.zeros(param.nbytes, dtype=torch.uint8) for name, param in params.items()}
            for name, param in params.items():
                tensor = (
                    live[name].detach()
                    if rank == RANK
                    else others[name].view(reshard.dtypes.torch_dtype(param.dtype)).view(param.shape)
                )
                executor.bind({name: tensor}, "target", 1 + rank)
        mine = reshard.neg_exp(live)["finalize"]
        executor.set_transform("neg_exp", finalize=lambda param: mine(param) if param.rank == 1 + RANK else None)
        executor.prepare()
        executor.run(timeout=60)


class Loader(DefaultModelLoader):
    """Runs vLLM's own loader, then the requested refit."""

    after = staticmethod(lambda live: None)

    def __init__(self, config):
        config.load_format = "auto"
        super().__init__(config)

    def load_weights(self, model, model_config):
        super().load_weights(model, model_config)
        Loader.after(dict(model.named_parameters()))


register_model_loader("refitted")(Loader)


def tokens(path, after):
    Loader.after = staticmethod(after)
    os.environ["MASTER_PORT"] = str(
        int(os.environ["MASTER_PORT"]) + 1
    )  # otherwise a rank may connect to the previous engine's store
    engine = LLM(
        str(path),
        load_format="refitted",
        tensor_parallel_size=WORLD,
        distributed_executor_backend="external_launcher" if WORLD > 1 else None,
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=128,
        seed=0,
    )
    prompts, wanted = (
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False),
    )
    calls = [[list(output.outputs[0].token_ids) for output in engine.generate(prompts, wanted)] for _ in range(3)]
    return max(calls, key=calls.count)  # of the same weights: docs/testing.md says why a call may differ


def main():
    result = {}
    for name in sys.argv[3:]:
        at, seen = FOLDER / name, {}

        def fresh(live):
            seen["fresh"] = snapshot(live)

        def refitted(live):
            seen["before"] = snapshot(live)
            addresses = {name: tensor.data_ptr() for name, tensor in live.items()}
            refit(at, live, f', ignore: ["{LEFT[name]}"]')
            seen["without"] = snapshot(live)
            refit(at, live)
            seen["after"] = snapshot(live)
            assert addresses == {name: tensor.data_ptr() for name, tensor in live.items()}

        wanted, found = tokens(at / "B", fresh), tokens(at / "A", refitted)
        result[name] = {
            "params": len(seen["fresh"]),
            "tokens wanted": wanted,
            "tokens found": found,
            "wrong": unequal(seen["fresh"], seen["after"]),
            "same before": sorted({*seen["fresh"]} - {*unequal(seen["fresh"], seen["before"])}),
            "wrong without": unequal(seen["fresh"], seen["without"]),
        }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
