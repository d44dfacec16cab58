"""A method's plan carried out over all ranks with the trainer's own weights and reward functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from accelerate.utils import gather_object

from apportion.credit.method import CreditMethod
from apportion.credit.pipeline import stages_of
from apportion.engines.base import Sampling
from apportion.engines.transformers import TransformersEngine
from apportion.measure.evidence import Continuations, Evidence
from apportion.measure.plan import Job
from apportion.measure.probe import Probe, Rescue, evidence_of, probe
from apportion.train.grading import grade
from apportion.train.host import Batch

if TYPE_CHECKING:
    from apportion.train.trainer import CreditTrainer


def sampling_of(trainer: CreditTrainer) -> Sampling:
    """How the trainer samples its rollouts."""
    return Sampling(
        stop_ids=tuple(trainer.eos_token_ids), temperature=trainer.temperature, top_k=trainer.top_k or 0,
        top_p=trainer.top_p, min_p=trainer.min_p or 0.0, repetition_penalty=trainer.repetition_penalty,
    )  # fmt: skip


def fresh_budget(method: CreditMethod) -> int:
    """Tokens that a continuation may use whatever its prefix has used (VinePPO's switch); 0: what the prefix left."""
    return max(getattr(stage, "fresh_budget", 0) for stage in stages_of(method))


class Prober:
    """Probes, grades and gathers what the method plans. Every rank plans alike and answers its share.

    The engine gets the unwrapped model, so that ranks may make different numbers of forwards.
    """

    def __init__(self, trainer: CreditTrainer) -> None:
        self.trainer = trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        self.engine = TransformersEngine(model, trainer._tokenizer.pad_token_id, max_batch=trainer.args.probe_rows)
        self.sampling = sampling_of(trainer)
        self.rescue = None
        if (cue := trainer.args.rescue_cue) is not None:
            ids = trainer._tokenizer(cue, add_special_tokens=False)["input_ids"]
            answer = re.compile(trainer.args.rescue_answer)
            self.rescue = Rescue(tuple(ids), lambda text: answer.search(text) is not None, trainer.args.rescue_tokens)

    def measure(
        self, batch: Batch, jobs: Sequence[Job], step: int
    ) -> tuple[Continuations, Sequence[Probe], float | None]:
        """Carries out the jobs and the method's second wave, where it has one. The same result on every rank.

        Returns:
            the values, every probe in no particular order, and the largest difference, in nats, between the
            engine's and the trainer's own log-probabilities of the tokens before a probe: None where no probed
            prefix holds a token of a response.
        """
        method, rollouts = self.trainer.credit_method, batch.rollouts
        probes, gap = self._wave(batch, jobs, step, first=0)
        evidence = evidence_of(rollouts, jobs, probes)
        if more := method.refine(rollouts, batch.base, Evidence(evidence)):
            found, other = self._wave(batch, more, step, first=max(job.samples for job in jobs))
            probes, jobs = [*probes, *found], [*jobs, *more]
            gap = max((each for each in (gap, other) if each is not None), default=None)
            evidence = evidence_of(rollouts, jobs, probes)
        return evidence, probes, gap

    def _wave(self, batch: Batch, jobs: Sequence[Job], step: int, first: int) -> tuple[list[Probe], float | None]:
        trainer, rollouts = self.trainer, batch.rollouts
        assert rollouts.prompt_ids is not None
        prompts = [ids.tolist() for ids in rollouts.prompt_ids]
        group = rollouts.group.tolist()

        def graded(rows: list[int], responses: list[list[int]], texts: list[str]) -> list[float | None]:
            with trainer.clock.phase("grade"):
                return grade(trainer, [batch.rows[i] for i in rows], [prompts[group[i]] for i in rows], responses)

        with trainer.clock.phase("probe"):
            mine = probe(
                rollouts, jobs, self.engine, self.sampling, graded, trainer.decode,
                run=str(trainer.args.seed), step=step, max_new_tokens=trainer.max_completion_length, first=first,
                fresh_budget=fresh_budget(trainer.credit_method),
                rescue=self.rescue, rank=trainer.accelerator.process_index, world=trainer.accelerator.num_processes,
            )  # fmt: skip
            gap = self._gap(batch, mine)
        shares: list[tuple[list[Probe], float | None]] = gather_object([(mine, gap)])
        gaps = [each for _, each in shares if each is not None]
        return [p for probes, _ in shares for p in probes], max(gaps, default=None)

    def _gap(self, batch: Batch, probes: Sequence[Probe]) -> float | None:
        """Between two ways to the same numbers: the engine's cache and the trainer's padded batch."""
        rollouts = batch.rollouts
        first = next((p for p in probes if p.position > 0), None)
        if first is None:
            return None
        assert rollouts.prompt_ids is not None and rollouts.old_logprob is not None
        start = int(rollouts.offsets[first.row])
        kept = slice(start, start + first.position)
        prompt = rollouts.prompt_ids[int(rollouts.group[first.row])].tolist()
        logprob, _ = self.engine.score(
            [*prompt, *rollouts.token_ids[kept].tolist()], len(prompt), self.sampling.temperature
        )
        seen = rollouts.mask[kept]
        return float((logprob - rollouts.old_logprob[kept])[seen].abs().max()) if seen.any() else None
