"""The scheduler of probes over workers: cases worked out by hand, and whatever order events come in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.engines.base import Key, Request
from apportion.errors import InputError
from apportion.integrations.verl.scheduler import NO_WORKER, Lost, Piece, Scheduler


def ask(position: int, samples: int = 2, budget: int = 10, first: int = 0, prompt: str = "p") -> Request:
    return Request(Key("run", 1, prompt, 0, position), (1,) * (position + 1), samples, budget, first)


def sent(sends: Iterable[tuple[Any, Piece]]) -> list[tuple[Any, int, tuple[int, ...], int]]:
    return [(worker, piece.request.key.position, piece.numbers, piece.attempt) for worker, piece in sends]


def only(sends: list[tuple[Any, Piece]]) -> Piece:
    ((_, piece),) = sends
    return piece


# What is sent first, and to whom


def test_the_longest_budget_goes_first_then_the_most_continuations_then_as_asked() -> None:
    requests = [ask(1, 2, 10), ask(2, 3, 10), ask(3, 1, 50), ask(4, 2, 10)]
    work = Scheduler(requests, ["a"], in_flight=8)
    assert sent(work.start(0.0)) == [
        ("a", 3, (0,), 0),
        ("a", 2, (0, 1, 2), 0),
        ("a", 1, (0, 1), 0),
        ("a", 4, (0, 1), 0),
    ]


def test_the_worker_with_the_fewest_continuations_is_next_and_the_first_of_equals() -> None:
    work = Scheduler([ask(1, 4), ask(2, 1), ask(3, 1), ask(4, 1)], ["a", "b", "c"], in_flight=9)
    # a holds 4; b and c one each; then b again, the first of those with one.
    assert [worker for worker, _ in work.start(0.0)] == ["a", "b", "c", "b"]


def test_no_more_is_out_than_in_flight_and_a_place_is_taken_when_a_piece_ends() -> None:
    work = Scheduler([ask(1, 2), ask(2, 2), ask(3, 2)], ["a", "b"], in_flight=5)
    first = work.start(0.0)
    assert sent(first) == [("a", 1, (0, 1), 0), ("b", 2, (0, 1), 0)]
    assert work.start(1.0) == []
    assert work.came(first[1][1], [0, 1], 2.0) == [0, 1]
    assert sent(work.start(2.0)) == [("b", 3, (0, 1), 0)]


def test_a_piece_is_no_larger_than_one_replicas_share_of_what_may_be_out() -> None:
    work = Scheduler([ask(1, 7, first=3)], ["a", "b"], in_flight=8, replicas=2)
    sends = work.start(0.0)
    assert sent(sends) == [("a", 1, (3, 4, 5, 6), 0), ("b", 1, (7, 8, 9), 0)]
    assert sends[0][1].route != sends[1][1].route
    # A share below one is one.
    assert [p.numbers for _, p in Scheduler([ask(1, 3)], ["a"], in_flight=2, replicas=5).start(0.0)] == [(0,), (1,)]


def test_nothing_asked_is_done_at_once() -> None:
    for requests in ([], [ask(1, 0)]):
        work = Scheduler(requests, ["a"], in_flight=4)
        assert work.done and work.start(0.0) == [] and work.next_deadline() is None and work.lost == []


def test_workers_beyond_the_pieces_stay_idle() -> None:
    work = Scheduler([ask(1)], ["a", "b", "c"], in_flight=9)
    piece = only(work.start(0.0))
    work.worker_lost("c", 1.0)
    assert work.came(piece, [0, 1], 2.0) == [0, 1] and work.done


# What comes back


def test_every_continuation_is_accepted_once_whichever_attempt_brings_it() -> None:
    work = Scheduler([ask(1, 3)], ["a", "b"], in_flight=3, timeout=10.0)
    first = only(work.start(0.0))
    assert work.next_deadline() == 10.0
    assert work.expire(9.0) == [] and work.expire(10.0) == [first]
    again = only(work.start(10.0))
    assert (again.numbers, again.attempt) == ((0, 1, 2), 1)
    # The first answers late, in part; the second brings the rest and a doubled one.
    assert work.came(first, [0, 2], 11.0) == [0, 2]
    assert not work.done
    assert work.came(again, [0, 1, 1], 12.0) == [1]
    assert work.done
    counts = work.counts
    assert (counts["accepted"], counts["late"], counts["doubled"], counts["expired"]) == (3, 2, 2, 1)
    assert (counts["pieces"], counts["retried"], counts["lost"]) == (2, 1, 0)


def test_a_late_answer_takes_its_numbers_off_what_is_asked_again() -> None:
    work = Scheduler([ask(1, 3), ask(2, 3, 5)], ["a", "b"], in_flight=3, timeout=10.0)
    first = only(work.start(0.0))
    work.expire(10.0)
    assert work.came(first, [1], 10.5) == [1]
    assert sent(work.start(11.0)) == [("b", 1, (0, 2), 1)]


def test_nothing_is_asked_again_that_came_meanwhile() -> None:
    work = Scheduler([ask(1, 2), ask(2, 2, 5)], ["a", "b"], in_flight=2, timeout=10.0)
    first = only(work.start(0.0))
    work.expire(10.0)
    work.came(first, [0, 1], 10.5)
    assert [piece.request.key.position for _, piece in work.start(11.0)] == [2]
    assert work.counts["retried"] == 0


def test_a_late_answer_counts_even_after_it_was_given_up() -> None:
    work = Scheduler([ask(1, 2)], ["a"], in_flight=2, retries=0, timeout=1.0)
    piece = only(work.start(0.0))
    work.expire(1.0)
    assert work.done and [(lost.m, lost.reason) for lost in work.lost] == [
        (0, "no answer in 1 s"),
        (1, "no answer in 1 s"),
    ]
    assert work.came(piece, [1], 2.0) == [1]
    assert [lost.m for lost in work.lost] == [0] and work.done
    assert work.came(piece, [1], 3.0) == []


def test_answers_that_were_not_asked_are_not_taken() -> None:
    work = Scheduler([ask(1, 4), ask(2, 2, 5)], ["a"], in_flight=4, replicas=2)
    low, high = [piece for _, piece in work.start(0.0)]
    assert (low.numbers, high.numbers) == ((0, 1), (2, 3))
    # Number 2 is missing, but it is the other piece's; number 9 nobody asked for.
    assert work.came(low, [0, 1, 2, 9], 1.0) == [0, 1]
    assert work.counts["foreign"] == 2
    other = Scheduler([ask(7, 2, prompt="another step")], ["a"], in_flight=2).start(0.0)[0][1]
    assert work.came(other, [0, 1], 1.0) == [] and work.counts["accepted"] == 2


def test_what_an_answer_lacks_is_asked_again() -> None:
    work = Scheduler([ask(1, 3)], ["a", "b"], in_flight=3, retries=1)
    first = only(work.start(0.0))
    assert work.came(first, [1], 1.0, "the server restarted") == [1]
    again = only(work.start(1.0))
    assert (again.numbers, again.attempt) == ((0, 2), 1)
    assert work.came(again, [2], 2.0, "the server restarted") == [2]
    assert work.lost == [Lost(ask(1).key, 0, "the server restarted")] and work.done


# Failures


def test_a_failed_piece_is_asked_of_another_by_another_name_before_anything_new() -> None:
    work = Scheduler([ask(1, 2), ask(2, 2), ask(3, 2), ask(4, 2)], ["a", "b"], in_flight=4)
    first = work.start(0.0)
    work.came(first[1][1], [0, 1], 1.0)
    work.failed(first[0][1], "refused", 1.0)
    second = work.start(1.0)
    assert sent(second) == [("b", 1, (0, 1), 1), ("b", 3, (0, 1), 0)]
    assert second[0][1].route != first[0][1].route


def test_a_worker_that_refuses_everything_is_not_given_everything() -> None:
    work = Scheduler([ask(i, 1) for i in range(1, 41)], ["good", "bad"], in_flight=2, retries=1)
    now, given = 0.0, Counter[str]()
    out = work.start(now)
    while out:
        # The bad one answers at once, the good one after it.
        at = next((i for i, (worker, _) in enumerate(out) if worker == "bad"), 0)
        worker, piece = out.pop(at)
        given[worker] += 1
        now += 1.0
        if worker == "bad":
            work.failed(piece, "refused", now)
        else:
            work.came(piece, piece.numbers, now)
        out += work.start(now)
    assert work.done and work.lost == [] and given == {"good": 40, "bad": 1}


def test_a_worker_that_never_answers_is_not_given_everything() -> None:
    work = Scheduler([ask(i, 1) for i in range(1, 21)], ["dead", "good"], in_flight=4, retries=1, timeout=10.0)
    given = Counter[str]()
    now, out = 0.0, work.start(0.0)
    while not work.done:
        given.update(worker for worker, _ in out)
        for worker, piece in out:
            if worker == "good":
                work.came(piece, piece.numbers, now + 1)
        now += 10.0
        work.expire(now)
        out = work.start(now)
    assert work.lost == [] and given["dead"] == 2


def test_retries_are_used_up_and_no_more() -> None:
    work = Scheduler([ask(1, 2)], ["a", "b", "c"], in_flight=2, retries=2)
    routes, workers = set(), []
    for attempt in range(3):
        ((worker, piece),) = work.start(float(attempt))
        assert piece.attempt == attempt and not work.done
        routes.add(piece.route)
        workers.append(worker)
        work.failed(piece, f"refused {attempt}", attempt + 0.5)
        work.failed(piece, "said twice", attempt + 0.5)
    assert work.start(3.0) == [] and work.done
    assert len(routes) == 3 and workers == ["a", "b", "c"]
    assert work.lost == [Lost(ask(1).key, m, "refused 2") for m in (0, 1)]
    assert work.counts["failed"] == 3 and work.counts["accepted"] == 0


def test_a_single_worker_is_asked_again_though_it_failed() -> None:
    work = Scheduler([ask(1, 1)], ["a"], in_flight=1, retries=1)
    work.failed(only(work.start(0.0)), "refused", 1.0)
    assert sent(work.start(1.0)) == [("a", 1, (0,), 1)]


def test_the_pieces_of_a_lost_worker_are_asked_of_the_others() -> None:
    work = Scheduler([ask(1, 2), ask(2, 2), ask(3, 2)], ["a", "b"], in_flight=6)
    first = work.start(0.0)
    assert [worker for worker, _ in first] == ["a", "b", "a"]
    work.worker_lost("a", 1.0)
    work.worker_lost("a", 1.0)
    assert sent(work.start(1.0)) == [("b", 1, (0, 1), 1), ("b", 3, (0, 1), 1)]
    # It had finished one of them all the same.
    assert work.came(first[0][1], [0], 2.0) == [0] and work.counts["late"] == 1
    work.failed(first[2][1], "the actor died", 2.0)
    assert work.counts["failed"] == 0


def test_without_workers_everything_that_is_missing_is_lost_and_nothing_is_sent() -> None:
    work = Scheduler([ask(1, 2), ask(2, 1)], ["a", "b"], in_flight=2)
    piece = only(work.start(0.0))
    work.came(piece, [1], 1.0)
    work.worker_lost("a", 2.0)
    assert not work.done
    work.worker_lost("b", 3.0)
    assert work.done and work.start(4.0) == [] and {lost.reason for lost in work.lost} == {NO_WORKER}
    assert [(lost.key.position, lost.m) for lost in work.lost] == [(1, 0), (2, 0)]
    none = Scheduler([ask(1, 2)], [], in_flight=2)
    assert none.done and none.start(0.0) == [] and len(none.lost) == 2


def test_deadlines_are_those_of_what_is_out() -> None:
    work = Scheduler([ask(1, 1), ask(2, 1), ask(3, 1)], ["a", "b"], in_flight=2, timeout=5.0)
    first = work.start(1.0)
    work.came(first[0][1], [0], 2.0)
    assert len(work.start(3.0)) == 1
    assert work.next_deadline() == 6.0
    assert work.expire(7.9) == [first[1][1]]
    assert work.next_deadline() == 8.0
    assert Scheduler([ask(1)], ["a"], in_flight=2).next_deadline() is None
    never = Scheduler([ask(1)], ["a"], in_flight=2)
    never.start(0.0)
    assert never.next_deadline() is None and never.expire(1e12) == []


# Bad input


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("in_flight", {"in_flight": 0}),
        ("replicas", {"replicas": 0}),
        ("retries", {"retries": -1}),
        ("timeout", {"timeout": 0.0}),
        ("timeout", {"timeout": float("nan")}),
        ("workers", {"workers": ["a", "a"]}),
        ("request", {"requests": [ask(1, 3), ask(1, 1, first=2)]}),
        ("request", {"requests": [ask(1, 3, budget=0)]}),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(field: str, change: dict[str, Any]) -> None:
    given = {"requests": [ask(1)], "workers": ["a"], "in_flight": 2, **change}
    with pytest.raises(InputError, match=f"^{field}"):
        Scheduler(given.pop("requests"), given.pop("workers"), **given)


def test_a_key_may_be_asked_in_parts() -> None:
    work = Scheduler([ask(1, 2), ask(1, 2, first=2)], ["a"], in_flight=9)
    sends = work.start(0.0)
    assert [piece.numbers for _, piece in sends] == [(0, 1), (2, 3)]
    assert work.came(sends[1][1], [2, 3], 1.0) == [2, 3] and not work.done


# Whatever happens, in whatever order

# (samples, budget, prompt) of each request.
ASKED = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50), st.integers(0, 3)), max_size=8)
KINDS = ("came", "part", "failed", "lost", "expire", "late", "twice")
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 99)), max_size=60)


class Watched:
    """A driver that obeys, and keeps its own books to judge by."""

    def __init__(self, requests: list[Request], workers: int, in_flight: int, replicas: int, retries: int) -> None:
        self.work = Scheduler(
            requests, range(workers), in_flight=in_flight, replicas=replicas, retries=retries, timeout=7.0
        )
        self.in_flight, self.retries = in_flight, retries
        self.asked = {(r.key, r.first + i) for r in requests for i in range(r.samples)}
        self.alive, self.now = set(range(workers)), 0.0
        self.out: dict[str, tuple[int, Piece, float]] = {}
        self.past: list[Piece] = []
        self.accepted, self.log = Counter[tuple[Key, int]](), list[Any]()
        self.attempts = Counter[tuple[Key, int]]()
        self.routes, self.failed_by = set[str](), dict[tuple[Key, int], set[int]]()

    def start(self) -> None:
        for worker, piece in self.work.start(self.now):
            self.log.append((worker, piece.request.key, piece.numbers, piece.attempt))
            assert worker in self.alive
            assert piece.route not in self.routes and piece.numbers
            self.routes.add(piece.route)
            self.out[piece.route] = (worker, piece, self.now + 7.0)
            for m in piece.numbers:
                name = (piece.request.key, m)
                assert name in self.asked and not self.accepted[name], "asked though it is there, or nobody wants it"
                self.attempts[name] += 1
                assert self.attempts[name] <= self.retries + 1
                if (failed := self.failed_by.setdefault(name, set())) >= self.alive:
                    failed.clear()
                assert worker not in failed, "asked of one that had failed it, though another was there"
                failed.add(worker)
        assert sum(len(piece.numbers) for _, piece, _ in self.out.values()) <= self.in_flight
        assert self.work.start(self.now) == []

    def came(self, piece: Piece, numbers: list[int]) -> None:
        for m in self.work.came(piece, numbers, self.now):
            assert m in piece.numbers and m in numbers
            self.accepted[piece.request.key, m] += 1

    def event(self, kind: str, which: int) -> None:
        self.now += 1.0
        routes = list(self.out)
        if kind == "lost":
            worker = which % 7
            self.work.worker_lost(worker, self.now)
            self.alive.discard(worker)
            gone = [route for route, (w, _, _) in self.out.items() if w == worker]
            self.past += [self.out.pop(route)[1] for route in gone]
        elif kind == "expire":
            self.now += which % 9
            due = [route for route, (_, _, deadline) in self.out.items() if deadline <= self.now]
            assert {piece.route for piece in self.work.expire(self.now)} == set(due)
            self.past += [self.out.pop(route)[1] for route in due]
        elif kind in ("late", "twice") and self.past:
            piece = self.past[which % len(self.past)]
            self.came(piece, [*piece.numbers, *piece.numbers, 77] if kind == "twice" else [*piece.numbers[::2]])
        elif routes and kind in ("came", "part", "failed"):
            _, piece, _ = self.out.pop(routes[which % len(routes)])
            self.past.append(piece)
            if kind == "failed":
                self.work.failed(piece, "refused", self.now)
            else:
                self.came(piece, list(piece.numbers[which % 2 :: 2] if kind == "part" else piece.numbers))
        self.judge()
        self.start()

    def judge(self) -> None:
        lost = Counter((lost.key, lost.m) for lost in self.work.lost)
        assert all(n == 1 for n in (*self.accepted.values(), *lost.values()))
        assert not lost.keys() & self.accepted.keys()
        assert lost.keys() | self.accepted.keys() <= self.asked
        assert self.work.done == (lost.keys() | self.accepted.keys() == self.asked)
        assert self.work.counts["accepted"] == len(self.accepted) and self.work.counts["lost"] == len(lost)
        assert self.work.done or self.alive
        deadlines = [deadline for _, _, deadline in self.out.values()]
        assert self.work.next_deadline() == (min(deadlines) if deadlines else None)


def run(
    asked: list[tuple[int, int, int]],
    workers: int,
    in_flight: int,
    replicas: int,
    retries: int,
    events: list[tuple[str, int]],
) -> Watched:
    requests = [ask(i + 1, samples, budget, i % 3, str(prompt)) for i, (samples, budget, prompt) in enumerate(asked)]
    watched = Watched(requests, workers, in_flight, replicas, retries)
    watched.start()
    for kind, which in events:
        watched.event(kind, which)
    # It ends: every piece that is out fails or comes, and each is sent a bounded number of times.
    for turn in range((retries + 1) * len(watched.asked) + 1):
        if watched.work.done:
            break
        assert watched.out, "neither done nor anything out: it hangs"
        watched.event("came" if turn % 3 else "failed", turn)
    assert watched.work.done
    return watched


@given(ASKED, st.integers(1, 5), st.integers(1, 20), st.integers(1, 4), st.integers(0, 3), EVENTS)
def test_any_events_in_any_order(
    asked: list[tuple[int, int, int]], workers: int, in_flight: int, replicas: int, retries: int, events: list[Any]
) -> None:
    once = run(asked, workers, in_flight, replicas, retries, events)
    again = run(asked, workers, in_flight, replicas, retries, events)
    assert once.log == again.log and once.work.lost == again.work.lost
