"""Work ahead of its reader: order, lists of a fixed length, overlap, and an end to both whoever fails.

Planted in a copy of the package and seen caught: lists cut by what has come so far; the work done before the first
list is handed out, and in the reader's thread; an error of the work swallowed; the work going on after the reader left.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import closing

import pytest

from apportion.measure.ahead import ahead


def counting(log: list[object], upto: int) -> Generator[int, None, None]:
    try:
        for i in range(upto):
            log.append(i)
            yield i
    finally:
        log.append("closed")


def test_lists_have_one_length_but_for_the_last() -> None:
    assert list(ahead(counting([], 7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(ahead(counting([], 6), 3)) == [[0, 1, 2], [3, 4, 5]]
    assert list(ahead(counting([], 0), 3)) == []


def test_the_work_goes_on_while_its_reader_is_busy() -> None:
    """Each waits for the other: in one thread this would hang, so it ends by the time-out and fails."""
    read, made = threading.Event(), threading.Event()

    def work() -> Generator[int, None, None]:
        yield 0
        assert read.wait(20)
        made.set()
        yield 1

    results = ahead(work(), 1)
    assert next(results) == [0]
    read.set()
    assert made.wait(20)
    assert list(results) == [[1]]


def test_the_reader_stays_in_its_own_thread_and_the_work_does_not() -> None:
    threads = []

    def work() -> Generator[int, None, None]:
        threads.append(threading.current_thread())
        yield 0

    for _ in ahead(work(), 1):
        assert threading.current_thread() is threading.main_thread()
    assert threads[0] is not threading.main_thread()


def test_an_error_of_the_work_comes_after_its_results() -> None:
    def work() -> Generator[int, None, None]:
        yield 0
        raise RuntimeError("out of memory")

    seen = []
    with pytest.raises(RuntimeError, match="out of memory"):
        for some in ahead(work(), 5):
            seen.append(some)
    assert seen == [[0]]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_reader_that_fails_ends_the_work(error: type[BaseException]) -> None:
    log: list[object] = []
    with pytest.raises(error), closing(ahead(counting(log, 10**6), 1)) as results:
        for _ in results:
            raise error
    assert log[-1] == "closed"
    assert not [t for t in threading.enumerate() if t.name == "apportion-ahead"]
