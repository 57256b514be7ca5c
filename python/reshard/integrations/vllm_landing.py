# SPDX-License-Identifier: Apache-2.0
"""Where a vLLM model receives weights: in its live params, or in landing memory, from which vLLM repacks a layer.

A plan describes params as vLLM's loader fills them (the load format). Afterwards vLLM repacks some of them for its
kernels, often under the same name, shape and dtype. A ``Load`` finds the layers that were repacked: their params get
landing memory in the load format. All other params are written in place. Of some of them vLLM keeps a packed copy too,
which it makes again after an update. Persistent buffers count as params.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import (
    materialize_layer,
    materialize_meta_tensor,
    restore_layer_on_meta,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers

from ..coverage import check_coverage, matched, persistent_buffers
from ..errors import BindError, Error
from ..executor import Executor
from ..plan import Plan
from ..transforms import neg_exp
from .vllm import OWN_BUFFERS

_LOAD = "_reshard_load"  # the attribute of a model that has its Load
_PROCESSED = "_already_called_process_weights_after_loading"  # a mark of vLLM on a layer
_NOT_DERIVED = (_PROCESSED, "_parameters", "_buffers", "_modules")
_PIECE = 1 << 22  # bytes of a tensor that are hashed at a time


@dataclass(frozen=True)
class _Param:
    """A param or a persistent buffer of the model directly after loading."""

    layer: torch.nn.Module  #: the module that has it
    leaf: str  #: its name there
    key: int  #: equal for names of one tensor
    state: tuple[Any, ...]  #: address, shape, strides, dtype and hash
    buffer: bool

    @property
    def live(self) -> torch.Tensor | None:
        """The tensor of this name now."""
        return (self.layer._buffers if self.buffer else self.layer._parameters).get(self.leaf)

    @property
    def zeros(self) -> bool:
        """Whether all its bytes are zero."""
        return bool(self.state) and self.state[-1] == 0


def _hash(tensor: torch.Tensor) -> int:
    """Returns a hash of the bytes and their order, computed on the device of the tensor."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = 0
    for begin in range(0, data.numel(), _PIECE):
        piece = data[begin : begin + _PIECE].to(torch.int64)
        weights = torch.arange(begin + 1, begin + 1 + piece.numel(), device=piece.device) * 0x1E3779B97F4A7C15
        total += int((piece * (weights ^ (weights >> 29))).sum())
    return total & (2**64 - 1)


def _state(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    if tensor is None or tensor.is_meta:
        return ()
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, _hash(tensor))


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        not one.is_meta
        and one.numel() == other.numel() > 0
        and one.dtype == other.dtype
        and one.data_ptr() == other.data_ptr()
    )


def _attributes(layer: torch.nn.Module) -> dict[str, Any]:
    """Returns what a layer has beside its params and submodules."""
    if not hasattr(layer, "quant_method"):
        return {}
    return {name: value for name, value in vars(layer).items() if name not in _NOT_DERIVED} | dict(layer._buffers)


class Load:
    """The params of a model before vLLM repacks them; after ``compare``, also the layers that were repacked, and those
    that keep packed copies.

    A layer counts as repacked if the address, shape, strides, dtype or bytes of any of its params changed: vLLM repacks
    layer by layer, and a param of equal elements looks the same afterwards.
    """

    def __init__(self, model: torch.nn.Module):
        self.params: dict[str, _Param] = {}
        self.repacked: dict[int, torch.nn.Module] = {}  # by id
        #: Layers whose params are as loaded, but of which vLLM has derived something, such as a packed copy; by id.
        self.derived: dict[int, torch.nn.Module] = {}
        self.replaced: set[str] = set()  #: buffers that vLLM has changed after loading
        buffers = persistent_buffers(model, OWN_BUFFERS)
        for name, tensor in [*model.named_parameters(remove_duplicate=False), *buffers.items()]:
            module, _, leaf = name.rpartition(".")
            self.params[name] = _Param(model.get_submodule(module), leaf, id(tensor), _state(tensor), name in buffers)
        #: Buffers that are views of a param as loaded, by param; for example the convolution weights of Mamba. After
        #: ``compare`` only those that repacking has separated from the param.
        self.views = {
            name: [buffer for buffer in model.buffers() if _same_memory(buffer, tensor)]
            for name, tensor in model.named_parameters()
        }
        self._attributes = {id(param.layer): _attributes(param.layer) for param in self.params.values()}
        setattr(model, _LOAD, self)

    def compare(self) -> None:
        """Compares with the params as they are now."""
        states = {param.key: param.state for param in self.params.values()}
        for name, param in self.params.items():
            now = param.live
            if param.buffer:
                if _state(now) != param.state:
                    self.replaced.add(name)
            elif id(param.layer) not in self.repacked and _state(now) != states.get(id(now), param.state):
                self.repacked[id(param.layer)] = param.layer  # unless vLLM has only tied it to another param
        for name, views in self.views.items():
            now = self.params[name].live
            self.views[name] = [view for view in views if now is None or not _same_memory(view, now)]
        for layer in {id(param.layer): param.layer for param in self.params.values()}.values():
            before, after = self._attributes[id(layer)], _attributes(layer)
            changed = [name for name in {*before, *after} if before.get(name) is not after.get(name)]
            if (
                changed
                and id(layer) not in self.repacked
                and hasattr(layer.quant_method, "process_weights_after_loading")
            ):
                self.derived[id(layer)] = layer
        self._attributes.clear()

    def lands(self, param: _Param) -> bool:
        """Whether a param needs landing memory."""
        if param.buffer or id(param.layer) not in self.repacked:
            return False
        return param.leaf in layerwise.get_layerwise_info(param.layer).restore_metadata[0]


