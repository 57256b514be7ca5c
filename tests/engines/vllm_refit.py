# SPDX-License-Identifier: Apache-2.0
"""One trainer rank: vllm_refit.py FOLDER MODEL KIND TRAINERS TP RANK CASE. KIND is a trainer of vllm_trainers.py with
TRAINERS ranks. Rank 0 also has a vLLM engine of TP workers, which vLLM spawns. Rank 0 writes the tokens and
log-probabilities of each engine as JSON.

Case `steps`: after each of five optimizer steps a checked refit through the plug-in of the engine. Then a refit that
the trainer does not take part in, one with q and k swapped (qwen3-8b), one that only some of the workers receive, and a
fresh engine that loads the trained checkpoint. Case `killed`, in pull mode: a worker is stopped in an update, and
killed; the trainer continues, and a new engine, which loads the first checkpoint, pulls the newest weights."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import reshard
from reshard.integrations.vllm_trainer import LLMClient, Trainer
from vllm_engines import engine, generated, shut_down, weights
from vllm_trainers import KINDS

FOLDER, MODEL, KIND, TRAINERS, TP, RANK = Path(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:7])

STEPS = 5
AT = FOLDER / MODEL
CASE = f"{KIND}{TRAINERS}to{TP}.{sys.argv[7]}"


def plan_of(layout, source):
    """The path of the plan from the trainer to the engine's layout. Rank 0 compiles it for all ranks."""
    job = AT / f"{CASE}.{layout}.yaml"
    mesh, replicas = f"{{tp: {TP}, views: [{{etp: {TP}}}]}}", ", replicas: 1" if CASE.endswith("killed") else ""
    if RANK == 0:
        job.write_text(
            f"version: 1\nmodel: model.yaml\nsource: {source}\n"
            f"target: {{layout: {layout}, mesh: {mesh}, ranks: {TRAINERS}..{TRAINERS + TP - 1}{replicas}}}\n"
        )
        reshard.compile(job, output=job.with_suffix(".rplan"))
    if TRAINERS > 1:
        torch.distributed.barrier()
    return str(job.with_suffix(".rplan"))


def save(model, path):
    """Writes the model as the checkpoint that the library's layout hf describes."""
    tensors = model.gathered()
    if RANK:
        return
    job = AT / f"{CASE}.save.yaml"
    job.write_text(
        f"version: 1\nmodel: model.yaml\nsource: {model.whole}\ntarget: {{layout: hf, mesh: {{}}, ranks: [0]}}\n"
    )
    plan = reshard.compile(job)
    saved = {
        name: torch.zeros(param.shape, dtype=reshard.dtypes.torch_dtype(param.dtype))
        for name, param in plan.params(0, "target").items()
    }
    with reshard.Executor(plan, threads=1) as executor:
        executor.bind({name: tensors[name].detach().contiguous() for name in plan.params(0, "source")}, "source", 0)
        executor.bind(saved, "target", 0)
        executor.prepare()
        executor.run(timeout=60)
    path.mkdir()
    shutil.copy(AT / "config.json", path)
    save_file(saved, path / "model.safetensors", {"format": "pt"})


def joined(model, llm, layout):
    store = AT / f"{CASE}.{layout}"
    store.mkdir(exist_ok=True)
    return Trainer(
        plan_of(layout, model.source),
        model.module,
        LLMClient(llm) if llm else None,
        rank=RANK,
        rendezvous=f"file://{store}",
        timeout=300,
        pull=CASE.endswith("killed"),
    )


def step(model, optimizer):
    model.backward(torch.randint(0, 1000, (4, 32)))
    optimizer.step()
    optimizer.zero_grad()


def failure(function):
    """The error of a call, and its seconds."""
    begin = time.monotonic()
    try:
        function()
    except Exception as error:
        return {"error": str(error), "seconds": time.monotonic() - begin}
    return {"error": "", "seconds": time.monotonic() - begin}


def late(llm):
    """An update that no trainer sends."""
    client = LLMClient(llm)
    client.start_weight_update()
    client.update_weights({"timeout": 3})


def partial(trainer, llm):
    """An update that the last worker refuses, because a param has moved. Returns the engine's error."""

    def update():
        client = LLMClient(llm)
        llm.collective_rpc("move_norm", args=(TP - 1,))
        client.start_weight_update()
        client.update_weights({"timeout": 10})

    found = {}
    call = threading.Thread(target=lambda: found.update(failure(update)) if llm else None)
    call.start()
    failure(lambda: trainer.executor.run(timeout=10))
    call.join()
    return found


def steps(model, optimizer):
    """Case `steps`."""
    result = {"steps": []}
    llm = engine(AT / "A", TP) if RANK == 0 else None
    trainer = joined(model, llm, "vllm")
    for _ in range(STEPS):
        step(model, optimizer)
        trainer.refit(timeout=300, check=True)
        if llm:
            result["steps"].append(generated(llm))
    save(model, AT / f"{CASE}.trained")
    if llm:
        result["weights"] = weights(llm)
        result["late"] = failure(lambda: late(llm))
        result["after late"] = generated(llm)
    trainer.close()
    trainer = joined(model, llm, "swapped" if MODEL == "qwen3-8b" else "vllm")
    trainer.refit(timeout=300)
    if llm:
        result["swapped"] = generated(llm)
    if TP > 1:
        result["partial"] = partial(trainer, llm)
    if llm:
        shut_down(llm)
    trainer.close()
    return result


def worker(rank):
    """The process of a worker that vLLM has spawned."""
    import psutil

    names = {process.pid: " ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)}
    (found,) = [pid for pid, name in names.items() if f"Worker_TP{rank}" in name]
    return found


def killed(model, optimizer):
    """Case `killed`."""
    result = {"steps": []}
    llm = engine(AT / "A", TP)
    trainer = joined(model, llm, "vllm")
    step(model, optimizer)
    trainer.refit(timeout=300, check=True)
    result["steps"].append(generated(llm))
    victim = worker(TP - 1)
    os.kill(victim, signal.SIGSTOP)
    threading.Timer(3, os.kill, (victim, signal.SIGKILL)).start()
    step(model, optimizer)
    result["killed"] = failure(lambda: trainer.refit(timeout=20))
    shut_down(llm)
    trainer.attach(None)
    step(model, optimizer)
    trainer.refit(timeout=20)
    llm = engine(AT / "A", TP)
    result["restarted"] = generated(llm)
    trainer.attach(LLMClient(llm))
    trainer.refit(timeout=300)
    result["steps"].append(generated(llm))
    result["weights"] = weights(llm)
    save(model, AT / f"{CASE}.trained")
    shut_down(llm)
    trainer.close()
    return result


def main():
    torch.set_num_threads(1)
    if TRAINERS > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{AT}/{CASE}.gloo", rank=RANK, world_size=TRAINERS
        )
    model = KINDS[KIND](AT, RANK, TRAINERS)
    model.module.train()
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.5)
    result = killed(model, optimizer) if CASE.endswith("killed") else steps(model, optimizer)
    if KIND == "megatron":
        torch.distributed.barrier()  # rank 0 has saved the checkpoint
        result["distance"] = model.distance(AT / f"{CASE}.trained")
    if RANK == 0:
        fresh = engine(AT / f"{CASE}.trained", TP)
        result["fresh"], result["fresh weights"] = generated(fresh), weights(fresh)
        shut_down(fresh)
        (AT / f"{CASE}.json").write_text(json.dumps(result))
    if TRAINERS > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
