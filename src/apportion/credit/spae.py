"""SPAE: steps are credited by what they did to a potential made of correctness and confidence.

Shapes: _N flat tokens, _R responses, _K measured states, _S segments.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from apportion.credit.answers import BOXED, AnswerPattern, reasoning_ends
from apportion.credit.boundaries import check_opening, has_states, lay_states, per_token, step_positions
from apportion.credit.grpo_vps import before_answer
from apportion.credit.method import CreditMethod, Need
from apportion.credit.prpo import row_minmax_
from apportion.credit.record import Conserves, Credit, Segments, nothing
from apportion.credit.reinforce_pp import whiten
from apportion.groups import Base, centred, compared_rows
from apportion.measure.evidence import Confidence, Evidence
from apportion.measure.plan import ConfidenceJob
from apportion.rollouts import Rollouts, keep_
from apportion.segments import DEFAULT_MARKERS, step_starts


class SPAE(CreditMethod):
    """SPAE, step potential advantage estimation [note, arXiv 2601.03823]: A = (r − μ)·f + ξ·g, then batch whitening.

    After each step the answer is asked for: Φ = 1.5·Acc·Conf + .5·Acc − Conf [paper code], see `potential`.
    f = 1 − a(1 − exp(−number of earlier steps with Φ > threshold)) takes credit from steps that come after the
    problem is solved. g = exp(min-max of ΔΦ over the response) − its mean over the batch. Groups whose rewards are all
    equal keep g.

    [ours]: a step is what ProbePO calls one, the last ends before the cue of the stated answer, or before EOS. ΔΦ of
    the first step counts from the prompt; `first="zero"` makes it 0, as in the authors' probing example. Min-max and
    mean run over trainable tokens of steps, so a long step weighs more; the range is 1 where all ΔΦ are equal. Tokens
    behind the last step, and those of responses without a gold answer, have f = 1 and g = 0. Whitening adds
    `epsilon` to the deviation.

    `Confidence` states are those after steps. Segments of the record hold Φ, not a reward.
    """

    name: ClassVar[str] = "spae"
    needs: ClassVar[frozenset[Need]] = frozenset({"steps", "confidence"})
    conserves: ClassVar[Conserves] = "none"
    uses_base: ClassVar[bool] = False
    learns_when_collapsed: ClassVar[bool] = True
    cost: ClassVar[str] = "samples short answers after every step"
    paper: ClassVar[str] = "SPAE, arXiv 2601.03823"
    marks: ClassVar[str] = "[note], Φ and cue [paper code]; steps, first ΔΦ, scope of means, answer tokens [ours]"

    alpha: float = Field(0.5, ge=0, le=1, description="most that a solved problem takes from later steps (a)")
    xi: float = Field(0.5, ge=0, allow_inf_nan=False, description="weight of the change in potential (ξ)")
    threshold: float = Field(0.9, ge=-1, le=1, description="potential above which the problem counts as solved")
    samples: int = Field(5, ge=1, description="short answers a state (N)")
    tokens: int = Field(10, ge=1, description="most tokens of a short answer")
    cue: str = Field("**Final Answer**\n\\boxed{", min_length=1, description="text that asks for the answer")
    first: Literal["prompt", "zero"] = Field("prompt", description="ΔΦ of the first step: from the prompt's Φ, or 0")
    whiten: bool = Field(True, description="whiten advantages over the batch's trainable tokens")
    epsilon: float = Field(1e-8, ge=0, allow_inf_nan=False, description="added to the batch's deviation")
    markers: tuple[str, ...] = Field(DEFAULT_MARKERS, description="patterns that start a step, besides a blank line")
    answer_pattern: AnswerPattern = BOXED

    @model_validator(mode="after")
    def _markers_compile(self) -> Self:
        step_starts("", self.markers)
        return self

    @property
    def batch_wide(self) -> bool:
        return True

    def plan(self, rollouts: Rollouts, base: Base) -> list[ConfidenceJob]:
        """One job for each scored response: the states after its steps and, for the first ΔΦ, its prompt."""
        compared = compared_rows(rollouts)
        ends = reasoning_ends(rollouts, self.answer_pattern, self.name, compared)
        steps = step_positions(rollouts, partial(step_starts, patterns=self.markers), self.name)
        opening = {0} if self.first == "prompt" else set()
        return [
            ConfidenceJob(
                row, tuple(sorted(opening | {p for p in steps[row] if p < ends[row]} | {ends[row]})),
                self.cue, self.samples, self.tokens,
            )
            for row in compared.nonzero()[:, 0].tolist()
        ]  # fmt: skip

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        states = evidence.confidence
        compared = compared_rows(rollouts)
        self.demand(
            "evidence.confidence", None if states is None else states.given, compared,
            "measure what `apportion plan --method spae` lists; an empty list where there is no gold answer",
        )  # fmt: skip
        states = states or Confidence.from_entries(rollouts, [], [])
        if self.first == "prompt":
            check_opening("spae: evidence.confidence", rollouts, states.row, states.position)
        counted = (states.position > 0) | (self.first == "prompt")
        row, value = states.row[counted], potential(states.acc, states.conf)[counted]
        segments, measured = lay_states(rollouts, row, states.position[counted], value)
        scored = rollouts.mask & rollouts.spread(compared)
        step = per_token(segments, measured) & before_answer(rollouts, evidence)
        solved = _solved_before(segments, len(rollouts), self.threshold)
        f = keep_(per_token(segments, 1 - self.alpha * (1 - torch.exp(-solved))), step, 1.0)
        use = step & scored
        g = keep_(row_minmax_(rollouts, per_token(segments, segments.increment), use).exp_(), use)
        mean = g.sum() / use.sum().clamp(min=1)
        outcome, weight, residual = centred(rollouts, base), f, keep_(g.sub_(mean).mul_(self.xi), use)
        if self.whiten:
            whole = f.mul_(rollouts.spread(outcome)).add_(residual)
            weight, residual = nothing(whole), whiten(whole, scored, self.ddof, self.epsilon)
        return Credit.form(
            rollouts, outcome.float(), weight=weight, residual=residual, segments=segments,
            method=self.name, settings=self.settings, conserves=self.keeps,
            counts={
                "unmeasured": int((compared & ~has_states(rollouts, states.row)).sum()),
                "solved_states": int((compared[row] & (value > self.threshold)).sum()),
            },
        )  # fmt: skip


def potential(acc: Tensor, conf: Tensor) -> Tensor:
    """Φ = 1.5·Acc·Conf + .5·Acc − Conf [paper code], from −1 (sure and wrong) to 1 (sure and right).

    (Acc, Conf) = (1, 1) gives 1, (0, 1) −1, (0, 0) 0, (1, 0) .5.
    """
    return 1.5 * acc * conf + 0.5 * acc - conf


def _solved_before(segments: Segments, rows: int, threshold: float) -> Tensor:
    """[S] float64: of the steps of a response that lie before a segment, how many ended with Φ above the threshold.

    A segment starts in the state in which the one before it ended; the prompt is no step's end.
    """
    solved = ((segments.raw > threshold) & (segments.start > 0)).double()
    of_row = torch.zeros(rows, dtype=torch.float64).index_add_(0, segments.row, solved)
    return solved.cumsum(0) - (of_row.cumsum(0) - of_row)[segments.row]
