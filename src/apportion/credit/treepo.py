"""TreePO: each response is compared with all responses that share its path, at every depth.

Shapes: _N flat tokens, _R responses, _M nodes, (D, R) one row a depth.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from apportion.credit.method import CreditMethod, Need
from apportion.credit.record import Conserves, Credit
from apportion.credit.reinforce_pp import whiten
from apportion.credit.tree import tree_of
from apportion.groups import Base, stats_by
from apportion.measure.evidence import Evidence
from apportion.rollouts import Rollouts


class TreePO(CreditMethod):
    """TreePO [paper: authors' code, arXiv 2508.17445]: r_i less the mean of a subgroup, averaged over its subgroups.

    The subgroup at a depth is the responses that share the path so far. The average is whitened over the batch's
    trainable tokens. Depth 0 is the whole group and always counts. A deeper part of the path counts where more
    than one scored response shares it, and not all of the group's do: that is depth 0 again, with a root id or
    without. Where an edge lies in the response does not matter, so `boundary` is not read and a path of any length
    will do [ours].

    Whitened or not, a response has one advantage, its credit's base; so the token mean is kept by construction.
    Over a group nothing is: responses average over different depths and have different lengths. Responses of a
    collapsed group count in the batch's statistics and get exactly 0, as in `reinforce_pp_baseline` [ours].

    `size_weighted` weighs the depths by the number of responses that share them, as the released code does.
    ε and the sample deviation of the whitening are verl's; their place in TreePO is [ours].

    Numbers [note]: two pairs, r = (1, 0 | 0, 0), before whitening: (.625, −.375, −.125, −.125); size-weighted
    (.667, −.333, −.167, −.167).
    """

    name: ClassVar[str] = "treepo"
    needs: ClassVar[frozenset[Need]] = frozenset({"tree"})
    per_token: ClassVar[bool] = False
    conserves: ClassVar[Conserves] = "token_mean"
    uses_base: ClassVar[bool] = False
    cost: ClassVar[str] = "none beyond its tree rollouts"
    paper: ClassVar[str] = "TreePO, arXiv 2508.17445"
    marks: ClassVar[str] = "[paper: authors' code, faults mended]; whitening's ε and collapsed groups [ours]"

    epsilon: float = Field(1e-8, ge=0, allow_inf_nan=False, description="added to the batch's deviation")
    whiten: bool = Field(True, description="whiten over the batch's trainable tokens")
    size_weighted: bool = Field(False, description="weigh depths by subgroup size, as the released code does")
    width: int = Field(16, ge=1, description="responses of a tree")
    depth: int = Field(14, ge=1, description="segments of a path")
    segment_tokens: int = Field(512, ge=1, description="tokens of a segment")

    @property
    def batch_wide(self) -> bool:
        return self.whiten

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        advantage = self._compared(rollouts)
        if self.whiten:
            advantage = whiten(advantage, rollouts.trainable * rollouts.scored, self.ddof, self.epsilon)
        return Credit.form(
            rollouts, torch.where(base.live, advantage, 0.0).float(),
            method=self.name, settings=self.settings, conserves=self.keeps,
        )  # fmt: skip

    def _compared(self, rollouts: Rollouts) -> Tensor:
        """[R] float64 advantages before whitening; 0 for responses that are not scored."""
        tree, scored = tree_of(rollouts, self.name), rollouts.scored
        reward = torch.where(scored, rollouts.reward.double(), 0.0)
        on = (tree.node >= 0) & scored
        stats = stats_by(reward.expand_as(tree.node)[on], tree.node[on], len(tree), ddof=0)
        size = torch.where(on, stats.count[tree.node], 0.0)
        gap = torch.where(on, reward - stats.mean[tree.node], 0.0)
        counts = (size > 1) & (size < size[0])
        counts[0] = True
        weight = torch.where(counts, size if self.size_weighted else 1.0, 0.0)
        return (weight * gap).sum(0) / weight.sum(0).clamp(min=1)
