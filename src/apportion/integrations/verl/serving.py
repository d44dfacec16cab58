"""What a replica of the `apportion_transformers` engine does, without Ray and without verl.

Requests that wait are gathered into micro-batches and continued by `TransformersEngine`, a batch at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from apportion.engines.base import Key, Request, Sampling
from apportion.engines.transformers import TransformersEngine
from apportion.errors import InputError
from apportion.integrations.verl.asks import Ask

# Seconds between the first request of a micro-batch and its first forward [ours]: calls of one moment arrive together.
GATHER = 0.005

Part = Literal["weights", "kv_cache"]
PARTS: tuple[Part, ...] = ("weights", "kv_cache")


class ReplicaAsleepError(RuntimeError):
    """A request came to a replica whose weights or cache are released: wake the replicas, or update their weights."""


@dataclass(frozen=True)
class Served:
    """The answer to a request.

    Attributes:
        log_probs: nats, at the sampling temperature and before any filter, as trainers compute theirs; None where
            nobody asked.
        stop: "completed" by a stop token or the budget; "aborted" with what was there by then.
        version: of the weights that sampled it, None before the first update.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...] | None
    stop: Literal["completed", "aborted"]
    version: int | None


class Serving:
    """A model that answers requests, sleeps, and gets new weights, in one event loop.

    While the gate is closed (`abort`) requests wait for `resume`; while it is open and the replica sleeps they are
    refused. From the first part of new weights to the last nothing is generated, and each parameter has to come.

    Args:
        name: for errors. max_batch: continuations decoded at once. length: tokens of the longest sequence.
        ready: whether the model's weights are the policy's, or random until the first update.

    Attributes:
        version: of the weights, as the last update named it.
    """

    def __init__(
        self, name: str, model: nn.Module, pad_id: int, *, max_batch: int, length: int, ready: bool = True
    ) -> None:
        self.name = name
        self.engine = TransformersEngine(
            model, pad_id, max_batch=max_batch, max_cache_tokens=max(131_072, length), decided=self._cut
        )
        self.version: int | None = None
        self._running = 0
        self._model, self._ready = model, ready
        self._released: set[Part] = set()
        self._came: set[int] = set()
        self._waiting: list[tuple[Ask, asyncio.Future[Served]]] = []
        self._worker: asyncio.Task[None] | None = None
        self._gate = asyncio.Event()
        self._gate.set()
        self._rejecting = False

    async def generate(self, ask: Ask) -> Served:
        """Continues a request.

        Raises:
            ReplicaAsleepError: the replica sleeps, or its weights are not whole.
            InputError: token ids that the model does not have.
        """
        highest = self.engine.scorer.vocabulary - 1
        for token in ask.prefix_ids:
            if not 0 <= token <= highest:
                raise InputError("prompt_ids", token, f"ids from 0 to {highest}, which the model has")
        while not self._gate.is_set():
            if self._rejecting:
                return self._nothing()
            await self._gate.wait()
        self._check()
        answer: asyncio.Future[Served] = asyncio.get_running_loop().create_future()
        self._waiting.append((ask, answer))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await answer

    async def abort(self, rejecting: bool = False) -> int:
        """Closes the gate and ends all that runs with what is there; returns how many requests that were.

        Args:
            rejecting: requests that come now are answered with nothing, "aborted", instead of waiting.
        """
        self._rejecting = rejecting
        self._gate.clear()
        waiting, self._waiting = self._waiting, []
        for _, answer in waiting:
            _settle(answer, self._nothing())
        running = self._running
        await self.drained()
        return len(waiting) + running

    def resume(self) -> None:
        """Opens the gate."""
        self._rejecting = False
        self._gate.set()

    async def drained(self) -> None:
        """Returns when nothing waits or runs."""
        while self._worker is not None and not self._worker.done():
            await asyncio.wait([self._worker])

    async def release(self, parts: Iterable[Part], *, forget: bool = False) -> None:
        """Sleeps without these parts, once what was accepted has ended.

        Args:
            forget: the weights are gone, and waking up does not bring them back.
        """
        # Before it waits: who comes now is refused and cannot keep it awake.
        self._released |= set(parts)
        await self.drained()
        self._ready = self._ready and not forget

    def wake(self, parts: Iterable[Part]) -> None:
        """Brings parts back; weights that were forgotten come with the next update."""
        self._released -= set(parts)

    async def update(self, named: Mapping[str, Tensor], version: int | None, *, first: bool, last: bool) -> None:
        """Copies a part of new weights into the model, once what was accepted has ended.

        Args:
            version: what the weights are called from the last part on; None leaves the name.

        Raises:
            InputError: a name or a shape that the model does not have, or a parameter that never came.
        """
        await self.drained()
        self._ready = False
        if first:
            self._came = set()
        own = dict(self._model.named_parameters(remove_duplicate=False)) | dict(self._model.named_buffers())
        for name, tensor in named.items():
            if name not in own or own[name].shape != tensor.shape:
                raise InputError(f"weights: {name}", tuple(tensor.shape), "a name and a shape of the replica's model")
            own[name].data.copy_(tensor)
            self._came.add(id(own[name]))
        if last:
            missing = [name for name, tensor in self._model.named_parameters() if id(tensor) not in self._came]
            if missing:
                raise InputError("weights", f"no {missing[0]} ({len(missing)} missing)", "all parameters of the model")
            self._ready = True
            self.version = self.version if version is None else version

    def _check(self) -> None:
        if self._released:
            raise ReplicaAsleepError(f"{self.name} is asleep: replicas must be awake to generate; wake them first")
        if not self._ready:
            raise ReplicaAsleepError(f"{self.name} has no weights: they were released; update them before it generates")

    def _nothing(self) -> Served:
        return Served((), None, "aborted", self.version)

    def _cut(self, _: Sequence[int]) -> bool:
        return not self._gate.is_set()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()

        def done(answer: asyncio.Future[Served], served: Served) -> None:
            loop.call_soon_threadsafe(_settle, answer, served)

        while self._waiting:
            await asyncio.sleep(GATHER)
            if not self._waiting:
                return
            sampling = self._waiting[0][0].sampling
            batch = [each for each in self._waiting if each[0].sampling == sampling]
            self._waiting = [each for each in self._waiting if each[0].sampling != sampling]
            self._running = len(batch)
            try:
                await asyncio.to_thread(self._run, batch, sampling, done)
            # Whatever the forward raised belongs to those who asked.
            except Exception as error:
                for _, answer in batch:
                    _settle(answer, error)
            self._running = 0

    def _run(
        self,
        batch: Sequence[tuple[Ask, asyncio.Future[Served]]],
        sampling: Sampling,
        done: Callable[[asyncio.Future[Served], Served], None],
    ) -> None:
        """Answers a batch, each request as it ends; equal requests share one continuation."""
        of: dict[Key, list[tuple[Ask, asyncio.Future[Served]]]] = {}
        for ask, answer in batch:
            of.setdefault(ask.key, []).append((ask, answer))
        requests = [
            Request(key, each[0][0].prefix_ids, samples=1, budget=max(ask.budget for ask, _ in each))
            for key, each in of.items()
        ]
        for continuation in self.engine.continuations(requests, sampling):
            ids = continuation.token_ids
            each = of[continuation.key]
            logprobs: tuple[float, ...] | None = None
            if any(ask.logprobs for ask, _ in each):
                prefix = each[0][0].prefix_ids
                logprobs = tuple(self.engine.score((*prefix, *ids), len(prefix), sampling.temperature)[0].tolist())
            for ask, answer in each:
                aborted = continuation.finish == "decided" and len(ids) < ask.budget
                done(answer, Served(
                    ids[: ask.budget], logprobs[: ask.budget] if logprobs and ask.logprobs else None,
                    "aborted" if aborted else "completed", self.version,
                ))  # fmt: skip


def _settle(answer: asyncio.Future[Served], result: Served | Exception) -> None:
    if answer.done():
        return
    if isinstance(result, Served):
        answer.set_result(result)
    else:
        answer.set_exception(result)
