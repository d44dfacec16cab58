"""How many groups have nothing to teach because all their rewards are equal.

Shapes: _R responses, _G groups, _N flat tokens, _S steps.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from apportion.credit.avspo import collapsed
from apportion.diagnose.stats import Counts
from apportion.groups import group_stats
from apportion.measure.evidence import StepLabels
from apportion.rollouts import Rollouts

RIGHT = 0.5
"""θ_r: a response with a higher reward is right [note, EP-GRPO's threshold for groups of σ = 0; value ours]."""


def collapsed_groups(rollouts: Rollouts, prompt: np.ndarray) -> tuple[Counts, Counts, Counts]:
    """ACR and its split: of the groups with several scored responses, those with nothing to compare.

    Source: AVSPO (arXiv 2605.21125) [note]: share of the whole batch's groups, singletons left out, whose population
    standard deviation is below 1e-6. The split [ours]: all right where the common reward is above θ_r = 0.5, else all
    wrong.

    Args:
        prompt: [R] int64.

    Returns:
        collapsed, all right and all wrong, each over all groups counted; a unit is a group.
    """
    stats = group_stats(rollouts, ddof=0)
    several = stats.count >= 2
    first = np.zeros(rollouts.groups, dtype=np.int64)
    first[rollouts.group.numpy()[::-1]] = np.arange(len(rollouts))[::-1]
    owner = prompt[first[several.numpy()]]
    collapse_G = collapsed(rollouts)[several]
    right = (stats.mean > RIGHT)[several]
    kinds = (collapse_G, collapse_G & right, collapse_G & ~right)
    collapse, all_right, all_wrong = (Counts.of(kind.numpy(), 1.0, owner) for kind in kinds)
    return collapse, all_right, all_wrong


def steps_in_collapsed_groups(rollouts: Rollouts, labels: StepLabels, prompt: np.ndarray) -> Counts:
    """Share of the steps that stand in groups of zero variance. Source: EP-GRPO (arXiv 2605.04960) [note].

    A unit is a response; steps of responses without a reward are left out.
    """
    stats = group_stats(rollouts, ddof=0)
    # A group of one has nothing to compare either.
    zero = (collapsed(rollouts) | (stats.count < 2))[rollouts.group]
    steps = torch.bincount(labels.row, minlength=len(rollouts)).double()
    use: Tensor = rollouts.scored & (steps > 0)
    counted = steps[use].numpy()
    return Counts.of(counted * zero[use].numpy(), counted, prompt[use.numpy()], n=int(counted.sum()))
