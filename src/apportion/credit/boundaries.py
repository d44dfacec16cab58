"""Step boundaries of a batch as token positions, and segments laid between measured positions.

Shapes: _R responses, _K pivots, _S segments, _N flat tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from apportion.credit.record import Segments
from apportion.errors import InputError
from apportion.measure.evidence import Continuations
from apportion.rollouts import Rollouts, repeated
from apportion.segments import char_to_token


def step_positions(rollouts: Rollouts, split: Callable[[str], Sequence[int]], method: str) -> list[list[int]]:
    """For each response the positions where a step starts after its first token, rising.

    Taken from `rollouts.boundary` where the host gives it for the response; else `split` names the characters of
    its text at which steps start, and each starts at the first token that begins there or later. The last token
    of a response that is not truncated is EOS, and that is no step of its own [paper, VinePPO].

    Raises:
        InputError: a response has neither boundaries nor text with `char_start`.
    """
    flags, starts = rollouts.boundary, rollouts.char_start
    text = (None,) * len(rollouts) if rollouts.text is None or starts is None else rollouts.text
    given = torch.full((len(rollouts),), flags is not None) if rollouts.bounded is None else rollouts.bounded
    if any(own is None and not listed for own, listed in zip(text, given.tolist(), strict=True)):
        raise InputError(
            f"{method}: boundaries", "none, and no text with offsets to find them in",
            "`boundaries`, or `text` with `offsets`", "give one of them for every row",
        )  # fmt: skip
    found = []
    spans, stops = pairwise(rollouts.offsets.tolist()), (~rollouts.truncated).tolist()
    for (a, b), own_text, listed, stopped in zip(spans, text, given.tolist(), stops, strict=True):
        if listed and flags is not None:
            found.append(flags[a:b].nonzero()[:, 0].tolist())
        elif own_text is not None and starts is not None:
            # EOS belongs to the step before it, whatever its text is; a step may start in no token at all.
            own = starts[a : max(a, b - stopped)]
            found.append([p for p in char_to_token(own, split(own_text)).tolist() if p < len(own)])
    # Two steps may start in one token, and a response's own start cuts nothing off.
    return [sorted({p for p in row if p > 0}) for row in found]


def lay_segments(rollouts: Rollouts, pivots: Continuations, keep: Tensor, opening: Tensor) -> Segments:
    """Cuts every response at its kept pivots, each segment with the raw value of the state it starts in.

    `shrunk` equals `raw` and `increment` is 0: the method fills them. Empty responses have no segment.

    Args:
        keep: [K] bool, the pivots to cut at.
        opening: [R] float64, the value of a response's start where no pivot measures it; NaN for unknown.
    """
    kept = keep.nonzero()[:, 0]
    at_start = pivots.position[kept] == 0
    measured_start = torch.full((len(rollouts),), -1, dtype=torch.int64)
    measured_start[pivots.row[kept[at_start]]] = kept[at_start]
    inner = kept[~at_start]
    first = (rollouts.length > 0).nonzero()[:, 0]
    row = torch.cat([first, pivots.row[inner]])
    start = torch.cat([torch.zeros_like(first), pivots.position[inner]])
    pivot = torch.cat([measured_start[first], inner])
    order = torch.argsort(rollouts.offsets[row] + start)
    row, start, pivot = row[order], start[order], pivot[order]
    # A segment ends where the next one starts; the last of a response ends with it.
    following = torch.cat([rollouts.offsets[row] + start, rollouts.offsets[-1:]])[1:]
    end = torch.minimum(following, rollouts.offsets[row + 1]) - rollouts.offsets[row]

    def of_pivot(values: Tensor, unmeasured: float) -> Tensor:
        return torch.cat([values, values.new_tensor([unmeasured])])[pivot]

    raw = torch.where(pivot < 0, opening[row], of_pivot(pivots.mean, 0.0))
    zero = torch.zeros_like(raw)
    return Segments(row, start, end, raw, raw, of_pivot(pivots.stderr, 0.0), zero, of_pivot(pivots.count, 0))


def take_increments(rollouts: Rollouts, segments: Segments, shrunk: Tensor) -> tuple[Segments, float]:
    """Fills in `shrunk` [S] and the change in value across each segment; the last one ends at the reward.

    A segment whose start has no value (NaN), or of a response without a reward, gets 0.

    Returns:
        the segments, and the largest error of Σ increments = r − first known value over the responses.
    """
    row = segments.row
    last = torch.ones_like(row, dtype=torch.bool)
    last[:-1] = row[1:] != row[:-1]
    after = torch.where(last, rollouts.reward.double()[row], shrunk.roll(-1))
    known = ~torch.isnan(shrunk) & ~torch.isnan(after)
    increment = torch.where(known, after - shrunk, 0.0)
    total = torch.zeros(len(rollouts), dtype=torch.float64).index_add_(0, row, increment)
    index = torch.arange(len(row))[known]
    first = torch.full((len(rollouts),), len(row)).scatter_reduce_(0, row[known], index, "amin")
    has = first < len(row)
    error = (total[has] - (rollouts.reward.double()[has] - shrunk[first[has]])).abs()
    filled = replace(segments, shrunk=shrunk, increment=increment)
    return filled, float(error.max()) if len(error) else 0.0


def value_changes(rollouts: Rollouts, pivots: Continuations) -> tuple[Segments, float]:
    """Scored responses cut at their measured states, each segment with the change in value across it.

    What stands before a response's first measured state has no value, and its change is 0.

    Returns:
        the segments, and the error of `take_increments`.
    """
    unknown = torch.full((len(rollouts),), torch.nan, dtype=torch.float64)
    laid = lay_segments(rollouts, pivots, rollouts.scored[pivots.row], opening=unknown)
    return take_increments(rollouts, laid, laid.raw)


def per_token(segments: Segments, values: Tensor) -> Tensor:
    """[N] values of [S] segments on their tokens. Segments cover every token, in order."""
    return repeated(values, segments.end - segments.start)


def lay_states(rollouts: Rollouts, row: Tensor, position: Tensor, value: Tensor) -> tuple[Segments, Tensor]:
    """Segments between measured states of scored responses, each with the change in value across it.

    A response's first segment starts with its first token and its last ends with its last one; where the first or
    last token is no measured state, the value there is unknown (`raw` NaN at the start) and the change is 0.

    Args:
        row, position: [K] int64, each state once. value: [K] float64.

    Returns:
        the segments, and [S] bool: the value at the segment's end is known.
    """
    zero = torch.zeros_like(value)
    # A value that was read and not sampled has neither an error nor a number of samples.
    states = Continuations(row, position, value, zero, zero.long())
    unknown = torch.full((len(rollouts),), torch.nan, dtype=torch.float64)
    keep = rollouts.scored[row] & (position < rollouts.length[row])
    laid = lay_segments(rollouts, states, keep, opening=unknown)
    at_end = rollouts.scored[row] & (position == rollouts.length[row])
    closing = unknown.index_put((row[at_end],), value[at_end])
    last = torch.ones_like(laid.row, dtype=torch.bool)
    last[:-1] = laid.row[1:] != laid.row[:-1]
    after = torch.where(last, closing[laid.row], laid.raw.roll(-1))
    change = torch.nan_to_num(after - laid.raw, nan=0.0)
    return replace(laid, increment=change), ~torch.isnan(after)


def has_states(rollouts: Rollouts, row: Tensor) -> Tensor:
    """[R] bool: responses that any of the [K] states belongs to."""
    return torch.bincount(row, minlength=len(rollouts)) > 0


def check_opening(field: str, rollouts: Rollouts, row: Tensor, position: Tensor) -> None:
    """Raises InputError for the first scored response that has [K] states, but none at its prompt."""
    lacking = rollouts.scored & has_states(rollouts, row) & ~has_states(rollouts, row[position == 0])
    if lacking.any():
        at = int(lacking.nonzero()[0])
        raise InputError(
            f"{field} of row {at}", f"states from position {int(position[row == at].min())} on",
            "position 0, the prompt, among them", "measure the prompt too: the first change starts there",
        )  # fmt: skip
