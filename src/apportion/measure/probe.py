"""Probing on the host: planned jobs become requests, answers are graded, grades become evidence.

Engine-agnostic: everything is matched by key and number, never by order. Shapes: none, these are records.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal

from apportion.engines.base import Continuation, ContinuationEngine, Key, Request, Sampling
from apportion.errors import InputError
from apportion.measure.ahead import ahead
from apportion.measure.evidence import Continuations
from apportion.measure.plan import Job
from apportion.rollouts import Rollouts

# Rows of the batch, full responses as token ids, the same decoded; None where the verifier abstains.
Grade = Callable[[list[int], list[list[int]], list[str]], Sequence[float | None]]
Decode = Callable[[list[int]], str]

_GRADED_AT_ONCE = 64


@dataclass(frozen=True)
class Probe:
    """One graded continuation of the state before token `position` of response `row`.

    Attributes:
        m: its number among that state's continuations.
        token_ids: the new tokens, stop token included.
        text: the full response as graded: kept tokens and continuation, decoded in one go.
        reward: None where the verifier abstained.
        finish: "length" where the budget ran out before a stop token.
        rescued: the answer cue was appended (see `Rescue`).
    """

    row: int
    position: int
    m: int
    token_ids: tuple[int, ...]
    text: str
    reward: float | None
    finish: Literal["stop", "length"]
    rescued: bool
    key: Key


@dataclass(frozen=True)
class Rescue:
    """Cutoff rescue: the paper names it (ProbePO, appendix C); this design is [ours], and off by default.

    A continuation that uses up its budget but for the last `tokens`, with no answer to grade, gets `cue_ids`
    and then greedy tokens, cue included at most `tokens`, so that no response outgrows the limit. States
    closer than that to the limit go without: all their continuations would be the same.

    Attributes:
        tokens: tokens reserved at the end of the budget.
        cue_ids: the task's answer cue.
        has_answer: whether the text of a response holds an answer that can be graded.

    Raises:
        InputError: a cue that leaves no token for the answer.
    """

    cue_ids: tuple[int, ...]
    has_answer: Callable[[str], bool]
    tokens: int = 64

    def __post_init__(self) -> None:
        if len(self.cue_ids) >= self.tokens:
            raise InputError("rescue.tokens", self.tokens, f"more than the cue's {len(self.cue_ids)} tokens")


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
    if not 0 <= rank < world:
        raise InputError("rank", rank, f"0 to {world - 1}")
    loads = [(0, each) for each in range(world)]
    mine = []
    cost = [request.samples * request.budget for request in requests]
    for i in sorted(range(len(requests)), key=lambda i: (-cost[i], i)):
        load, least = loads[0]
        heapq.heapreplace(loads, (load + cost[i], least))
        if least == rank:
            mine.append(i)
    return [requests[i] for i in sorted(mine)]


def probe(
    rollouts: Rollouts,
    jobs: Sequence[Job],
    engine: ContinuationEngine,
    sampling: Sampling,
    grade: Grade,
    decode: Decode,
    *,
    run: str,
    step: int,
    max_new_tokens: int,
    first: int = 0,
    fresh_budget: int = 0,
    rescue: Rescue | None = None,
    rank: int = 0,
    world: int = 1,
) -> list[Probe]:
    """Has this rank's share of the jobs continued and graded, the first of them while the rest are decoded.

    Args:
        sampling: that of the rollouts.
        grade: the rollouts' verifier, called in this thread with up to 64 full responses at a time, as they come.
            Not called where there is nothing to grade.
        decode: token ids to text.

    Returns:
        Probes in the order of the jobs and of m, whatever the engine's order; what it lost is missing.

    Raises:
        InputError: see `requests_of` and `shard`; a continuation that was not asked for or does not keep to
            its budget; a number of grades that is not that of the responses.
    """
    asked = requests_of(
        rollouts, jobs, run=run, step=step, max_new_tokens=max_new_tokens, first=first, fresh_budget=fresh_budget
    )
    requests = {request.key: request for request in shard(asked, rank, world)}
    row = dict(zip(_keys(rollouts, jobs, run, step), (job.row for job in jobs), strict=True))

    def response(c: Continuation) -> list[int]:
        prefix = requests[c.key].prefix_ids
        return [*prefix[len(prefix) - c.key.position :], *c.token_ids]

    probes: dict[tuple[Key, int], Probe] = {}

    def keep(found: Sequence[Continuation]) -> None:
        rows, responses = [row[c.key] for c in found], [response(c) for c in found]
        texts = [decode(ids) for ids in responses]
        rewards = grade(rows, responses, texts) if found else []
        if len(rewards) != len(found):
            raise InputError("grade", f"{len(rewards)} rewards", f"{len(found)}, one a response, None to abstain")
        for i, c, text, reward in zip(rows, found, texts, rewards, strict=True):
            known = None if reward is None or reward != reward else float(reward)
            probes[c.key, c.m] = Probe(
                i, c.key.position, c.m, c.token_ids, text, known, c.finish, c.rescued, c.key
            )  # fmt: skip

    def cut(c: Continuation) -> bool:
        """Whether the budget ended it without an answer, and an answer can be asked for."""
        if rescue is None or c.finish != "length" or requests[c.key].budget <= rescue.tokens:
            return False
        return not rescue.has_answer(decode(response(c)))

    first_wave = list(requests.values())
    if rescue is not None:
        first_wave = [_reserved(request, rescue) for request in first_wave]
    unanswered: dict[tuple[Key, int], Continuation] = {}
    with closing(ahead(_checked(engine, first_wave, sampling), _GRADED_AT_ONCE)) as sampled:
        for found in sampled:
            unanswered |= {(c.key, c.m): c for c in found if cut(c)}
            keep([c for c in found if (c.key, c.m) not in unanswered])
    if rescue is not None and unanswered:
        greedy = replace(sampling, top_k=1, top_p=1.0, min_p=0.0)
        cued = {(c.key, c.m): (*c.token_ids, *rescue.cue_ids) for c in unanswered.values()}
        answers = [
            Request(key, requests[key].prefix_ids + ids, 1, rescue.tokens - len(rescue.cue_ids), m)
            for (key, m), ids in cued.items()
        ]
        with closing(ahead(_checked(engine, answers, greedy), _GRADED_AT_ONCE)) as rescued:
            for found in rescued:
                keep([replace(c, token_ids=cued[c.key, c.m] + c.token_ids, rescued=True) for c in found])
        keep([c for pair, c in unanswered.items() if pair not in probes])
    pairs = ((request.key, m) for request in requests.values() for m in range(first, first + request.samples))
    return [probes[pair] for pair in pairs if pair in probes]


def evidence_of(rollouts: Rollouts, jobs: Iterable[Job], probes: Iterable[Probe]) -> Continuations:
    """Pools the probes of all ranks and waves over the pivots that their jobs serve.

    The order does not matter, and two probes of one key and m count once (a graded one before one that the
    verifier abstained on). A job without any reward leaves its pivots out, counted in `dropped`.

    Raises:
        InputError: a probe of a state that none of the jobs asked for, or a reward that is infinite.
    """
    pivots: dict[tuple[int, int], dict[tuple[int, int], None]] = {}
    for job in jobs:
        pivots.setdefault((job.row, job.position), {}).update(dict.fromkeys(job.pivots))
    rewards: dict[tuple[int, int], dict[tuple[Key, int], float | None]] = {state: {} for state in pivots}
    # Sorted, so that sums round the same way in whatever order the probes came.
    for p in sorted(probes, key=lambda p: (p.row, p.position, p.m, p.reward is None)):
        if (p.row, p.position) not in rewards:
            raise InputError(
                f"probe of row {p.row}", f"position {p.position}", "a state that one of the jobs asked for",
                "give the jobs of every wave whose probes are pooled",
            )  # fmt: skip
        rewards[p.row, p.position].setdefault((p.key, p.m), p.reward)
    return Continuations.from_rewards(
        rollouts,
        [(*pivot, list(rewards[state].values())) for state, served in pivots.items() for pivot in served],
    )


def _keys(rollouts: Rollouts, jobs: Sequence[Job], run: str, step: int) -> list[Key]:
    """The key of each job's state."""
    return [Key(run, step, rollouts.name(job.row), rollouts.sample[job.row], job.position) for job in jobs]


def _reserved(request: Request, rescue: Rescue) -> Request:
    left = request.budget - rescue.tokens
    return replace(request, budget=left) if left > 0 else request


def _checked(
    engine: ContinuationEngine, requests: Sequence[Request], sampling: Sampling
) -> Generator[Continuation, None, None]:
    """What the engine returns, each continuation once."""
    asked = {(r.key, m): r.budget for r in requests for m in range(r.first, r.first + r.samples)}
    seen: set[tuple[Key, int]] = set()
    for c in engine.continuations(requests, sampling) if requests else ():
        if (c.key, c.m) not in asked:
            raise InputError("continuation", f"{c.key}, m = {c.m}", "a key and number that was asked for")
        if not 1 <= len(c.token_ids) <= asked[c.key, c.m]:
            raise InputError(
                f"continuation {c.key}, m = {c.m}", f"{len(c.token_ids)} tokens", f"1 to {asked[c.key, c.m]}",
                "the engine must keep to each request's budget and return the stop token",
            )  # fmt: skip
        if (c.key, c.m) not in seen:
            seen.add((c.key, c.m))
            yield c
