"""A method's plan carried out over all ranks, kind by kind, with the trainer's own weights and data.

Every rank plans alike, answers its share of the jobs and gets everybody's answers.
Shapes: _R responses, _K states.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object

from apportion.engines.base import (
    BeliefRequest,
    ConfidenceRequest,
    Cost,
    DivergenceRequest,
    Key,
    Reading,
    SensitivityRequest,
)
from apportion.engines.belief import beliefs
from apportion.engines.confidence import confidences
from apportion.engines.divergence import divergences
from apportion.engines.scoring import Scorer
from apportion.engines.sensitivity import sensitivities
from apportion.engines.transformers import TransformersEngine
from apportion.errors import InputError
from apportion.measure.evidence import Belief, Confidence, Evidence, Importance, StepLabels
from apportion.measure.gap import Gap
from apportion.measure.plan import AnyJob, BeliefJob, ConfidenceJob, DivergenceJob, Job, SensitivityJob
from apportion.measure.probe import evidence_of
from apportion.measure.wave import Probe
from apportion.segments import token_offsets
from apportion.train.host import Batch, answers_of
from apportion.train.probing import Prober

if TYPE_CHECKING:
    from apportion.train.streaming import Streamed
    from apportion.train.trainer import CreditTrainer

# Kinds that read the model without sampling rewards from it.
READ = frozenset({"belief", "sensitivity", "confidence", "divergence"})


@dataclass(frozen=True)
class Measurement:
    """What was measured on a batch, by all ranks.

    Attributes:
        evidence: for the method. probes: every graded continuation, in no particular order.
        gap: see `Prober`. read: rows for the run's records, of the kinds that are no continuations.
    """

    evidence: Evidence = field(default_factory=Evidence)
    probes: Sequence[Probe] = ()
    gap: Gap = field(default_factory=Gap)
    read: Sequence[dict[str, Any]] = ()


class Measurer:
    """Answers every kind of job that the trainer's method asks for."""

    def __init__(self, trainer: CreditTrainer) -> None:
        self.trainer = trainer
        method = trainer.credit_method
        self.prober = Prober(trainer) if {"continuations", "confidence"} & method.needs else None
        self.scorer = None
        if READ & method.needs:
            model = trainer.accelerator.unwrap_model(trainer.model)
            self.scorer = Scorer(model, trainer._tokenizer.pad_token_id, temperature=trainer.temperature)

    @property
    def sampler(self) -> TransformersEngine:
        """The trained model as it continues prefixes."""
        assert self.prober is not None and isinstance(self.prober.engine, TransformersEngine)
        return self.prober.engine

    def measure(self, batch: Batch, step: int, streamed: Streamed | None = None) -> Measurement:
        """Carries out the method's plan, and its second wave where it has one. The same result on every rank.

        Args:
            streamed: what was measured while the batch was sampled.
        """
        if streamed is not None:
            assert self.prober is not None
            with self.trainer.clock.phase("probe"):
                gap = self.prober.streamed_gap(batch, streamed.requests)
            evidence = Evidence(evidence_of(batch.rollouts, streamed.jobs, streamed.probes))
            return Measurement(evidence, streamed.probes, gap)
        trainer, rollouts = self.trainer, batch.rollouts
        method = trainer.credit_method
        jobs = method.plan(rollouts, batch.base)
        if self.prober is not None:
            with trainer.clock.phase("probe"):
                self.prober.refresh()
        found: dict[str, Any] = {}
        probes: Sequence[Probe] = ()
        gap = Gap()
        if self.prober is not None and "continuations" in method.needs:
            wave = [job for job in jobs if isinstance(job, Job)]
            found["continuations"], probes, gap = self.prober.measure(batch, wave, step)
        with trainer.clock.phase("probe"):
            readings = self.readings(batch, [job for job in jobs if not isinstance(job, Job)], step)
            found |= evidence_from(batch, jobs, readings)
            if "step_labels" in method.needs:
                found["steps"] = self._step_labels(batch)
        return Measurement(Evidence(**found), probes, gap, reading_rows(batch, jobs, readings, found))

    @property
    def cost(self) -> Cost:
        """What this rank has spent so far, grading not counted."""
        engines = (self.scorer, self.prober and self.prober.engine)
        spent = sum((engine.cost for engine in engines if engine), Cost())
        # Sampling rollouts is no measuring.
        return spent - self.trainer.stream.cost if self.trainer.stream else spent

    def readings(self, batch: Batch, jobs: Sequence[AnyJob], step: int) -> dict[tuple[str, int], Reading]:
        """(kind, row) → what was read for jobs that are no continuations, of all ranks."""
        if self.scorer is None:
            return {}
        accelerator = self.trainer.accelerator
        mine: list[tuple[str, int, Reading]] = []
        for kind in sorted({job.kind for job in jobs}):
            # The kinds share no random stream: a key says which it is.
            run = f"{self.trainer.args.seed}/{kind}"
            asked = [job for job in jobs if job.kind == kind][accelerator.process_index :: accelerator.num_processes]
            requests = {}
            rows = {}
            for job in asked:
                key = key_of(batch, job.row, run, step)
                request = self._request(batch, job, key)
                if request is not None:
                    requests[key], rows[key] = request, job.row
            mine += [(kind, rows[reading.key], reading) for reading in self._answer(kind, list(requests.values()))]
        gathered: list[tuple[str, int, Reading]] = gather_object(mine)
        return {(kind, row): reading for kind, row, reading in gathered}

    def _answer(self, kind: str, requests: Sequence[Any]) -> Iterator[Reading]:
        assert self.scorer is not None
        if kind == "confidence":
            assert self.prober is not None and self.prober.engine is not None
            return confidences(self.prober.engine, self.scorer, requests, self.prober.sampling)
        answer: dict[str, Callable[..., Iterator[Reading]]] = {
            "belief": beliefs, "sensitivity": sensitivities, "divergence": divergences
        }  # fmt: skip
        return answer[kind](self.scorer, requests)

    def _request(self, batch: Batch, job: AnyJob, key: Key) -> Any:
        """The job with token ids in place of names; None where the row has no gold answer to ask about."""
        rollouts = batch.rollouts
        assert rollouts.prompt_ids is not None
        prompt = rollouts.prompt_ids[int(rollouts.group[job.row])].tolist()
        start, end = rollouts.offsets[job.row : job.row + 2].tolist()
        response = rollouts.token_ids[start:end].tolist()
        whole: dict[str, Any] = {"key": key, "ids": (*prompt, *response), "prompt": len(prompt)}
        if isinstance(job, SensitivityJob):
            return SensitivityRequest(
                **whole, reasoning=job.reasoning, answer=job.answer, estimator=job.estimator,
                representation=job.representation, noise=job.noise, seed=job.seed,
            )  # fmt: skip
        if isinstance(job, DivergenceJob):
            blank, disturbed = self._altered(prompt, batch.rows[job.row]["span"], job, key)
            return DivergenceRequest(**whole, blank_ids=blank, disturbed_ids=disturbed)
        assert isinstance(job, BeliefJob | ConfidenceJob)
        golds = [self._ids(answer) for answer in answers_of(batch.rows[job.row])]
        if not golds:
            return None
        asked = {**whole, "positions": job.positions, "cue_ids": self._ids(job.cue)}
        if isinstance(job, BeliefJob):
            return BeliefRequest(**asked, answers=tuple(golds), per_token=job.per_token)
        return ConfidenceRequest(**asked, gold_ids=golds[0], samples=job.samples, tokens=job.tokens)

    def _altered(self, prompt: list[int], span: str, job: DivergenceJob, key: Key) -> tuple[tuple[int, ...], ...]:
        """The prompt with the span's tokens blanked by the pad id, and with a share of them drawn anew from the span.

        [ours]: what stands for a blank and for a disturbed image in a text.
        """
        starts, text = token_offsets(self.trainer.decode, prompt, [])
        at = text.find(span)
        if at < 0 or not span:
            raise InputError(f"span of prompt {key.prompt}", repr(span)[:60], "a part of the prompt as it is tokenized")
        inside = [t for t, start in enumerate(starts) if at <= start < at + len(span)]
        pad = self.trainer._tokenizer.pad_token_id
        blank, disturbed = list(prompt), list(prompt)
        draw = random.Random(f"{key.run}/{key.step}/{key.prompt}/{job.seed}")
        for t in inside:
            blank[t] = pad
            if draw.random() < job.disturb:
                disturbed[t] = prompt[draw.choice(inside)]
        return tuple(blank), tuple(disturbed)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.trainer._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _step_labels(self, batch: Batch) -> StepLabels:
        assert self.trainer.step_verifier is not None
        verdicts = self.trainer.step_verifier(batch.prompts, batch.rollouts.unstopped_text(), batch.rows)
        return StepLabels.from_verdicts(batch.rollouts, verdicts)


