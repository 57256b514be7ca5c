# SPDX-License-Identifier: Apache-2.0
"""The modules of Transformer Engine that Megatron-Core's layer specs name, and the kernels of Mamba and of the gated
delta net, in plain PyTorch on the CPU. The params and the keys of a checkpoint have the names of the real modules, so a
model of Megatron-Core's own specs computes logits without a GPU and saves the checkpoint that it saves on one. Experts
are SequentialMLP, whose keys are those of TEGroupedMLP.

Importing this replaces the names in Megatron-Core's modules. Import it before a module that builds specs when it is
imported (megatron.core.models.mamba.mamba_layer_specs)."""

import functools
import importlib
import inspect
import sys
import types
from pathlib import Path

import megatron_cpu  # noqa: F401

import torch
import torch._dynamo
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP

#: Modules of Megatron-Core that import Transformer Engine's names.
USERS = [
    "extensions.transformer_engine",
    "extensions.transformer_engine_spec_provider",
    "transformer.multi_latent_attention",
    "models.gpt.gpt_layer_specs",
    "models.gpt.gpt_model",
    "models.gpt.experimental_attention_variant_module_specs",
    "ssm.gated_delta_net",
    "ssm.mamba_block",
    "transformer.multi_token_prediction",
]


def norm(x, weight, config):
    weight = weight + 1 if config.layernorm_zero_centered_gamma else weight
    return torch.nn.functional.rms_norm(x, weight.shape, weight, config.layernorm_epsilon)


def gain(size, config):
    return torch.nn.Parameter(
        torch.full((size,), 0.0 if config.layernorm_zero_centered_gamma else 1.0, dtype=config.params_dtype)
    )


class TENorm(torch.nn.Module):
    """An RMS norm."""

    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__()
        self.config, self.weight = config, gain(hidden_size, config)

    def forward(self, x):
        return norm(x, self.weight, self.config)


class TEColumnParallelLinear(ColumnParallelLinear):
    """Cut by output rows. `norms`: the norm of the input is part of the module."""

    norms = False

    def __init__(
        self,
        input_size,
        output_size,
        *,
        config,
        init_method,
        bias,
        skip_bias_add,
        is_expert,
        gather_output=False,
        tp_group=None,
        **_,
    ):
        super().__init__(
            input_size,
            output_size,
            config=config,
            init_method=init_method,
            bias=bias,
            gather_output=gather_output,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            tp_group=tp_group,
        )
        if self.norms:
            self.layer_norm_weight = gain(input_size, config)

    def forward(self, x, **more):
        return super().forward(norm(x, self.layer_norm_weight, self.config) if self.norms else x, **more)


class TELayerNormColumnParallelLinear(TEColumnParallelLinear):
    norms = True


class TELinear(torch.nn.Linear):
    """The same on every rank (parallel_mode="duplicated")."""

    def __init__(self, input_size, output_size, *, bias, parallel_mode, **_):
        assert parallel_mode == "duplicated" and not bias
        super().__init__(input_size, output_size, bias=False)

    def forward(self, x):
        return super().forward(x), None


class TEDotProductAttention(DotProductAttention):
    """Heads of the values may have another length than those of the queries."""

    def __init__(self, *args, k_channels=None, v_channels=None, num_splits=None, **more):
        super().__init__(*args, **more)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
            self.num_query_groups_per_partition = self.num_attention_heads_per_partition


def l2norm(x):
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def causal_conv1d(x, weight, bias, activation, **_):
    """fla's convolution of each channel. x: [batch, positions, channels]."""
    assert activation in ("silu", "swish")
    out = torch.nn.functional.conv1d(
        x.transpose(1, 2), weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=len(weight)
    )
    return torch.nn.functional.silu(out[..., : x.shape[1]]).transpose(1, 2), None


class RMSNormGated(torch.nn.Module):
    """mamba_ssm's norm of each group of the gated input."""

    def __init__(self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=True, **_):
        super().__init__()
        assert not norm_before_gate
        self.weight, self.eps, self.group = torch.nn.Parameter(torch.ones(hidden_size)), eps, group_size or hidden_size

    def forward(self, x, z=None):
        x = x * torch.nn.functional.silu(z)
        groups = x.unflatten(-1, (-1, self.group))
        return (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(-2) * self.weight


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, dt_softplus=False, **_):
    """The recurrence of Mamba-2, one position after the other. x: [batch, positions, heads, dim]; dt: [batch,
    positions, heads]; B, C: [batch, positions, groups, state]."""
    assert z is None and dt_softplus
    dt = torch.nn.functional.softplus(dt + dt_bias)
    heads = x.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(heads, dim=2), C.repeat_interleave(heads, dim=2)
    state, out = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[3]), []
    for t in range(x.shape[1]):
        state = (
            state * torch.exp(dt[:, t] * A)[..., None, None]
            + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        )
        out.append((state * C[:, t, :, None, :]).sum(-1) + D.reshape(1, x.shape[2], -1) * x[:, t])
    return torch.stack(out, dim=1)


