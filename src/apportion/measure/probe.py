"""Probing on the host: planned jobs become requests, answers are graded, grades become evidence.

Engine-agnostic: everything is matched by key and number, never by order. Shapes: none, these are records.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from apportion.engines.base import Continuation, ContinuationEngine, Key, Request, Sampling
from apportion.errors import InputError
from apportion.measure.ahead import ahead
from apportion.measure.evidence import Continuations
from apportion.measure.plan import Job
from apportion.measure.wave import Decode, Grade, Probe, Wave
from apportion.rollouts import Rollouts

GRADED_AT_ONCE = 64


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


def probe(
    rollouts: Rollouts,
    jobs: Sequence[Job],
    engine: ContinuationEngine,
    sampling: Sampling,
    grade: Grade,
    decode: Decode,
    *,
    rescue: Rescue | None = None,
    **which: Any,
) -> list[Probe]:
    """Has this rank's share of the jobs continued and graded, the first of them while the rest are decoded.

    Args:
        sampling: that of the rollouts.
        grade: the rollouts' verifier, called in this thread with up to 64 full responses at a time, as they come.
            Not called where there is nothing to grade.
        decode: token ids to text.
        which: run, step, max_new_tokens and the other settings of a `Wave`.

    Returns:
        Probes in the order of the jobs and of m, whatever the engine's order; what it lost is missing.

    Raises:
        InputError: see `Wave`; a continuation that was not asked for or does not keep to its budget; a number of
            grades that is not that of the responses.
    """
    wave = Wave(rollouts, jobs, decode, **which)
    requests = wave.requests

    def cut(c: Continuation) -> bool:
        """Whether the budget ended it without an answer, and an answer can be asked for."""
        if rescue is None or c.finish != "length" or requests[c.key].budget <= rescue.tokens:
            return False
        return not rescue.has_answer(wave.text(c))

    first_wave = list(requests.values())
    if rescue is not None:
        first_wave = [_reserved(request, rescue) for request in first_wave]
    unanswered: dict[tuple[Key, int], Continuation] = {}
    with closing(ahead(_checked(engine, first_wave, sampling), GRADED_AT_ONCE)) as sampled:
        for found in sampled:
            unanswered |= {(c.key, c.m): c for c in found if cut(c)}
            wave.keep([c for c in found if (c.key, c.m) not in unanswered], grade)
    if rescue is not None and unanswered:
        greedy = replace(sampling, top_k=1, top_p=1.0, min_p=0.0)
        cued = {(c.key, c.m): (*c.token_ids, *rescue.cue_ids) for c in unanswered.values()}
        answers = [
            Request(key, requests[key].prefix_ids + ids, 1, rescue.tokens - len(rescue.cue_ids), m)
            for (key, m), ids in cued.items()
        ]
        with closing(ahead(_checked(engine, answers, greedy), GRADED_AT_ONCE)) as rescued:
            for found in rescued:
                whole = [replace(c, token_ids=cued[c.key, c.m] + c.token_ids, rescued=True) for c in found]
                wave.keep(whole, grade)
                for c in whole:
                    del unanswered[c.key, c.m]
        wave.keep(list(unanswered.values()), grade)
    return wave.probes


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
