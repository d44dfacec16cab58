"""Rollouts and their probes from one decoding loop [ours].

TRL generates a whole batch before anything can be measured in it. Here our own engine samples the rollouts: a group
whose last rollout has ended is graded and planned while the others are still decoded, and its probes join their batch.
They start from the rollouts' own keys and values, and entropies are read as tokens are drawn, so no pass over the batch
and no prefill is made for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from apportion.credit.pipeline import fresh_budget
from apportion.engines.base import Continuation, Cost, Key, Request, Rollout
from apportion.engines.rng import frozen_rng
from apportion.engines.stream import Stream
from apportion.engines.transformers import TransformersEngine
from apportion.errors import InputError
from apportion.measure.ahead import ahead
from apportion.measure.batch import base_of
from apportion.measure.evidence import Evidence
from apportion.measure.plan import Job
from apportion.measure.probe import GRADED_AT_ONCE, evidence_of
from apportion.measure.wave import Probe, Wave
from apportion.train.grading import Logs, grade, rewards_of
from apportion.train.host import read_text, response_of, rollouts_of, trl_base, truncated
from apportion.train.probing import sampling_of

if TYPE_CHECKING:
    from apportion.train.trainer import CreditTrainer


@dataclass(frozen=True)
class Streamed:
    """What came of a batch, in the order of its rows.

    Attributes:
        rollouts: the responses. rewards: (R, F), NaN where a function abstained.
        texts: what `read_text` found in each. logs: of the reward functions, a group each.
        jobs, probes, requests: of all groups, in rows of the batch.
    """

    rollouts: list[Rollout]
    rewards: Tensor
    texts: list[tuple[list[int], str] | None]
    logs: list[Logs]
    jobs: list[Job]
    probes: list[Probe]
    requests: list[Request]

    @property
    def read(self) -> tuple[Tensor, Tensor]:
        """(R, T) log-probabilities and entropies, 0 behind a response's end."""
        width = max(len(rollout.token_ids) for rollout in self.rollouts)
        logprob, entropy = torch.zeros((2, len(self.rollouts), width))
        for i, rollout in enumerate(self.rollouts):
            logprob[i, : len(rollout.logprobs)] = torch.tensor(rollout.logprobs)
            entropy[i, : len(rollout.entropies)] = torch.tensor(rollout.entropies)
        return logprob, entropy


