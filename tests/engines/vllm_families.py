# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines of several models in this process, each refitted through its plug-in from checkpoint A to B:
vllm_families.py FOLDER MODEL… The trainer is a process that has B in memory (vllm_families.py FOLDER MODEL trainer).
Writes for each model what differs from a fresh engine that loads B, as JSON."""

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1])
sys.path.insert(0, str(FOLDER / "module"))

import reshard  # noqa: E402
import torch  # noqa: E402
from vllm_engines import engine, generated, shut_down  # noqa: E402


def plan_of(at, more=""):
    """The plan from checkpoint B in one process to an engine of one worker."""
    job = at / "family.yaml"
    job.write_text(f"version: 1\nmodel: model.yaml\nsource: {{layout: hf, mesh: {{}}}}\ntarget: {{layout: vllm, mesh: {{}}, ranks: [1]{more}}}\n")
    return reshard.compile(job, output=at / ("part.rplan" if more else "family.rplan")).path


def train(at):
    from reshard.integrations.vllm_trainer import Trainer
    from safetensors.torch import load_file

    tensors = load_file(at / "B" / "model.safetensors")
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    trainer = Trainer(str(at / "family.rplan"), tensors, None, rank=0, rendezvous=f"file://{at}/store", timeout=300)
    trainer.refit(timeout=300)
    trainer.close()


def params_of(llm):
    """The params as the kernels read them."""
    return llm.apply_model(lambda model: {name: tensor.detach().clone() for name, tensor in model.named_parameters()})[0]


def refusal(client, info):
    try:
        client.init_weight_transfer_engine(info)
    except Exception as error:
        return str(error)
    return ""


def refitted(at):
    """The results of one model."""
    from reshard.integrations.vllm_trainer import LLMClient

    plan, part = plan_of(at), plan_of(at, ', ignore: ["*.o_proj.weight"]')
    (at / "store").mkdir()
    llm = engine(at / "A")
    client, info = LLMClient(llm), {"plan": plan, "rendezvous": f"file://{at}/store"}
    result = {"uncovered": refusal(client, info | {"plan": part}), "both": refusal(client, info | {"left": ["*.o_proj.weight"]}),
              "unknown": refusal(client, info | {"left": ["nothing"]}), "before": generated(llm)}
    trainer = subprocess.Popen([sys.executable, __file__, FOLDER, at.name, "trainer"])
    try:
        client.init_weight_transfer_engine(info)
        addresses = llm.apply_model(lambda model: [tensor.data_ptr() for tensor in model.parameters()])[0]
        client.start_weight_update()
        client.update_weights({"timeout": 300})
        client.finish_weight_update()
        assert llm.apply_model(lambda model: [tensor.data_ptr() for tensor in model.parameters()])[0] == addresses
    finally:
        trainer.kill()
        trainer.wait()
    landing = llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine._landing
    result |= {"after": generated(llm), "beside": sorted(landing.beside), "in place": len(landing.in_place)}
    found = params_of(llm)
    shut_down(llm)
    del llm, client, landing
    fresh = engine(at / "B")
    result["fresh"], wanted = generated(fresh), params_of(fresh)
    shut_down(fresh)
    result["wrong"] = sorted(name for name in {*found, *wanted} if name not in found or name not in wanted or not torch.equal(found[name], wanted[name]))
    return result


if __name__ == "__main__":
    if sys.argv[3:] == ["trainer"]:
        train(FOLDER / sys.argv[2])
        sys.exit()
    for name in sys.argv[2:]:
        (FOLDER / name / "result.json").write_text(json.dumps(refitted(FOLDER / name)))
