"""Where a step's probing budget went, and why a response got no pivot.

A reason is the method's own: it plans the recorded batch again, and where that is not what was recorded, no reason is
given. Shapes: _R responses, _G groups, _K states.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from apportion.credit.method import CreditMethod
from apportion.credit.pipeline import stages_of
from apportion.credit.probepo import ProbePO, forward_max
from apportion.credit.registry import make_method, method_class
from apportion.credit.spo_chain import SPOChain
from apportion.credit.vineppo import VinePPO
from apportion.diagnose.reading import rollouts_of
from apportion.errors import InputError
from apportion.groups import Base, group_stats, live_rows
from apportion.measure.plan import Job, prefix_digests
from apportion.records import ROLLOUTS
from apportion.rollouts import Rollouts
from apportion.segments import keep_tail

Row = Mapping[str, Any]
Place = tuple[int, int]  # response, position
State = tuple[str, bytes]  # group, digest of the tokens before it

UNKNOWN = "the record does not say why"
NO_REWARD = "no reward: the verifier abstained"
UNTRAINED, EMPTY = "none of its tokens is trained", "it is empty"
COLLAPSED = "σ = 0: all rewards are equal, so there is nothing to tell apart"
ALONE = "only one response has a reward"
LOST = "a pivot was planned, but no continuation came back with a reward"
UNUSED = "continuations were sampled inside it, but the method recorded no value of them"
SEVERAL = "no response has a pivot, each for its own reason"

_READ = {
    "belief": "the belief in the gold answer", "confidence": "the confidence of forced answers",
    "sensitivity": "how tokens bear on the answer", "divergence": "how predictions hang on what was shown",
    "step_labels": "a verifier’s verdicts on steps",
}  # fmt: skip


@dataclass(frozen=True)
class Spending:
    """What the continuations of a step were spent on.

    Attributes:
        groups: for each group, in order of appearance, `spent` (`pivots`, `continuations` and their generated
            `tokens`), `budget` and `why`, which is None where it has a pivot.
        responses: for each response, in row order, `continuations`, `probe_tokens` and `why`, likewise.

    `why` is None as well where the method is not installed, and the numbers are where values are recorded without the
    continuations behind them.
    """

    groups: list[dict[str, Any]]
    responses: list[dict[str, Any]]


def spending(rollouts: Sequence[Row], evidence: Sequence[Row], credit: Sequence[Row]) -> Spending:
    """Where the continuations of a step went, by its `rollouts`, `evidence` and `credit` rows.

    A pivot is a measured state inside a response, its start left out. A state that several responses of a group share
    counts once in the group; its continuations count in the one that they were sampled from.
    """
    # The first records had fewer columns, and no evidence but continuations.
    rollouts = [dict.fromkeys(ROLLOUTS.names) | dict(row) for row in rollouts]
    sampled = [row for row in evidence if row.get("kind", "continuations") == "continuations"]
    record = _Record(rollouts, sampled, credit)
    reasons = _Reasons(record)
    members: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(rollouts):
        members[row["group"]].append(i)
    whys = [reasons.response(i) for i in range(len(rollouts))]
    budget = _budget(record.settings)
    groups = []
    for rows in members.values():
        pivots = record.pivots(rows)
        spent = {
            "pivots": pivots, "continuations": record.sum(record.continuations, rows),
            "tokens": record.sum(record.tokens, rows),
        }  # fmt: skip
        why = None if pivots else reasons.group(rows, whys)
        groups.append({"spent": spent, "budget": budget, "why": why})
    responses = [
        {
            "continuations": record.sum(record.continuations, [i]), "probe_tokens": record.sum(record.tokens, [i]),
            "why": why,
        }
        for i, why in enumerate(whys)
    ]  # fmt: skip
    return Spending(groups, responses)


def _budget(settings: Mapping[str, Any]) -> int | None:
    """The setting `budget` of a method, or of the first stage of a pipeline that has one."""
    for table in (settings, *(each for each in settings.values() if isinstance(each, dict))):
        if type(value := table.get("budget")) is int:
            return value
    return None


class _Record:
    """A step's rows, and what they say of its continuations.

    Attributes:
        cls: the method's class; None where it is not installed.
        continuations, tokens: R numbers, of what was sampled from states of each response.
        found: states of which a continuation is recorded: whether one of them has a reward.
        values: states with a recorded value.
        inner: R numbers, of each response's values behind its start.
    """

    def __init__(self, rows: Sequence[Row], continuations: Sequence[Row], credit: Sequence[Row]) -> None:
        self.rows = rows
        first = credit[0] if credit else {"method": "", "settings": "{}", "counts": "{}"}
        self.method = first["method"]
        self.settings, self.counts = json.loads(first["settings"]), json.loads(first["counts"])
        try:
            self.cls: type[CreditMethod] | None = method_class(self.method)
        except InputError:
            self.cls = None
        self.continuations, self.tokens = [0] * len(rows), [0] * len(rows)
        self.found: dict[Place, bool] = {}
        place = {row["row"]: i for i, row in enumerate(rows)}
        for each in continuations:
            i = place.get(each["row"])
            if i is not None and 0 <= each["position"] <= len(rows[i]["token_ids"]):
                self.continuations[i] += 1
                self.tokens[i] += len(each["token_ids"] or ())
                at = (i, each["position"])
                self.found[at] = self.found.get(at, False) or _finite(each["reward"])
        self.values = {
            (i, int(s["start"])) for i, row in enumerate(credit) for s in row["segments"] or () if s["samples"]
        }
        self.inner = [0] * len(rows)
        for i, position in self.values:
            self.inner[i] += position > 0
        self._inside: dict[int, list[Place]] = defaultdict(list)
        for at in self.values | {at for at, good in self.found.items() if good}:
            if at[1] > 0:
                self._inside[at[0]].append(at)

    @cached_property
    def batch(self) -> Rollouts | None:
        """The batch with what the method needs; None where the record makes none, or the method is not installed."""
        needs = () if self.cls is None else self.cls.needs
        columns = {"old_logprob": "old_logprob", "entropy": "entropy", "char_start": "steps", "prompt_ids": ""}
        spared = dict.fromkeys(column for column, need in columns.items() if need not in needs)
        try:
            return rollouts_of([{**row, **spared} for row in self.rows]) if needs else None
        except InputError:
            return None

    @cached_property
    def _plain(self) -> Rollouts:
        """Tokens and groups, to tell states apart by."""
        ids, groups = [row["token_ids"] for row in self.rows], [row["group"] for row in self.rows]
        return self.batch or Rollouts.from_lists(ids, groups, [None] * len(ids))

    @cached_property
    def states(self) -> dict[Place, State]:
        """What is continued or valued anywhere, by its tokens."""
        return self.identify(self.values | self.found.keys())

    def identify(self, places: Iterable[Place]) -> dict[Place, State]:
        listed = list(places)
        row, position = torch.tensor(listed, dtype=torch.int64).reshape(-1, 2).unbind(1)
        digests = prefix_digests(self._plain, row, position)
        return {at: (self.rows[at[0]]["group"], digest) for at, digest in zip(listed, digests, strict=True)}

    def pivots(self, rows: Iterable[int]) -> int:
        """Distinct measured states inside these responses."""
        return len({self.states[at] for i in rows for at in self._inside[i]})

    def sum(self, numbers: Sequence[int], rows: Iterable[int]) -> int | None:
        """The sum over these responses; None where it is of continuations that are not in the record."""
        rows = list(rows)
        samples = self.cls is None or "continuations" in self.cls.needs
        lost = samples and not self.found and any(self.inner[i] for i in rows)
        return None if lost else sum(numbers[i] for i in rows)

    def scored(self, i: int) -> bool:
        return _finite(self.rows[i]["reward"]) and any(self.rows[i]["mask"])


class _Reasons:
    """Why responses and groups of a record have no pivot."""

    def __init__(self, record: _Record) -> None:
        self.record = record

    @cached_property
    def plan(self) -> _Plan | None:
        """The method's plan for the recorded batch; None where it cannot be made from the record."""
        record = self.record
        if record.batch is None:
            return None
        try:
            return _Plan(make_method(record.method, record.settings), record.batch, record)
        except InputError:
            return None

    def response(self, i: int) -> str | None:
        """Why response i has no pivot; None where it has one or its method is not installed."""
        record = self.record
        row, cls = record.rows[i], record.cls
        if cls is None or record.inner[i]:
            return None
        if record.pivots([i]):
            return UNUSED
        if reason := _unsampled(cls):
            return reason
        if not _finite(row["reward"]):
            return NO_REWARD
        if not record.scored(i):
            return UNTRAINED if row["mask"] else EMPTY
        return UNKNOWN if self.plan is None else self.plan.why(i)

    def group(self, rows: Sequence[int], whys: Sequence[str | None]) -> str | None:
        """Why no response of a group, which has these rows, has a pivot."""
        record = self.record
        if record.cls is None or (reason := _unsampled(record.cls)):
            return None if record.cls is None else reason
        if scored := [i for i in rows if record.scored(i)]:
            return whys[scored[0]] if len({whys[i] for i in scored}) == 1 else SEVERAL
        rewarded = any(_finite(record.rows[i]["reward"]) for i in rows)
        return "no response has a reward" + (" and a token to train" if rewarded else "")


