"""EP-GRPO: a gate by entropy on the base advantage, and a progress term standardised along the response.

Shapes: _N flat tokens, _R responses, _G groups, _B = _G · buckets.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from apportion.credit.method import CreditMethod, Need
from apportion.credit.record import Conserves, Credit
from apportion.errors import InputError
from apportion.groups import Base, compared_rows
from apportion.measure.evidence import Evidence
from apportion.rollouts import Rollouts, in_blocks, keep, keep_

# Advantages and rewards nearer to 0 than this are what float32 leaves of 0, and a residue has no direction.
_RESIDUE = 1e-6


class EPGRPO(CreditMethod):
    """EP-GRPO: A_t = W_t·A_i + η·W_t·z_t, an entropy gate on the advantage and on a progress signal.

    Gate W_t = sigmoid(γ(H_t − μ_H)/σ_H) and A_outcome = W_t·A_i [note]. Signal s_t = λ(log π_old − log π_ref) of the
    sampled token, direction d_i = sign(A_i) where the group's rewards differ, else sign(r_i − θ_r) [note]. Progress
    coordinate τ_t = entropy up to and with t over the response's total; K buckets by τ [note].

    Completion [ours]: p_t = d_i·s_t; z = (p − mean)/(std + 1e-6) over the tokens of the prompt group in the same
    bucket, A_progress = η·W_t·z; defaults of γ, λ, η and θ_r; z = 0 in a bucket with one token or std < 1e-8;
    τ = t/T where the total entropy is 0; W = .5 where σ_H < 1e-8; μ_H and σ_H over the batch's trainable tokens.
    Also [ours]: bucket b holds τ in (b/K, (b+1)/K], so that the last token is in the last one; both deviations
    are the population's; an A_i or r_i − θ_r within 1e-6 of 0 has direction 0; a response without a reward
    counts in no statistic; `mean_gate` divides W by its mean over the batch's trainable tokens.

    Source: EP-GRPO, arXiv 2605.04960. A group whose rewards are all equal learns from its progress term.
    """

    name: ClassVar[str] = "ep_grpo"
    needs: ClassVar[frozenset[Need]] = frozenset({"entropy", "old_logprob", "ref_logprob"})
    conserves: ClassVar[Conserves] = "none"
    learns_when_collapsed: ClassVar[bool] = True
    cost: ClassVar[str] = "log-probabilities of a reference model"
    paper: ClassVar[str] = "EP-GRPO, arXiv 2605.04960"
    marks: ClassVar[str] = "[note]; standardisation of progress, defaults and edge rules [ours]"

    gamma: float = Field(1.0, allow_inf_nan=False, description="slope of the entropy gate")
    lambda_: float = Field(1.0, allow_inf_nan=False, description="factor on log π_old − log π_ref")
    eta: float = Field(0.1, allow_inf_nan=False, description="share of the progress term")
    buckets: int = Field(10, ge=1, le=10_000, description="buckets of the progress coordinate (K)")
    reward_threshold: float = Field(
        0.5, allow_inf_nan=False, description="reward above which a response of a collapsed group counts as good (θ_r)"
    )
    mean_gate: bool = Field(False, description="divide the gate by its mean over the batch")

    @property
    def batch_wide(self) -> bool:
        return True

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        entropy, logprob, reference = (self._field(rollouts, f) for f in ("entropy", "old_logprob", "ref_logprob"))
        # An engine in bf16 may report an entropy a little below 0.
        entropy = entropy.to(torch.float64, copy=True).clamp_(min=0.0)
        use = rollouts.counted
        signal = logprob.to(torch.float64, copy=True).sub_(reference)
        signal *= rollouts.spread(self._direction(rollouts, base) * self.lambda_)
        z = standardised_(rollouts, signal, self._runs(rollouts, entropy), use)
        gate = self._gate_(entropy, use)
        compared = use & rollouts.spread(compared_rows(rollouts))
        return Credit.form(
            rollouts, base.advantage, weight=gate, residual=keep_(z.mul_(gate).mul_(self.eta), compared),
            method=self.name, settings=self.settings, conserves=self.keeps,
        )  # fmt: skip

    def _field(self, rollouts: Rollouts, field: str) -> Tensor:
        value: Tensor | None = getattr(rollouts, field)
        if value is None:
            raise InputError(f"{self.name}: {field}", "none", "one value a token", f"give `{field}` for every row")
        return value

    def _gate_(self, entropy: Tensor, use: Tensor) -> Tensor:
        """[N] W_t; whatever it is on tokens out of `use`. Writes into `entropy`."""
        count = int(np.count_nonzero(use.numpy()))
        if not count:
            return torch.ones_like(entropy)
        distance = entropy.sub_(keep(entropy, use).sum() / count)
        chosen = keep(distance, use)
        deviation = (chosen.dot(chosen) / count).sqrt()
        gate = distance.fill_(0.5) if deviation < 1e-8 else distance.mul_(self.gamma / deviation).sigmoid_()
        return gate.div_(keep(gate, use).sum() / count) if self.mean_gate else gate

    def _direction(self, rollouts: Rollouts, base: Base) -> Tensor:
        """[R] d_i: −1, 0 or 1."""
        judged = rollouts.reward.double() - self.reward_threshold
        towards = torch.where(base.live, base.advantage.detach().double(), judged)
        return torch.where(rollouts.scored & (towards.abs() > _RESIDUE), towards.sign(), 0.0)

    def _runs(self, rollouts: Rollouts, entropy: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """[K] the first token, rising, and [K] the bucket of every run: tokens of a response that lie in one bucket.

        The progress coordinate never falls, so there are not many.
        """
        silent = (rollouts.row_sum(entropy) == 0) & (rollouts.trainable > 0)
        if silent.any():
            entropy = torch.where(rollouts.spread(silent), rollouts.mask.double(), entropy)
        first, bucket = [np.zeros(0, np.int64)], [np.zeros(0)]
        for block in in_blocks(entropy.numpy(), rollouts.length.numpy(), 0.0):
            # Added up row by row and not along the flat batch, whose order must not reach the edges of the buckets.
            progress = torch.from_numpy(block.values)
            torch.cumsum(progress, 1, out=progress)
            progress *= self.buckets / progress[:, -1:].clamp(min=1e-300)
            # The hair is taken off because 10 · (.1 + .2) comes out above 3.
            end = progress.sub_(1e-9).ceil_().numpy()
            opens = np.ones(end.shape, dtype=bool)
            np.not_equal(end[:, 1:], end[:, :-1], out=opens[:, 1:])
            row, at = np.divmod(np.flatnonzero(opens), end.shape[1])
            first.append(rollouts.offsets.numpy()[block.rows[row]] + at)
            bucket.append(end[row, at] - 1)
        order = np.argsort(np.concatenate(first))
        return np.concatenate(first)[order], np.concatenate(bucket)[order].clip(0, self.buckets - 1)


def standardised_(rollouts: Rollouts, values: Tensor, runs: tuple[np.ndarray, np.ndarray], use: Tensor) -> Tensor:
    """[N] (x − mean)/(std + 1e-6) over the tokens of a group's bucket; 0 in one with one token or std < 1e-8.

    Writes into `values`.

    Args:
        values: [N] float64. runs: [K] first tokens, rising, and [K] buckets. use: [N] bool, the tokens that count.
    """
    if not len(values):
        return values
    start, bucket = runs
    tokens = np.diff(start, append=len(values))
    group = rollouts.group[torch.searchsorted(rollouts.offsets, torch.from_numpy(start), right=True) - 1].numpy()
    owner = np.unique(group * (bucket.max() + 1) + bucket, return_inverse=True)[1]
    count = np.bincount(owner, np.add.reduceat(use.view(torch.int8).numpy(), start, dtype=np.int32)).clip(min=1)

    def mean(of: Tensor) -> np.ndarray:
        return np.bincount(owner, np.add.reduceat(keep(of, use).numpy(), start)) / count

    def spread(of_bucket: np.ndarray) -> Tensor:
        return torch.from_numpy(np.repeat(of_bucket[owner], tokens))

    values -= spread(mean(values))
    # The mean of one value is that value, so its deviation is exactly 0.
    deviation = np.sqrt(mean(values**2))
    return values.div_(spread(np.where(deviation >= 1e-8, deviation + 1e-6, np.inf)))
