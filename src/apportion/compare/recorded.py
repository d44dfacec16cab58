"""A recorded step as methods read it, and what its record already answers of a method's plan.

Shapes: _R responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from apportion.credit.method import CreditMethod
from apportion.credit.pipeline import fresh_budget
from apportion.credit.registry import make_method
from apportion.diagnose.reading import Recorded, read_step
from apportion.errors import InputError
from apportion.groups import Base, group_stats, live_rows
from apportion.measure.plan import AnyJob, BeliefJob, ConfidenceJob, Job, prefix_digests
from apportion.records import RunFolder
from apportion.rollouts import Rollouts

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """One recorded step.

    Attributes:
        recorded: as diagnostics read it. rollouts: the same, with reference log-probabilities and tree paths.
        base: the host's, see `host_base`. credit: rows as they were recorded.
        own: the run's method with the settings that it had on this step; None where it is not installed here.
    """

    recorded: Recorded
    rollouts: Rollouts
    base: Base
    credit: Sequence[Row]
    own: CreditMethod | None

    @property
    def number(self) -> int:
        return self.recorded.step


def read(folder: RunFolder, number: int) -> Step:
    """The step as it was recorded.

    Raises:
        InputError: see `read_step`.
    """
    recorded = read_step(folder, number)
    rows, credit = folder.read("rollouts", number), folder.read("credit", number)
    reference = None if any(row["ref_logprob"] is None for row in rows) else torch.tensor(
        [p for row in rows for p in row["ref_logprob"]], dtype=torch.float32
    )  # fmt: skip
    paths = None if any(row["path"] is None for row in rows) else tuple(tuple(row["path"]) for row in rows)
    rollouts = replace(recorded.rollouts, ref_logprob=reference, path=paths)
    try:
        own = make_method(recorded.method, recorded.settings)
    except InputError:
        own = None
    return Step(recorded, rollouts, host_base(rollouts, credit), credit, own)


def host_base(rollouts: Rollouts, credit: Sequence[Row]) -> Base:
    """What the trainer handed to the run's method, from the μ and the divisor that were recorded.

    (r − μ)/divisor in float32, as TRL computes it, so bit for bit its advantage; 0 where there is no reward. The base
    in the record is the method's own, which may be another one (r − μ, or a repaired group's).

    Numbers: r = (1, 0, 0, 0) with μ = .25 and the divisor .5001 gives 1.4997 and −.4999.
    """
    mean, scale = (torch.tensor([row[name] for row in credit], dtype=torch.float64) for name in ("mean", "scale"))
    advantage = (rollouts.reward.float() - mean.float()) / scale.float()
    return Base(advantage.nan_to_num(nan=0.0), mean, scale, live_rows(rollouts, group_stats(rollouts)))


class Held:
    """What the record of a step answers: rows that were measured by the policy that wrote the responses.

    A continuation is reused at the state it was sampled from, whichever response of the group it was noted under; a
    reading where the run's method asked for exactly the same one.
    """

    def __init__(self, step: Step) -> None:
        self._rollouts, self._own = step.rollouts, step.own
        rows = step.recorded.evidence
        probes = [row for row in rows if row["kind"] == "continuations"]
        self._probes: dict[tuple[int, bytes], dict[int, Row]] = {}
        for state, row in zip(self._states([(row["row"], row["position"]) for row in probes]), probes, strict=True):
            self._probes.setdefault(state, {})[row["m"]] = row
        self._values = {(row["kind"], row["row"], row["position"]): row["values"] for row in rows if row["values"]}
        jobs = self._own.plan(step.rollouts, step.base) if self._own is not None and self._values else []
        self._asked = {(job.kind, job.row): job for job in jobs}

    def continuations(self, method: CreditMethod, jobs: Sequence[Job], first: int = 0) -> list[list[Row] | None]:
        """For each job its continuations `first` to `first + samples`; None where the record lacks one of them.

        None as well where the run's continuations had another budget than the method's.
        """
        if self._own is None or fresh_budget(self._own) != fresh_budget(method):
            return [None] * len(jobs)
        states = self._states([(job.row, job.position) for job in jobs])
        found: list[list[Row] | None] = []
        for job, state in zip(jobs, states, strict=True):
            rows, wanted = self._probes.get(state, {}), range(first, first + job.samples)
            whole = all(m in rows for m in wanted)
            found.append(
                [{**rows[m], "row": job.row, "position": job.position} for m in wanted] if whole else None
            )  # fmt: skip
        return found

    def reading(self, job: AnyJob) -> list[Any] | None:
        """What the job would be answered with; None where the record has no such reading."""
        asked = self._asked.get((job.kind, job.row))
        if isinstance(job, BeliefJob | ConfidenceJob):
            if not isinstance(asked, BeliefJob | ConfidenceJob) or replace(asked, positions=job.positions) != job:
                return None
            values = [self._values.get((job.kind, job.row, position)) for position in job.positions]
            if any(value is None for value in values):
                return None
            return [value[0] if len(value) == 1 else value for value in values if value is not None]
        if asked != job:
            return None
        found: list[Any] | None = next(
            (values for (kind, row, _), values in self._values.items() if (kind, row) == (job.kind, job.row)), None
        )
        return found

    def _states(self, places: Sequence[tuple[int, int]]) -> list[tuple[int, bytes]]:
        """(group, digest of the tokens before it) of each (row, position)."""
        row, position = torch.tensor(places, dtype=torch.int64).reshape(-1, 2).unbind(1)
        return list(
            zip(self._rollouts.group[row].tolist(), prefix_digests(self._rollouts, row, position), strict=True)
        )  # fmt: skip