class GroupStream:
    """Samples, grades and probes the batches of a trainer in one process. The method plans one group at a time.

    Reward functions are called with one group's rollouts, in the order in which groups end.

    Attributes:
        cost: what the rollouts were of the engine's cost; their tokens are not in it.

    Raises:
        InputError: a model with layers that do not keep every key of a response.
    """

    def __init__(self, trainer: CreditTrainer, engine: TransformersEngine) -> None:
        self.trainer, self.engine = trainer, engine
        if not self.fits([[]]):
            raise InputError(
                "stream", f"True with {type(engine.model).__name__}",
                f"False: not every layer keeps every key of {trainer.max_completion_length} tokens, or no cache does",
                "leave it out",
            )  # fmt: skip
        self.sampling = sampling_of(trainer)
        self.cost = Cost()

    def fits(self, prompts: Sequence[Sequence[int]]) -> bool:
        """Whether the engine can keep responses to these prompts; TRL samples those that it cannot."""
        return self.engine.streams(self._longest(prompts))

    def _longest(self, prompts: Sequence[Sequence[int]]) -> int:
        fresh = fresh_budget(self.trainer.credit_method)
        return max(map(len, prompts)) + self.trainer.max_completion_length + fresh

    def sample(self, rows: Sequence[dict[str, Any]], prompts: Sequence[list[int]], step: int, first: int) -> Streamed:
        """A rollout for each row, of which every `num_generations` have the same prompt, and the method's probes.

        Args:
            first: number of the batch's first prompt among those of this optimiser step.
        """
        size, limit = self.trainer.num_generations, self.trainer.max_completion_length
        budget = max(limit, fresh_budget(self.trainer.credit_method))
        stream = self.engine.stream(self.sampling, self._longest(prompts), budget)
        groups = {
            str(first + at // size): _Group(self.trainer, rows[at : at + size], prompts[at], step, first + at // size)
            for at in range(0, len(prompts), size)
        }
        stream.add([group.request for group in groups.values()], rollouts=True)
        self._decode(stream, groups, len(prompts))
        self.cost += stream.cost
        return _together(list(groups.values()), size)

    def _decode(self, stream: Stream, groups: dict[str, _Group], rollouts: int) -> None:
        """Decodes in a thread of its own; what ends is graded and planned for here."""
        with ExitStack() as phases, closing(ahead(self.engine.read(stream), 1, stream.stop)) as results:
            for (result,) in results:
                rollouts -= isinstance(result, Rollout)
                follows = groups[result.key.prompt].take(result)
                if follows is not None:
                    stream.answer(result.key.prompt, follows)
                if rollouts == 0:
                    # What is decoded from here on is probes alone.
                    phases.enter_context(self.trainer.clock.phase("probe"))
                    rollouts = -1


class _Group:
    """The rollouts of one prompt, and then its probes, wave by wave."""

    def __init__(
        self, trainer: CreditTrainer, rows: Sequence[dict[str, Any]], prompt: list[int], step: int, number: int
    ) -> None:
        self.trainer, self.rows, self.prompt, self.step, self.number = trainer, rows, prompt, step, number
        self.size = len(rows)
        self.run = str(trainer.args.seed)
        key = Key(f"{self.run}/rollout", step, str(number), 0, 0)
        self.request = Request(key, tuple(prompt), self.size, trainer.max_completion_length)
        self.rollouts: dict[int, Rollout] = {}
        self.jobs: list[Job] = []
        self.probes: list[Probe] = []
        self.requests: list[Request] = []
        self._found: list[Continuation] = []
        self._waves, self._left = 0, 0

    def take(self, result: Continuation) -> list[Request] | None:
        """Takes in a rollout or a continuation; after the last one that was asked for, what is asked next."""
        if isinstance(result, Rollout):
            self.rollouts[result.m] = result
            return self._planned() if len(self.rollouts) == self.size else None
        self._found.append(result)
        self._left -= 1
        if self._left == 0 or len(self._found) == GRADED_AT_ONCE:
            self._wave.keep(self._found, self._grade)
            self._found = []
        return self._more() if self._left == 0 else None

    def _planned(self) -> list[Request]:
        trainer = self.trainer
        responses = [self.rollouts[m] for m in range(self.size)]
        ids = [list(rollout.token_ids) for rollout in responses]
        with trainer.clock.phase("grade"):
            self.rewards, self.logs = rewards_of(trainer, self.rows, [self.prompt] * self.size, ids)
        reward, mean, scale, advantage = trl_base(
            self.rewards, trainer.reward_weights, self.size, trainer.args.scale_rewards
        )
        self.texts = [read_text(trainer, self.prompt, each) for each in ids]
        found = []
        for row, each, read, rollout in zip(self.rows, ids, self.texts, responses, strict=True):
            trained = not (trainer.mask_truncated_completions and truncated(trainer, each))
            stats = {"old_logprob": torch.tensor(rollout.logprobs), "entropy": torch.tensor(rollout.entropies)}
            found.append(response_of(trainer, row, self.prompt, each, torch.full((len(each),), trained), read, stats))
        self.batch = rollouts_of(found, reward.double().cpu(), self.size, self.number)
        self.base = base_of(self.batch, mean, scale, advantage)
        with frozen_rng():
            return self._asked(trainer.credit_method.plan(self.batch, self.base), first=0)

    def _asked(self, jobs: Sequence[Any], first: int) -> list[Request]:
        trainer = self.trainer
        self._waves += 1
        self._wave = Wave(
            self.batch, jobs, trainer.decode, run=self.run, step=self.step, first=first,
            max_new_tokens=trainer.max_completion_length, fresh_budget=fresh_budget(trainer.credit_method),
        )  # fmt: skip
        self.jobs += jobs
        asked = [request for request in self._wave.requests.values() if request.samples]
        self.requests += asked
        self._left = sum(request.samples for request in asked)
        return asked or self._more()

    def _more(self) -> list[Request]:
        """The method's second wave after its first; nothing after that."""
        self.probes += self._wave.probes
        if self._waves > 1:
            return []
        evidence = Evidence(evidence_of(self.batch, self.jobs, self.probes))
        with frozen_rng():
            more = self.trainer.credit_method.refine(self.batch, self.base, evidence)
        return self._asked(more, max(job.samples for job in self.jobs)) if more else []

    def _grade(self, rows: list[int], responses: list[list[int]], texts: list[str]) -> list[float | None]:
        with self.trainer.clock.phase("grade"), frozen_rng():
            return grade(self.trainer, [self.rows[i] for i in rows], [self.prompt] * len(rows), responses)


def _together(groups: Sequence[_Group], size: int) -> Streamed:
    """The groups side by side, their rows numbered through."""

    def moved(job: Job, by: int) -> Job:
        return replace(job, row=job.row + by, pivots=tuple((row + by, position) for row, position in job.pivots))

    return Streamed(
        rollouts=[group.rollouts[m] for group in groups for m in range(size)],
        rewards=torch.cat([group.rewards for group in groups]),
        texts=[read for group in groups for read in group.texts],
        logs=[group.logs for group in groups],
        jobs=[moved(job, at * size) for at, group in enumerate(groups) for job in group.jobs],
        probes=[replace(p, row=p.row + at * size) for at, group in enumerate(groups) for p in group.probes],
        requests=[request for group in groups for request in group.requests],
    )
