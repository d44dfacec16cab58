"""Steps whose credit points the wrong way: right ones that are punished, wrong ones that are rewarded.

Shapes: _N flat tokens, _R responses, _S steps or segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from apportion.credit.record import Segments
from apportion.diagnose.collapse import RIGHT
from apportion.diagnose.noise import increments
from apportion.diagnose.stats import Counts
from apportion.measure.evidence import StepLabels
from apportion.rollouts import Rollouts


@dataclass(frozen=True)
class Spans:
    """Labelled pieces of responses: tokens `start` to `end` of `row`, all [S] int64, and [S] bool `ok`."""

    row: Tensor
    start: Tensor
    end: Tensor
    ok: Tensor


def step_spans(rollouts: Rollouts, labels: StepLabels) -> Spans:
    """Each labelled step up to where the next one starts; the last one of a response ends with it."""
    last = torch.ones_like(labels.row, dtype=torch.bool)
    last[:-1] = labels.row[1:] != labels.row[:-1]
    end = torch.where(last, rollouts.length[labels.row], labels.start.roll(-1))
    return Spans(labels.row, labels.start, end, labels.ok)


def probed_spans(rollouts: Rollouts, segments: Segments, n0: float) -> Spans:
    """Segments across which the measured value rose (ok) or fell by more than one standard error [ours].

    Smaller changes get no label. These labels come from the probes that the credit was made from, so they agree
    with it more than an independent check would.

    Args:
        n0: the prior continuations by which the method shrank its values; 0 for none.
    """
    measured = increments(rollouts, segments, n0)
    sure = measured.known & (measured.change.abs() > measured.stderr)
    return Spans(segments.row[sure], segments.start[sure], segments.end[sure], measured.change[sure] > 0)


def misaligned(rollouts: Rollouts, spans: Spans, advantage: Tensor, prompt: np.ndarray) -> tuple[Counts, Counts]:
    """Polarity misalignment: right steps of failed responses with A < 0, and wrong steps of right ones with A > 0.

    Source: EP-GRPO (arXiv 2605.04960) [note]. A of a step is the mean over its trainable tokens [ours]; a response is
    right where its reward is above θ_r = 0.5. Steps without a trainable token, and responses without a reward, are
    left out.

    Args:
        advantage: [N] float64. prompt: [R] int64.

    Returns:
        punished over all right steps of failed responses; rewarded over all wrong steps of right ones. A unit is a
        step.
    """
    mean, trained = span_means(rollouts, spans, advantage)
    use = trained & rollouts.scored[spans.row]
    right = rollouts.reward[spans.row] > RIGHT
    punishable, rewardable = use & ~right & spans.ok, use & right & ~spans.ok
    owner = prompt[spans.row.numpy()]
    return (
        Counts.of((mean < 0)[punishable].numpy(), 1.0, owner[punishable.numpy()]),
        Counts.of((mean > 0)[rewardable].numpy(), 1.0, owner[rewardable.numpy()]),
    )


def span_means(rollouts: Rollouts, spans: Spans, values: Tensor) -> tuple[Tensor, Tensor]:
    """[S] mean of [N] values over each span's trainable tokens, 0 where it has none, and [S] whether it has one."""
    length = (spans.end - spans.start).clamp(min=0)
    first = rollouts.offsets[:-1][spans.row] + spans.start
    owner = torch.repeat_interleave(torch.arange(len(length)), length)
    within = torch.arange(int(length.sum())) - torch.repeat_interleave(length.cumsum(0) - length, length)
    token = first[owner] + within
    mask = rollouts.mask[token].double()
    zero = torch.zeros(len(length), dtype=torch.float64)
    total, count = zero.index_add(0, owner, values.double()[token] * mask), zero.index_add(0, owner, mask)
    return total / count.clamp(min=1), count > 0
