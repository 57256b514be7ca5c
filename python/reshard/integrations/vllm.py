# SPDX-License-Identifier: Apache-2.0
"""The plug-in of vLLM: registers the weight-transfer backend "reshard" in each of vLLM's processes.

    vllm serve MODEL --weight-transfer-config '{"backend": "reshard"}'

vLLM calls ``register`` by the entry point ``vllm.general_plugins`` of this package. ``vllm_engine`` is the part of a
worker, ``vllm_trainer`` that of a trainer.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from ..errors import Error

#: The releases with which reshard is tested.
TESTED = ("0.32.0",)
#: The environment variable that permits others.
ANY_VERSION = "RESHARD_ANY_VERSION"
BACKEND = "reshard"


def check_version() -> None:
    """Raises Error unless the running vLLM is one of TESTED, or RESHARD_ANY_VERSION is set."""
    import vllm

    found = vllm.__version__.partition("+")[0]
    if found not in TESTED and not os.environ.get(ANY_VERSION):
        raise Error(f"vllm: found release {found}, expected {' or '.join(TESTED)}, with which reshard is tested; {ANY_VERSION}=1 permits others")


def register() -> None:
    """Registers the backend. A second call has no effect.

    A release that is not tested is refused where the backend is used, not here: vLLM calls this function also for
    engines that do not use reshard.
    """
    from vllm.distributed.weight_transfer import factory

    engines = factory.WeightTransferEngineFactory
    if BACKEND in engines._registry:
        return
    engines.register_engine(BACKEND, "reshard.integrations.vllm_engine", "Engine")
    if trainers := getattr(factory, "WeightTransferTrainerFactory", None):
        trainers.register_engine(BACKEND, "reshard.integrations.vllm_engine", "TrainerEngine")
    _observe_loading()


def _observe_loading() -> None:
    """Wraps the function that repacks weights after loading, so that each model with this backend has a ``Load``."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.model_loader import base_loader

    process = base_loader.process_weights_after_loading

    @functools.wraps(process)
    def observed(model: Any, *arguments: Any, **options: Any) -> None:
        transfer = get_current_vllm_config().weight_transfer_config
        if transfer is None or transfer.backend != BACKEND:
            process(model, *arguments, **options)
            return
        check_version()
        from .vllm_landing import Load

        load = Load(model)
        process(model, *arguments, **options)
        load.compare()

    base_loader.process_weights_after_loading = observed
