# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines of several models in this process, each refitted through its plug-in from checkpoint A to B:
vllm_families.py FOLDER MODEL… The trainer is a process that has B in memory (vllm_families.py FOLDER MODEL trainer).
Writes for each model what differs from a fresh engine that loads B, as JSON."""

import contextlib
import json
import subprocess
import sys
import threading
import time
import types
import unittest.mock
from pathlib import Path

import torch

import reshard
from reshard.coverage import persistent_buffers
from reshard.integrations.vllm import OWN_BUFFERS
from reshard_record.engine import params_of
from vllm_engines import engine, generated, shut_down

FOLDER = Path(sys.argv[1])


def plan_of(at, name="family", left=""):
    """The plan from checkpoint B in one process to an engine of one worker, without the params that the glob `left`
    names."""
    job = at / f"{name}.yaml"
    more = f', ignore: ["{left}"]' if left else ""
    job.write_text(
        f"version: 1\nmodel: model.yaml\nsource: {{layout: hf, mesh: {{}}}}\n"
        f"target: {{layout: vllm, mesh: {{}}, ranks: [1]{more}}}\n"
    )
    return reshard.compile(job, output=at / f"{name}.rplan").path


def train(at, store="store"):
    from safetensors.torch import load_file

    from reshard.integrations.vllm_trainer import Trainer

    tensors = load_file(at / "B" / "model.safetensors")
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    trainer = Trainer(str(at / "family.rplan"), tensors, None, rank=0, rendezvous=f"file://{at}/{store}", timeout=300)
    trainer.refit(timeout=300)
    trainer.close()


def live_params(llm):
    """The params and persistent buffers as the kernels read them."""
    return llm.apply_model(
        lambda model: {name: tensor.detach().clone() for name, tensor in params_of(model, OWN_BUFFERS).items()}
    )[0]


def refusal(client, info):
    try:
        client.init_weight_transfer_engine(info)
    except Exception as error:
        return str(error)
    return ""


@contextlib.contextmanager
def changed(thing, name, value):
    """A context in which an attribute has another value."""
    before = getattr(thing, name)
    object.__setattr__(thing, name, value)
    try:
        yield
    finally:
        object.__setattr__(thing, name, before)


def speculative(method):
    return types.SimpleNamespace(method=method, model="the/draft")


def unstated(llm, refuse):
    """What `refuse` returns while the engine has what a plan cannot state, by name."""
    config = worker(llm).weight_transfer_engine.vllm_config
    states = {
        "eplb": (config.parallel_config, "enable_eplb", True),
        "draft": (config, "speculative_config", speculative("eagle3")),
    }
    for layer in worker(llm).get_model().modules():
        if hasattr(layer, "expert_map_manager"):
            states["round robin"] = (layer.expert_map_manager, "_placement_strategy", "round_robin")
        if hasattr(layer, "eplb_state"):
            states["rebalanced"] = (layer.router, "eplb_state", object())
    found = {}
    for name, state in states.items():
        with changed(*state):
            found[name] = refuse()
    return found


def unbound(at, client, info):
    """The errors of a trainer and of the engine, if a weight of the engine cannot be bound after both have joined, and
    the seconds."""
    found, begin = {}, time.monotonic()

    def join():
        try:
            train(at, "unbound")
        except Exception as error:
            found["trainer"] = str(error)

    trainer = threading.Thread(target=join)
    trainer.start()
    wrong = reshard.BindError("a weight without memory")
    with unittest.mock.patch("reshard.integrations.vllm_engine.Landing.bind", side_effect=wrong):
        found["engine"] = refusal(client, info | {"rendezvous": f"file://{at}/unbound"})
    trainer.join()
    return found | {"seconds": time.monotonic() - begin}


def worker(llm):
    return llm.llm_engine.model_executor.driver_worker.worker


def refused_update(client):
    client.start_weight_update()
    try:
        client.update_weights({"timeout": 1})
    except Exception as error:
        return str(error)
    return ""


def refitted(at):
    """The results of one model."""
    from reshard.integrations.vllm_trainer import LLMClient

    plan, part = plan_of(at), plan_of(at, "part", "*.o_proj.weight")
    (at / "store").mkdir()
    llm = engine(at / "A")
    client, info = LLMClient(llm), {"plan": plan, "rendezvous": f"file://{at}/store"}
    result = {
        "uncovered": refusal(client, info | {"plan": part}),
        "both": refusal(client, info | {"left": ["*.o_proj.weight"]}),
        "unknown": refusal(client, info | {"left": ["nothing"]}),
        "before": generated(llm),
        "unstated": unstated(llm, lambda: refusal(client, info)),
    }
    result["wrong URL"] = refusal(client, info | {"rendezvous": "file:///none/store"})
    if at.name == "qwen3-8b":
        result["unbound"] = unbound(at, client, info)
    with changed(worker(llm).weight_transfer_engine.vllm_config, "speculative_config", speculative("ngram")):
        result["without draft"] = refusal(client, info | {"plan": part})
    for leaf in {buffer.rpartition(".")[2] for buffer in persistent_buffers(worker(llm).get_model(), OWN_BUFFERS)}:
        result.setdefault("buffers", {})[leaf] = refusal(client, info | {"plan": plan_of(at, leaf, f"*.{leaf}")})
    trainer = subprocess.Popen([sys.executable, __file__, FOLDER, at.name, "trainer"])
    try:
        client.init_weight_transfer_engine(info)
        result["unstated later"] = unstated(llm, lambda: refused_update(client))
        addresses = llm.apply_model(lambda model: [tensor.data_ptr() for tensor in model.parameters()])[0]
        client.start_weight_update()
        client.update_weights({"timeout": 300})
        client.finish_weight_update()
        assert llm.apply_model(lambda model: [tensor.data_ptr() for tensor in model.parameters()])[0] == addresses
    finally:
        trainer.kill()
        trainer.wait()
    landing = worker(llm).weight_transfer_engine._landing
    result |= {"after": generated(llm), "beside": sorted(landing.beside), "in place": len(landing.in_place)}
    found = live_params(llm)
    shut_down(llm)
    llm = client = landing = None
    fresh = engine(at / "B")
    result["fresh"], wanted = generated(fresh), live_params(fresh)
    shut_down(fresh)
    result["wrong"] = sorted(
        name
        for name in {*found, *wanted}
        if name not in found or name not in wanted or not torch.equal(found[name], wanted[name])
    )
    return result


if __name__ == "__main__":
    if sys.argv[3:] == ["trainer"]:
        train(FOLDER / sys.argv[2])
        sys.exit()
    for name in sys.argv[2:]:
        (FOLDER / name / "result.json").write_text(json.dumps(refitted(FOLDER / name)))
