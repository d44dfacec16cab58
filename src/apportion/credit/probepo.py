"""ProbePO: probe a few uncertain step boundaries and spread each response's advantage by what they show.

Shapes: _N flat tokens, _R responses, _K pivots, _S segments.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from apportion.credit.allocation import neyman
from apportion.credit.boundaries import lay_segments, per_token, step_positions, take_increments
from apportion.credit.method import CreditMethod, Need
from apportion.credit.record import Credit
from apportion.errors import InputError
from apportion.groups import Base
from apportion.measure.evidence import Continuations, Evidence
from apportion.measure.plan import Job, jobs_of, prefix_digests
from apportion.rollouts import Rollouts
from apportion.segments import DEFAULT_MARKERS, keep_tail, merge_close, step_starts


class ProbePO(CreditMethod):
    """ProbePO: freeze the batch, probe the top step boundaries by forward-window entropy, redistribute.

    Where to measure [paper]: step starts of each response, scored by the highest entropy of the `window`
    tokens from there on; the best `shortlist` of each response are pooled over its group and the top
    ⌊budget/samples⌋ are probed. Ties go to the higher score, then the lower response, then the earlier
    position. Collapsed groups are not probed. States that several responses share are measured once and count
    once against the budget.

    What is done with it [paper]: V_k = (M·V̂_k + n₀·μ)/(M + n₀) between V_0 = μ and V_{K+1} = r_i;
    D_t = (V_k − V_{k−1})/σ on every token of segment k; A_t = A_base + α·(D_t − mean of D over the response's
    trainable tokens). So the token mean stays A_base (Proposition 1), and α = 0 or K = 0 is GRPO bit for bit.

    [ours]: the defaults of `alpha` and `n0`, `min_gap`, the tail kept after a candidate, rounding of the
    shortlist, `allocation="neyman"`, `placement="random"`'s draw (a hash of the tokens, so that row order
    does not matter), and reuse of the budget that shared states leave.

    Numbers [note]: μ = σ = .5, r = 1, T = 10, pivots at 4 and 7 with raw .75 and .25, M = n₀ = 4, α = 1,
    ε = 0: V = .625, .375; Δ/σ = .25, −.5, 1.25; A = .925 ×4, .175 ×3, 1.925 ×3.
    """

    name: ClassVar[str] = "probepo"
    needs: ClassVar[frozenset[Need]] = frozenset({"steps", "entropy", "continuations"})
    cost: ClassVar[str] = "at most budget continuations a group"
    paper: ClassVar[str] = "ProbePO"
    marks: ClassVar[str] = "[paper]; defaults of alpha, n0, min_gap, Neyman allocation [ours]"

    alpha: float = Field(0.5, allow_inf_nan=False, description="share of the redistribution that is applied")
    n0: float = Field(4.0, ge=0, allow_inf_nan=False, description="prior continuations worth of μ; 0: no shrinkage")
    budget: int = Field(40, ge=1, description="continuations a group (B)")
    samples: int = Field(8, ge=1, description="continuations a pivot (M)")
    window: int = Field(8, ge=1, description="tokens whose entropy a boundary is scored by (L), and the tail kept")
    shortlist: float = Field(0.5, gt=0, le=1, description="share of each response's candidates that is ranked")
    min_gap: int = Field(16, ge=1, description="candidates closer than this many tokens are merged")
    markers: tuple[str, ...] = Field(DEFAULT_MARKERS, description="patterns that start a step, besides a blank line")
    placement: Literal["entropy", "random"] = Field("entropy", description="random: ablation, any interior token")
    seed: int = Field(0, ge=0, description="of random placement")
    allocation: Literal["uniform", "neyman"] = Field("uniform", description="how the budget is split over pivots")
    pilot: int = Field(2, ge=1, description="continuations a pivot before a Neyman allocation")

    @model_validator(mode="after")
    def _affordable(self) -> Self:
        if self.budget < self.samples:
            raise InputError("budget", self.budget, f"at least samples, {self.samples}: less pays for no pivot")
        if self.allocation == "neyman" and self.pilot > self.samples:
            raise InputError("pilot", self.pilot, f"at most samples, {self.samples}, of which it is the first part")
        step_starts("", self.markers)
        return self

    def plan(self, rollouts: Rollouts, base: Base) -> list[Job]:
        row, position, score = self.candidates(rollouts, base)
        # Sorted by group, then by the tie rule; numpy's lexsort takes its last key first.
        order = np.lexsort((position, row, -score, rollouts.group[row]))
        row, position, score = (t[torch.from_numpy(order)] for t in (row, position, score))
        first_wave = self.samples if self.allocation == "uniform" else self.pilot
        jobs = jobs_of(rollouts, row, position, first_wave, score)
        taken: dict[int, int] = {}
        chosen = []
        for job in jobs:
            group = int(rollouts.group[job.row])
            taken[group] = taken.get(group, 0) + 1
            if taken[group] <= self.budget // self.samples:
                chosen.append(job)
        return chosen

    def refine(self, rollouts: Rollouts, base: Base, evidence: Evidence) -> list[Job]:
        """The rest of each group's budget by the pilot's spread; nothing for uniform allocation."""
        if self.allocation == "uniform" or evidence.continuations is None:
            return []
        return neyman(rollouts, base, evidence.continuations, self.pilot, self.samples)

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        if evidence.continuations is None and self.alpha != 0 and base.live.any():
            row = int(base.live.nonzero()[0])
            raise InputError(
                f"probepo: evidence.continuations of row {row}", "nothing, in this row or any other",
                "values at the planned pivots, or an empty list where none was measured",
                "measure what `apportion plan --method probepo` lists, or set alpha=0",
            )  # fmt: skip
        pivots = evidence.continuations or Continuations.from_rewards(rollouts, [])
        # V_0 is μ by rule, so a value measured at the prompt (as VinePPO does) is no pivot.
        keep = base.live[pivots.row] & (pivots.position > 0)
        segments = lay_segments(rollouts, pivots, keep, opening=base.mean)
        mean, m = base.mean[segments.row], segments.samples
        shrunk = torch.where(m > 0, (m * segments.raw + self.n0 * mean) / (m + self.n0).clamp(min=1), mean)
        segments, error = take_increments(rollouts, segments, shrunk)
        # Where there is no pivot, as in all responses that are not live, D is constant: it counts as 0, so that the
        # residual is 0 and not what rounding leaves.
        whole = torch.bincount(segments.row, minlength=len(rollouts)) < 2
        d = torch.where(whole[segments.row], 0.0, segments.increment / base.scale[segments.row])
        residual = per_token(segments, d)
        residual.sub_(rollouts.spread(rollouts.row_mean(residual))).mul_(self.alpha)
        return Credit.form(
            rollouts, base.advantage, residual=residual, segments=segments,
            method=self.name, settings=self.settings, conserves=self.keeps,
            invariants={"telescoping": error},
            counts={"pivots": int(keep.sum()), "dropped_pivots": pivots.dropped},
        )  # fmt: skip

    def position_weight(self, position: Tensor, length: Tensor) -> Tensor:
        """[K] factor on each candidate's score by its place in a response of [K] `length`: 1 [paper]."""
        return torch.ones_like(position, dtype=torch.float64)

    def steps(self, rollouts: Rollouts) -> list[list[int]]:
        """For each response the positions where a step starts after its first token, rising (`step_positions`)."""
        return step_positions(rollouts, partial(step_starts, patterns=self.markers), self.name)

    def candidates(self, rollouts: Rollouts, base: Base) -> tuple[Tensor, Tensor, Tensor]:
        """[K] rows, positions and scores of what may be probed: the shortlisted candidates of live groups [paper].

        Every response with a candidate has its best one in the shortlist. With random placement all trainable tokens
        behind the first are candidates, the scores are draws and there is no shortlist [ours].
        """
        if self.placement == "random":
            inside = rollouts.spread(base.live) & (rollouts.position > 0) & rollouts.mask
            row, position = rollouts.row[inside], rollouts.position[inside]
            return row, position, _draws(rollouts, self.seed, row, position)
        if rollouts.entropy is None:
            raise InputError("probepo: entropy", "none", "one value a token, in nats", "give `entropy` for every row")
        live, length = base.live.tolist(), rollouts.length.tolist()
        pivots = [
            (i, p)
            for i, steps in enumerate(self.steps(rollouts)) if live[i]
            for p in keep_tail(merge_close(steps, self.min_gap), length[i], self.window)
        ]  # fmt: skip
        row, position = torch.tensor(pivots, dtype=torch.int64).reshape(-1, 2).unbind(1)
        score = forward_max(rollouts, self.window)[rollouts.offsets[row] + position]
        score = score * self.position_weight(position, rollouts.length[row])
        seen = torch.isfinite(score)
        row, position, score = row[seen], position[seen], score[seen]
        order = torch.from_numpy(np.lexsort((position, -score, row)))
        row, position, score = row[order], position[order], score[order]
        count = torch.bincount(row, minlength=len(rollouts))
        rank = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
        # The hair is taken off because .07 · 100 comes out above 7.
        best = rank < torch.ceil(self.shortlist * count.double() - 1e-9).clamp(min=1)[row]
        return row[best], position[best], score[best]