def load_of(model: torch.nn.Module) -> Load:
    """Returns the Load of a model. Raises Error if the model was loaded without this plug-in."""
    load: Load | None = getattr(model, _LOAD, None)
    if load is None:
        raise Error(
            "vLLM loaded this model without BaseModelLoader.load_model, so reshard does not know which weights were "
            "repacked; expected load_format auto, safetensors or dummy"
        )
    return load


class Landing:
    """The memory in which a worker receives the params of a plan.

    plan, rank: the plan and the worker's world rank.
    dtype: that of the model's config.
    left: globs of live params that the plan does not cover and that keep their values. Each must match a param.

    A live param that the plan has on other workers only, and that vLLM's loader has left as zeros on this one, keeps
    its zeros: of a bias that is added after a sum over the workers, only the first has the values.

    Raises BindError, which names the rank and the param: for another live param that neither the plan nor ``left``
    covers, for one that both cover, and for a param of the plan that the model lacks.
    """

    def __init__(self, plan: Plan, rank: int, model: torch.nn.Module, dtype: torch.dtype, left: Sequence[str] = ()):
        self._model, self._dtype, self._plan = model, dtype, plan
        self._load = load_of(model)
        self._where = f"vLLM worker with world rank {rank}"
        self._params = plan.params(rank)
        #: Landing memory with zeros, by param: for those that vLLM loads on other workers only, but repacks on all.
        self._zeros: dict[str, torch.Tensor] = {}
        self._check(left)
        #: Landing memory by param.
        self.beside: dict[str, torch.Tensor] = {}
        #: The live params that are written in place.
        self.in_place: dict[str, torch.Tensor] = {}
        for name in self._params:
            param = self._load.params[name]
            if name in self._load.replaced:
                raise BindError(
                    f"{self._where} buffer {name!r}: vLLM has changed it after loading, expected a buffer as loaded; "
                    "name it in left=[…] to keep its value"
                )
            if not self._load.lands(param):
                self.in_place[name] = param.live.detach()  # type: ignore[union-attr]
            elif self._params[name].transform:
                raise BindError(
                    f"{self._where} param {name!r}: vLLM has repacked it, expected a param without transform"
                )
            else:
                self.beside[name] = self._memory(param)

    def bind(self, executor: Executor) -> None:
        """Binds the memory, and sets the hooks of the plan. Raises BindError for wrong dtypes and shapes."""
        executor.bind(
            {name: tensor for name, tensor in (self.in_place | self.beside).items() if not self._params[name].transform}
        )
        self._set_hooks(executor)

    def _check(self, left: Sequence[str]) -> None:
        """Checks that the plan and ``left`` cover each tensor of the model once."""
        live, tensors = self._load.params, self._names()
        kept = matched(live, left, self._where)
        zeros = [
            tied
            for tied in tensors
            if live[tied[0]].zeros and self._elsewhere.intersection(tied) and not kept.intersection(tied)
        ]
        zeros = [tied for tied in zeros if not self._params.keys() & tied]
        names = dict.fromkeys(name for tied in tensors if tied not in zeros for name in tied)
        check_coverage(names, self._params, left, self._where, {name: tied[0] for tied in tensors for name in tied})
        for name in (min(self._elsewhere.intersection(tied)) for tied in zeros):
            if self._load.lands(live[name]):
                self._zeros[name] = self._memory(live[name]).zero_()
        for tied in tensors:
            planned = [name for name in tied if name in self._params]
            if len({live[name].key for name in planned}) > 1:
                raise BindError(
                    f"{self._where} param {planned[1]!r}: vLLM has tied it to {planned[0]!r}, since the loaded values "
                    "were equal; expected a checkpoint in which they differ"
                )
            for name in kept.intersection(tied):
                if planned:
                    raise BindError(
                        f"{self._where} param {name!r}: found in left, but it is tied to {planned[0]!r}, which is in "
                        "the plan; expected one of them"
                    )
                if self._load.lands(live[name]):
                    raise BindError(
                        f"{self._where} param {name!r}: found in left, but vLLM repacks its layer as a whole; "
                        "expected it in the plan"
                    )

    @functools.cached_property
    def _elsewhere(self) -> set[str]:
        """The params that the plan has on any worker."""
        return {name for rank in self._plan.endpoints[1].ranks for name in self._plan.params(rank)}

    def _names(self) -> list[list[str]]:
        """Returns the names of each tensor of the model: several if vLLM has built it tied, or has tied it after
        loading because the values were equal."""
        names: dict[int, list[str]] = {}
        at: dict[int, list[str]] = {}
        for name, param in self._load.params.items():
            tensor = param.live
            address = tensor.data_ptr() if tensor is not None and tensor.numel() else 0
            tied = names.setdefault(param.key, at.get(address, []))
            tied.append(name)
            if address:
                at.setdefault(address, tied)
        return list({id(tied): tied for tied in names.values()}.values())

    def _memory(self, param: _Param) -> torch.Tensor:
        info = layerwise.get_layerwise_info(param.layer)
        if not hasattr(getattr(param.layer, "quant_method", None), "process_weights_after_loading"):
            raise BindError(
                f"{self._where}: {type(param.layer).__name__}.{param.leaf} was replaced after loading, "
                "but its layer has no quant_method to repack it"
            )
        with info.restore_device:
            return materialize_meta_tensor(info.restore_metadata[0][param.leaf]).detach()

    def _set_hooks(self, executor: Executor) -> None:
        for transform in {param.transform for param in self._params.values()} - {""}:
            if transform != "neg_exp":
                raise BindError(f"{self._where}: found transform {transform!r} in the plan, expected neg_exp or none")
            executor.set_transform("neg_exp", **neg_exp(self.in_place))
        for refresh in {param.refresh for param in self._params.values()} - {""}:
            executor.set_hook(refresh, lambda rank: None)  # ``process`` refreshes all attention layers

    def moved(self) -> Iterator[str]:
        """Yields the names of params that vLLM has moved since they were bound."""
        for name, tensor in self.in_place.items():
            now = self._load.params[name].live
            if now is None or now.data_ptr() != tensor.data_ptr():
                yield name

    @torch.no_grad()
    def process(self) -> None:
        """Repacks the layers with landing memory, one after the other, then what vLLM derives from weights. Addresses
        of live tensors stay."""
        layers: dict[int, tuple[torch.nn.Module, dict[str, torch.Tensor]]] = {}
        for name, tensor in (self.beside | self._zeros).items():
            param = self._load.params[name]
            layers.setdefault(id(param.layer), (param.layer, {}))[1][param.leaf] = tensor
            for view in self._load.views.get(name, ()):
                view.copy_(tensor.reshape(view.shape))
        for layer, landed in layers.values():
            _repack(layer, landed)
        for layer in self._load.derived.values():
            _process(layer)
        for layer in self._model.modules():
            if is_deferred_attention_layer(layer):
                _derive(layer, self._dtype)


