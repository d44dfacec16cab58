"""Tokens that a step's update would hang on: heavy tails of the covariance, and large advantages.

Shapes: _N flat tokens, _R responses, _G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from apportion.diagnose.stats import Counts
from apportion.rollouts import Rollouts

_FLAT = 1e-12


@dataclass(frozen=True)
class Covariance:
    """c of the trainable tokens of groups in which it varies, in units of its own standard deviation there.

    Attributes:
        score: [N'] float64, c/σ_c. centred: [N'] float64, (c − mean c)/σ_c. group: [N'] int64.
    """

    score: Tensor
    centred: Tensor
    group: Tensor


def covariance(rollouts: Rollouts, advantage: Tensor) -> Covariance | None:
    """c_t = (log π − mean log π)(A_t − mean A) over the trainable tokens of each prompt group.

    Source: CW-GRPO (arXiv 2605.11538) [note], with the group as scope [ours]. σ_c is c's population standard
    deviation; groups where it is below 1e-12, such as collapsed ones, are left out.

    Returns:
        None where the batch has no log-probabilities.
    """
    if rollouts.old_logprob is None:
        return None
    mask = rollouts.mask
    group = rollouts.group[rollouts.row[mask]]
    count = torch.bincount(group, minlength=rollouts.groups).double().clamp(min=1)

    def centred(values: Tensor) -> Tensor:
        mean = torch.zeros(rollouts.groups, dtype=torch.float64).index_add_(0, group, values) / count
        return values - mean[group]

    c = centred(rollouts.old_logprob[mask].double()) * centred(advantage[mask].double())
    off = centred(c)
    spread = (torch.zeros(rollouts.groups, dtype=torch.float64).index_add_(0, group, off**2) / count).sqrt()[group]
    use = spread >= _FLAT
    return Covariance((c / spread)[use], (off / spread)[use], group[use])


def tail_counts(
    found: Covariance, rollouts: Rollouts, prompt: np.ndarray, sigmas: float = 3.0
) -> tuple[Counts, Counts]:
    """Share of tokens with |c| > 3σ_c, and the kurtosis of c: E[(c − mean)⁴]/σ_c⁴, which is 3 for a normal [ours].

    Kurtosis is that inside the groups, each weighing by its tokens. A unit is a group.
    """
    first = np.zeros(rollouts.groups, dtype=np.int64)
    first[rollouts.group.numpy()[::-1]] = np.arange(len(rollouts))[::-1]
    tokens = torch.bincount(found.group, minlength=rollouts.groups)
    there = (tokens > 0).numpy()
    owner, n = prompt[first[there]], len(found.group)

    def per_group(values: Tensor) -> np.ndarray:
        total = torch.zeros(rollouts.groups, dtype=torch.float64).index_add_(0, found.group, values.double())
        return total.numpy()[there]

    below = tokens.double().numpy()[there]
    return (
        Counts.of(per_group(found.score.abs() > sigmas), below, owner, n),
        Counts.of(per_group(found.centred**4), below, owner, n),
    )


def quantile_ratio(size: np.ndarray, high: float = 0.99, low: float = 0.5) -> float | None:
    """The `high` quantile of [N] sizes over the `low` one; None where the latter is 0 or there is no size."""
    if not len(size):
        return None
    top, middle = np.quantile(size, [high, low]).tolist()
    return top / middle if middle > 0 else None


def p99_abs_advantage(rollouts: Rollouts, advantage: Tensor) -> float | None:
    """99th percentile of |A_t| over a step's trainable tokens: ProbePO [paper]; None where it has no such token."""
    size = advantage[rollouts.mask].abs().numpy()
    return float(np.quantile(size, 0.99)) if len(size) else None