def forward_max(rollouts: Rollouts, window: int) -> Tensor:
    """[N] H_max(u): the highest entropy of the trainable tokens among u … u+window−1 of the same response.

    −inf where there is none. Source: ProbePO, stage 2 [paper].
    """
    assert rollouts.entropy is not None
    entropy = torch.where(rollouts.mask, rollouts.entropy.double(), -torch.inf)
    best = entropy.clone()
    for ahead in range(1, min(window, len(entropy))):
        same = rollouts.row[ahead:] == rollouts.row[:-ahead]
        best[:-ahead] = torch.where(same, torch.maximum(best[:-ahead], entropy[ahead:]), best[:-ahead])
    return best


def _draws(rollouts: Rollouts, seed: int, row: Tensor, position: Tensor) -> Tensor:
    """[K] numbers in [0, 1), each a hash of the seed, the group's name and the tokens before the position."""
    digests = prefix_digests(rollouts, row, position)
    keys = [f"{seed}/{rollouts.name(i)}/".encode() for i in range(len(rollouts))]
    words = [
        hashlib.blake2b(keys[i] + digest, digest_size=6).digest()
        for i, digest in zip(row.tolist(), digests, strict=True)
    ]
    return torch.tensor([int.from_bytes(word, "big") / 2**48 for word in words], dtype=torch.float64)
