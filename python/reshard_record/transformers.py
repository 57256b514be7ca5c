# SPDX-License-Identifier: Apache-2.0
"""Records transformers: its own `from_pretrained`, with the conversions of the weights that release 5 makes (experts in
one tensor, renamed and joined tensors), on tensors without memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from reshard.errors import Error

from . import record
from .checkpoint import tensors_of
from .recording import Recording

_SYNCHRONOUS = "HF_DEACTIVATE_ASYNC_LOAD"  # conversions in this thread, in which operations are recorded


def recording(model: str | os.PathLike[str], dtype: str = "bfloat16", checkpoint: Any = None) -> Recording:
    """Returns the recording of the module that `from_pretrained` of `AutoModelForImageTextToText`, or else of
    `AutoModelForCausalLM`, makes, on one rank: its params and persistent buffers.

    model: a folder with a config.json and, if `checkpoint` is None, with the checkpoint.
    dtype: of the module, as PyTorch names it.
    checkpoint: as for `reshard_record.record`. Default: `model`.

    Raises Error as `reshard_record.record` does.
    """
    import torch
    import transformers

    from reshard.torch import tensors_of as tensors_of_module

    config = transformers.AutoConfig.from_pretrained(Path(model))
    kinds = [
        auto._model_mapping.get(type(config), None)
        for auto in (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM)
    ]
    kind = next(filter(None, kinds), None)
    if kind is None:
        raise Error(
            f"{Path(model) / 'config.json'}: transformers {transformers.__version__} has no language model of type "
            f"{config.model_type}"
        )
    loaded: list[Any] = []

    def load(weights: Any) -> None:
        loaded.append(kind.from_pretrained(None, config=config, state_dict=dict(weights), dtype=getattr(torch, dtype)))

    def params() -> dict[str, Any]:
        return tensors_of_module(loaded[0]) if loaded else {}

    before = os.environ.get(_SYNCHRONOUS)
    os.environ[_SYNCHRONOUS] = "1"
    try:
        return record(
            load=load, params=params, checkpoint=tensors_of(model if checkpoint is None else checkpoint), mesh={}
        )
    finally:
        if before is None:
            del os.environ[_SYNCHRONOUS]
        else:
            os.environ[_SYNCHRONOUS] = before
