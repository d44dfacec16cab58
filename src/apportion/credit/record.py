"""The Credit record: what every method returns and what report, metrics and tests read.

Shapes: _N flat tokens, _R responses, _S segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from apportion.errors import InputError
from apportion.groups import group_sum
from apportion.rollouts import Rollouts, keep_

Conserves = Literal["token_mean", "token_sum", "group_sum", "none"]


@dataclass(frozen=True)
class Segments:
    """The pieces of responses that share one value, in row order and then by start.

    Attributes:
        row: [S] int64.
        start: [S] int64, first position of the segment.
        end: [S] int64, one past its last position.
        raw: [S] float64, the measured value of the state in which the segment starts; μ for a first segment
            that starts at the prompt; NaN where nothing was measured.
        shrunk: [S] float64, the value after shrinkage; `raw` where the method does not shrink.
        stderr: [S] float64, standard error of `raw`; 0 where the value is known and not measured.
        increment: [S] float64, value at the segment's end minus `shrunk`, in units of reward.
        samples: [S] int64, continuations behind `raw`.
    """

    row: Tensor
    start: Tensor
    end: Tensor
    raw: Tensor
    shrunk: Tensor
    stderr: Tensor
    increment: Tensor
    samples: Tensor

    def by_row(self, rows: int) -> list[list[dict[str, float]]]:
        """For each of `rows` responses its segments in order, every field but `row` by name."""
        names = [f.name for f in fields(self) if f.name != "row"]
        columns = [getattr(self, name).tolist() for name in names]
        found: list[list[dict[str, float]]] = [[] for _ in range(rows)]
        for row, *values in zip(self.row.tolist(), *columns, strict=True):
            found[row].append(dict(zip(names, values, strict=True)))
        return found


@dataclass(frozen=True)
class Credit:
    """Per-token advantages and how they came about. Make it with `form`.

    Attributes:
        token: [N] float32 advantage of each token; exactly 0 where the mask is.
        base: [R] float32, the advantage that was spread.
        weight: [N] float64 or None (1 everywhere).
        residual: [N] float64 or None (0 everywhere).
        segments: the segments and their values, for methods that have them.
        invariants: name → measured error; `conserved` is the declared conservation's.
        counts: name → number of things that happened, such as dropped pivots.
        method: registered name; settings: every setting of the method as it was used.
    """

    token: Tensor
    base: Tensor
    method: str
    settings: Mapping[str, Any]
    weight: Tensor | None = None
    residual: Tensor | None = None
    segments: Segments | None = None
    invariants: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def form(
        cls,
        rollouts: Rollouts,
        base: Tensor,
        *,
        method: str,
        settings: Mapping[str, Any],
        conserves: Conserves,
        weight: Tensor | None = None,
        residual: Tensor | None = None,
        segments: Segments | None = None,
        invariants: Mapping[str, float] | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> Credit:
        """A = weight · base + residual on trainable tokens, 0 elsewhere: the one place where it is formed.

        Formed in float64 and rounded once, so that weight 1 and residual 0 give the base bit for bit.

        Raises:
            InputError: a base that is not [R].
        """
        if base.shape != rollouts.reward.shape:
            raise InputError("base", f"shape {tuple(base.shape)}", f"shape {tuple(rollouts.reward.shape)}")
        exact, base = base.detach().double(), base.detach().float()
        constant = weight is None and residual is None
        # A base on all its tokens is not rounded, so it needs no second precision.
        token = rollouts.spread(base if constant else exact)
        if weight is not None:
            token *= weight
        if residual is not None:
            token += residual
        token = keep_(token.float(), rollouts.mask)
        formed = base if constant else token
        if not np.isfinite(formed.numpy()).all() and (beyond := ~torch.isfinite(token)).any():
            row = int(rollouts.row[beyond.nonzero()[0, 0]])
            raise InputError(
                f"{method}: advantage of row {row}", "a number beyond float32", "finite advantages",
                "lower the method's settings or the scale of the rewards",
            )  # fmt: skip
        if constant:
            # The same number on all trainable tokens of a response has that mean: one a response is looked at.
            error = _last_error(rollouts, token, base) if conserves != "none" else None
        else:
            error = conservation_error(rollouts, token, exact, conserves)
        measured = {} if error is None else {"conserved": error}
        return cls(
            token, base, method, settings, weight, residual, segments,
            {**measured, **(invariants or {})}, counts or {},
        )  # fmt: skip


def nothing(like: Tensor) -> Tensor:
    """The weight of a base that counts for nothing beside the residual: [N] zeros that are one number in memory."""
    return like.new_zeros(1).expand_as(like)


def _last_error(rollouts: Rollouts, token: Tensor, base: Tensor) -> float:
    """The largest distance of a response's last token, where it is trainable, from the response's base."""
    some = rollouts.length > 0
    last = rollouts.offsets[1:][some] - 1
    gap = (token[last] - base[some]).abs()[rollouts.mask[last]]
    return float(gap.max()) if len(gap) else 0.0


def conservation_error(rollouts: Rollouts, token: Tensor, base: Tensor, conserves: Conserves) -> float | None:
    """Largest distance between what a method promises to keep and what it kept; None where it promises none.

    token_mean: the mean over a response's trainable tokens equals its base. token_sum: their sum equals the
    base times their number. group_sum: the same sum, over the whole group.
    """
    if conserves == "none" or not len(rollouts):
        return None
    gap = rollouts.row_sum(token) - base.double() * rollouts.trainable
    if conserves == "token_mean":
        gap = gap / rollouts.trainable.clamp(min=1)
    elif conserves == "group_sum":
        gap = group_sum(rollouts, gap)
    return float(gap.abs().max())
