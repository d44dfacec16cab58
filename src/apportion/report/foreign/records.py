"""A source made from the files of another trainer, read when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from apportion.errors import InputError
from apportion.groups import group_stats
from apportion.report.foreign.files import File
from apportion.report.foreign.responses import Row, Step, Tables


class Records:
    """A `Source` over files of another trainer. Files are read when they are asked for, the last ones kept.

    Args:
        path: what was opened.
        find: the files that are there now, a step each, or one that holds several.
        load: reads a file: its steps.
        logged: metrics that the trainer wrote itself, by step.
    """

    def __init__(
        self,
        path: Path,
        find: Callable[[], Sequence[File]],
        load: Callable[[File], Mapping[int, Step]],
        logged: Callable[[], Mapping[int, Mapping[str, Any]]] = dict,
    ) -> None:
        self.path = path
        self._find, self._load, self._logged = find, load, logged
        self._loaded: tuple[File, object, Mapping[int, Step]] | None = None
        self._tables: tuple[File, object, int, Tables] | None = None
        self._numbers: dict[File, tuple[object, list[dict[str, Any]]]] = {}

    def steps(self) -> list[int]:
        """The steps of the record, rising.

        Raises:
            InputError: a file that must be read to know them is not what it should be.
        """
        return sorted({step for file in self._find() for step in self._steps_of(file)})

    def recorded_steps(self) -> list[int]:
        """The same.

        Raises:
            InputError: there are none.
        """
        if steps := self.steps():
            return steps
        raise InputError("RUN", f"{self.path}, without a whole record", "at least one response", "wait for a step")

    def read(self, kind: str, step: int) -> list[dict[str, Any]]:
        """The `rollouts`, `evidence` or `credit` rows of a step; none where there is no such step.

        Raises:
            InputError: the step's file is not what it should be; names the file, the line and the field.
        """
        for file in self._find():
            if file.step in (step, None) and step in self._steps_of(file):
                rows: list[Row] = getattr(self._tables_of(file, step), kind)
                return rows
        return []

    def metrics(self) -> list[dict[str, Any]]:
        """Mean reward, share of groups with equal rewards and mean length of each step; what was logged comes first.

        Raises:
            InputError: a file is not what it should be.
        """
        rows: dict[int, dict[str, Any]] = {}
        for file in self._find():
            stamp = file.stamp()
            if self._numbers.get(file, (None, []))[0] != stamp:
                found = [_numbers(number, step) for number, step in sorted(self._content(file).items())]
                self._numbers[file] = (stamp, found)
            rows |= {row["step"]: row for row in self._numbers[file][1]}
        for step, logged in self._logged().items():
            rows[step] = {"step": step, **rows.get(step, {}), **logged}
        return [rows[step] for step in sorted(rows)]

    def _steps_of(self, file: File) -> set[int]:
        return {file.step} if file.step is not None else set(self._content(file))

    def _content(self, file: File) -> Mapping[int, Step]:
        stamp = file.stamp()
        if self._loaded is None or self._loaded[:2] != (file, stamp):
            self._loaded = (file, stamp, self._load(file))
        return self._loaded[2]

    def _tables_of(self, file: File, step: int) -> Tables:
        key = (file, file.stamp(), step)
        if self._tables is None or self._tables[:3] != key:
            content = self._content(file)
            self._tables = (*key, content[step].tables() if step in content else Tables([], []))
        return self._tables[3]


def _numbers(number: int, step: Step) -> dict[str, Any]:
    """The metrics of a step; without a mean reward where it has no reward."""
    batch, length = step.outcome()
    found = {
        "step": number, "credit/zero_variance": float(group_stats(batch).collapsed.double().mean()),
        "completions/mean_length": length,
    }  # fmt: skip
    rewards = [reward for reward in batch.reward.tolist() if not math.isnan(reward)]
    return found | ({"reward": math.fsum(rewards) / len(rewards)} if rewards else {})
