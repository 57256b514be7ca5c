"""A trainer and a server, two groups of processes. After each step of the trainer, the server receives its weights.

mpirun -n 4 python refit.py ../refit.yaml                  NumPy, over MPI
mpirun -n 4 python refit.py ../refit.yaml --nccl           PyTorch, one GPU per process, over NCCL
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
    weights = {
        name: torch.zeros(param.shape, dtype=dtypes[param.dtype], device="cuda") for name, param in params.items()
    }
    return weights


def torch_synchronize():
    import torch

    torch.cuda.synchronize()


parser = argparse.ArgumentParser()
parser.add_argument("job", help="the job file, refit.yaml")
parser.add_argument("--steps", type=int, default=5, help="the number of training steps (default: 5)")
parser.add_argument(
    "--nccl", action="store_true", help="use PyTorch tensors on GPUs, and NCCL (default: NumPy and MPI)"
)
options = parser.parse_args()

plan = reshard.compile(options.job)  # the same plan in every process
backend = {"transport": "nccl", "device": "cuda"} if options.nccl else {"transport": "mpi"}
with reshard.Executor(plan, join_timeout=120, **backend) as executor:
    rank = executor.ranks[0]
    endpoint = plan.endpoint(None, rank)  # the only endpoint of this rank: source (trainer) or target (server)
    weights = (torch_weights if options.nccl else numpy_weights)(plan.params(rank))
    executor.bind(weights)
    executor.prepare()
    for step in range(1, options.steps + 1):
        if endpoint.role == "source":
            for weight in weights.values():
                weight += 1  # the optimizer step
        if options.nccl:
            torch_synchronize()  # the sources must be written before run reads them
        began = time.perf_counter()
        executor.run(timeout=60)
        seconds = time.perf_counter() - began
        if endpoint.role == "target":
            assert all((weight == step).all() for weight in weights.values()), (
                f"step {step}: rank {rank} has wrong weights"
            )
        if rank == endpoint.ranks[0]:
            print(f"{endpoint.role} rank {rank}: step {step}, {seconds:.4f} s, version {executor.version}", flush=True)
