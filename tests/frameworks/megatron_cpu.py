# SPDX-License-Identifier: Apache-2.0
"""Importing this lets Megatron-Core's models run on a CPU: some modules request a GPU even if they are configured to
initialize on the CPU. Checkpoints are saved by the process itself: Megatron-Core's queue for the results of its writers
is one of another process, which would import the frameworks again."""

import contextlib
import queue

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

torch.cuda.current_device = lambda: torch.device("cpu")
torch.Tensor.cuda = lambda self, *_, **__: self
CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
filesystem_async._results_queue = queue.Queue()
