"""Weights from trainers to standalone replicas through Ray's object store: a checkpoint engine for CPUs.

`actor_rollout_ref.rollout.checkpoint_engine.backend=apportion_ray`. Rank 0 of the trainers puts the weights, a bucket
of them at a time, and every rollout worker takes all of them in order.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import ray
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from apportion.integrations.verl.mailbox import Mailbox

# A part of a model's weights by name.
Bucket = dict[str, Tensor]


async def buckets(weights: Any, size: int) -> AsyncIterator[tuple[Bucket, bool]]:
    """Groups weights, copied to the CPU, into buckets of at most `size` bytes; with each, whether it is the last.

    Args:
        weights: (name, tensor) pairs, from an iterator that may be asynchronous. A larger tensor goes alone.
    """
    bucket: Bucket = {}
    held = 0
    async for name, tensor in ensure_async_iterator(weights):
        if bucket and held + tensor.nbytes > size:
            yield bucket, False
            bucket, held = {}, 0
        bucket[name] = tensor.detach().cpu().clone()
        held += tensor.nbytes
    yield bucket, True


@CheckpointEngineRegistry.register("apportion_ray")
class RayCheckpointEngine(CheckpointEngine):
    """One side of a transfer: a trainer's rank or a rollout worker.

    Args:
        bucket_size: bytes. is_master: whether this is rank 0 of the trainers, which all hold whole tensors.
    """

    # The driver's: one for each number of readers, which lives as long as the run.
    _mailboxes: dict[int, Any] = {}  # noqa: RUF012

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size, self.is_master = bucket_size, is_master
        self._mailbox: Any = None
        self._reader = 0

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        if rollout_world_size not in cls._mailboxes:
            # No name: it ends with the driver that holds it.
            cls._mailboxes[rollout_world_size] = ray.remote(Mailbox).options(num_cpus=0).remote(rollout_world_size)
        mailbox = cls._mailboxes[rollout_world_size]
        return (
            {"mailbox": [mailbox] * actor_wg_world_size, "reader": [0] * actor_wg_world_size},
            {"mailbox": [mailbox] * rollout_world_size, "reader": list(range(rollout_world_size))},
        )

    def init_process_group(self, mailbox: Any, reader: int) -> None:
        self._mailbox, self._reader = mailbox, reader

    def finalize(self) -> None:
        self._mailbox = None

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        # Gathering a tensor takes every rank, so all of them walk through.
        async for bucket, last in buckets(weights, self.bucket_size):
            if self.is_master:
                await self._mailbox.put.remote([ray.put(bucket)], last)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        number, last = 0, False
        while not last:
            (bucket,), last = await self._mailbox.take.remote(self._reader, number)
            number += 1
            for each in (await bucket).items():
                yield each
