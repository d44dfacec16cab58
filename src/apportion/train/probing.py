"""A method's plan carried out over all ranks with the trainer's own weights and reward functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object

from apportion.credit.pipeline import fresh_budget
from apportion.engines.base import Reading, Request, Sampling
from apportion.engines.logprobs import logprobs
from apportion.engines.scoring import Scorer
from apportion.engines.transformers import TransformersEngine
from apportion.engines.vllm import VLLMEngine, through_trl
from apportion.engines.vllm_hosts import Colocated, own_llm
from apportion.measure.batch import Batch
from apportion.measure.evidence import Continuations, Evidence
from apportion.measure.gap import Gap, gap_of, prefixes_of
from apportion.measure.plan import Job
from apportion.measure.probe import Rescue, evidence_of, probe
from apportion.measure.wave import Probe, requests_of, shard
from apportion.train.grading import grade
from apportion.train.host import statistics_pass

if TYPE_CHECKING:
    from apportion.train.trainer import CreditTrainer


def sampling_of(trainer: CreditTrainer) -> Sampling:
    """How the trainer samples its rollouts."""
    return Sampling(
        stop_ids=tuple(trainer.eos_token_ids), temperature=trainer.temperature, top_k=trainer.top_k or 0,
        top_p=trainer.top_p, min_p=trainer.min_p or 0.0, repetition_penalty=trainer.repetition_penalty,
    )  # fmt: skip


class Prober:
    """Probes, grades and gathers what the method plans. Every rank plans alike and answers its share.

    The engine gets the unwrapped model, so that ranks may make different numbers of forwards.
    """

    def __init__(self, trainer: CreditTrainer) -> None:
        self.trainer = trainer
        self.engine = engine_of(trainer)
        # A server is asked by the main process for all ranks, so that nobody gets another rank's answers.
        alone = trainer.use_vllm and trainer.vllm_mode == "server"
        self.rank = 0 if alone else trainer.accelerator.process_index
        self.world = 1 if alone else trainer.accelerator.num_processes
        # What the trainer answers where vLLM, which scores before temperature, is compared with it.
        self.scorer = Scorer(trainer.accelerator.unwrap_model(trainer.model), trainer._tokenizer.pad_token_id)
        self.sampling = sampling_of(trainer)
        self.rescue = None
        if (cue := trainer.args.rescue_cue) is not None:
            ids = trainer._tokenizer(cue, add_special_tokens=False)["input_ids"]
            answer = re.compile(trainer.args.rescue_answer)
            self.rescue = Rescue(tuple(ids), lambda text: answer.search(text) is not None, trainer.args.rescue_tokens)

    def refresh(self) -> None:
        """Gives a vLLM of our own the weights that are trained now. TRL sees to its own."""
        if isinstance(self.engine, VLLMEngine) and not self.trainer.use_vllm:
            self.engine.update(self.trainer.accelerator.unwrap_model(self.trainer.model))

    def measure(self, batch: Batch, jobs: Sequence[Job], step: int) -> tuple[Continuations, Sequence[Probe], Gap]:
        """Carries out the jobs and the method's second wave, where it has one. The same result on every rank.

        Returns:
            the values, every probe in no particular order, and the gap between the engine's and the trainer's own
            log-probabilities: over every probed prefix with vLLM, over one of them with the trained model itself.
        """
        method, rollouts = self.trainer.credit_method, batch.rollouts
        probes, gap = self._wave(batch, jobs, step, first=0)
        evidence = evidence_of(rollouts, jobs, probes)
        if more := method.refine(rollouts, batch.base, Evidence(evidence)):
            found, other = self._wave(batch, more, step, first=max(job.samples for job in jobs))
            probes, jobs = [*probes, *found], [*jobs, *more]
            gap += other
            evidence = evidence_of(rollouts, jobs, probes)
        return evidence, probes, gap

    def _wave(self, batch: Batch, jobs: Sequence[Job], step: int, first: int) -> tuple[list[Probe], Gap]:
        trainer, rollouts = self.trainer, batch.rollouts
        assert rollouts.prompt_ids is not None
        prompts = [ids.tolist() for ids in rollouts.prompt_ids]
        group = rollouts.group.tolist()

        def graded(rows: list[int], responses: list[list[int]], texts: list[str]) -> list[float | None]:
            with trainer.clock.phase("grade"):
                return grade(trainer, [batch.rows[i] for i in rows], [prompts[group[i]] for i in rows], responses)

        where = {
            "run": str(trainer.args.seed), "step": step, "max_new_tokens": trainer.max_completion_length,
            "first": first, "fresh_budget": fresh_budget(trainer.credit_method),
        }  # fmt: skip
        mine: list[Probe] = []
        gap = Gap()
        with trainer.clock.phase("probe"):
            if self.engine is not None:
                asked = shard(requests_of(rollouts, jobs, **where), self.rank, self.world)
                if isinstance(self.engine, VLLMEngine):
                    # Before they are continued: vLLM caches what it scores.
                    gap = self._gap(batch, self.engine, asked)
                mine = probe(
                    rollouts, jobs, self.engine, self.sampling, graded, trainer.decode, **where,
                    rescue=self.rescue, rank=self.rank, world=self.world,
                )  # fmt: skip
                if isinstance(self.engine, TransformersEngine):
                    gap = self._own_gap(batch, self.engine, asked)
        shares: list[tuple[list[Probe], Gap]] = gather_object([(mine, gap)])
        whole = sum((each for _, each in shares), Gap())
        whole.warn(trainer.args.probe_gap)
        return [p for probes, _ in shares for p in probes], whole

    def _gap(self, batch: Batch, engine: VLLMEngine, asked: Sequence[Request]) -> Gap:
        """Between vLLM and the trainer, on every prefix that is probed."""
        prefixes = prefixes_of(asked)
        readings = list(engine.logprobs(prefixes))
        theirs = None if self.sampling.temperature == 1 else list(logprobs(self.scorer, prefixes))
        return gap_of(batch.rollouts, readings, theirs)

    def streamed_gap(self, batch: Batch, asked: Sequence[Request]) -> Gap:
        """Between what was read as a response was drawn, and the trainer's own pass over it; of one response."""
        first = next(iter(prefixes_of(asked)), None)
        gap = Gap()
        if first is not None:
            prompt_ids, ids = torch.tensor([first.ids], device=self.trainer.accelerator.device).tensor_split(
                [first.prompt], dim=1
            )
            row = {"prompt_ids": prompt_ids, "completion_ids": ids}
            masks = {"prompt_mask": torch.ones_like(prompt_ids), "completion_mask": torch.ones_like(ids)}
            logprob, _ = statistics_pass(self.trainer, {**row, **masks})
            gap = gap_of(batch.rollouts, [Reading(first.key, logprob[0].double().cpu())])
        gap.warn(self.trainer.args.probe_gap)
        return gap

    def _own_gap(self, batch: Batch, engine: TransformersEngine, asked: Sequence[Request]) -> Gap:
        """Between two ways to the same numbers: the engine's cache and the trainer's padded batch."""
        first = next(iter(prefixes_of(asked)), None)
        if first is None:
            return Gap()
        logprob, _ = engine.score(first.ids, first.prompt, self.sampling.temperature)
        return gap_of(batch.rollouts, [Reading(first.key, logprob.double())])