def key_of(batch: Batch, row: int, run: str, step: int) -> Key:
    """What is asked about a whole response; `run` starts its random streams."""
    return Key(run, step, batch.rollouts.name(row), batch.rollouts.sample[row], 0)


def evidence_from(
    batch: Batch, jobs: Sequence[AnyJob], readings: dict[tuple[str, int], Reading]
) -> dict[str, Belief | Confidence | Importance | torch.Tensor]:
    """Field of `Evidence` → its record. A row without a reading had nothing to be asked about."""
    rollouts = batch.rollouts
    rows = range(len(rollouts))
    found: dict[str, Any] = {}
    states = [job for job in jobs if isinstance(job, BeliefJob | ConfidenceJob) and (job.kind, job.row) in readings]
    for field_, cls in (("belief", Belief), ("confidence", Confidence)):
        mine = [job for job in states if job.kind == field_]
        entries = [
            (job.row, position, *(value if isinstance(value, list) else [value]))
            for job in mine
            for position, value in zip(job.positions, readings[job.kind, job.row].values.tolist(), strict=True)
        ]
        found[field_] = cls.from_entries(rollouts, entries, rows)
    length = rollouts.length.tolist()
    values = [[0.0] * n for n in length]
    start = [-1] * len(length)
    for job in jobs:
        if isinstance(job, SensitivityJob | DivergenceJob) and (job.kind, job.row) in readings:
            read = readings[job.kind, job.row].values.tolist()
            values[job.row][: len(read)] = read
            start[job.row] = job.reasoning if isinstance(job, SensitivityJob) else length[job.row]
    found["importance"] = Importance.from_rows(rollouts, values)
    found["answer_start"] = torch.tensor(start)
    return found


