# SPDX-License-Identifier: Apache-2.0
"""A checkpoint engine of NeMo-RL:

    policy.generation:
      refit_transport: "reshard.integrations.nemo_rl:Engine"
      refit_cfg: {"reshard.integrations.nemo_rl:Engine": {plan: /path/refit.rplan}}

The world ranks of the plan are those of the policy's workers, then those of the generation's workers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

from ..errors import Error
from ._engine import CheckpointSide, check_given, free_address


class Engine(CheckpointEngine):
    """Refits by a plan.

    bucket_size: stated by NeMo-RL, not used: landing memory has the size of the rank's params.
    release_after_refit: NeMo-RL then calls ``finalize`` after each refit, and the next one joins again.
    policy_live, generation_live: as ``live`` of CheckpointSide, for either side. A generation worker with live params
        yields no tensors to NeMo-RL.
    options: of CheckpointSide.
    """

    shard_expert_weights = False  # the plan knows which rank needs what
    shard_hf_weights = False

    def __init__(
        self,
        bucket_size: int = 0,
        *,
        release_after_refit: bool = False,
        policy_live: str | None = None,
        generation_live: str | None = None,
        **options: Any,
    ):
        self._live = {"policy": policy_live, "generation": generation_live}
        self._options = options
        self._offered: str | None = options.pop("rendezvous", None)
        check_given(self._offered, options)
        self._side: CheckpointSide | None = None

    def prepare(self) -> dict[str, Any]:
        import ray

        return {"rendezvous": self._offered or free_address(ray.util.get_node_ip_address())}

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> None:
        self._join("policy", worker_rank, metadata)

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> None:
        self._join("generation", train_world_size + rollout_rank, metadata)

    def _join(self, role: str, rank: int, metadata: list[dict[str, Any]]) -> None:
        if not self._side:
            self._side = CheckpointSide(live=self._live[role], **self._options)
        self._side.join(rank, metadata[0]["rendezvous"])  # the offer of policy worker 0, which is world rank 0

    def _joined(self) -> CheckpointSide:
        if not self._side:
            raise Error("found a refit before the process group was initialized, expected init_…_process_group first")
        return self._side

    async def send_weights(self, weights: Any) -> None:
        await self._joined().send(weights)

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, Any]], None]:
        batch = await self._joined().receive()
        if batch:
            yield batch

    def finalize(self) -> None:
        if self._side and self._side.member:
            self._side.member.close()
        self._side = None
