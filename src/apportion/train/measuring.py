"""A method's plan carried out over all ranks, kind by kind, with the trainer's own weights and data.

Every rank plans alike, answers its share of the jobs and gets everybody's answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object

from apportion.engines.base import Cost, Reading
from apportion.engines.scoring import Scorer
from apportion.engines.transformers import TransformersEngine
from apportion.measure.batch import READ, Batch
from apportion.measure.evidence import Evidence, StepLabels
from apportion.measure.gap import Gap
from apportion.measure.plan import AnyJob, Job
from apportion.measure.probe import evidence_of
from apportion.measure.readings import Asker, At, Measurement, evidence_from, read, reading_rows
from apportion.measure.wave import Probe
from apportion.train.probing import Prober

if TYPE_CHECKING:
    from apportion.train.streaming import Streamed
    from apportion.train.trainer import CreditTrainer


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

    def readings(self, batch: Batch, jobs: Sequence[AnyJob], step: int) -> dict[At, Reading]:
        """(kind, row) → what was read for jobs that are no continuations, of all ranks."""
        if self.scorer is None:
            return {}
        accelerator, prober = self.trainer.accelerator, self.prober
        asker = Asker(self.trainer._tokenizer, self.trainer.decode, str(self.trainer.args.seed))
        mine = [
            job
            for kind in sorted({job.kind for job in jobs})
            for job in [job for job in jobs if job.kind == kind][accelerator.process_index :: accelerator.num_processes]
        ]
        engine, sampling = (None, None) if prober is None else (prober.engine, prober.sampling)
        found = read(asker.requests(batch, mine, step), self.scorer, engine, sampling)
        gathered: list[tuple[At, Reading]] = gather_object(list(found.items()))
        return dict(gathered)

    def _step_labels(self, batch: Batch) -> StepLabels:
        assert self.trainer.step_verifier is not None
        verdicts = self.trainer.step_verifier(batch.prompts, batch.rollouts.unstopped_text(), batch.rows)
        return StepLabels.from_verdicts(batch.rollouts, verdicts)
