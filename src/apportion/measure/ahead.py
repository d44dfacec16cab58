"""Work done ahead of its reader: continuations are decoded while those before them are graded."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")

_END = object()


def ahead(
    work: Generator[T, None, None], count: int, stop: Callable[[], object] = lambda: None
) -> Generator[list[T], None, None]:
    """Lists of `count` results of `work`, the last one shorter, in its order.

    `work` runs in a thread of its own, the reader in the calling one: reward functions may need the main thread
    (alarms do), an engine does not. Which results share a list does not depend on how fast either is. Closing the
    iterator ends the work after the result in hand; what `work` raises is raised here, after the results before it.

    Args:
        stop: called when the iterator is closed, before the thread is waited for: ends a wait of the work's own.
    """
    results: queue.SimpleQueue[T | object] = queue.SimpleQueue()
    stopped = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            for result in work:
                results.put(result)
                if stopped.is_set():
                    return
        except BaseException as error:
            failed.append(error)
        finally:
            work.close()
            results.put(_END)

    thread = threading.Thread(target=run, name="apportion-ahead", daemon=True)
    try:
        thread.start()
        while True:
            some: list[T] = []
            while len(some) < count and (result := results.get()) is not _END:
                some.append(result)  # type: ignore[arg-type]
            if some:
                yield some
            if len(some) < count:
                break
    finally:
        stopped.set()
        stop()
        if thread.ident is not None:
            thread.join()
    if failed:
        raise failed[0]
