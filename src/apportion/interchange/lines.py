"""Credit and requests as lines of the interchange file.

Shapes: _N flat tokens, _R responses, _S segments.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np
from torch import Tensor

from apportion.credit.record import Credit, Segments
from apportion.errors import InputError
from apportion.interchange.batch import Batch
from apportion.interchange.rows import Row
from apportion.measure.plan import AnyJob, Job


def credit_lines(batch: Batch, credit: Credit) -> Iterator[str]:
    """Each row with its credit, in the file's order, ready to be written.

    Added: `advantage` (one value a token, 0 where masked), `base`, `segments` (`start`, `end`, `raw`,
    `shrunk`, `stderr`, `increment`, `samples`; none for methods without), `weight` (one value a token) where
    the method has one, `invariants`, `method`, `settings`. `advantage` and `base` are the shortest decimals
    that read back as the same float32, other numbers as the same float64; null where there is no value.
    """
    token, base = _shortest(credit.token), _shortest(credit.base)
    weight = None if credit.weight is None else _finite(credit.weight.tolist())
    segments = _segments(credit.segments, len(batch.rows))
    common = {
        "invariants": dict(zip(credit.invariants, _finite(credit.invariants.values()), strict=True)),
        "method": credit.method,
        "settings": dict(credit.settings),
    }
    for i, (a, b) in enumerate(pairwise(batch.rollouts.offsets.tolist())):
        added = {"advantage": token[a:b], "base": base[i], "segments": segments[i]}
        if weight is not None:
            added["weight"] = weight[a:b]
        yield to_line({**batch.rows[i], **added, **common}, batch.lines[i])


def request_lines(batch: Batch, jobs: Iterable[AnyJob]) -> Iterator[str]:
    """Each request as a line: `group`, `row` (responses counted from 0), `kind`, and what its kind asks for.

    Continuations: `position`, `samples`, `score` where the method ranks, and `shared_with`: the other pivots whose
    prefix is the same, which this measurement serves too. Other kinds: the fields of their job in `measure.plan`.
    """
    for job in jobs:
        record: Row = {"group": batch.rows[job.row]["group"], "row": job.row}
        if isinstance(job, Job):
            record |= {"position": job.position, "samples": job.samples, "kind": job.kind}
            if isfinite(job.score):
                record["score"] = job.score
            record["shared_with"] = [{"row": row, "position": position} for row, position in job.pivots[1:]]
        else:
            record |= {"kind": job.kind, **{f.name: getattr(job, f.name) for f in fields(job) if f.name != "row"}}
        yield to_line(record, batch.lines[job.row])


def to_line(record: Row, number: int) -> str:
    """One JSON line. ASCII, so that half a surrogate pair in a model's text can be written.

    Raises:
        InputError: a field that was passed through holds a number beyond float64.
    """
    try:
        return json.dumps(record, allow_nan=False) + "\n"
    except ValueError:
        raise InputError(f"line {number}", "a number beyond float64", "numbers up to 1.8e308") from None


def _segments(segments: Segments | None, rows: int) -> list[list[Row]]:
    """The segments of each of R responses as objects."""
    if segments is None:
        return [[] for _ in range(rows)]
    return [
        [dict(zip(piece, _finite(list(piece.values())), strict=True)) for piece in pieces]
        for pieces in segments.by_row(rows)
    ]


def _shortest(values: Tensor) -> list[Any]:
    """float32 values as the float64 with the shortest decimal form that reads back as the same float32."""
    # Told apart by their bits, so that −0 stays −0. Few differ: tokens of a segment share theirs.
    bits, index = np.unique(values.numpy().view(np.int32), return_inverse=True)
    distinct = bits.view(np.float32)
    short = np.array([float(str(value)) for value in distinct], dtype=np.float64)
    # Rounded to float64 first, a decimal may end at a neighbour; the float32's own expansion never does.
    exact = short.astype(np.float32) == distinct
    return _finite(np.where(exact, short, distinct.astype(np.float64))[index].tolist())


def _finite(values: Iterable[Any]) -> list[Any]:
    """JSON has no NaN and no infinity: null."""
    return [value if isfinite(value) else None for value in values]
