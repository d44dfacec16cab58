"""Credit of one scored group, for hosts that hand over a group at a time and have an asynchronous pool to sample from.

Shapes: R responses of one prompt, N_i tokens of response i.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from apportion.credit.method import CreditMethod
from apportion.credit.pipeline import fresh_budget
from apportion.engines.base import Continuation, Request
from apportion.errors import InputError
from apportion.groups import Base, group_stats, live_rows
from apportion.measure.evidence import Evidence
from apportion.measure.plan import Job
from apportion.measure.probe import evidence_of
from apportion.measure.wave import Probe, requests_of
from apportion.rollouts import Rollouts
from apportion.segments.offsets import token_offsets

logger = logging.getLogger(__name__)

Sample = Callable[[Request, int], Awaitable[Continuation]]
Grade = Callable[[Any, list[int]], Awaitable[float | None]]

_SERVED = frozenset({"steps", "continuations", "entropy", "old_logprob", "ref_logprob"})


@dataclass(frozen=True)
class Response:
    """One response of the group, as the host has it.

    Attributes:
        token_ids, mask: N_i each, from the first sampled token on; the mask is False on what the policy did not sample.
        reward: None where the verifier abstained. host: the host's own advantage of the response.
        old_logprob, ref_logprob, entropy: N_i values, None where masked; None for the whole where there are none.
        single: whether the policy sampled every token behind the prompt. Only then is a prefix a state from which the
            policy alone goes on.
        origin: what the host's verifier is told beside the tokens.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    mask: Sequence[bool]
    reward: float | None
    host: float
    truncated: bool = False
    old_logprob: Sequence[float | None] | None = None
    ref_logprob: Sequence[float | None] | None = None
    entropy: Sequence[float | None] | None = None
    single: bool = True
    origin: Any = None


