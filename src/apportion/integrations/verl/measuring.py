"""A method's plan carried out in a verl run: probes by its replicas and reward workers, readings by its actors.

Everything goes by key. Shapes: none, these are records.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

from transformers import GenerationConfig

from apportion.credit.method import CreditMethod
from apportion.credit.pipeline import fresh_budget, stages_of
from apportion.engines.base import Cost, Reading, Sampling
from apportion.errors import InputError
from apportion.integrations.verl.gap import Scored, probe_gap
from apportion.integrations.verl.reading import Readers, needs_readings
from apportion.integrations.verl.rows import Rows, versions
from apportion.integrations.verl.workers import Answer, Probes
from apportion.measure.evidence import Evidence, StepLabels
from apportion.measure.gap import Gap
from apportion.measure.plan import Job
from apportion.measure.probe import Rescue, evidence_of
from apportion.measure.readings import Asker, At, Measurement, evidence_from, reading_rows
from apportion.measure.wave import Probe, requests_of

log = logging.getLogger(__name__)


class Measurer:
    """Answers what the method of a verl trainer asks for.

    Attributes:
        decode: token ids to text, special tokens and spaces as they are. eos: ids that end a response.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.settings = trainer, trainer.credit_settings
        config = trainer.config
        needs = trainer.credit_method.needs
        self.tokenizer = trainer.tokenizer
        self.eos = stop_ids(trainer.tokenizer, config.actor_rollout_ref.model.path)
        self.limit = config.data.max_response_length
        rollout = config.actor_rollout_ref.rollout
        self.verify_steps = self.settings.load_step_verifier() if "step_labels" in needs else None
        for stage in stages_of(trainer.credit_method):
            _check_cue(self.tokenizer, stage)
        self.asker = Asker(self.tokenizer, self.decode, str(self.settings.seed))
        self.probes = self.readers = None
        # Of the last step's probes, those that the actors may score too.
        self.scored: list[Scored] = []
        if "continuations" in needs:
            self.probes = Probes(
                config, trainer.get_llm_client(), trainer.get_reward_handles(), self.settings.probe,
                stop_ids=self.eos, rescue=self._rescue(), balancer=trainer.serving().global_load_balancer,
            )  # fmt: skip
        if needs_readings(trainer.credit_method):
            sampling = Sampling(tuple(self.eos), rollout.temperature, max(rollout.top_k, 0), rollout.top_p)
            self.readers = Readers(trainer.actor_rollout_wg, sampling, self.tokenizer.pad_token_id)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _rescue(self) -> Rescue | None:
        if (asked := self.settings.rescue) is None:
            return None
        cue = self.tokenizer(asked.cue, add_special_tokens=False)["input_ids"]
        return Rescue(tuple(cue), partial(_found, asked.answer), asked.tokens)

    def close(self) -> None:
        if self.probes is not None:
            self.probes.close()

    def measure(self, rows: Rows, step: int, metrics: dict[str, Any]) -> tuple[Measurement, Cost]:
        """Carries out the plan, and a second wave where the method has one.

        Args:
            metrics: gets what was spent, retried and lost.
        """
        method, batch = self.trainer.credit_method, rows.batch
        jobs = method.plan(batch.rollouts, batch.base)
        found: dict[str, Any] = {}
        probes: list[Probe] = []
        cost, self.scored = Cost(), []
        if self.probes is not None:
            wave = [job for job in jobs if isinstance(job, Job)]
            found["continuations"], probes = self._probe(rows, wave, step, metrics)
            cost += Cost(generated=sum(len(probe.token_ids) for probe in probes))
        readings: dict[At, Reading] = {}
        if self.readers is not None:
            readings, spent = self.readers.read(self.asker.requests(batch, jobs, step))
            cost += spent
        found |= evidence_from(batch, jobs, readings)
        if self.verify_steps is not None:
            verdicts = self.verify_steps(batch.prompts, batch.rollouts.unstopped_text(), batch.rows)
            found["steps"] = StepLabels.from_verdicts(batch.rollouts, verdicts)
        return Measurement(Evidence(**found), probes, read=reading_rows(batch, jobs, readings, found)), cost

    def _check_rows(self, rows: Rows) -> None:
        """Raises InputError for the first prompt whose responses a probe cannot continue."""
        for key, about in zip(rows.keys, rows.about, strict=True):
            agent = about.get("agent_name") or "single_turn_agent"
            if agent != "single_turn_agent":
                raise InputError(
                    f"agent_name of row {key}", repr(agent), "single_turn_agent: a probe would be without its tools",
                    "leave such rows out, or use a method without probes",
                )  # fmt: skip
            messages = about.get("raw_prompt")
            contents = [message.get("content") for message in (() if messages is None else messages)]
            parts = [part for content in contents if not isinstance(content, str) for part in content or ()]
            if any(isinstance(part, dict) and part.get("type") != "text" for part in parts):
                raise InputError(
                    f"prompt of row {key}", "more than text", "text: a probe would be without its pictures",
                    "leave such rows out, or use a method without probes",
                )  # fmt: skip

    def _probe(self, rows: Rows, jobs: Sequence[Job], step: int, metrics: dict[str, Any]) -> Any:
        """The values of the plan's states, and the probes they are of."""
        self._check_rows(rows)
        method, rollouts = self.trainer.credit_method, rows.batch.rollouts
        probes, counts, seen = self._wave(rows, jobs, step, 0)
        evidence = evidence_of(rollouts, jobs, probes)
        if more := method.refine(rollouts, rows.batch.base, Evidence(evidence)):
            first = max(job.samples for job in jobs)
            found, other, later = self._wave(rows, more, step, first)
            probes, jobs, counts, seen = [*probes, *found], [*jobs, *more], counts + other, seen + later
            evidence = evidence_of(rollouts, jobs, probes)
        metrics.update({f"probe/{name}": float(number) for name, number in counts.items()})
        self._note_versions(rows, step, seen, metrics)
        return evidence, probes

    def _wave(
        self, rows: Rows, jobs: Sequence[Job], step: int, first: int
    ) -> tuple[list[Probe], Counter[str], Counter[int | None]]:
        assert self.probes is not None
        rollouts = rows.batch.rollouts
        requests = requests_of(
            rollouts, jobs, run=str(self.settings.seed), step=step, max_new_tokens=self.limit, first=first,
            fresh_budget=fresh_budget(self.trainer.credit_method),
        )  # fmt: skip
        row_of = {(rollouts.name(i), rollouts.sample[i]): i for i in range(len(rollouts))}
        prefix = {request.key: request.prefix_ids for request in requests}
        row = {request.key: row_of[request.key.prompt, request.key.sample] for request in requests}
        about = {key: rows.about[i] for key, i in row.items()}
        outcome = self.probes.run(requests, about, replicas=len(self.trainer.serving().get_replicas()))
        counts, kept, seen = Counter(outcome.counts), [], Counter[int | None]()
        sampled_by = versions(rows.tags)
        for (key, m), answer in outcome.answers.items():
            seen[answer.version] += 1
            if self._stale(answer, sampled_by[row[key]]):
                counts["stale"] += 1
                continue
            if answer.logprobs is not None:
                self.scored.append(Scored(prefix[key], answer.token_ids, answer.logprobs))
            kept.append(
                Probe(row[key], key.position, m, answer.token_ids, answer.text, answer.reward, answer.finish,
                      answer.rescued, key)
            )  # fmt: skip
        if outcome.lost:
            reasons = Counter(lost.reason for lost in outcome.lost)
            log.warning("step %d: %d of %d probes did not come back: %s", step, len(outcome.lost),
                        len(outcome.lost) + len(outcome.answers), dict(reasons))  # fmt: skip
        return kept, counts, seen

    def gap(self, meta: Any, metrics: dict[str, Any]) -> Gap:
        """Between the replicas' log-probabilities and the actors', over a micro-batch of probes on each rank.

        Only where the probes were sampled with the weights that the actors have now.
        """
        newest = {float(self.trainer.global_steps - 1)}
        if {metrics.get("probe/version_min"), metrics.get("probe/version_max")} != newest:
            return Gap()
        if not self.scored:
            return Gap()
        actors, rollout = self.trainer.actor_rollout_wg, self.trainer.config.actor_rollout_ref.rollout
        # verl wants whole micro-batches on every rank; where there are fewer probes, some are scored twice.
        size = 1 if rollout.log_prob_use_dynamic_bsz else rollout.log_prob_micro_batch_size_per_gpu or 1
        count = size * (max(actors._dispatch_info["actor"]) + 1)
        gap = probe_gap(actors, meta, list(islice(cycle(self.scored), count)), rollout.temperature)
        gap.warn(self.settings.probe.gap)
        return gap

    def _stale(self, answer: Answer, sampled_by: tuple[int | None, int | None]) -> bool:
        """Whether any two of the weights that sampled a probe and its response are too many versions apart."""
        known = [each for each in (answer.version, answer.oldest, *sampled_by) if each is not None]
        limit = self.settings.probe.max_staleness
        return limit is not None and bool(known) and max(known) - min(known) > limit

    def _note_versions(self, rows: Rows, step: int, seen: Counter[int | None], metrics: dict[str, Any]) -> None:
        """Which weights sampled the step's responses and which its probes, into the log and the run folder."""
        known = [version for version in seen if version is not None]
        sampled_by = versions(rows.tags)
        if known:
            metrics |= {"probe/version_min": float(min(known)), "probe/version_max": float(max(known))}
        if self.trainer.records is not None:
            line = {
                "step": step,
                "rollouts": [{"group": rows.batch.rollouts.name(i), "sample": rows.batch.rollouts.sample[i],
                              "first": first, "last": last} for i, (first, last) in enumerate(sampled_by)],
                "probes": [{"version": version, "count": count} for version, count in seen.items()],
            }  # fmt: skip
            with (self.trainer.records.path / "versions.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")


def stop_ids(tokenizer: Any, model: str) -> frozenset[int]:
    """Ids that end a response: the tokenizer's, and those of the model's generation settings where it has any."""
    ids = {tokenizer.eos_token_id}
    try:
        eos = GenerationConfig.from_pretrained(model, local_files_only=True).eos_token_id
    except (OSError, ValueError):
        eos = None
    ids |= {*eos} if isinstance(eos, list) else {eos}
    return frozenset(i for i in ids if i is not None)


def _found(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def _check_cue(tokenizer: Any, method: CreditMethod) -> None:
    """Raises InputError where the tokenizer cannot encode the method's cue, before a step is spent on it."""
    if (cue := getattr(method, "cue", None)) is None:
        return
    try:
        tokenizer(cue, add_special_tokens=False)
    # Tokenizers fail in ways of their own.
    except Exception as error:
        raise InputError(
            "apportion.settings.cue", repr(cue), f"text in the tokenizer's alphabet ({error})", "set another cue"
        ) from None
