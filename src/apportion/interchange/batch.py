"""A whole interchange file as one batch: what the core needs of it, and the core's errors with line numbers.

Shapes: _R responses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from typing import Any

import torch

from apportion.credit.method import CreditMethod
from apportion.credit.pipeline import stages_of
from apportion.credit.record import Credit
from apportion.errors import InputError
from apportion.groups import group_stats
from apportion.interchange.rows import Measured, Row, check, measured
from apportion.measure.evidence import Belief, Confidence, Continuations, Evidence, Importance, StepLabels
from apportion.measure.plan import AnyJob
from apportion.rollouts import Rollouts

# VinePPO measures every response's prompt, so a scored row without a single entry was forgotten. Other methods may
# have found nothing to measure in a row.
_MEASURES_EVERY_ROW = frozenset({"vineppo"})


@dataclass(frozen=True)
class Batch:
    """The rows of a file, in its order. The whole file is one batch.

    Attributes:
        rows: the objects as they came.
        lines: the line number of each, from 1; blank lines count.
        rollouts: R responses, in the order of `rows`. A field that only some rows have is None in it.
        evidence: what was measured; a kind that no row has is None.
        absent: field name → the first line that lacks it, for fields that not every row has.
    """

    rows: Sequence[Row]
    lines: Sequence[int]
    rollouts: Rollouts
    evidence: Evidence
    absent: Mapping[str, int]


def read(numbered: Iterable[tuple[int, Row]]) -> Batch:
    """The batch of (line number, object) pairs, as `objects` yields them.

    Raises:
        InputError: no row at all, or a missing field, wrong type, length or range; names field and line.
    """
    rows: list[Row] = []
    lines: list[int] = []
    found: list[Measured] = []
    for number, row in numbered:
        check(row, number)
        found.append(measured(row, number))
        rows.append(row)
        lines.append(number)
    if not rows:
        raise InputError("the input", "no rows", "one JSON object a line, one line a response")
    absent = _absent(rows, lines)
    with lines_for_rows(lines, absent):
        rollouts = _rollouts(rows)
        evidence = _evidence(rollouts, found)
    return Batch(rows, lines, rollouts, evidence, absent)


def _evidence(rollouts: Rollouts, found: Sequence[Measured]) -> Evidence:
    """One record a kind; None where no row has it."""

    def states(kind: str) -> tuple[list[Any], list[int]] | None:
        given = [i for i, row in enumerate(found) if kind in row.states]
        return ([(i, *entry) for i in given for entry in found[i].states[kind]], given) if given else None

    entries = [
        (i, position, rewards) for i, row in enumerate(found) for position, rewards in row.continuations or []
    ]  # fmt: skip
    probed = any(row.continuations is not None for row in found)
    belief, confidence, steps = states("belief"), states("confidence"), states("steps")
    weighed = any(row.importance is not None for row in found)
    length = rollouts.length.tolist()
    starts = [n if row.answer_start is None else row.answer_start for row, n in zip(found, length, strict=True)]
    return Evidence(
        continuations=Continuations.from_rewards(rollouts, entries) if probed else None,
        belief=Belief.from_entries(rollouts, *belief) if belief else None,
        confidence=Confidence.from_entries(rollouts, *confidence) if confidence else None,
        steps=StepLabels.from_entries(rollouts, *steps) if steps else None,
        importance=Importance.from_rows(rollouts, [row.importance for row in found]) if weighed else None,
        answer_start=torch.tensor(starts),
    )


def assign(batch: Batch, method: CreditMethod) -> Credit:
    """The method's credit for the batch, from its own base and the file's evidence.

    Raises:
        InputError: something the method needs is missing; names the method, the field and the line.
    """
    for name in _MEASURES_EVERY_ROW & {stage.name for stage in stages_of(method)}:
        _check_every_row_measured(batch, name)
    with lines_for_rows(batch.lines, batch.absent):
        return method.assign(batch.rollouts, batch.evidence, method.base(batch.rollouts))


def plan(batch: Batch, method: CreditMethod) -> Sequence[AnyJob]:
    """What the method would have measured.

    Where it allocates by a pilot, and the file holds the pilot's evidence, its second wave.

    Raises:
        InputError: something the method needs is missing; names the method, the field and the line.
    """
    pilot = batch.evidence.continuations
    with lines_for_rows(batch.lines, batch.absent):
        base = method.base(batch.rollouts)
        by_pilot = any(stage.settings.get("allocation") == "neyman" for stage in stages_of(method))
        if by_pilot and pilot is not None and len(pilot.row):
            return method.refine(batch.rollouts, base, batch.evidence)
        return method.plan(batch.rollouts, base)


def singletons(batch: Batch) -> list[int]:
    """Lines of responses that alone have a reward in their group: nothing to compare them with."""
    alone = group_stats(batch.rollouts).count[batch.rollouts.group] == 1
    return [batch.lines[i] for i in (alone & batch.rollouts.scored).nonzero()[:, 0].tolist()]


def _check_every_row_measured(batch: Batch, method: str) -> None:
    for i in batch.rollouts.scored.nonzero()[:, 0].tolist():
        if not (batch.rows[i].get("evidence") or {}).get("continuations"):
            raise InputError(
                f"{method}: evidence.continuations of line {batch.lines[i]}", "none",
                "values at step boundaries", f"measure what `apportion plan --method {method}` lists",
            )  # fmt: skip


def _absent(rows: Sequence[Row], lines: Sequence[int]) -> dict[str, int]:
    """Field → first line without it. A row marks its steps by `boundaries`, or by `text` with `offsets`."""

    def first_without(*names: str) -> int | None:
        return next((n for row, n in zip(rows, lines, strict=True) if any(row.get(f) is None for f in names)), None)

    lacking = {field: first_without(field) for field in ("old_logprob", "ref_logprob", "entropy", "path")}
    unmarked = (row.get("boundaries") is None and not _has_text(row) for row in rows)
    lacking["boundaries"] = next((n for none, n in zip(unmarked, lines, strict=True) if none), None)
    return {field: line for field, line in lacking.items() if line is not None}


def _rollouts(rows: Sequence[Row]) -> Rollouts:
    def column(field: str) -> list[Any] | None:
        values = [row.get(field) for row in rows]
        return None if any(value is None for value in values) else values

    def measured(field: str) -> list[list[float]] | None:
        # Null stands only where the mask is 0, and NaN is stored as 0 there.
        lists = column(field)
        return lists and [[nan if v is None else v for v in values] if None in values else values for values in lists]

    length = [len(row["token_ids"]) for row in rows]
    path = column("path")
    marks = [row.get("boundaries") for row in rows]
    has_text = any(map(_has_text, rows))
    return Rollouts.from_lists(
        [row["token_ids"] for row in rows],
        [row["group"] for row in rows],
        [row["reward"] for row in rows],
        mask=[row.get("mask") or [1] * n for row, n in zip(rows, length, strict=True)],
        truncated=[row.get("finish") == "length" for row in rows],
        old_logprob=measured("old_logprob"),
        ref_logprob=measured("ref_logprob"),
        entropy=measured("entropy"),
        boundary=[_flags(mark or [], n) for mark, n in zip(marks, length, strict=True)],
        bounded=torch.tensor([mark is not None for mark in marks], dtype=torch.bool),
        text=tuple(row["text"] if _has_text(row) else None for row in rows) if has_text else None,
        char_start=[row.get("offsets") or [0] * n for row, n in zip(rows, length, strict=True)] if has_text else None,
        path=path and tuple(tuple(map(str, nodes)) for nodes in path),
    )


def _has_text(row: Row) -> bool:
    return row.get("text") is not None and row.get("offsets") is not None


def _flags(positions: Sequence[int], length: int) -> list[bool]:
    at = set(positions)
    return [position in at for position in range(length)]


@contextmanager
def lines_for_rows(lines: Sequence[int], absent: Mapping[str, int]) -> Iterator[None]:
    """The core counts responses from 0 and knows no file: its errors are raised again with line numbers.

    Where a method misses a field (it calls that `method: field`), the first line without it is named.
    """

    def at_line(text: object) -> str:
        return re.sub(r"\brow (\d+)", lambda match: f"line {lines[int(match[1])]}", str(text))

    try:
        yield
    except InputError as error:
        field = at_line(error.field)
        line = absent.get(field.rpartition(": ")[2])
        if line is not None:
            field += f" of line {line}"
        raise InputError(field, at_line(error.got), error.expected, error.fix) from None
