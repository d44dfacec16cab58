"""How much of the measured credit may be noise of the measurement.

Shapes: _R responses, _S segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from apportion.credit.record import Segments
from apportion.diagnose.stats import Counts
from apportion.rollouts import Rollouts


@dataclass(frozen=True)
class Increments:
    """Changes in value across S segments, in units of reward.

    Attributes:
        change: [S] float64. stderr: [S] float64, of the change: the errors of the values at both ends, taken as
            independent; the reward at a response's end has none.
        known: [S] bool, a value at both ends, and continuations behind at least one of them.
    """

    change: Tensor
    stderr: Tensor
    known: Tensor


def increments(rollouts: Rollouts, segments: Segments, n0: float) -> Increments:
    """The increments of recorded segments with their standard errors.

    Shrinking a value by M/(M + n₀) shrinks its error alike.
    """
    row, m = segments.row, segments.samples.double()
    measured = segments.samples > 0
    own = torch.where(measured, segments.stderr * m / (m + n0).clamp(min=1), 0.0)
    last = torch.ones_like(row, dtype=torch.bool)
    last[:-1] = row[1:] != row[:-1]

    def after(values: Tensor, end: Tensor) -> Tensor:
        return torch.where(last, end, values.roll(-1))

    value_after = after(segments.shrunk, rollouts.reward.double()[row])
    known = (measured | after(measured, torch.zeros_like(measured))) & ~torch.isnan(segments.shrunk + value_after)
    return Increments(segments.increment, torch.hypot(own, after(own, torch.zeros_like(own))), known)


def below_one_error(found: Increments, row: Tensor, prompt: np.ndarray) -> Counts:
    """Share of the measured increments with |Δ| at most one standard error: credit that may be noise [ours].

    An error of 0 says that all continuations agreed, and such an increment counts as above it. A unit is a segment.
    """
    change, stderr, owner = found.change[found.known], found.stderr[found.known], prompt[row[found.known].numpy()]
    return Counts.of(((stderr > 0) & (change.abs() <= stderr)).numpy(), 1.0, owner)
