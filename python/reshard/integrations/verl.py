# SPDX-License-Identifier: Apache-2.0
"""A checkpoint engine of verl 0.9.1:

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: reshard
      custom_backend_module: reshard.integrations.verl
      engine_kwargs: {reshard: {plan: /path/refit.rplan}}

verl starts a process for it beside each process of the rollout engine, to which verl hands full tensors. So the plan's
target layout holds whole tensors (layout ``hf`` without shards), one rank for each rollout process. ``engine_kwargs``
are the arguments of ``Engine``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from ..errors import Error
from ..releases import check_release
from ._engine import CheckpointSide

check_release(("verl",), ("0.9.1",))


@CheckpointEngineRegistry.register("reshard")
class Engine(CheckpointEngine):
    """Refits by a plan whose world ranks are those of the actor, then those of the rollout.

    bucket_size: stated by verl, not used: landing memory has the size of the rank's params.
    actor_live: as ``live`` of CheckpointSide, for the processes of the actor.
    options: of CheckpointSide.
    """

    def __init__(
        self, bucket_size: int = 0, is_master: bool | None = None, *, actor_live: str | None = None, **options: Any
    ):
        actor = is_master is not None  # verl passes is_master to the actor's engines only
        self._side = CheckpointSide(live=actor_live if actor else None, **options)
        self._master = bool(is_master)

    def prepare(self) -> dict[str, Any]:
        import ray

        return {"rendezvous": self._side.offer(ray.util.get_node_ip_address())} if self._master else {}

    @classmethod
    def build_topology(
        cls, actors: int, rollouts: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        urls = [each["rendezvous"] for each in metadata if each.get("rendezvous")]
        if len(urls) != 1:
            raise Error(f"found {len(urls)} actor processes with is_master, expected one")

        def group(ranks: range) -> dict[str, list[Any]]:
            return {"rank": list(ranks), "rendezvous": urls * len(ranks)}

        return group(range(actors)), group(range(actors, actors + rollouts))

    def init_process_group(self, rank: int, rendezvous: str) -> None:
        self._side.join(rank, rendezvous)

    def finalize(self) -> None:
        """Does nothing: memory and connections stay for the next refit."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        await self._side.send(weights)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, Any], None]:
        for name, tensor in await self._side.receive():
            yield name, tensor
