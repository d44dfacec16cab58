"""Requests, pooled measurements, and the segments that are laid between them.

Planted in a copy of the package and seen caught here: states shared across groups; a digest that takes in the
token at the pivot, or runs on from row to row; rewards pooled by row; None counted as 0; the sample deviation
in the standard error; a segment one token late; steps at a response's start, at EOS or past the end; an
increment taken up to an unknown reward.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from apportion.credit.boundaries import lay_segments, per_token, step_positions, take_increments
from apportion.errors import InputError
from apportion.measure.evidence import Continuations
from apportion.measure.plan import jobs_of, prefix_digests
from apportion.rollouts import Rollouts
from strategies import Batch, batches

NAN = float("nan")


@settings(max_examples=60)
@given(batch=batches())
def test_jobs_are_the_distinct_prefixes_of_each_group(batch: Batch) -> None:
    rollouts = batch.rollouts()
    pivots = [(i, t) for i, y in enumerate(batch.responses) for t in range(len(y.ids))][::-3]
    row, position = torch.tensor(pivots, dtype=torch.int64).reshape(-1, 2).unbind(1)
    wanted: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    for i, t in pivots:
        wanted.setdefault((batch.responses[i].group, tuple(batch.responses[i].ids[:t])), []).append((i, t))
    score = torch.arange(len(pivots)).double()
    jobs = jobs_of(rollouts, row, position, 5, score)
    assert [list(job.pivots) for job in jobs] == list(wanted.values())
    assert [(job.row, job.position) for job in jobs] == [states[0] for states in wanted.values()]
    assert [job.score for job in jobs] == [pivots.index(states[0]) for states in wanted.values()]
    assert all(job.samples == 5 for job in jobs)
    digests = prefix_digests(rollouts, row, position)
    ids = [tuple(batch.responses[i].ids[:t]) for i, t in pivots]
    assert len(set(digests)) == len(set(ids)) == len(set(zip(digests, ids, strict=True)))


def test_pooling() -> None:
    rollouts = Rollouts.from_lists([[1, 2, 3], [4]], ["p", "p"], [1.0, 0.0])
    measured = Continuations.from_rewards(
        rollouts, [(1, 0, [1.0]), (0, 2, [1.0, None]), (0, 1, [None]), (0, 2, [0.0, 0.0, 1.0]), (0, 0, [])]
    )
    assert measured.row.tolist() == [0, 1] and measured.position.tolist() == [2, 0]
    assert measured.mean.tolist() == [0.5, 1.0] and measured.count.tolist() == [4, 1]
    # √(.25/4), the bound .5/√M for rewards that are 0 or 1; and no spread seen in one.
    assert measured.stderr.tolist() == [0.25, 0.0]
    assert measured.dropped == 2
    none = Continuations.from_rewards(rollouts, [])
    assert len(none.row) == len(none.mean) == none.dropped == 0


@pytest.mark.parametrize(
    "entry, message",
    [
        ((0, 3, [1.0]), "of row 0: got position 3; expected a position from 0, below the response's 3 tokens"),
        ((0, -1, [1.0]), "position -1"),
        ((1, 0, [1.0]), "of row 1: got position 0"),
        ((2, 0, [1.0]), "row 2"),
        ((-1, 0, [1.0]), "row -1"),
        ((0, 1, [1.0, NAN]), "of row 0, position 1: got nan"),
        ((0, 1, [-math.inf]), "of row 0, position 1: got -inf"),
    ],
)
def test_bad_evidence(entry: tuple[int, int, list[float | None]], message: str) -> None:
    rollouts = Rollouts.from_lists([[1, 2, 3], []], ["p", "p"], [1.0, 0.0])
    with pytest.raises(InputError, match=message):
        Continuations.from_rewards(rollouts, [entry])


def test_segments_of_every_kind_of_row() -> None:
    # Row 0 is measured at its start and at 2; 1 is empty; 2 has no pivot; 3 has one that is not kept.
    rollouts = Rollouts.from_lists([[1, 2, 3], [], [4, 5], [6, 7]], ["p"] * 4, [1.0, 1.0, 0.0, None])
    pivots = Continuations.from_rewards(rollouts, [(0, 2, [0.0, 1.0]), (0, 0, [0.25] * 4), (3, 1, [1.0])])
    keep = torch.tensor([True, True, False])
    cut = lay_segments(rollouts, pivots, keep, opening=torch.tensor([9.0, 9.0, NAN, 0.5]).double())
    assert cut.row.tolist() == [0, 0, 2, 3]
    assert cut.start.tolist() == [0, 2, 0, 0] and cut.end.tolist() == [2, 3, 2, 2]
    assert cut.raw.tolist() == pytest.approx([0.25, 0.5, NAN, 0.5], nan_ok=True)
    assert cut.samples.tolist() == [4, 2, 0, 0]
    assert cut.stderr.tolist() == pytest.approx([0, 0.5 / 2**0.5, 0, 0])
    filled, error = take_increments(rollouts, cut, cut.raw)
    # .5 − .25, 1 − .5, and nothing where the value or the reward is not known.
    assert filled.increment.tolist() == [0.25, 0.5, 0.0, 0.0] and error == 0
    assert per_token(filled, filled.increment).tolist() == [0.25, 0.25, 0.5, 0.0, 0.0, 0.0, 0.0]


def test_no_rows_at_all() -> None:
    rollouts = Rollouts.from_lists([], [], [])
    pivots = Continuations.from_rewards(rollouts, [])
    cut = lay_segments(rollouts, pivots, torch.zeros(0, dtype=torch.bool), torch.zeros(0).double())
    filled, error = take_increments(rollouts, cut, cut.raw)
    assert len(filled.row) == 0 and error == 0 and per_token(filled, filled.increment).shape == (0,)


@settings(max_examples=60)
@given(batch=batches())
def test_segments_cover_every_token_once(batch: Batch) -> None:
    rollouts = batch.rollouts()
    pivots = batch.evidence().continuations
    assert pivots is not None
    keep = pivots.position % 2 == 0
    cut = lay_segments(rollouts, pivots, keep, torch.zeros(len(rollouts)).double())
    covered = [
        (row, t)
        for row, start, end in zip(cut.row.tolist(), cut.start.tolist(), cut.end.tolist(), strict=True)
        for t in range(start, end)
    ]
    assert covered == [(i, t) for i, y in enumerate(batch.responses) for t in range(len(y.ids))]
    starts = {(r, t) for r, t in zip(cut.row.tolist(), cut.start.tolist(), strict=True) if t}
    kept = {(r, t) for r, t in batch.measured() if batch.measured()[r, t] and t and t % 2 == 0}
    assert starts == kept


def test_step_positions_are_inside_and_rising() -> None:
    rollouts = Rollouts.from_lists(
        [[1, 2, 3], [4], []], ["p"] * 3, [1.0, 0.0, 0.0],
        text=("abcdef", "g", ""), char_start=[[0, 2, 4], [0], []],
    )  # fmt: skip

    def split(text: str) -> list[int]:
        return [0, 1, 2, 3, 5][: len(text)]

    # Characters 1 and 2 both start at token 1; 3 at EOS, which is no step; 5 in no token; 0 is the start.
    assert step_positions(rollouts, split, "m") == [[1], [], []]
    cut_off = replace(rollouts, truncated=torch.tensor([True] * 3))
    assert step_positions(cut_off, split, "m") == [[1, 2], [], []]
    flagged = Rollouts.from_lists([[1, 2], [3]], ["p", "p"], [1.0, 0.0], boundary=[[1, 1], [1]])
    assert step_positions(flagged, lambda text: [], "m") == [[1], []]
    bare = Rollouts.from_lists([[1, 2]], ["p"], [1.0])
    with pytest.raises(InputError, match="m: boundaries"):
        step_positions(bare, lambda text: [], "m")
