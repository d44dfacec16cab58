"""Planned jobs become requests, and what comes back for them becomes graded probes.

Engine-agnostic: everything is matched by key and number, never by order. Shapes: none, these are records.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from apportion.engines.base import Continuation, Finish, Key, Request
from apportion.errors import InputError
from apportion.measure.plan import Job
from apportion.rollouts import Rollouts

# Rows of the batch, full responses as token ids, the same decoded; None where the verifier abstains.
Grade = Callable[[list[int], list[list[int]], list[str]], Sequence[float | None]]
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Probe:
    """One graded continuation of the state before token `position` of response `row`.

    Attributes:
        m: its number among that state's continuations.
        token_ids: the new tokens, stop token included.
        text: the full response as graded: kept tokens and continuation, decoded in one go.
        reward: None where the verifier abstained.
        finish: "length" where the budget ran out before a stop token, "decided" where the verdict was (see `Decided`).
        rescued: the answer cue was appended (see `Rescue`).
    """

    row: int
    position: int
    m: int
    token_ids: tuple[int, ...]
    text: str
    reward: float | None
    finish: Finish
    rescued: bool
    key: Key


def requests_of(
    rollouts: Rollouts,
    jobs: Sequence[Job],
    *,
    run: str,
    step: int,
    max_new_tokens: int,
    first: int = 0,
    fresh_budget: int = 0,
) -> list[Request]:
    """A request for each job; one whose position leaves no budget, `max_new_tokens` − position, is dropped.

    Args:
        max_new_tokens: the length limit T_max of a response, as in the rollouts.
        first: number of the first continuation. A second wave starts where the first ended (at the largest
            `samples` of its jobs), so that no random stream is used twice.
        fresh_budget: tokens that every continuation may use, whatever its prefix has used; 0 for none.

    Raises:
        InputError: no `prompt_ids`, groups that share a name, a position outside its response, or two jobs
            for one state.
    """
    if rollouts.prompt_ids is None:
        raise InputError("prompt_ids", "none", "the prompt's token ids for every group: prefixes start with them")
    if rollouts.names and len(set(rollouts.names)) < len(rollouts.names):
        twice = next(name for name in rollouts.names if rollouts.names.count(name) > 1)
        raise InputError("names", f"{twice!r} twice", "one name a group", "number a prompt's occurrences")
    prompts = [ids.tolist() for ids in rollouts.prompt_ids]
    requests: dict[Key, Request] = {}
    for job, key in zip(jobs, _keys(rollouts, jobs, run, step), strict=True):
        length, start = int(rollouts.length[job.row]), int(rollouts.offsets[job.row])
        if not 0 <= job.position < length:
            raise InputError(f"job of row {job.row}", f"position {job.position}", f"0 to {length - 1}")
        if key in requests:
            raise InputError(f"job of row {job.row}", f"position {job.position} twice", "one job a state")
        kept = rollouts.token_ids[start : start + job.position].tolist()
        prefix = (*prompts[int(rollouts.group[job.row])], *kept)
        budget = fresh_budget or max_new_tokens - job.position
        requests[key] = Request(key, prefix, job.samples, budget, first)
    return [request for request in requests.values() if request.budget >= 1]


def shard(requests: Sequence[Request], rank: int, world: int) -> list[Request]:
    """The requests that one of `world` ranks answers; every rank computes the same split, some may get none.

    The most expensive request first, each goes to the least loaded rank; its cost is the new tokens it may
    take, samples × budget [ours].

    Raises:
        InputError: a rank outside 0 … world−1.
    """
    return [requests[i] for i in balanced([r.samples * r.budget for r in requests], rank, world)]


def balanced(cost: Sequence[int], rank: int, world: int) -> list[int]:
    """Which of some pieces of work one of `world` ranks does, in their order; see `shard`.

    Raises:
        InputError: a rank outside 0 … world−1.
    """
    if not 0 <= rank < world:
        raise InputError("rank", rank, f"0 to {world - 1}")
    loads = [(0, each) for each in range(world)]
    mine = []
    for i in sorted(range(len(cost)), key=lambda i: (-cost[i], i)):
        load, least = loads[0]
        heapq.heapreplace(loads, (load + cost[i], least))
        if least == rank:
            mine.append(i)
    return sorted(mine)


class Wave:
    """The requests of jobs, and the probes that come of them, whatever the order in which they come.

    Args:
        decode: token ids to text.
        rank, world: only the requests of this share (see `shard`).
        run, step, max_new_tokens, first, fresh_budget: see `requests_of`.

    Attributes:
        requests: by their key.

    Raises:
        InputError: see `requests_of` and `shard`.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        jobs: Sequence[Job],
        decode: Decode,
        *,
        run: str,
        step: int,
        max_new_tokens: int,
        first: int = 0,
        fresh_budget: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        asked = requests_of(
            rollouts, jobs, run=run, step=step, max_new_tokens=max_new_tokens, first=first, fresh_budget=fresh_budget
        )
        self.requests = {request.key: request for request in shard(asked, rank, world)}
        self._row = dict(zip(_keys(rollouts, jobs, run, step), (job.row for job in jobs), strict=True))
        self._decode = decode
        self._probes: dict[tuple[Key, int], Probe] = {}

    def response(self, c: Continuation) -> list[int]:
        """The whole response: what its state kept, and the continuation."""
        prefix = self.requests[c.key].prefix_ids
        return [*prefix[len(prefix) - c.key.position :], *c.token_ids]

    def text(self, c: Continuation) -> str:
        """The whole response, decoded."""
        return self._decode(self.response(c))

    def keep(self, found: Sequence[Continuation], grade: Grade) -> None:
        """Grades continuations; nothing is graded where there are none.

        Raises:
            InputError: a number of grades that is not that of the responses.
        """
        rows, responses = [self._row[c.key] for c in found], [self.response(c) for c in found]
        texts = [self._decode(ids) for ids in responses]
        rewards = grade(rows, responses, texts) if found else []
        if len(rewards) != len(found):
            raise InputError("grade", f"{len(rewards)} rewards", f"{len(found)}, one a response, None to abstain")
        for i, c, text, reward in zip(rows, found, texts, rewards, strict=True):
            known = None if reward is None or reward != reward else float(reward)
            self._probes[c.key, c.m] = Probe(
                i, c.key.position, c.m, c.token_ids, text, known, c.finish, c.rescued, c.key
            )  # fmt: skip

    @property
    def probes(self) -> list[Probe]:
        """In the order of the jobs and of m; what was lost is missing."""
        asked = ((r.key, m) for r in self.requests.values() for m in range(r.first, r.first + r.samples))
        return [self._probes[pair] for pair in asked if pair in self._probes]


def _keys(rollouts: Rollouts, jobs: Sequence[Job], run: str, step: int) -> list[Key]:
    """The key of each job's state."""
    return [Key(run, step, rollouts.name(job.row), rollouts.sample[job.row], job.position) for job in jobs]
