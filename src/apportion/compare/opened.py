"""The model that answers what a record lacks, with the run's own reward, sampling and data, opened for one step.

Shapes: _R responses, _T tokens of a response.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from apportion.compare.recorded import Step
from apportion.compare.source import Source, Weights
from apportion.diagnose.model import Bench, open_bench
from apportion.engines.base import Cost, Key, Reading, Scoring
from apportion.engines.logprobs import logprobs, scored
from apportion.engines.scoring import Scorer
from apportion.engines.transformers import TransformersEngine
from apportion.measure.batch import Batch
from apportion.measure.gap import Gap, gap_of
from apportion.measure.plan import AnyJob, Job
from apportion.measure.probe import Rescue, probe
from apportion.measure.readings import Asker, At, read
from apportion.measure.wave import Probe
from apportion.rollouts import Rollouts
from apportion.train.grading import completions_of
from apportion.train.models import load_model, model_folder
from apportion.train.prepare import trainer_args

AT_ONCE = 16
"""Responses that are read between two reports of progress."""

Tick = Callable[[int], None]


class Opened:
    """A model with everything that measuring takes, loaded when it is asked for the first time.

    Args:
        source: of the responses. weights: of the model.

    Attributes:
        tick: called with the continuations or responses that have been answered since it was called last.
    """

    def __init__(self, source: Source, weights: Weights, step: Step) -> None:
        self.source, self.weights, self.step = source, weights, step
        self.tick: Tick = lambda done: None
        self._seed = f"{source.config.run.seed}/compare"

    @cached_property
    def _args(self) -> Any:
        return trainer_args(self.source.config)

    @cached_property
    def _bench(self) -> Bench:
        return open_bench(self.source.config, str(self.weights.folder), 0, lambda generated: None)

    @cached_property
    def _engine(self) -> TransformersEngine:
        """As the trainer's own, which may end a continuation where its verdict is decided."""
        stop = None if self._args.probe_stop is None else re.compile(self._args.probe_stop)
        decided = None if stop is None else lambda ids: stop.search(self.decode(ids)) is not None
        model = cast(TransformersEngine, self._bench.engine).model
        pad_id = self.source.tokenizer.pad_token_id
        return TransformersEngine(model, pad_id, max_batch=self._args.probe_rows, decided=decided)

    @cached_property
    def _scorer(self) -> Scorer:
        return Scorer(self._engine.model, self._engine.pad_id, temperature=self._bench.sampling.temperature)

    @cached_property
    def _rescue(self) -> Rescue | None:
        if self._args.rescue_cue is None:
            return None
        answer, cue = re.compile(self._args.rescue_answer), tuple(self.source.ids(self._args.rescue_cue))
        return Rescue(cue, lambda text: answer.search(text) is not None, self._args.rescue_tokens)

    @cached_property
    def _host(self) -> Any:
        """What the trainer's own code reads of a trainer to hand responses to a reward."""
        return SimpleNamespace(_tokenizer=self.source.tokenizer, processing_class=self.source.tokenizer, tools=None)

    def batch(self, rollouts: Rollouts) -> Batch:
        """The step as the trainer's measuring reads it."""
        prompts = list(self.step.recorded.prompts)
        return Batch(rollouts, self.step.base, list(self.source.rows), prompts)

    @property
    def cost(self) -> Cost:
        """What was spent so far, padding counted."""
        if "_engine" not in vars(self):
            return Cost()
        return self._engine.cost + self._scorer.cost

    def statistics(self, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """[N] float32 log-probabilities and entropies of the recorded tokens under this model."""
        logprob, entropy = (torch.zeros(len(rollouts.token_ids)) for _ in range(2))
        offsets = rollouts.offsets.tolist()
        for i, logprob_T, entropy_T in scored(self._scorer, [(s.ids, s.prompt) for s in self._responses(rollouts)]):
            logprob[offsets[i] : offsets[i + 1]], entropy[offsets[i] : offsets[i + 1]] = logprob_T, entropy_T
        return logprob, entropy

    def gap(self, rollouts: Rollouts) -> Gap | None:
        """Between this model and the policy that wrote the responses; None where the record has no old_logprob."""
        if rollouts.old_logprob is None:
            return None
        asked = [each for each in self._responses(rollouts) if each.key.position]
        return gap_of(rollouts, list(logprobs(self._scorer, asked)))

    def reference(self, rollouts: Rollouts) -> Tensor:
        """[N] float32 log-probabilities under the model that the run started from, which is its reference."""
        model: Any = load_model(model_folder(self.source.config.model.name), self.source.config.model.dtype)
        scorer = Scorer(
            model.to(self._scorer.device), self._scorer.pad_id, temperature=self._scorer.temperature
        )  # fmt: skip
        found, responses = torch.zeros(len(rollouts.token_ids)), self._responses(rollouts)
        starts = dict(zip((each.key for each in responses), rollouts.offsets[:-1].tolist(), strict=True))
        for reading in logprobs(scorer, responses):
            start = starts[reading.key]
            found[start : start + len(reading.values)] = reading.values.float()
        self._scorer.cost.forwards += scorer.cost.forwards
        self._scorer.cost.forward_tokens += scorer.cost.forward_tokens
        return found

    def continued(self, rollouts: Rollouts, jobs: Sequence[Job], first: int, fresh: int) -> list[Probe]:
        """The jobs' continuations, graded by the run's reward; numbers and budgets as the trainer gives them.

        A state has the same random streams under every method, so that methods differ by their rules alone.
        """

        def grade(rows: list[int], responses: list[list[int]], texts: list[str]) -> list[float | None]:
            rewards = self._graded(rollouts, rows, responses)
            self.tick(len(rows))
            return rewards

        return probe(
            rollouts, jobs, self._engine, self._bench.sampling, grade, self.decode, rescue=self._rescue,
            run=self._seed, step=self.step.number, max_new_tokens=self._bench.limit, first=first, fresh_budget=fresh,
        )  # fmt: skip

    def readings(self, rollouts: Rollouts, jobs: Sequence[AnyJob]) -> dict[At, Reading]:
        """(kind, row) → what was read, some responses at a time."""
        found: dict[At, Reading] = {}
        batch, asker = self.batch(rollouts), Asker(self.source.tokenizer, self.decode, self._seed)
        for at in range(0, len(jobs), AT_ONCE):
            some = jobs[at : at + AT_ONCE]
            asked = asker.requests(batch, some, self.step.number)
            found |= read(asked, self._scorer, self._engine, self._bench.sampling)
            self.tick(len(some))
        return found

    def _graded(self, rollouts: Rollouts, rows: Sequence[int], responses: list[list[int]]) -> list[float | None]:
        assert rollouts.prompt_ids is not None
        asked = [self.source.rows[row] for row in rows]
        prompts = [row["prompt"] for row in asked]
        prompt_ids = [rollouts.prompt_ids[int(rollouts.group[row])].tolist() for row in rows]
        columns = {name: [row[name] for row in asked] for name in asked[0] if name != "prompt"}
        completions = completions_of(self._host, prompts, prompt_ids, responses)
        found = self.source.problems.reward(prompts=prompts, completions=completions, **columns)
        return [None if value is None or value != value else float(value) for value in found]

    def _responses(self, rollouts: Rollouts) -> list[Scoring]:
        assert rollouts.prompt_ids is not None
        prompts = [ids.tolist() for ids in rollouts.prompt_ids]
        ids, offsets = rollouts.token_ids.tolist(), rollouts.offsets.tolist()
        return [
            Scoring(
                Key(self._seed, self.step.number, rollouts.name(row), rollouts.sample[row], b - a),
                (*prompts[group], *ids[a:b]), len(prompts[group]),
            )
            for row, (group, a, b) in enumerate(
                zip(rollouts.group.tolist(), offsets[:-1], offsets[1:], strict=True)
            )
        ]  # fmt: skip

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.source.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
