"""A trainer and a server, two groups of processes: after each step of the trainer the server gets its weights.

    mpirun -n 4 python refit.py ../refit.yaml                  NumPy, over MPI
    mpirun -n 4 python refit.py ../refit.yaml --nccl           PyTorch, a GPU for each process, over NCCL
"""

import argparse
import os
import time

import reshard


def numpy_weights(params):
    import numpy

    return {name: numpy.zeros(param.shape, param.numpy_dtype) for name, param in params.items()}


def torch_weights(params):
    import torch

    torch.cuda.set_device(int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", os.environ.get("LOCAL_RANK", "0"))))
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    weights = {name: torch.zeros(param.shape, dtype=dtypes[param.dtype], device="cuda") for name, param in params.items()}
    return weights


def torch_synchronize():
    import torch

    torch.cuda.synchronize()


parser = argparse.ArgumentParser()
parser.add_argument("job")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--nccl", action="store_true", help="PyTorch's tensors on GPUs, over NCCL")
options = parser.parse_args()

plan = reshard.compile(options.job)  # the same plan in every process
how = {"transport": "nccl", "device": "cuda"} if options.nccl else {"transport": "mpi"}
with reshard.Executor(plan, join_timeout=120, **how) as executor:
    rank = executor.ranks[0]
    side = plan.endpoint(None, rank)  # each rank trains or serves
    weights = (torch_weights if options.nccl else numpy_weights)(plan.params(rank))
    executor.bind(weights)
    executor.prepare()
    for step in range(1, options.steps + 1):
        if side.role == "source":
            for weight in weights.values():
                weight += 1  # an optimizer would
        if options.nccl:
            torch_synchronize()  # sources are written before they are read
        began = time.perf_counter()
        executor.run(timeout=60)
        seconds = time.perf_counter() - began
        if side.role == "target":
            assert all((weight == step).all() for weight in weights.values()), f"step {step}: rank {rank} serves other weights"
        if rank == side.ranks[0]:
            print(f"{side.role} rank {rank}: step {step}, {seconds:.4f} s, version {executor.version}", flush=True)
