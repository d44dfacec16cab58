"""A rollout engine for verl on plain transformers, which runs on a CPU: `rollout.name=apportion_transformers`.

It is for debugging a cluster run on a laptop and for end-to-end tests. There is one server a replica, whatever its
parallel sizes, and no HTTP: requests come as token ids. Importing this registers it, the platform `cpu`, and the
checkpoint engine `apportion_ray`.

Log-probabilities of rollouts are those at the sampling temperature before top-k, top-p, min-p and the repetition
penalty, which is what trainers compute. [ours]
"""

from __future__ import annotations

import os
from typing import Any

import ray
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from apportion.errors import InputError
from apportion.integrations.verl import cpu, transfer  # noqa: F401  (the platform registers itself)

NAME = "apportion_transformers"


class Replica(RolloutReplica):
    """Starts and reaches the server of one replica; everything else is verl's."""

    async def launch_servers(self) -> None:
        # Every process of a run imports this module; the engine is for those that serve.
        from apportion.integrations.verl.server import Server

        worker = self.workers[0]
        node = await worker.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        name = f"{server_name(self.replica_rank, kind)}{self.name_suffix}"
        server = ray.remote(Server).options(
            name=name,
            max_concurrency=self.max_concurrency,
            scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False),
        )
        self.servers = [server.remote(self.config, self.model_config, self.rollout_mode, self.replica_rank)]
        await self.servers[0].wait_for_requests_to_drain.remote()
        # Servers are told apart by their address, and this one listens on none.
        self._server_handle, self._server_address = self.servers[0], name


class ServerAdapter(base.BaseRollout):
    """A trainer's or a rollout worker's side of the replica that it belongs to: brings it the weights."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        size = (
            self.config.tensor_model_parallel_size
            * self.config.data_parallel_size
            * self.config.pipeline_model_parallel_size
        )
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0
        self._server: Any = None

    @property
    def server(self) -> Any:
        # Trainers are there before the servers.
        self._server = self._server or ray.get_actor(server_name(self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        if self.is_leader_rank and self.config.free_cache_engine:
            await self.server.wake_up.remote(tags)

    async def release(self) -> None:
        if self.is_leader_rank and self.config.free_cache_engine:
            await self.server.sleep.remote()

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **rest: Any
    ) -> None:
        """Sends the weights in buckets; every rank walks through them, which may take all of them.

        Raises:
            InputError: differences of weights, or LoRA weights that are not merged.
        """
        if wire_format != "named_tensors":
            raise InputError("checkpoint_engine.backend", wire_format, "one that sends whole tensors", "apportion_ray")
        if rest.get("peft_config") is not None:
            raise InputError("model.lora.merge", "false", "true: this engine takes merged weights alone")
        size = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        first = True
        async for bucket, last in transfer.buckets(weights, size):
            if self.is_leader_rank:
                await self.server.update_weights.remote(bucket, global_steps, first, last)
            first = False


def server_name(rank: int, kind: str = "") -> str:
    """The name of a replica's actor."""
    return f"{NAME}_server_{kind}{rank}"


def register() -> None:
    """Makes verl know the engine; done once when this module is imported, and harmless after that."""
    RolloutReplicaRegistry.register(NAME, lambda: Replica)
    # There is no function for the other half: verl reads this table of class names.
    base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.ServerAdapter"


register()
