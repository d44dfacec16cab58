"""Seconds by phase, each second counted once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("generate", "probe", "grade", "credit", "update")


class Clock:
    """Times one optimiser step. A phase inside another takes its time out of the outer one; the rest is `update`."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._phase = "update"
        self._since = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts what happens inside as `name`, one of PHASES."""
        outer = self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def read(self) -> dict[str, float]:
        """Seconds since the clock was made, by phase."""
        self._switch(self._phase)
        return dict(self._seconds)

    def _switch(self, name: str) -> str:
        now, outer = time.perf_counter(), self._phase
        self._seconds[outer] += now - self._since
        self._since, self._phase = now, name
        return outer