def reading_rows(
    batch: Batch, jobs: Sequence[AnyJob], readings: dict[tuple[str, int], Reading], found: dict[str, Any]
) -> list[dict[str, Any]]:
    """A row a state, or a response where a value a token was read (see `records.EVIDENCE`)."""
    out: list[dict[str, Any]] = []

    def add(kind: str, key: str, row: int, position: int, values: list[float]) -> None:
        group = batch.rollouts.name(row)
        out.append({"key": key, "kind": kind, "group": group, "row": row, "position": position, "values": values})

    for job in jobs:
        reading = readings.get((job.kind, job.row))
        if reading is None:
            continue
        key = "/".join(map(str, vars(reading.key).values()))
        values = reading.values.tolist()
        if isinstance(job, BeliefJob | ConfidenceJob):
            for position, value in zip(job.positions, values, strict=True):
                add(job.kind, key, job.row, position, value if isinstance(value, list) else [value])
        else:
            start = job.reasoning if isinstance(job, SensitivityJob) else int(batch.rollouts.length[job.row])
            add(job.kind, key, job.row, start, values)
    if (steps := found.get("steps")) is not None:
        for row, start, ok in zip(steps.row.tolist(), steps.start.tolist(), steps.ok.tolist(), strict=True):
            add("steps", "", row, start, [float(ok)])
    return out
