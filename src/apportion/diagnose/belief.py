"""Whether a rising belief in the gold answer marks a right step.

Shapes: _N flat tokens, _R responses, _K states, _S segments between them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from apportion.diagnose.polarity import Spans
from apportion.diagnose.stats import Counts
from apportion.measure.evidence import Belief
from apportion.rollouts import Rollouts


def belief_changes(belief: Belief) -> tuple[Spans, Tensor]:
    """The segments between consecutive measured states of a response and [S] ΔC, the change in probability across.

    C is the probability of the whole gold answer, not its logarithm: GRPO-VPS (arXiv 2604.20659) [paper]. `ok` of
    the spans is ΔC > 0.
    """
    k = (belief.row[1:] == belief.row[:-1]).nonzero()[:, 0]
    confidence = belief.logprob.exp()
    change = confidence[k + 1] - confidence[k]
    return Spans(belief.row[k], belief.position[k], belief.position[k + 1], change > 0), change


def segment_truth(rollouts: Rollouts, segments: Spans, steps: Spans) -> Tensor:
    """[S] int64 for each segment: 1 where every step that it shares a token with is right, 0 where one is not [ours].

    −1 where it is empty or holds a token of no labelled step.
    """
    first = rollouts.offsets[:-1]

    def inside(which: Tensor) -> Tensor:
        """[S] how many tokens of each segment lie in the steps of `which`."""
        row = steps.row[which]
        edges = torch.zeros(len(rollouts.token_ids) + 1, dtype=torch.int64)
        edges.index_add_(0, first[row] + steps.start[which], torch.ones_like(row))
        edges.index_add_(0, first[row] + steps.end[which], -torch.ones_like(row))
        # The running sum of the edges is 1 on the steps' tokens; that of those counts them.
        before = torch.cat([edges.new_zeros(1), edges.cumsum(0).cumsum(0)])
        return before[first[segments.row] + segments.end] - before[first[segments.row] + segments.start]

    length = segments.end - segments.start
    labelled = (inside(torch.ones_like(steps.ok)) == length) & (length > 0)
    return torch.where(labelled, (inside(~steps.ok) == 0).long(), -1)


def sign_f1(rises: Tensor, truth: Tensor, row: Tensor, prompt: np.ndarray) -> tuple[Counts, Counts]:
    """F1 of "ΔC > 0" as a test for a right segment, and the F1 of calling every segment right.

    Source: GRPO-VPS (arXiv 2604.20659) [paper]; the right segments as the positive class, and ΔC = 0 as no rise
    [ours]. F1 = 2TP/(2TP + FP + FN). A unit is a segment; those of truth −1 are left out.

    Args:
        rises: [S] bool. truth: [S] as `segment_truth` gives it. row: [S]. prompt: [R].
    """
    use = truth >= 0
    rises, right, owner = rises[use], truth[use] == 1, prompt[row[use].numpy()]

    def f1(called: Tensor) -> Counts:
        hit = 2.0 * (called & right).numpy()
        return Counts.of(hit, hit + (called != right).numpy(), owner)

    return f1(rises), f1(torch.ones_like(rises))