def fused(*_):
    """mamba_ssm's kernel with the convolution, which Megatron-Core is told not to use."""
    raise NotImplementedError


def window(rows, columns, size):
    """True where a query does not see a key. `size`: how many keys before and after its own it sees."""
    distance = torch.arange(rows).unsqueeze(1) + columns - rows - torch.arange(columns)
    return (distance > size[0]) | (distance < -size[1])


def mamba_mixer():
    """Imports Megatron-Core's Mamba layer with the functions above in place of mamba_ssm's, and with names of Triton,
    which has no wheel for CPUs; no kernel of it is called."""
    language = types.SimpleNamespace(constexpr=None)
    missing = {
        "triton": types.SimpleNamespace(jit=lambda function: function, language=language),
        "triton.language": language,
        "mamba_ssm.ops.triton.layernorm_gated": types.SimpleNamespace(RMSNorm=RMSNormGated),
        "mamba_ssm.ops.triton.ssd_combined": types.SimpleNamespace(
            mamba_chunk_scan_combined=mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined=fused
        ),
    }
    missing = {name: module for name, module in missing.items() if name not in sys.modules}
    sys.modules.update(missing)
    try:
        importlib.import_module("megatron.core.ssm.mamba_mixer")
    finally:
        for name in missing:  # PyTorch and transformers look for them too
            del sys.modules[name]


def bridge(name):
    """A module of Megatron-Bridge. The packages around it are empty here: their __init__.py import Transformer
    Engine. So is the class that downloads a model and distributes it: it needs packages that
    scripts/frameworks.sh does not install."""
    root = Path(sys.modules["megatron.core"].__file__).parents[1] / "bridge"
    for package in ("", ".models", ".utils", "." + name.rpartition(".")[0]):
        module = types.ModuleType("megatron.bridge" + package)
        module.__path__ = [str(root.joinpath(*package.split(".")))]
        sys.modules.setdefault(module.__name__, module)
    base = types.ModuleType("megatron.bridge.models.model_provider")
    base.ModelProviderMixin = type("ModelProviderMixin", (), {"__class_getitem__": classmethod(lambda cls, _: cls)})
    sys.modules.setdefault(base.__name__, base)
    return importlib.import_module(f"megatron.bridge.{name}")


def replace():
    torch._dynamo.config.disable = True  # compiling takes longer than these runs
    made = [TENorm, TEColumnParallelLinear, TELayerNormColumnParallelLinear, TELinear, TEDotProductAttention]
    names = {each.__name__: each for each in made} | {"TERowParallelLinear": RowParallelLinear}
    mamba_mixer()
    for user in USERS:
        importlib.import_module(f"megatron.core.{user}")
    for module in [each for name, each in sys.modules.items() if name.startswith("megatron.core.")]:
        for name, each in names.items():
            if hasattr(module, name):
                setattr(module, name, each)
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.fusions import fused_softmax
    from megatron.core.models.gpt import experimental_attention_variant_module_specs, gpt_layer_specs
    from megatron.core.ssm import gated_delta_net
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.moe import moe_utils

    for module in (
        experimental_attention_variant_module_specs,
        gpt_layer_specs,
    ):  # they do not import it without Transformer Engine
        module.TESpecProvider, module.TENorm = TESpecProvider, TENorm
    transformer_block.LayerNormImpl = TENorm  # of the block, where its spec does not state one
    TESpecProvider.layer_norm = lambda *_, **__: TENorm
    TESpecProvider.activation_func = lambda _: None
    linears = MLPSubmodules(linear_fc1=TEColumnParallelLinear, linear_fc2=RowParallelLinear)
    builds = "Builder" in str(
        inspect.signature(TESpecProvider.grouped_mlp_modules).return_annotation
    )  # since Megatron-Core 0.17
    experts = functools.partial(SequentialMLP, submodules=linears) if builds else (SequentialMLP, linears)
    TESpecProvider.grouped_mlp_modules = lambda *_: experts
    moe_utils.te_general_gemm = None
    fused_softmax.get_sliding_window_causal_mask = window
    for name, module in list(sys.modules.items()):  # one module, or since Megatron-Core 0.19 a package
        if name.startswith(gated_delta_net.__name__):
            module.HAVE_FLA, module.l2norm, module.causal_conv1d = True, l2norm, causal_conv1d
            module.chunk_gated_delta_rule = gated_delta_net.torch_chunk_gated_delta_rule


replace()
