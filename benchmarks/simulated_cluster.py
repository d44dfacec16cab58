"""Replicas that are not there: verl's routing and an engine with continuous batching, in simulated seconds.

Served with apportion's own `Scheduler`; only what is behind it is simulated:

  driver     one process; `driver_s` for each piece, half when it is sent and half when it is back
  workers    a piece's continuations are asked for one after the other, `worker_s` each; the piece is answered when its
             last has ended
  balancer   one process, as verl's: `balancer_s` for each acquire and each release. A name that it has met goes where
             it went, another to a replica with the fewest requests, drawn among equals
  replica    up to `slots` sequences at once, the others wait; each of b gets its next token every `step(b)` seconds; a
             prefill stops all of them for `prefill` seconds a token that is not in the prefix cache. Nothing is cached
             at first, and nothing is evicted
"""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from apportion.engines.base import Key, Request
from apportion.integrations.verl.scheduler import Piece, Scheduler


@dataclass(frozen=True)
class Engine:
    """A replica's speed: `steps` are pairs of (sequences at once, seconds a step), rising; between them a line."""

    slots: int
    steps: Sequence[tuple[int, float]]
    prefill: float

    def curve(self) -> list[float]:
        """Seconds of a step with 0, 1, … `slots` sequences."""
        b, s = zip(*self.steps, strict=True)
        return np.interp(np.arange(self.slots + 1), b, s).tolist()


@dataclass(frozen=True)
class State:
    """A pivot: tokens of its prompt, of its prefix (prompt included), and of what each of its continuations will be."""

    request: Request
    prompt: int
    prefix: int
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Host:
    """Seconds that Ray's processes take, see above, and how many workers there are."""

    workers: int = 8
    driver_s: float = 0.0
    worker_s: float = 0.0
    balancer_s: float = 0.0


@dataclass
class Replica:
    step: list[float]
    slots: int
    prefill: float
    at: float = 0.0
    stalled: float = 0.0
    tokens: float = 0.0  # that each running sequence would have since the start
    version: int = 0
    running: list[tuple[float, int, Any]] = field(default_factory=list)
    waiting: deque[Any] = field(default_factory=deque)
    cached: dict[object, int] = field(default_factory=dict)
    busy_s: float = 0.0

    def advance(self, now: float) -> None:
        if self.running:
            self.tokens += max(0.0, now - max(self.at, self.stalled)) / self.step[len(self.running)]
            self.busy_s += now - self.at
        self.at = now

    def admit(self, now: float) -> None:
        """Moves from waiting to running while there are slots."""
        while self.waiting and len(self.running) < self.slots:
            state, m, piece = self.waiting.popleft()
            key = state.request.key
            response, prompt = (key.prompt, key.sample), (key.prompt, -1)
            have = max(min(self.cached.get(response, 0), state.prefix), self.cached.get(prompt, 0))
            self.cached[response] = max(self.cached.get(response, 0), state.prefix)
            self.cached[prompt] = state.prompt
            self.stalled = max(self.stalled, now) + (state.prefix - have) * self.prefill
            heapq.heappush(
                self.running, (self.tokens + state.lengths[m], self.version * 1000 + len(self.running), piece)
            )

    def next_end(self) -> float:
        left = max(0.0, self.running[0][0] - self.tokens)
        return max(self.at, self.stalled) + left * self.step[len(self.running)]


class Balancer:
    def __init__(self, replicas: int) -> None:
        self.loads, self.homes, self.draw = np.zeros(replicas, dtype=np.int64), dict[str, int](), random.Random(0)

    def acquire(self, name: str) -> int:
        if name not in self.homes:
            least = np.flatnonzero(self.loads == self.loads.min())
            self.homes[name] = int(self.draw.choice(least))
        self.loads[self.homes[name]] += 1
        return self.homes[name]

    def release(self, replica: int) -> None:
        self.loads[replica] -= 1


