"""Where weights wait between a trainer and its replicas: an actor without verl and torch, which starts fast."""

from __future__ import annotations

import asyncio
from typing import Any


class Mailbox:
    """Parts of a model's weights on their way, one at a time, until each of `readers` took it; then the next model's.

    A part is whatever the sender puts: a list with a reference to Ray's object store, so no weights pass through here.
    """

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self._part: tuple[Any, bool] | None = None
        self._number, self._taken = 0, set[int]()
        self._changed = asyncio.Condition()

    async def put(self, part: Any, last: bool) -> None:
        """Waits until the part before was taken by all."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._part is None)
            self._part = part, last
            self._changed.notify_all()

    async def take(self, reader: int, number: int) -> tuple[Any, bool]:
        """Part `number` of a model, from 0, and whether it is the last."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._part is not None and self._number == number)
            assert self._part is not None
            part, last = self._part
            self._taken.add(reader)
            if len(self._taken) == self.readers:
                self._part, self._taken, self._number = None, set(), 0 if last else number + 1
                self._changed.notify_all()
            return part, last
