# SPDX-License-Identifier: Apache-2.0
"""Importing this lets Megatron-Core's models run on a CPU: some modules request a GPU even if they are configured to
initialize on the CPU."""

import contextlib

import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

torch.cuda.current_device = lambda: torch.device("cpu")
torch.Tensor.cuda = lambda self, *_, **__: self
CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
