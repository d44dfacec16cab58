"""A method's evidence on a recorded step: what the record answers is taken from it, the rest is asked of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from apportion.compare.opened import Opened
from apportion.compare.recorded import Held, Step
from apportion.credit.method import CreditMethod
from apportion.credit.pipeline import fresh_budget
from apportion.engines.base import Finish, Reading
from apportion.measure.batch import Batch
from apportion.measure.evidence import Evidence, StepLabels
from apportion.measure.plan import AnyJob, Job
from apportion.measure.probe import evidence_of
from apportion.measure.readings import evidence_from, key_of, reading_rows
from apportion.measure.wave import Probe
from apportion.rollouts import Rollouts
from apportion.train.compatibility import measures
from apportion.train.recording import probe_row

Row = Mapping[str, Any]


class Lacking(Exception):
    """The record does not answer all that a method asks, and no model is open."""


@dataclass
class Gathered:
    """A method's evidence.

    Attributes:
        evidence: for `assign`. rows: the same for RUN/compare/METHOD/evidence.
        reused, measured: continuations, and readings of a response, that the record answered and that the model did.
    """

    evidence: Evidence = field(default_factory=Evidence)
    rows: list[Row] = field(default_factory=list)
    reused: int = 0
    measured: int = 0


def gather(step: Step, rollouts: Rollouts, method: CreditMethod, held: Held, opened: Opened | None = None) -> Gathered:
    """All that the method asks about the step's responses.

    Args:
        rollouts: the step's, with the log-probabilities and entropies that the method reads.
        opened: answers what the record lacks.

    Raises:
        Lacking: the record does not answer all of it and nothing is `opened`.
        InputError: the method cannot plan on these responses.
    """
    found = Gathered()
    if not measures(method):
        return found
    jobs = method.plan(rollouts, step.base)
    parts: dict[str, Any] = {}
    if "continuations" in method.needs:
        wave = [job for job in jobs if isinstance(job, Job)]
        parts["continuations"] = _continuations(step, rollouts, method, wave, held, opened, found)
    asked = [job for job in jobs if not isinstance(job, Job)]
    readings = _readings(step, rollouts, asked, held, opened, found)
    batch = Batch(rollouts, step.base, [{}] * len(rollouts), list(step.recorded.prompts))
    parts |= evidence_from(batch, jobs, readings)
    if "step_labels" in method.needs:
        parts["steps"] = _step_labels(step, rollouts, opened, found)
    found.evidence = Evidence(**parts)
    found.rows += reading_rows(batch, jobs, readings, parts)
    return found


def _continuations(
    step: Step, rollouts: Rollouts, method: CreditMethod, wave: Sequence[Job], held: Held, opened: Opened | None,
    found: Gathered,
) -> Any:  # fmt: skip
    """Of both waves, where the method has a second one."""
    probes: list[Probe] = []

    def carry(jobs: Sequence[Job], first: int) -> None:
        missing = []
        for job, rows in zip(jobs, held.continuations(method, jobs, first), strict=True):
            if rows is None:
                missing.append(job)
                continue
            probes.extend(_probe(batch, row, step.number) for row in rows)
            found.rows += rows
            found.reused += len(rows)
        if not missing:
            return
        if opened is None:
            raise Lacking
        new = opened.continued(rollouts, missing, first, fresh_budget(method))
        probes.extend(new)
        found.rows += [probe_row(rollouts, probe, opened.decode) for probe in new]
        found.measured += len(new)

    batch = Batch(rollouts, step.base, [], [])
    carry(wave, 0)
    evidence = evidence_of(rollouts, wave, probes)
    if more := method.refine(rollouts, step.base, Evidence(evidence)):
        carry(more, max(job.samples for job in wave))
        evidence = evidence_of(rollouts, [*wave, *more], probes)
    return evidence


def _readings(
    step: Step, rollouts: Rollouts, jobs: Sequence[AnyJob], held: Held, opened: Opened | None, found: Gathered
) -> dict[tuple[str, int], Reading]:
    batch = Batch(rollouts, step.base, [], [])
    readings: dict[tuple[str, int], Reading] = {}
    missing = []
    for job in jobs:
        values = held.reading(job)
        if values is None:
            missing.append(job)
        else:
            key = key_of(batch, job.row, f"recorded/{job.kind}", step.number)
            readings[job.kind, job.row] = Reading(key, torch.tensor(values, dtype=torch.float64))
    found.reused += len(readings)
    if missing:
        if opened is None:
            raise Lacking
        new = opened.readings(rollouts, missing)
        found.measured += len(new)
        readings |= new
    return readings


def _step_labels(step: Step, rollouts: Rollouts, opened: Opened | None, found: Gathered) -> StepLabels:
    """The recorded verdicts where they are there, which a response without a step cannot show; else the verifier's."""
    verdicts = [row for row in step.recorded.evidence if row["kind"] == "steps"]
    known = {row["row"] for row in verdicts}
    entries = [(row["row"], row["position"], bool(row["values"][0])) for row in verdicts]
    found.reused += len(known)
    missing = [row for row in range(len(rollouts)) if row not in known]
    if not missing:
        return StepLabels.from_entries(rollouts, entries, sorted(known))
    if opened is None:
        raise Lacking
    asked = opened.batch(rollouts)
    texts = rollouts.unstopped_text()
    assert opened.source.problems.steps is not None
    new = opened.source.problems.steps(
        [asked.prompts[row] for row in missing], [texts[row] for row in missing], [asked.rows[row] for row in missing]
    )
    whole: list[Sequence[tuple[int, bool]] | None] = [None] * len(rollouts)
    for row, steps in zip(missing, new, strict=True):
        whole[row] = steps
    judged = StepLabels.from_verdicts(rollouts, whole)
    found.measured += len(missing)
    opened.tick(len(missing))
    entries += zip(judged.row.tolist(), judged.start.tolist(), judged.ok.tolist(), strict=True)
    return StepLabels.from_entries(rollouts, entries, sorted({*known, *judged.given.nonzero()[:, 0].tolist()}))


def _probe(batch: Batch, row: Row, step: int) -> Probe:
    """A recorded continuation."""
    key = key_of(batch, row["row"], "recorded", step)
    return Probe(
        row["row"], row["position"], row["m"], tuple(row["token_ids"]), row["text"] or "", row["reward"],
        cast(Finish, row["finish"]), bool(row["rescued"]), key,
    )  # fmt: skip