def serve(
    states: Sequence[State],
    engine: Engine,
    replicas: int,
    host: Host,
    in_flight: int,
    *,
    scheduler: type[Scheduler[int]] = Scheduler,
    route: Callable[[Piece], str] = lambda piece: piece.route,
) -> dict[str, float]:
    """Simulates until every continuation has come; in_flight is of one replica."""
    curve = engine.curve()
    servers = [Replica(curve, engine.slots, engine.prefill) for _ in range(replicas)]
    balancer = Balancer(replicas)
    events: list[tuple[float, int, str, Any]] = []
    number = iter(range(1 << 62))
    by_key: Mapping[Key, State] = {state.request.key: state for state in states}
    spent, pieces = 0.0, 0
    driver_free, balancer_free = 0.0, 0.0
    worker_free = [0.0] * host.workers
    left: dict[str, int] = {}

    def at(when: float, kind: str, what: Any) -> None:
        heapq.heappush(events, (when, next(number), kind, what))

    begun = time.process_time()
    work = scheduler(
        [s.request for s in states], range(host.workers), in_flight=in_flight * replicas, replicas=replicas
    )
    spent += time.process_time() - begun
    at(0.0, "driver", None)
    now = 0.0
    while events:
        now, _, kind, what = heapq.heappop(events)
        if kind == "driver":
            driver_free = max(driver_free, now)
            begun = time.process_time()
            if what is not None:
                work.came(what, what.numbers, driver_free)
            sends = work.start(driver_free)
            spent += time.process_time() - begun
            driver_free += host.driver_s / 2 * ((what is not None) + len(sends))
            if work.done:
                break
            for worker, piece in sends:
                pieces += 1
                left[piece.route] = len(piece.numbers)
                for m in piece.numbers:
                    worker_free[worker] = max(worker_free[worker], driver_free) + host.worker_s
                    at(worker_free[worker], "acquire", (piece, m))
        elif kind == "acquire":
            balancer_free = max(balancer_free, now) + host.balancer_s
            at(balancer_free, "arrive", (*what, balancer.acquire(route(what[0]))))
        elif kind == "arrive":
            piece, m, home = what
            server = servers[home]
            server.advance(now)
            server.waiting.append((by_key[piece.request.key], m, piece))
            server.admit(now)
            server.version += 1
            at(server.next_end(), "end", (home, server.version))
        else:
            home, version = what
            server = servers[home]
            if version != server.version:
                continue
            server.advance(now)
            _, _, piece = heapq.heappop(server.running)
            server.admit(now)
            server.version += 1
            if server.running:
                at(server.next_end(), "end", (home, server.version))
            balancer_free = max(balancer_free, now) + host.balancer_s
            balancer.release(home)
            left[piece.route] -= 1
            if not left[piece.route]:
                at(now, "driver", piece)
    return {
        "makespan_s": driver_free, "pieces": pieces, "scheduler_s_a_piece": spent / pieces,
        "busy": sum(s.busy_s for s in servers) / replicas / driver_free,
    }  # fmt: skip


def bounds(states: Sequence[State], engine: Engine, replicas: int) -> dict[str, float]:
    """Seconds that no schedule can be below.

    work: every token at the best rate that any batch up to `slots` reaches, each response's prefix prefilled once (up
    to its last pivot; its prompt once a group), over the replicas.
    chain: the longest continuation alone on a replica, its prefix prefilled.
    """
    curve = engine.curve()
    rate = min(seconds / b for b, seconds in enumerate(curve) if b)
    tokens = sum(sum(state.lengths) for state in states)
    own: dict[tuple[str, int], int] = {}
    prompts: dict[str, int] = {}
    for state in states:
        key = state.request.key
        prompts[key.prompt] = state.prompt
        own[key.prompt, key.sample] = max(own.get((key.prompt, key.sample), 0), state.prefix - state.prompt)
    prefill = (sum(own.values()) + sum(prompts.values())) * engine.prefill
    chain = max(state.prefix * engine.prefill + max(state.lengths) * curve[1] for state in states)
    return {"work_s": (tokens * rate + prefill) / replicas, "chain_s": chain}
