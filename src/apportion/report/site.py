"""What pages are made of: an index, and a chunk for each step and each response, made when it is asked for."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from apportion.errors import InputError
from apportion.report.beside import beside
from apportion.report.compared import Compared
from apportion.report.curves import curves
from apportion.report.escape import one_line, visible
from apportion.report.extremes import extremes
from apportion.report.source import Source
from apportion.report.view import SCHEMA, StepView, shown

_KEY = re.compile(r"step-(\d{1,9})(?:-row-(\d{1,9}))?")
_KEPT = 2
_CONFIG = 20_000  # characters
LAST = 8
"""Steps whose extreme credits a page that grows looks at."""


class Site:
    """A run as its page shows it. Safe to ask from several threads.

    Args:
        source: whose responses are shown.
        others: runs whose learning curves stand beside its own.
    """

    def __init__(self, source: Source, others: Sequence[Source] = (), live: bool = False) -> None:
        self.source, self.others, self.live = source, others, live
        self.compared = Compared.open(source.path)
        self.name = visible(source.path.resolve().name, 200)
        # By step, each with the stamp of its files: a resumed run records steps again.
        self._views: OrderedDict[int, tuple[Any, StepView]] = OrderedDict()
        self._extremes: dict[int, tuple[Any, list[dict[str, Any]]]] = {}
        self._lock = threading.RLock()

    def step(self, number: int) -> StepView:
        """The view of a recorded step; the last few are kept.

        Raises:
            InputError: there is no record of the step.
        """
        with self._lock:
            stamp = self._stamp(number)
            kept, view = self._views.pop(number, (None, None))
            if view is None or kept != stamp:
                if number not in (steps := self.source.steps()):
                    raise InputError("step", number, f"a recorded step: {_span(steps)}")
                view = StepView(self.source, number)
            self._views[number] = stamp, view
            while len(self._views) > _KEPT:
                self._views.popitem(last=False)
            return view

    def chunk(self, key: str) -> dict[str, Any]:
        """The JSON of `step-N`, `step-N-row-R`, or of a comparison of methods.

        Raises:
            InputError: there is nothing of that name.
        """
        if self.compared is not None and key.startswith("compare-"):
            return self.compared.chunk(key)
        if not (asked := _KEY.fullmatch(key)):
            raise InputError("key", key, "step-N or step-N-row-R")
        view = self.step(int(asked[1]))
        return view.summary if asked[2] is None else view.detail(int(asked[2]))

    def extremes(self, number: int, rows: Collection[int] | None = None) -> list[dict[str, Any]]:
        """The most extreme credits of a step, or of some of its rows.

        Raises:
            InputError: there is no record of the step.
        """
        with self._lock:
            stamp = self._stamp(number)
            if rows is None and number in self._extremes and self._extremes[number][0] == stamp:
                return self._extremes[number][1]
            view = self.step(number)
            kept = [k for k, r in enumerate(view.rollouts) if rows is None or r["row"] in rows]
            found = extremes([(number, [view.rollouts[k] for k in kept], [view.credit[k] for k in kept])])
            if rows is None:
                self._extremes[number] = stamp, found
            return found

    def _readable(self, left_out: list[str]) -> list[int]:
        """The recorded steps. Of the last ones, which are looked into, those that are whole: a run that was resumed
        may be recording one again."""
        steps = self.source.steps()
        for number in steps[-LAST:]:
            try:
                self.extremes(number)
            except (InputError, OSError, pa.ArrowException) as error:
                steps.remove(number)
                left_out.append(f"step {number}, which cannot be read now ({one_line(str(error), 200)})")
        return steps

    def _stamp(self, number: int) -> list[tuple[str, int, int]]:
        """What tells a record of a step from a later one; nothing for records that are no run folder."""
        found = []
        for path in self.source.path.glob(f"*/step-{number:06d}.parquet"):
            with suppress(OSError):  # gone in between
                about = path.stat()
                found.append((str(path), about.st_mtime_ns, about.st_size))
        return sorted(found)

    def index(
        self,
        steps: Sequence[int] | None = None,
        start: Mapping[str, Any] | None = None,
        extreme: Sequence[Mapping[str, Any]] | None = None,
        left_out: Sequence[str] = (),
    ) -> dict[str, Any]:
        """What a page starts from.

        Args:
            steps: those that the page shows; every recorded one where left out.
            start: step and row that it opens at; the last step where left out.
            extreme: its most extreme credits (`extremes`); those of the last steps where left out.
            left_out: what the page says that it lacks.
        """
        left_out = list(left_out)
        if steps is None:
            steps = self._readable(left_out)
            self.compared = Compared.open(self.source.path)
        if extreme is None:
            extreme = [each for number in steps[-LAST:] for each in self.extremes(number)]
        if start is None and steps:
            start = {"step": steps[-1], "row": start_row(self.step(steps[-1]).summary, None), "view": "response"}
        return {
            "schema": SCHEMA, "name": self.name, "live": self.live,
            "steps": list(steps), "start": start, "config": _config(self.source.path),
            "curves": curves([self.source, *self.others]), "beside": shown(beside(self.source.metrics())),
            "extremes": list(extreme),
            "compare": self.compared.index() if self.compared and self.compared.step in steps else None,
            "left_out": left_out, "finished": (self.source.path / "result.json").is_file(),
        }  # fmt: skip


def start_row(summary: Mapping[str, Any], response: int | None) -> int | None:
    """The row asked for, or the one whose advantage differs most along its tokens: it has the most to show.

    Raises:
        InputError: the step has no such row.
    """
    rows = {r["row"]: r for r in summary["responses"]}
    if response is None:
        return max(rows, key=lambda row: (rows[row]["spread"], -row), default=None)
    if response not in rows:
        raise InputError("response", response, f"a row of step {summary['step']}: {min(rows)} to {max(rows)}")
    return response


def _span(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]}, {len(steps)} in all" if steps else "none is recorded yet"


def _config(path: Path) -> str:
    file = path / "config.toml"
    return visible(file.read_text(encoding="utf-8", errors="replace"), _CONFIG) if file.is_file() else ""
