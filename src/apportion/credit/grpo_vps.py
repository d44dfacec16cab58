"""GRPO-VPS: each segment is credited by what it did to the policy's belief in the gold answer.

Shapes: _N flat tokens, _R responses, _K measured states, _S segments.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from apportion.credit.answers import BOXED, CUE, AnswerPattern, reasoning_ends
from apportion.credit.boundaries import check_opening, has_states, lay_states, per_token
from apportion.credit.method import CreditMethod, Need
from apportion.credit.record import Conserves, Credit
from apportion.errors import InputError
from apportion.groups import Base, centred, compared_rows
from apportion.measure.evidence import Belief, Evidence
from apportion.measure.plan import BeliefJob
from apportion.rollouts import Rollouts, keep_
from apportion.segments import entropy_cuts


class GRPOVPS(CreditMethod):
    """GRPO-VPS, belief probing [paper, arXiv 2604.20659]: A = (r_i − μ) + α·ΔC_k on the tokens of segment k.

    C_k is the probability of the whole gold answer after `cue` at the end of segment k, C_0 at the prompt, and
    ΔC_k = C_k − C_{k−1} a difference of probabilities, not of logs. Without a gold answer ΔC is 0. Tokens from the
    last measured state on, which are those of the stated answer, get r_i − μ. Groups whose rewards are all equal
    keep ΔC.

    Segments: the cutpoints are the tokens whose entropy is at least the response's own `quantile` of it, before the
    stated answer. There are min(segments, ⌊cutpoints/per_segment⌋) segments, at least one, with numbers of
    cutpoints that differ by at most one. A segment starts with its first cutpoint, the first one at the prompt, and
    the last one ends before the cue of the stated answer, or before EOS.

    [ours]: the quantile, that it is taken over the whole response, the rounding, on which side of a border its
    cutpoint lies, the cue, where the stated answer is looked for.
    """

    name: ClassVar[str] = "grpo_vps"
    needs: ClassVar[frozenset[Need]] = frozenset({"entropy", "belief"})
    conserves: ClassVar[Conserves] = "none"
    uses_base: ClassVar[bool] = False
    learns_when_collapsed: ClassVar[bool] = True
    cost: ClassVar[str] = "the gold answer scored at most segments + 1 times a response"
    paper: ClassVar[str] = "GRPO-VPS, arXiv 2604.20659"
    marks: ClassVar[str] = "[paper]; quantile, rounding of segments, cue, answer_pattern [ours]"

    alpha: float = Field(1.2, ge=0, allow_inf_nan=False, description="weight of the change in belief")
    quantile: float = Field(
        0.97, ge=0, le=1, description="of a response's own entropies, from which a token is a cutpoint"
    )
    per_segment: int = Field(4, ge=1, description="cutpoints a segment (n in the paper)")
    segments: int = Field(6, ge=1, description="most segments a response (cap of M)")
    geometric: bool = Field(False, description="beliefs are geometric means over the answer's tokens: for long answers")
    cue: str = Field(CUE, min_length=1, description="text after which the gold answer is scored")
    answer_pattern: AnswerPattern = BOXED

    def plan(self, rollouts: Rollouts, base: Base) -> list[BeliefJob]:
        """One job for each scored response: its segments' borders, of which the first is the prompt."""
        if rollouts.entropy is None:
            raise InputError("grpo_vps: entropy", "none", "one value a token, in nats", "give `entropy` for every row")
        compared = compared_rows(rollouts)
        ends = reasoning_ends(rollouts, self.answer_pattern, self.name, compared)
        return [
            BeliefJob(
                row, tuple(sorted({0, *self._borders(rollouts, row, ends[row]), ends[row]})), self.cue, self.geometric
            )
            for row in compared.nonzero()[:, 0].tolist()
        ]

    def _borders(self, rollouts: Rollouts, row: int, end: int) -> list[int]:
        """Positions inside the response's first `end` tokens where its second and later segments start."""
        assert rollouts.entropy is not None
        own = slice(*rollouts.offsets[row : row + 2].tolist())
        found = entropy_cuts(rollouts.entropy[own].double(), 100 * self.quantile, rollouts.mask[own])
        cuts = [t for t in found if t < end]
        segments = max(1, min(self.segments, len(cuts) // self.per_segment))
        return [cuts[k * len(cuts) // segments] for k in range(1, segments)]

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        belief = evidence.belief
        compared = compared_rows(rollouts)
        self.demand(
            "evidence.belief", None if belief is None else belief.given, compared,
            "measure what `apportion plan --method grpo_vps` lists; an empty list where there is no gold answer",
        )  # fmt: skip
        belief = belief or Belief.from_entries(rollouts, [], [])
        check_opening("grpo_vps: evidence.belief", rollouts, belief.row, belief.position)
        segments, _ = lay_states(rollouts, belief.row, belief.position, belief.logprob.exp())
        use = before_answer(rollouts, evidence) & rollouts.spread(compared)
        change = per_token(segments, self.alpha * segments.increment)
        return Credit.form(
            rollouts, centred(rollouts, base).float(), residual=keep_(change, use), segments=segments,
            method=self.name, settings=self.settings, conserves=self.keeps,
            counts={"unmeasured": int((compared & ~has_states(rollouts, belief.row)).sum())},
        )  # fmt: skip


def before_answer(rollouts: Rollouts, evidence: Evidence) -> Tensor:
    """[N] bool: tokens before the stated answer's cue, all of them where none is known."""
    start = evidence.answer_start
    if start is None:
        return torch.ones_like(rollouts.mask)
    return rollouts.before(torch.where(start < 0, rollouts.length, start))