@dataclass
class GroupCredit:
    """A method over single groups. Probes go out at once, named by key and number, and are graded as they come.

    Used in one event loop. A group with responses of several turns or different prompts is not probed and keeps the
    host's advantages (`unmeasured_groups`): between turns the environment answers, which a pool of the policy cannot.

    Args:
        method: one that a group alone decides, with no measurement but continuations.
        sample: continuation `m` of a request, with the request's budget and the seed `key.stream(m)`.
        grade: the reward of a whole response (`origin`, kept tokens and continuation); None where it abstains.
        decode: token ids to text, special tokens kept, for methods that look for steps.
        max_new_tokens: the length limit of a response, as in the rollouts.
        run: starts the random streams. in_flight: probes under way at a time. timeout: seconds of one probe.

    Attributes:
        counts: probes, failed (an exception, no token, more tokens than the budget, too late: dropped), abstained,
            unmeasured_groups, and what the method counts.

    Raises:
        InputError: a method that needs more than a group has, or settings that a probing method lacks.
    """

    method: CreditMethod
    sample: Sample | None = None
    grade: Grade | None = None
    decode: Callable[[list[int]], str] | None = None
    max_new_tokens: int = 0
    run: str = "0"
    in_flight: int = 64
    timeout: float | None = 600.0
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        name, needs = self.method.name, self.method.needs
        if missing := sorted(needs - _SERVED):
            raise InputError("method", f"{name}, which needs {missing[0]}", f"needs among {', '.join(sorted(_SERVED))}")
        if self.method.batch_wide:
            raise InputError("method", f"{name}, which compares groups", "one that a group alone decides",
                             "see `apportion methods`: leave out settings that reach over the batch")  # fmt: skip
        if "steps" in needs and self.decode is None:
            raise InputError("decode", "none", f"token ids to text: {name} looks for steps")
        if "continuations" in needs:
            for field_, given in (("sample", self.sample), ("grade", self.grade)):
                if given is None:
                    raise InputError(field_, "none", f"a function: {name} has responses continued and graded")
            if self.max_new_tokens < 1:
                raise InputError("max_new_tokens", self.max_new_tokens, "the length limit of a response, at least 1")
        self._slots = asyncio.Semaphore(self.in_flight)

    async def advantages(
        self, responses: Sequence[Response], *, name: str, step: int, scale: float = 1.0
    ) -> list[list[float]]:
        """R lists of N_i advantages, 0 where masked. Where a token keeps the host's advantage it is that very number.

        Args:
            name: the group's, once a step. step: the optimiser's.
            scale: what the host divided r − μ by; 1 where it does not divide.

        Raises:
            InputError: what the method needs is missing from a response, or its lists differ in length.
        """
        rollouts = self._rollouts(responses, name)
        host = torch.tensor([each.host for each in responses], dtype=torch.float64)
        stats = group_stats(rollouts)
        mean = stats.mean[rollouts.group]
        base = Base(host.float(), mean, torch.full_like(host, scale), live_rows(rollouts, stats))
        token = rollouts.spread(host)
        evidence = Evidence()
        probing = "continuations" in self.method.needs
        plain = all(each.single and [*each.prompt_ids] == [*responses[0].prompt_ids] for each in responses)
        if probing and not plain:
            self.counts["unmeasured_groups"] += 1
        else:
            if probing:
                evidence = await self._measure(rollouts, base, responses, step)
            credit = self.method.assign(rollouts, evidence, base)
            self.counts.update(credit.counts)
            token = torch.where(credit.token == rollouts.spread(base.advantage), token, credit.token.double())
        flat = token.masked_fill(~rollouts.mask, 0.0)
        return [values.tolist() for values in flat.split(rollouts.length.tolist())]

    async def _measure(self, rollouts: Rollouts, base: Base, responses: Sequence[Response], step: int) -> Evidence:
        jobs = [job for job in self.method.plan(rollouts, base) if isinstance(job, Job)]
        probes = await self._wave(rollouts, jobs, responses, step, first=0)
        evidence = Evidence(evidence_of(rollouts, jobs, probes))
        if second := list(self.method.refine(rollouts, base, evidence)):
            first = max(job.samples for job in jobs)
            probes += await self._wave(rollouts, second, responses, step, first)
            evidence = Evidence(evidence_of(rollouts, [*jobs, *second], probes))
        return evidence

    async def _wave(
        self, rollouts: Rollouts, jobs: Sequence[Job], responses: Sequence[Response], step: int, first: int
    ) -> list[Probe]:
        requests = requests_of(
            rollouts, jobs, run=self.run, step=step, max_new_tokens=self.max_new_tokens, first=first,
            fresh_budget=fresh_budget(self.method),
        )  # fmt: skip
        numbered = [(request, m) for request in requests for m in range(first, first + request.samples)]
        self.counts["probes"] += len(numbered)
        found = await asyncio.gather(*(self._one(request, m, responses) for request, m in numbered))
        return [probe for probe in found if probe is not None]

    async def _one(self, request: Request, m: int, responses: Sequence[Response]) -> Probe | None:
        assert self.sample is not None and self.grade is not None
        key, prefix = request.key, request.prefix_ids
        try:
            async with self._slots, asyncio.timeout(self.timeout):
                c = await self.sample(request, m)
                if (c.key, c.m) != (key, m) or not 1 <= len(c.token_ids) <= request.budget:
                    raise ValueError(f"{len(c.token_ids)} tokens for {c.key}, m = {c.m}; budget {request.budget}")
                whole = [*prefix[len(prefix) - key.position :], *c.token_ids]
                reward = await self.grade(responses[key.sample].origin, whole)
        except Exception as error:
            # Whatever went wrong with one probe, the group's other probes and its training go on.
            self.counts["failed"] += 1
            logger.warning("probe %s, m = %d dropped: %s: %s", key, m, type(error).__name__, error)
            return None
        if reward is None or not math.isfinite(reward):
            self.counts["abstained"] += 1
            reward = None
        return Probe(key.sample, key.position, m, c.token_ids, "", reward, c.finish, False, key)

    def _rollouts(self, responses: Sequence[Response], name: str) -> Rollouts:
        def column(field_: str) -> list[Any] | None:
            values = [getattr(each, field_) for each in responses]
            return None if any(value is None for value in values) else values

        found: dict[str, Any] = {each: column(each) for each in ("old_logprob", "ref_logprob", "entropy")}
        if "steps" in self.method.needs:
            assert self.decode is not None
            spans = [token_offsets(self.decode, each.token_ids, each.prompt_ids) for each in responses]
            found |= {"char_start": [starts for starts, _ in spans], "text": tuple(text for _, text in spans)}
        return Rollouts.from_lists(
            [each.token_ids for each in responses], [name] * len(responses), [each.reward for each in responses],
            mask=[list(map(int, each.mask)) for each in responses], truncated=[each.truncated for each in responses],
            prompt_ids=(torch.tensor(list(responses[0].prompt_ids), dtype=torch.int64),), **found,
        )  # fmt: skip
