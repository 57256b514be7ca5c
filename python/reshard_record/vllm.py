# SPDX-License-Identifier: Apache-2.0
"""Records vLLM: its own model class of a config.json, built without memory as one rank of a mesh after the other, in
one process, and its own `load_weights`. Stand-ins for the process groups state rank and size; nothing is sent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from reshard.dtypes import dtype_by_name
from reshard.integrations.vllm import OWN_BUFFERS, PACKAGES, TESTED
from reshard.releases import check_release

from .engine import Engine, group, meta_values, params_of, recordings_of
from .processing import Change, changes
from .recording import Recording, mesh_size

_GROUPS = ("_WORLD", "_INNER_DP_WORLD", "_TP", "_PP", "_DP", "_EP", "_PCP", "_DCP", "_EPLB")


def _config(model: Path, engine: Engine) -> Any:
    """vLLM's config of an engine that has no processes."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=str(model), skip_tokenizer_init=True, enforce_eager=True, dtype=engine.dtype
    ).create_engine_config()
    config.parallel_config.tensor_parallel_size = engine.tp
    config.parallel_config.pipeline_parallel_size = engine.pp
    config.parallel_config.enable_expert_parallel = engine.expert_parallel
    return config


def modules(
    model: str | os.PathLike[str],
    engine: Engine,
    context: Callable[[], Any] = meta_values,
    ranks: Iterable[int] | None = None,
) -> Iterator[tuple[int, Any]]:
    """Yields (mesh rank, module) of ranks of an engine. The module is to be used before the next one is built; until
    then, vLLM's current config is that of the engine.

    model: a folder with a config.json.
    context: makes the context in which params are created. Default: without memory.
    ranks: the mesh ranks. Default: all.

    Raises Error if vLLM is not installed, and for releases that are not tested, unless RESHARD_ANY_VERSION is set.
    """
    check_release(PACKAGES, TESTED)
    import vllm.distributed.parallel_state as state
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import utils as models
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = _config(Path(model), engine)
    before: Mapping[str, Any] = {name: getattr(state, name) for name in _GROUPS if hasattr(state, name)}
    try:
        for rank in range(mesh_size(engine.mesh)) if ranks is None else ranks:
            for name in before:
                setattr(state, name, group(0, 1))
            state._TP, state._PP = group(rank % engine.tp, engine.tp), group(rank // engine.tp, engine.pp)
            if engine.expert_parallel:
                state._EP = group(rank % engine.tp, engine.tp)
            config.compilation_config.static_forward_context.clear()
            # Its keys are addresses, which a module of an earlier stage may have had.
            models._model_to_pp_missing_layer_names.clear()
            with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
                with context():
                    module = initialize_model(config)
                yield rank, module
    finally:
        for name, value in before.items():
            setattr(state, name, value)


def recordings(model: str | os.PathLike[str], engine: Engine, checkpoint: Any = None) -> Iterator[Recording]:
    """Yields the recording of each rank of a vLLM engine.

    model: a folder with a config.json and, if `checkpoint` is None, with the checkpoint.
    checkpoint: as for `reshard_record.record`. Default: `model`.

    Raises Error as `modules` and `reshard_record.record` do.
    """
    load = lambda module, weights: module.load_weights(weights)
    yield from recordings_of(modules(model, engine), load, model, engine, checkpoint, OWN_BUFFERS)


def processed(model: str | os.PathLike[str], engine: Engine, rank: int = 0) -> dict[str, Change]:
    """Returns what `process_weights_after_loading` of the installed vLLM makes of each param of a mesh rank, by name.

    model: a folder with a config.json. The params of the rank are in memory several times: use
    a config with few layers.

    Raises Error as `modules` does.
    """
    import torch
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    def process(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        for _, module in modules(model, engine, contextlib.nullcontext, [rank]):
            params = params_of(module, OWN_BUFFERS)
            with torch.no_grad():
                for name, value in values:
                    params[name].copy_(torch.from_numpy(value))
            process_weights_after_loading(module, get_current_vllm_config().model_config, torch.device("cpu"))
            return {name: param.detach() for name, param in params_of(module, OWN_BUFFERS).items()}
        raise AssertionError("no module")

    loaded = {
        name: (dtype_by_name(param.dtype), tuple(param.shape))
        for _, module in modules(model, engine, ranks=[rank])
        for name, param in params_of(module, OWN_BUFFERS).items()
    }
    return changes(loaded, process)
