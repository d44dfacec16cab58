"""GRPO-VPS: each segment is credited by what it did to the policy's belief in the gold answer.

Shapes: _N flat tokens, _R responses, _K measured states, _S segments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from apportion.credit.answers import BOXED, CUE, AnswerPattern, reasoning_ends
from apportion.credit.boundaries import lay_segments, per_token
from apportion.credit.method import CreditMethod, Need
from apportion.credit.record import Conserves, Credit, Segments
from apportion.errors import InputError
from apportion.groups import Base, centred
from apportion.measure.evidence import Belief, Continuations, Evidence
from apportion.measure.plan import BeliefJob
from apportion.rollouts import Rollouts
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
        if self.geometric:
            raise InputError(
                "grpo_vps: geometric", "true", "false where this package measures: its beliefs are joint ones",
                "plan with geometric=false, which lists the same states, and divide each answer's log-probability by "
                "its number of tokens where you measure it",
            )  # fmt: skip
        if rollouts.entropy is None:
            raise InputError("grpo_vps: entropy", "none", "one value a token, in nats", "give `entropy` for every row")
        ends = reasoning_ends(rollouts, self.answer_pattern, self.name)
        return [
            BeliefJob(row, tuple(sorted({0, *self._borders(rollouts, row, ends[row]), ends[row]})), self.cue)
            for row in rollouts.scored.nonzero()[:, 0].tolist()
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
        self.demand(
            "evidence.belief", None if belief is None else belief.given, rollouts.scored,
            "measure what `apportion plan --method grpo_vps` lists; an empty list where there is no gold answer",
        )  # fmt: skip
        belief = belief or Belief.from_entries(rollouts, [], [])
        check_opening("grpo_vps: evidence.belief", rollouts, belief.row, belief.position)
        segments, _ = lay_states(rollouts, belief.row, belief.position, belief.logprob.exp())
        change = torch.where(before_answer(rollouts, evidence), per_token(segments, segments.increment), 0.0)
        return Credit.form(
            rollouts, centred(rollouts, base).float(), residual=self.alpha * change, segments=segments,
            method=self.name, settings=self.settings, conserves=self.keeps,
            counts={"unmeasured": int((rollouts.scored & ~has_states(rollouts, belief.row)).sum())},
        )  # fmt: skip


def lay_states(rollouts: Rollouts, row: Tensor, position: Tensor, value: Tensor) -> tuple[Segments, Tensor]:
    """Segments between measured states of scored responses, each with the change in value across it.

    A response's first segment starts with its first token and its last ends with its last one; where the first or
    last token is no measured state, the value there is unknown (`raw` NaN at the start) and the change is 0.

    Args:
        row, position: [K] int64, each state once. value: [K] float64.

    Returns:
        the segments, and [S] bool: the value at the segment's end is known.
    """
    zero = torch.zeros_like(value)
    # A value that was read and not sampled has neither an error nor a number of samples.
    states = Continuations(row, position, value, zero, zero.long())
    unknown = torch.full((len(rollouts),), torch.nan, dtype=torch.float64)
    keep = rollouts.scored[row] & (position < rollouts.length[row])
    laid = lay_segments(rollouts, states, keep, opening=unknown)
    at_end = rollouts.scored[row] & (position == rollouts.length[row])
    closing = unknown.index_put((row[at_end],), value[at_end])
    last = torch.ones_like(laid.row, dtype=torch.bool)
    last[:-1] = laid.row[1:] != laid.row[:-1]
    after = torch.where(last, closing[laid.row], laid.raw.roll(-1))
    change = torch.nan_to_num(after - laid.raw, nan=0.0)
    return replace(laid, increment=change), ~torch.isnan(after)


def has_states(rollouts: Rollouts, row: Tensor) -> Tensor:
    """[R] bool: responses that any of the [K] states belongs to."""
    return torch.bincount(row, minlength=len(rollouts)) > 0


def check_opening(field: str, rollouts: Rollouts, row: Tensor, position: Tensor) -> None:
    """Raises InputError for the first scored response that has [K] states, but none at its prompt."""
    lacking = rollouts.scored & has_states(rollouts, row) & ~has_states(rollouts, row[position == 0])
    if lacking.any():
        at = int(lacking.nonzero()[0])
        raise InputError(
            f"{field} of row {at}", f"states from position {int(position[row == at].min())} on",
            "position 0, the prompt, among them", "measure the prompt too: the first change starts there",
        )  # fmt: skip


def before_answer(rollouts: Rollouts, evidence: Evidence) -> Tensor:
    """[N] bool: tokens before the stated answer's cue, all of them where none is known."""
    start = evidence.answer_start
    if start is None:
        return torch.ones_like(rollouts.mask)
    return ((start < 0)[rollouts.row]) | (rollouts.position < start[rollouts.row])
