#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A refit of a vLLM engine through the plug-in beside vLLM's own ways, from one trainer process to two spawned workers
of a dense model of 0.33 GB. Prints the table of docs/performance.md. engine_refits.py [ROUNDS]

    scripts/frameworks.sh && . build/frameworks/env.sh
    . build/release/tests/env.sh && $RESHARD_FRAMEWORKS_PYTHON tests/bench/engine_refits.py

vLLM's own ways are `reload_weights` from a checkpoint in memory (/dev/shm), and a broadcast of whole tensors whose
receivers load them by the same `reload_weights`: what vLLM's backend `nccl` does, with gloo in place of NCCL, which
needs a GPU. Each round changes the weights, and runs all ways in another order."""

import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

import support
from module import importable, python_path
from vllm_engines import OPTIONS, WorkerExtension, generated, weights

HERE = Path(__file__).resolve().parent

TP, STEP = 2, 0.01
CONFIG = support.CONFIGS["qwen3-8b"] | {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
}


def group_of(port, rank):
    from vllm.distributed.utils import stateless_init_torch_distributed_process_group

    return stateless_init_torch_distributed_process_group("127.0.0.1", port, rank, 1 + TP, "gloo")


def broadcast(group, tensor):
    options = torch.distributed.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor.view(torch.uint8)], options).wait()


class Receiver(WorkerExtension):
    """What vLLM's workers have besides: the receiving side of the broadcast."""

    def join_broadcast(self, port):
        self.broadcasts = group_of(port, 1 + self.rank)

    def receive_broadcast(self, names, shapes):
        def tensors():
            for name, shape in zip(names, shapes, strict=True):
                tensor = torch.empty(shape, dtype=torch.bfloat16)
                broadcast(self.broadcasts, tensor)
                yield name, tensor

        self.reload_weights(weights_iterator=tensors())


class Ways:
    """The ways to give the engine the trainer's weights. Each returns its seconds by part; the part "" is the whole."""

    def __init__(self, at, module, llm, plan):
        from reshard.integrations.vllm_trainer import LLMClient, Trainer

        self.at, self.module, self.llm, self.parts = at, module, llm, {}
        ways = self

        class Client(LLMClient):
            def update_weights(self, update_info):
                ways.parts["receive"] = seconds(lambda: super(Client, self).update_weights(update_info))

            def finish_weight_update(self, weight_version=None):
                ways.parts["repack"] = seconds(lambda: super(Client, self).finish_weight_update(weight_version))

        (at / "store").mkdir()
        self.trainer = Trainer(plan.path, module, Client(llm), rank=0, rendezvous=f"file://{at}/store")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        call = threading.Thread(target=lambda: llm.collective_rpc("join_broadcast", args=(port,)))
        call.start()
        self.group = group_of(port, 0)
        call.join()

    def reshard(self):
        whole = seconds(self.trainer.refit)
        return {"": whole} | self.parts

    def reload(self):
        from safetensors.torch import save_file

        save = seconds(
            lambda: save_file(self.module.state_dict(), self.at / "A" / "model.safetensors", {"format": "pt"})
        )
        load = seconds(lambda: self._called("reload_weights", weights_path=str(self.at / "A")))
        return {"": save + load, "save": save, "load": load}

    def broadcast(self):
        tensors = {name: tensor.detach() for name, tensor in self.module.state_dict().items()}

        def send():
            call = threading.Thread(
                target=lambda: self._called(
                    "receive_broadcast", names=list(tensors), shapes=[list(each.shape) for each in tensors.values()]
                )
            )
            call.start()
            for tensor in tensors.values():
                broadcast(self.group, tensor)
            call.join()

        return {"": seconds(send)}

    def _called(self, method, **arguments):
        self.llm.collective_rpc(method, kwargs=arguments)
        self.llm.reset_prefix_cache()


def seconds(function):
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def measured(ways, module, llm, rounds):
    """{way: {part: seconds of each round}}. After each way the engine must have the same weights, and generate the
    same."""
    names, found = ["reshard", "reload", "broadcast"], {}
    for each in range(-1, rounds):  # the first round is not counted
        with torch.no_grad():
            for param in module.parameters():
                param.add_(torch.randn_like(param) * STEP)
        results = []
        for name in names[each % 3 :] + names[: each % 3]:
            parts = getattr(ways, name)()
            results.append((weights(llm), generated(llm)))
            if each >= 0:
                for part, value in parts.items():
                    found.setdefault(name, {}).setdefault(part, []).append(value)
        for number, what in enumerate(("has other weights", "generates other tokens")):
            if any(result[number] != results[0][number] for result in results):
                sys.exit(f"engine_refits.py: the engine {what} after another way")
    return found


def main():
    from transformers import AutoModelForCausalLM
    from vllm import LLM

    import reshard

    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    torch.manual_seed(0)
    torch.set_num_threads(1)
    at = support.model(FOLDER, "qwen3-8b", {"qwen3-8b": ("qwen3-8b", CONFIG)})
    (at / "refit.yaml").write_text(
        f"version: 1\nmodel: model.yaml\nsource: {{layout: hf, mesh: {{}}}}\n"
        f"target: {{layout: vllm, mesh: {{tp: {TP}}}, ranks: 1..{TP}}}\n"
    )
    plan = reshard.compile(at / "refit.yaml", output=at / "refit.rplan")
    support.checkpoint(at / "A", plan.params(0, "source"), 0)
    module = AutoModelForCausalLM.from_pretrained(at / "A", dtype=torch.bfloat16)
    llm = LLM(
        str(at / "A"),
        tensor_parallel_size=TP,
        weight_transfer_config={"backend": "reshard"},
        worker_extension_cls="engine_refits.Receiver",
        **OPTIONS,
    )
    found = measured(Ways(at, module, llm, plan), module, llm, rounds)
    base = found["reshard"][""]
    print(f"{'way':32} {'median, ms':>10} {'÷ reshard':>10}")
    for name, parts in found.items():
        for part, values in parts.items():
            ratio = statistics.median(value / own for value, own in zip(values, base, strict=True))
            print(f"{name + (': ' + part if part else ''):32} {1000 * statistics.median(values):10.1f} {ratio:10.2f}")
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # vLLM's default: the engine and its workers are spawned
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        FOLDER = Path(name)
        os.environ["PYTHONPATH"] = python_path(importable(FOLDER), HERE)
        main()