def engine_of(trainer: CreditTrainer) -> TransformersEngine | VLLMEngine | None:
    """What generates the probes; None on ranks for which the main process asks."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.args.probe_engine == "transformers":
        decided = None
        if trainer.args.probe_stop is not None:
            stop = re.compile(trainer.args.probe_stop)

            def decided(ids: Sequence[int]) -> bool:
                return stop.search(trainer.decode(ids)) is not None

        pad_id, rows = trainer._tokenizer.pad_token_id, trainer.args.probe_rows
        return TransformersEngine(model, pad_id, max_batch=rows, decided=decided)

    def trained() -> int:
        step: int = trainer.state.global_step
        return step

    if trainer.use_vllm:
        if trainer.vllm_mode == "server" and not trainer.accelerator.is_main_process:
            return None
        return through_trl(trainer.vllm_generation, trained, lambda: trainer._last_loaded_step)
    longest = trainer.args.vllm_max_model_length or model.config.max_position_embeddings
    return VLLMEngine(
        Colocated(
            own_llm(
                model, longest, max_num_seqs=trainer.args.probe_rows,
                gpu_memory_utilization=trainer.args.vllm_gpu_memory_utilization,
                # Compiling for the CPU takes longer than it saves on models that train there.
                enforce_eager=trainer.accelerator.device.type == "cpu",
            )
        ),
        trained,
    )  # fmt: skip
