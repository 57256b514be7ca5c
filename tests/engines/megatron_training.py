# SPDX-License-Identifier: Apache-2.0
"""Training with Megatron-Core's distributed optimizer on the CPU, and its checkpoints.

Importing this gives the optimizer a stand-in of Transformer Engine's FusedAdam: without Transformer Engine or Apex,
Megatron-Core 0.16.1 takes PyTorch's Adam, with which it does not load its own checkpoints (KeyError: 'step')."""

import torch
from megatron.core import dist_checkpointing, optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.transformer.moe import moe_utils
from torch.overrides import TorchFunctionMode

from megatron_checkpoint_test import on_rank_0
from megatron_test import LENGTH

STEPS = 3
STATES = ["param", "exp_avg", "exp_avg_sq"]
METADATA = {
    "chained_optim_avoid_prefix": True
}  # as Megatron-LM sets it: the names of fully_reshardable do not tell the optimizer


class FusedAdam(torch.optim.Optimizer):
    """As Transformer Engine's: the step is one of the param group, and a param has two moments alone."""

    def __init__(self, params, lr, betas, eps, weight_decay, adam_w_mode, capturable=False):
        assert adam_w_mode and not capturable
        super().__init__(
            params, {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = step = group.get("step", 0) + 1
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
                state["exp_avg"].lerp_(param.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
                update = (
                    state["exp_avg"]
                    / (1 - first**step)
                    / ((state["exp_avg_sq"] / (1 - second**step)).sqrt() + group["eps"])
                )
                param.add_(update + group["weight_decay"] * param, alpha=-group["lr"])


distrib_optimizer.Adam = optimizer.Adam = FusedAdam
distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
optimizer.USING_PYTORCH_OPTIMIZER = False
moe_utils.te_general_gemm = None  # a name that it imports from Transformer Engine alone


class OnCpu(TorchFunctionMode):
    """Tensors that Megatron-Core's optimizer puts on a GPU are on the CPU, and say that they are not."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        return (
            result.replace("torch.", "torch.cuda.", 1)
            if function is torch.Tensor.type and len(args) == 1 and isinstance(result, str)
            else result
        )


class Training:
    def __init__(self, model, bucket_size):
        self.model = model
        self.module = DistributedDataParallel(
            model.module.config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True, bucket_size=bucket_size, overlap_grad_reduce=bucket_size is not None
            ),
            model.module,
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                weight_decay=0.0,
                clip_grad=0.0,
                use_distributed_optimizer=True,
                params_dtype=torch.float32,
            ),
            [self.module],
            use_gloo_process_groups=False,
        )

    def train(self):
        """Three steps of all ranks."""
        labels = torch.arange(LENGTH).mul(11).remainder(100).unsqueeze(0)
        for _ in range(STEPS):
            self.module.zero_grad_buffer()
            self.optimizer.zero_grad()
            if self.model.pp == 1 and (self.model.tp == 1 or len(self.optimizer.chained_optimizers) == 1):
                self.model.forward(labels).mean().backward()
                self.module.finish_grad_sync()
            else:
                # forward() has no backward pass through stages, and experts train with tensor parallelism only if the
                # sequence is parallel.
                for param in self.module.parameters():
                    param.main_grad.copy_(torch.randn(param.shape))
            self.optimizer.step()

    def save(self, rank, folder, kind):
        on_rank_0(rank, lambda: (folder / kind).mkdir(parents=True))
        state = self.model.use().module.sharded_state_dict()
        state = {
            "model": state,
            "optimizer": self.optimizer.sharded_state_dict(
                state, metadata=METADATA | {"distrib_optim_sharding_type": kind}
            ),
        }
        dist_checkpointing.save(state, str(folder / kind))

    def load(self, folder, kind):
        """Megatron-Core's own load of its own checkpoint."""
        state = self.model.use().module.sharded_state_dict()
        state = {
            "model": state,
            "optimizer": self.optimizer.sharded_state_dict(
                state, is_loading=True, metadata=METADATA | {"distrib_optim_sharding_type": kind}
            ),
        }
        found = dist_checkpointing.load(state, str(folder / kind))
        self.model.module.load_state_dict(found["model"])
        with torch.no_grad():  # in fp32 the optimizer's params are views of the weights
            self.optimizer.load_state_dict(found["optimizer"])


def held(training):
    """[(number of the optimizer, model parallel rank, param, state, first element, values)] of all ranks: what the
    live optimizers hold."""
    names = {param: name.removeprefix("module.") for name, param in training.module.named_parameters()}
    mine = []
    for number, each in enumerate(training.optimizer.chained_optimizers):
        for ranges in each.gbuf_ranges:
            for buckets in ranges.values():
                for bucket in buckets:
                    for param, places in bucket["param_map"].items():
                        states = each._get_main_param_and_optimizer_states(param)
                        mine += [
                            (
                                number,
                                each.data_parallel_group_idx,
                                names[param],
                                state,
                                places["param"].start,
                                states[state].detach().clone(),
                            )
                            for state in STATES
                        ]
    every = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    return [each for one in every for each in one]
