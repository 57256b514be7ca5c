# SPDX-License-Identifier: Apache-2.0
"""Records SGLang: its own model class of a config.json, built without memory as one rank of a mesh after the other, in
one process, and its own `load_weights`. Process groups state rank and size; nothing is sent. SGLang imports its GPU
kernels even where it does not call them, so packages of kernels that are not installed are replaced by empty ones."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from typing import Any

from reshard.errors import Error
from reshard.integrations.sglang import PACKAGES, TESTED
from reshard.releases import check_release

from .engine import Engine, group, meta_values, recordings_of
from .recording import Recording, mesh_size

#: Packages that SGLang imports and that neither constructors nor loaders call.
_KERNELS = ("triton", "sgl_kernel", "gguf", "IPython")
#: The groups of a rank; each has a rank and a size of the same name.
_GROUPS = ("tp", "pp", "moe_ep", "moe_tp", "attn_tp", "attn_cp")


def _empty(name: str) -> Any:
    """A name of an empty package."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _EmptyType(name, (_Empty,), {})


#: Whether a loader runs. While modules are imported, kernels are decorated and configured, which calls empty names.
_loading = False


def _refuse_while_loading(name: str) -> None:
    if _loading:
        raise Error(f"the loader calls the kernel {name}, which is not installed: install SGLang with its kernels")


class _EmptyType(type):
    """A class that has any attribute, is subscripted and joined as types are, and returns a
    function that it decorates."""

    def __getattr__(cls, name: str) -> Any:
        return _empty(name)

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        _refuse_while_loading(cls.__name__)
        return args[0] if len(args) == 1 and callable(args[0]) else super().__call__()


class _Empty(metaclass=_EmptyType):
    def __getattr__(self, name: str) -> Any:
        return _empty(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_while_loading(type(self).__name__)
        return args[0] if len(args) == 1 and callable(args[0]) else self


class _EmptyPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of `names` and all their modules, which have every name."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.names else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        vars(module).update(__version__="99.0.0", __getattr__=_empty)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextlib.contextmanager
def _kernels() -> Iterator[None]:
    """A context in which packages of kernels that are not installed are empty. Afterwards they are absent again."""
    import torch._inductor.select_algorithm  # noqa: F401  looks for triton once, and must not find an empty one

    finder = _EmptyPackages(tuple(name for name in _KERNELS if importlib.util.find_spec(name) is None))
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in finder.names]:
            del sys.modules[name]


def modules(
    model: str | os.PathLike[str], engine: Engine, context: Callable[[], Any] = meta_values
) -> Iterator[tuple[int, Any]]:
    """Yields (mesh rank, module) of each rank of an engine. The module is to be used before the next one is built.

    model: a folder with a config.json.
    context: makes the context in which params are created. Default: without memory.

    Raises Error if SGLang is not installed, and for releases that are not tested, unless RESHARD_ANY_VERSION is set.
    """
    check_release(PACKAGES, TESTED)
    logging.getLogger("sglang").setLevel(logging.ERROR)  # warns of buffers without memory
    with _kernels():
        from sglang.srt import runtime_context
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.model_loader.loader import _initialize_model
        from sglang.srt.model_loader.utils import set_default_torch_dtype
        from sglang.srt.server_args import ServerArgs

        options = ServerArgs(
            model_path=str(model),
            tp_size=engine.tp,
            pp_size=engine.pp,
            ep_size=engine.tp if engine.expert_parallel else 1,
            dtype=engine.dtype,
            device="cpu",
            load_format="dummy",
            skip_tokenizer_init=True,
        )
        for rank in range(mesh_size(engine.mesh)):
            ranks = runtime_context.SpawnRanks(world_rank=rank, gpu_id=0)
            with runtime_context.use_context(runtime_context.create_context(options, role="scheduler", ranks=ranks)):
                parallel = runtime_context.get_parallel()
                groups = {
                    name: group(getattr(parallel, f"{name}_rank"), getattr(parallel, f"{name}_size"))
                    for name in _GROUPS
                }
                groups |= {
                    "world": group(rank, parallel.launch_world_size),
                    "moe_dp": group(0, 1),
                    "shared_experts_tp": groups["tp"],
                }
                parallel.override_permanently(**{f"{name}_group": each for name, each in groups.items()})
                config = ModelConfig.from_server_args(options)
                with set_default_torch_dtype(config.dtype):
                    with context():
                        module = _initialize_model(config, LoadConfig())
                    yield rank, module


def _load(module: Any, weights: Any) -> None:
    global _loading
    _loading = True
    try:
        module.load_weights(weights)
    finally:
        _loading = False


def recordings(model: str | os.PathLike[str], engine: Engine, checkpoint: Any = None) -> Iterator[Recording]:
    """Yields the recording of each rank of an SGLang engine.

    model: a folder with a config.json and, if `checkpoint` is None, with the checkpoint.
    checkpoint: as for `reshard_record.record`. Default: `model`.

    Raises Error as `modules` and `reshard_record.record` do.
    """
    yield from recordings_of(modules(model, engine), _load, model, engine, checkpoint)