class _Plan:
    """What a method plans for a recorded batch, and which groups' records are of another plan."""

    def __init__(self, method: CreditMethod, batch: Rollouts, record: _Record) -> None:
        self.batch, self.record = batch, record
        self.stage = next(stage for stage in stages_of(method) if "continuations" in stage.needs)
        self.stats = group_stats(batch)
        # Where to measure hangs on which responses are live, never on the host's μ, σ and advantages.
        zero = torch.zeros(len(batch), dtype=torch.float64)
        self.base = Base(zero.float(), zero, zero + 1, live_rows(batch, self.stats))
        self.jobs: dict[str, list[Job]] = defaultdict(list)
        for job in method.plan(batch, self.base):
            if isinstance(job, Job):
                self.jobs[batch.name(job.row)].append(job)
        pivots = [pivot for jobs in self.jobs.values() for job in jobs for pivot in job.pivots]
        self.planned = {i for i, _ in pivots}
        self.inside = {i for i, position in pivots if position > 0}
        self.unlike = self._unlike()

    def _unlike(self) -> set[str]:
        """Groups of which the record has what was not planned, or lacks more than the step says that it lost."""
        record = self.record
        jobs = {(job.row, job.position): job for jobs in self.jobs.values() for job in jobs}
        planned = {state: jobs[at] for at, state in record.identify(jobs).items()}
        pivots = {pivot for job in jobs.values() for pivot in job.pivots}
        answered = {state for at, state in record.states.items() if at in record.values or record.found[at]}
        # Every response that a measured state was planned for has its value, where the method records values.
        due = {pivot for state in planned.keys() & answered for pivot in planned[state].pivots if record.values}
        unlike = {self.batch.name(i) for i, _ in (due - record.values) | (record.values - pivots)}
        unlike |= {state[0] for state in record.states.values() if state not in planned}
        lost = {state: len(planned[state].pivots) for state in planned.keys() - answered}
        if record.counts.get("dropped_pivots", sum(lost.values())) != sum(lost.values()):
            unlike |= {group for group, _ in lost}
        return unlike

    def why(self, i: int) -> str:
        """Why a scored response has no pivot."""
        if self.batch.name(i) in self.unlike:
            return UNKNOWN
        if i in self.inside:
            return LOST
        group, stage = int(self.batch.group[i]), self.stage
        if self.stats.collapsed[group] and not stage.learns_when_collapsed:
            if self.stats.count[group] > 1:
                return COLLAPSED
            rewarded = ~torch.isnan(self.batch.reward) & (self.batch.group == group)
            return ALONE + (" and a token to train" if rewarded.sum() > 1 else "")
        if isinstance(stage, ProbePO):
            return self._outbid(stage, i) if i in self._best else self._no_candidate(stage, i)
        if isinstance(stage, VinePPO):
            return "no step starts inside it, so only the prompt was measured"
        if isinstance(stage, SPOChain):
            if i in self.planned:
                return "its only cutpoint is its first token, so only the prompt was measured"
            return f"every token it is trained on had a probability of {stage.threshold:g} or more"
        return "the method plans no state inside it"

    @cached_property
    def _best(self) -> dict[int, tuple[float, int]]:
        """The highest score among each response's candidates, and their number."""
        assert isinstance(self.stage, ProbePO)
        row, _, score = self.stage.candidates(self.batch, self.base)
        size = torch.bincount(row, minlength=len(self.batch))
        best = torch.full((len(self.batch),), -torch.inf, dtype=torch.float64).scatter_reduce_(0, row, score, "amax")
        return {i: (top, n) for i, (top, n) in enumerate(zip(best.tolist(), size.tolist(), strict=True)) if n}

    def _outbid(self, stage: ProbePO, i: int) -> str:
        """It had candidates, and the budget went to others."""
        jobs, (best, count) = self.jobs[self.batch.name(i)], self._best[i]
        last = min((job.score for job in jobs), default=-math.inf)
        if len(jobs) < stage.budget // stage.samples or best > last:
            # It would have been probed; the plan is of a subclass with a rule of its own.
            return UNKNOWN
        if stage.placement == "random":
            tokens = f"none of the {count} tokens" if count > 1 else "not the one token"
            return f"placement is random, and {tokens} where it could fall was drawn"
        high, low = _apart(last, best)
        weighed = type(stage).position_weight is not ProbePO.position_weight
        mine = f"its most uncertain boundary has {'the score' if weighed else 'H_max'} {low}"
        if best == last:
            return f"{mine}, as the last one probed in this group, and ties go to the earlier response"
        return f"{mine}, the last one probed in this group {high}"

    def _no_candidate(self, stage: ProbePO, i: int) -> str:
        if stage.placement == "random":
            return "no token behind its first is trained"
        steps, length = self._steps[i], int(self.batch.length[i])
        if not steps:
            return "no step starts inside it"
        far = keep_tail(steps, length, stage.window)
        if not far:
            ends = "its only step boundary" if len(steps) == 1 else f"each of its {len(steps)} step boundaries"
            return f"fewer than {stage.window} tokens follow {ends}"
        scores = self._scores[self.batch.offsets[i] + torch.tensor(far)]
        return UNKNOWN if torch.isfinite(scores).any() else "no token just behind its step boundaries is trained"

    @cached_property
    def _steps(self) -> list[list[int]]:
        assert isinstance(self.stage, ProbePO)
        return self.stage.steps(self.batch)

    @cached_property
    def _scores(self) -> torch.Tensor:
        assert isinstance(self.stage, ProbePO)
        return forward_max(self.batch, self.stage.window)


def _unsampled(cls: type[CreditMethod]) -> str | None:
    """What a method does in place of sampling continuations; None for one that does."""
    if "continuations" in cls.needs:
        return None
    if "tree" in cls.needs:
        return "no node of its tree lies inside it"
    read = [words for need, words in _READ.items() if need in cls.needs]
    if not read:
        return "the method measures nothing"
    return f"the method samples no continuations: it reads {' and '.join(read)}"


def _apart(high: float, low: float) -> tuple[str, str]:
    """Two numbers with as many digits, 2 or more, as tell them apart."""
    for digits in range(2, 8):
        if f"{high:.{digits}f}" != f"{low:.{digits}f}":
            break
    else:
        digits = 2
    return f"{high:.{digits}f}", f"{low:.{digits}f}"


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