def _repack(layer: Any, landed: Mapping[str, torch.Tensor]) -> None:
    """Repacks a layer by vLLM's own functions, as after loading. Its layerwise reload copies the result to the live
    tensors."""
    info = layerwise.get_layerwise_info(layer)
    info.kernel_tensors = get_layer_params_buffers(layer)
    info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    buffers = info.kernel_tensors[1]
    restore_layer_on_meta(layer, info)
    materialize_layer(layer, info)
    for name, tensor in landed.items():
        layer._parameters[name].copy_(tensor)
    for name, buffer in layer._buffers.items():  # they are not loaded again
        if (
            buffer is not None
            and name in buffers
            and buffers[name].shape == buffer.shape
            and buffers[name] is not buffer
        ):
            buffer.copy_(buffers[name])
    _process(layer)
    if hasattr(layer, "update_param_tp_status"):
        layer.update_param_tp_status()
    layerwise._copy_and_restore_kernel_tensors(layer, info)
    info.reset()


def _process(layer: Any) -> None:
    """Calls what vLLM calls after loading a layer."""
    if hasattr(layer, _PROCESSED):
        delattr(layer, _PROCESSED)
    if hasattr(layer.quant_method, "moe_kernel"):
        # With a kernel, vLLM 0.32.0 skips the kernel's own packing on CPUs and generates wrong tokens.
        layer.quant_method.moe_kernel = None
    layer.quant_method.process_weights_after_loading(layer)


def _derive(layer: Any, dtype: torch.dtype) -> None:
    """Computes again what an attention layer derives from weights (MLA), at the addresses that CUDA graphs know."""
    before = {name: value for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}
    layer.process_weights_after_loading(dtype)
    for name, old in before.items():
        new = getattr(layer, name, None)
        if isinstance(new, torch.Tensor) and new is not old and new.shape == old.shape and new.dtype == old.dtype:
            old.copy_(new)
            setattr(layer, name, old)
