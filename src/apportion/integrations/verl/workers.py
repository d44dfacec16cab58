"""Probes on a Ray cluster: workers on every node, driven by the scheduler, and what came of it by key.

Shapes: none, these are records.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from apportion.engines.base import Key, Request
from apportion.errors import InputError
from apportion.integrations.verl.probe_worker import Answer, ProbeWorker, why
from apportion.integrations.verl.scheduler import Lost, Piece, Scheduler
from apportion.integrations.verl.settings import ProbeSettings
from apportion.measure.probe import Rescue

__all__ = ["Answer", "Lost", "Outcome", "Piece", "ProbeWorker", "Probes"]

log = logging.getLogger(__name__)

# Seconds in which a worker starts: it imports verl and loads the tokenizer.
START_S = 600.0
# Seconds between lines of progress.
REPORT_S = 30.0
# A worker answers with what it has after `timeout_s`; one that is silent for this much longer has lost it all [ours].
PATIENCE = 1.25


@dataclass(frozen=True)
class Outcome:
    """What came back, by key and number, and what never did.

    Attributes:
        counts: the scheduler's, and `abstained` (answers without a reward), `grading_failed` (those of them whose
            verifier raised) and `workers_lost`.
    """

    answers: dict[tuple[Key, int], Answer]
    lost: list[Lost]
    counts: dict[str, int]


@dataclass
class _Worker:
    actor: Any
    started: Any


class Probes:
    """Owns the workers, from the driver. They are spread over the live nodes, as verl spreads its agent loop's.

    A worker that dies is replaced; its work goes to the others, and the new one joins with the next call, or at once
    where it was the last. Results are those of an undisturbed run, as far as the engine draws by seed
    (`probe_worker.SEEDED`): a continuation is asked again by its key. What a worker had asked when it died stays in the
    counts of verl's balancer, which sends that many fewer to those replicas from then on. A balancer that dies with its
    node leaves every further continuation lost.

    Args:
        config: verl's whole configuration. llm_client: verl's client of the rollout replicas.
        reward_handles: verl's reward loop workers.
        stop_ids: token ids that end a response.
        balancer: verl's balancer, to take replicas off that die (see `ProbeWorker`).

    Raises:
        InputError: verl has no reward workers to grade with.
    """

    def __init__(
        self,
        config: Any,
        llm_client: Any,
        reward_handles: Sequence[Any] | None,
        settings: ProbeSettings,
        *,
        stop_ids: Collection[int],
        rescue: Rescue | None = None,
        balancer: Any = None,
    ) -> None:
        if not reward_handles:
            raise InputError(
                "reward_loop_worker_handles", "none", "verl's reward workers, which grade probes as they come",
                "set reward.reward_model.enable_resource_pool=True, or grade by rule",
            )  # fmt: skip
        self._settings, self._handles = settings, list(reward_handles)
        self._config, self._client = config, llm_client
        self._rest = (tuple(stop_ids), rescue, settings.timeout_s, balancer)
        number = settings.workers or config.actor_rollout_ref.rollout.agent.num_workers
        self._served = False
        self._workers = [self._start(slot) for slot in range(number)]

    def run(self, requests: Sequence[Request], rows: Mapping[Key, Mapping[str, Any]], *, replicas: int) -> Outcome:
        """Has every request answered; blocks until each of its continuations came or was given up.

        Args:
            rows: what the data set says of each request's prompt; only a piece's own travels with it.
            replicas: rollout replicas that answer now.

        Raises:
            InputError: see `Scheduler`.
            RayActorError: none of the workers starts, such as for want of a tokenizer. GetTimeoutError: none of them
                does in `START_S` seconds.
        """
        if not requests:
            return Outcome({}, [], {})
        course = _Course(self, self._settings, requests, rows, replicas)
        try:
            course.follow()
        finally:
            course.cancel()
        return course.outcome()

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            ray.kill(worker.actor)
        self._workers = []

    def up(self) -> list[int]:
        """The slots of the workers that are up. The first call waits for all of them, at most `START_S` seconds.

        Raises:
            RayActorError, GetTimeoutError: see `run`.
        """
        slots = {worker.started: slot for slot, worker in enumerate(self._workers)}
        for patience in (0.0, START_S) if self._served else (START_S,):
            came, waiting = ray.wait(list(slots), num_returns=len(slots), timeout=patience)
            if alive := [ref for ref in came if _fine(ref)]:
                break
        else:
            ray.get([*came, *waiting][0], timeout=0)
        self._served = True
        for ref in came:
            if ref not in alive:
                self.replace(slots[ref])
        return sorted(slots[ref] for ref in alive)

    def actor(self, slot: int) -> Any:
        """The worker of a slot."""
        return self._workers[slot].actor

    def replace(self, slot: int) -> None:
        """Puts a new worker into a slot. The old one may only be out of reach: it is ended."""
        ray.kill(self._workers[slot].actor)
        self._workers[slot] = self._start(slot)

    def _start(self, slot: int) -> _Worker:
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        near = NodeAffinitySchedulingStrategy(nodes[slot % len(nodes)], soft=True) if nodes else "SPREAD"
        turn = slot % len(self._handles)
        actor = (
            ray.remote(ProbeWorker)
            # As verl's: a CPU to start with and none to run. An actor of none at all is not kept to its node.
            .options(max_restarts=0, scheduling_strategy=near)
            .remote(self._config, self._client, self._handles[turn:] + self._handles[:turn], *self._rest)
        )
        return _Worker(actor, actor.ready.remote())


class _Course:
    """One call of `Probes.run`: the pieces that are out, by Ray's reference, and what has come."""

    def __init__(
        self,
        probes: Probes,
        settings: ProbeSettings,
        requests: Sequence[Request],
        rows: Mapping[Key, Mapping[str, Any]],
        replicas: int,
    ) -> None:
        self._probes, self._rows, self._retries = probes, rows, settings.retries
        self._asked = sum(request.samples for request in requests)
        self._serving = set(probes.up())
        self._scheduler: Scheduler[int] = Scheduler(
            requests, sorted(self._serving), in_flight=settings.in_flight * replicas, replicas=replicas,
            retries=settings.retries, timeout=settings.timeout_s * PATIENCE,
        )  # fmt: skip
        self._out: dict[Any, tuple[int, Piece]] = {}
        self._answers: dict[tuple[Key, int], Answer] = {}
        self._workers_lost = self._revived = 0

    def follow(self) -> None:
        """Sends what may be sent and takes what comes until the scheduler is done."""
        scheduler, report = self._scheduler, time.monotonic() + REPORT_S
        while not scheduler.done:
            for slot, piece in scheduler.start(time.monotonic()):
                sent = self._probes.actor(slot).probe.remote(piece, self._rows[piece.request.key])
                self._out[sent] = slot, piece
            if not self._out:
                raise RuntimeError("the scheduler is not done and nothing is out")
            until = min(report, scheduler.next_deadline() or report)
            ray.wait(list(self._out), num_returns=1, timeout=max(0.0, until - time.monotonic()))
            # All that came by now at once: each wait costs time in proportion to what is out.
            for ref in ray.wait(list(self._out), num_returns=len(self._out), timeout=0)[0]:
                if ref in self._out:
                    self._take(ref)
            # They stay out until they return, for an answer that is on its way still counts.
            late = {piece.route for piece in scheduler.expire(time.monotonic())}
            for ref in [ref for ref, (_, piece) in self._out.items() if piece.route in late]:
                ray.cancel(ref)
            if time.monotonic() >= report:
                report += REPORT_S
                log.info("probes: %d of %d came, %d pieces out, so far %s", len(self._answers), self._asked,
                         len(self._out), dict(scheduler.counts))  # fmt: skip

    def cancel(self) -> None:
        """Cancels what is out, with what it has asked of the replicas."""
        for ref in self._out:
            ray.cancel(ref)
        self._out.clear()

    def outcome(self) -> Outcome:
        faults = [answer.fault for answer in self._answers.values() if answer.fault]
        if faults:
            log.warning("%d of %d probes were not graded: %s", len(faults), len(self._answers), faults[0])
        counts = dict(self._scheduler.counts) | {
            "abstained": sum(answer.reward is None for answer in self._answers.values()),
            "grading_failed": len(faults), "workers_lost": self._workers_lost,
        }  # fmt: skip
        return Outcome(self._answers, list(self._scheduler.lost), counts)

    def _take(self, ref: Any) -> None:
        slot, piece = self._out.pop(ref)
        try:
            found, reason = ray.get(ref)
        except RayTaskError as error:
            # Before the next case: what a worker raised may itself be about another actor.
            self._scheduler.failed(piece, why(error), time.monotonic())
        except RayActorError as error:
            self._worker_lost(slot, piece, why(error))
        except RayError as error:
            self._scheduler.failed(piece, why(error), time.monotonic())
        else:
            accepted = set(self._scheduler.came(piece, [answer.m for answer in found], time.monotonic(), reason))
            # The state is that of the piece that was sent, and of two answers to one number the first counts.
            self._answers |= {(piece.request.key, a.m): a for a in reversed(found) if a.m in accepted}

    def _worker_lost(self, slot: int, piece: Piece, reason: str) -> None:
        gone = {ref: other for ref, (where, other) in self._out.items() if where == slot}
        for ref in gone:
            del self._out[ref]
        self._probes.replace(slot)
        self._workers_lost += 1
        log.warning("a probe worker is gone (%s); its %d pieces are asked again", reason, len(gone) + 1)
        if self._serving != {slot} or self._revived == self._retries:
            self._serving.discard(slot)
            self._scheduler.worker_lost(slot, time.monotonic())
            return
        self._revived += 1
        for each in (piece, *gone.values()):
            self._scheduler.failed(each, reason, time.monotonic())


def _fine(ref: Any) -> bool:
    try:
        ray.get(ref)
    except RayError:
        return False
    return True
