"""Which continuations are asked of which worker, and when again: no Ray, no clock, no text [ours].

The driver tells what happened and when; `start` answers what is to be sent now. The same events give the same sends.
Results hang on none of it, for a continuation draws from its own stream (`Key.stream`): not on the order, the split
into pieces, the workers or the retries. `benchmarks/cluster_schedule.py` measured the choices made here.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from apportion.engines.base import Key, Request, asked_of
from apportion.errors import InputError

Worker = TypeVar("Worker", bound=Hashable)
NO_WORKER = "no worker is left"


@dataclass(frozen=True)
class Piece:
    """What a worker is sent at once: continuations of one prefix, so that one replica's prefix cache serves them all.

    Attributes:
        request: the key, prefix and budget; its `samples` and `first` are those of the whole request.
        numbers: the continuations that are wanted, rising.
        attempt: 0 for the first.
        route: the name that requests are routed by. No other piece and no other attempt has it, so that a replica
            that does not answer is not asked by the same name again.
    """

    request: Request
    numbers: tuple[int, ...]
    attempt: int
    route: str


@dataclass(frozen=True)
class Lost:
    """Continuation `m` of a key, given up, and why."""

    key: Key
    m: int
    reason: str


class _Sent(NamedTuple, Generic[Worker]):
    piece: Piece
    worker: Worker
    tried: frozenset[Worker]
    deadline: float


class Scheduler(Generic[Worker]):
    """Keeps at most `in_flight` continuations out, hands them evenly to workers, and asks again for what is missing.

    Pieces with the largest budget start first, so that few are left at the end, and of those the largest; what is
    asked again comes before what was not asked yet. Of the workers that have not failed it, a piece goes to the one
    with the fewest failures since its last answer, then with the fewest continuations: a worker that refuses everything
    at once, or never answers, would otherwise look idle and be given all.

    Args:
        requests: any number of them. Several may have a key if their numbers differ.
        workers: names to tell workers by. None at all is as if all were lost.
        in_flight: continuations that may be out at a time, over all workers.
        replicas: servers that share them. A piece has at most in_flight/replicas continuations, at least one: what one
            server is meant to have at a time.
        retries: how often a piece that failed, or whose worker is lost, is asked again.
        timeout: seconds after which a piece counts as failed; None for never. Times are the driver's, never falling.

    Raises:
        InputError: a number outside its range, a worker named twice, a continuation asked twice, an empty prefix or
            budget.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        workers: Sequence[Worker],
        *,
        in_flight: int,
        replicas: int = 1,
        retries: int = 2,
        timeout: float | None = None,
    ) -> None:
        for name, wrong, got, expected in (
            ("in_flight", in_flight < 1, in_flight, "at least 1"),
            ("replicas", replicas < 1, replicas, "at least 1"),
            ("retries", retries < 0, retries, "at least 0"),
            ("timeout", timeout is not None and not timeout > 0, timeout, "above 0 seconds, or None"),
            ("workers", len(set(workers)) < len(workers), list(workers), "each once"),
        ):
            if wrong:
                raise InputError(name, got, expected)
        self._in_flight, self._retries, self._busy = in_flight, retries, 0
        self._timeout = float("inf") if timeout is None else timeout
        self._missing: dict[Key, set[int]] = {}
        self._lost: dict[tuple[Key, int], Lost] = {}
        self._counts: Counter[str] = Counter()
        pieces = sorted(self._pieces(requests, max(in_flight // replicas, 1)), key=self._rank)
        self._fresh = deque((piece, frozenset[Worker]()) for piece in pieces)
        self._again: deque[tuple[Piece, frozenset[Worker]]] = deque()
        # By route, in the order of their deadlines.
        self._out: OrderedDict[str, _Sent[Worker]] = OrderedDict()
        self._number = {worker: i for i, worker in enumerate(workers)}
        self._load = dict.fromkeys(workers, 0)
        self._failures = dict.fromkeys(workers, 0)
        # Entries that are no longer true stay in the heap until they are met.
        self._free = [self._entry(worker) for worker in workers]
        if not workers:
            self._give_up_all()

    def _pieces(self, requests: Iterable[Request], size: int) -> Iterator[Piece]:
        for request in asked_of(list(requests)):
            wanted = self._missing.setdefault(request.key, set())
            numbers = range(request.first, request.first + request.samples)
            if not wanted.isdisjoint(numbers):
                raise InputError(f"request {request.key}", "a continuation that another request asks for", "each once")
            wanted.update(numbers)
            self._counts["asked"] += len(numbers)
            for at in range(0, len(numbers), size):
                yield _named(request, tuple(numbers[at : at + size]), 0)

    @staticmethod
    def _rank(piece: Piece) -> tuple[int, int]:
        return -piece.request.budget, -len(piece.numbers)

    @property
    def done(self) -> bool:
        """Whether every continuation has come or is lost. Pieces may be out all the same: nobody needs them."""
        return self._counts["accepted"] + len(self._lost) == self._counts["asked"]

    @property
    def lost(self) -> list[Lost]:
        """What was given up, in that order."""
        return list(self._lost.values())

    @property
    def counts(self) -> dict[str, int]:
        """Counts of continuations and of pieces.

        asked, accepted, lost: continuations. late: accepted after they were asked again or given up. doubled: ignored,
        for they were there. foreign: ignored, for the piece did not ask for them. pieces: sent, retries included.
        retried: sent again. failed, expired: pieces that ended so.
        """
        names = ("asked", "accepted", "late", "doubled", "foreign", "pieces", "retried", "failed", "expired")
        return {**{name: self._counts[name] for name in names}, "lost": len(self._lost)}

    def start(self, now: float) -> list[tuple[Worker, Piece]]:
        """What to send now. To be asked after every event, until `done`."""
        sends: list[tuple[Worker, Piece]] = []
        while queue := self._again or self._fresh:
            piece, tried = queue[0]
            numbers = tuple(m for m in piece.numbers if m in self._missing[piece.request.key])
            if numbers and self._busy + len(numbers) > self._in_flight:
                break
            queue.popleft()
            if not numbers:  # a late answer was faster
                continue
            piece = replace(piece, numbers=numbers)
            worker = self._idlest(tried)
            self._out[piece.route] = _Sent(piece, worker, tried | {worker}, now + self._timeout)
            self._busy += len(numbers)
            self._counts["pieces"] += 1
            self._counts["retried"] += piece.attempt > 0
            self._burden(worker, len(numbers))
            sends.append((worker, piece))
        return sends

    def came(self, piece: Piece, numbers: Iterable[int], now: float, reason: str = "") -> list[int]:
        """A piece is answered: which of `numbers` to keep. What it lacks is asked again.

        Args:
            reason: why it lacks some.
        """
        missing, key = self._missing.get(piece.request.key, set()), piece.request.key
        wanted, accepted = set(piece.numbers), []
        sent = self._close(piece)
        for m in numbers:
            if m not in wanted:
                self._counts["foreign"] += 1
            elif m not in missing and (key, m) not in self._lost:
                self._counts["doubled"] += 1
            else:
                missing.discard(m)
                self._lost.pop((key, m), None)
                accepted.append(m)
        self._counts["accepted"] += len(accepted)
        self._counts["late"] += 0 if sent else len(accepted)
        if sent:
            self._settle(sent.worker, ok=bool(accepted))
            self._ask_again(sent, reason or "the answer did not have it")
        return accepted

    def failed(self, piece: Piece, reason: str, now: float) -> None:
        """A piece ended without an answer."""
        if sent := self._close(piece):
            self._counts["failed"] += 1
            self._settle(sent.worker, ok=False)
            self._ask_again(sent, reason)

    def worker_lost(self, worker: Worker, now: float) -> None:
        """A worker is gone: nothing is sent to it again, and what it had is asked of others."""
        if worker not in self._load:
            return
        del self._load[worker], self._failures[worker], self._number[worker]
        for sent in [sent for sent in self._out.values() if sent.worker == worker]:
            self._close(sent.piece)
            self._ask_again(sent, f"worker {worker} is lost")
        if not self._load:
            self._give_up_all()

    def expire(self, now: float) -> list[Piece]:
        """Counts as failed what is past its time, and returns it. A late answer still counts where none came since."""
        found = []
        while self._out and (sent := next(iter(self._out.values()))).deadline <= now:
            self._close(sent.piece)
            self._counts["expired"] += 1
            self._settle(sent.worker, ok=False)
            self._ask_again(sent, f"no answer in {self._timeout:g} s")
            found.append(sent.piece)
        return found

    def next_deadline(self) -> float | None:
        """When to call `expire`; None where nothing is out, or waits for ever."""
        first = next(iter(self._out.values()), None)
        return None if first is None or first.deadline == float("inf") else first.deadline

    def _close(self, piece: Piece) -> _Sent[Worker] | None:
        """Takes a piece off what is out. None where it was not: what is late, doubled or of another step."""
        sent = self._out.pop(piece.route, None)
        if sent:
            self._busy -= len(sent.piece.numbers)
            self._burden(sent.worker, -len(sent.piece.numbers))
        return sent

    def _ask_again(self, sent: _Sent[Worker], reason: str) -> None:
        request, attempt = sent.piece.request, sent.piece.attempt + 1
        missing = self._missing[request.key]
        numbers = tuple(m for m in sent.piece.numbers if m in missing)
        if attempt > self._retries:
            self._give_up(request.key, numbers, reason)
        elif numbers:
            self._again.append((_named(request, numbers, attempt), sent.tried))

    def _give_up(self, key: Key, numbers: Iterable[int], reason: str) -> None:
        for m in numbers:
            self._missing[key].discard(m)
            self._lost[key, m] = Lost(key, m, reason)

    def _give_up_all(self) -> None:
        for key, numbers in self._missing.items():
            self._give_up(key, sorted(numbers), NO_WORKER)

    def _idlest(self, tried: frozenset[Worker]) -> Worker:
        passed = []
        while self._free:
            entry = heapq.heappop(self._free)
            worker = entry[-1]
            if worker not in self._load or entry != self._entry(worker):
                continue
            passed.append(entry)
            if worker not in tried:
                break
        for entry in passed:
            heapq.heappush(self._free, entry)
        # Where all have tried it, the best of them.
        return passed[-1][-1] if passed[-1][-1] not in tried else passed[0][-1]

    def _settle(self, worker: Worker, ok: bool) -> None:
        if worker in self._failures:
            self._failures[worker] = 0 if ok else self._failures[worker] + 1
            self._burden(worker, 0)

    def _burden(self, worker: Worker, more: int) -> None:
        if worker in self._load:
            self._load[worker] += more
            heapq.heappush(self._free, self._entry(worker))
        if len(self._free) > 4 * len(self._load) + 64:
            self._free = sorted(map(self._entry, self._load))

    def _entry(self, worker: Worker) -> tuple[int, int, int, Worker]:
        return self._failures[worker], self._load[worker], self._number[worker], worker


def _named(request: Request, numbers: tuple[int, ...], attempt: int) -> Piece:
    return Piece(request, numbers, attempt, f"{request.key.stream(numbers[0]):016x}-{attempt}")
