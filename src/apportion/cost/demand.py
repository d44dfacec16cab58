"""The passes of a model that a method's plan takes in apportion's engines, batched as those batch them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from apportion.cost.roofline import Call, decode, padded
from apportion.cost.shape import ModelShape
from apportion.cost.standin import Workload
from apportion.credit.method import CreditMethod
from apportion.engines.base import Key, Request
from apportion.groups import grpo_base
from apportion.measure.evidence import Continuations, Evidence
from apportion.measure.plan import AnyJob, BeliefJob, ConfidenceJob, Job, SensitivityJob
from apportion.measure.wave import requests_of
from apportion.rollouts import Rollouts

# The engines' limits, which their callers in `train` leave at their defaults.
_PREFILL, _CACHE, _TOKENS, _LOGITS = 2_048, 131_072, 16_384, 2**26
# Rows of OAR-P's batches of suffixes (see `engines.sensitivity`); logits of OAR-G's are as few.
_ROWS_SHARE, _FEW_ROWS = 8, 16
_PROMPTS = 3


@dataclass(frozen=True)
class Demand:
    """What measuring takes. `probing` is generated from the policy, `reading` is read off it."""

    probing: tuple[Call, ...] = ()
    reading: tuple[Call, ...] = ()
    generated: int = 0
    continuations: int = 0


def planned(method: CreditMethod, rollouts: Rollouts) -> list[AnyJob]:
    """All jobs of both waves; the second one's depend on rewards, which stand in too: half of them right."""
    base = grpo_base(rollouts)
    jobs = list(method.plan(rollouts, base))
    first = [job for job in jobs if isinstance(job, Job)]
    if first:
        values = [(row, at, [m % 2 for m in range(job.samples)]) for job in first for row, at in job.pivots]
        jobs += method.refine(rollouts, base, Evidence(Continuations.from_rewards(rollouts, values)))
    return jobs


def demand(
    jobs: Sequence[AnyJob],
    rollouts: Rollouts,
    work: Workload,
    shape: ModelShape,
    tokens: Callable[[str], int],
    *,
    slots: int = 256,
    fresh_budget: int = 0,
    cache: int = _CACHE,
    paged: bool = False,
) -> Demand:
    """The passes that the jobs take.

    Args:
        tokens: number of tokens of a text, for cues. slots: most continuations decoded together.
        cache: tokens that its cache holds. paged: a row reads its own tokens of the cache, not the widest row's.
    """
    continued = [job for job in jobs if isinstance(job, Job)]
    room = _Room(slots, cache, paged)
    probing, generated, count = _continued(continued, rollouts, work, room, fresh_budget)
    reading: list[Call] = []
    for kind in ("belief", "confidence", "sensitivity", "divergence"):
        own: list[Any] = [job for job in jobs if job.kind == kind]
        if kind == "belief":
            reading += _forced([_branches(job, rollouts, tokens, work.gold) for job in own], shape)
        elif kind == "confidence":
            calls, more = _answered(own, rollouts, work, tokens, room)
            reading += calls
            generated += more
            reading += _forced([_branches(job, rollouts, tokens, work.gold) for job in own], shape)
        elif kind == "sensitivity":
            by_gradient = [job for job in own if job.estimator == "gradient"]
            for call in _batches(_read(job, rollouts)[0] for job in by_gradient):
                reading += [replace(call, logits=_FEW_ROWS), replace(call, logits=_FEW_ROWS, backward=1.0)]
            reading += [call for job in own if job not in by_gradient for call in _perturbed(job, rollouts, shape)]
        elif kind == "divergence":
            rows = [_length(job, rollouts) for job in own for _ in range(_PROMPTS)]
            reading += [replace(call, logits=call.tokens) for call in _batches(rows)]
    return Demand(tuple(probing), tuple(reading), generated, count)


@dataclass(frozen=True)
class _Room:
    """Of the engine that generates: see `demand`."""

    slots: int
    cache: int
    paged: bool


def schedule(runs: Sequence[tuple[int, int]], slots: int, paged: bool = False) -> Iterator[Call]:
    """Decoding steps of runs, (tokens cached at first, steps) each, that take a slot in turn as one becomes free.

    Attention is over the widest row's tokens, or with a paged cache over each row's own.

    Two slots and steps (4, 2, 3) are 2 + 2 + 1 turns: of 2, 2 and 1 rows.
    """
    waiting = iter(runs)
    running: list[tuple[int, int, int]] = []
    now = 0
    while True:
        for cached, steps in waiting:
            if steps > 0:
                heapq.heappush(running, (now + steps, now, cached))
            if len(running) == slots:
                break
        if not running:
            return
        end = running[0][0]
        middle = (now + end) / 2
        widths = [cached + middle - start for _, start, cached in running]
        width = (sum(widths) / len(widths) if paged else max(widths)) + 0.5
        yield decode(end - now, len(running), width, "slots")
        now = end
        while running and running[0][0] == now:
            heapq.heappop(running)


def _length(job: AnyJob, rollouts: Rollouts) -> int:
    return _prompt(job, rollouts) + int(rollouts.length[job.row])


def _prompt(job: AnyJob, rollouts: Rollouts) -> int:
    assert rollouts.prompt_ids is not None
    return len(rollouts.prompt_ids[int(rollouts.group[job.row])])


def _continued(
    jobs: Sequence[Job], rollouts: Rollouts, work: Workload, room: _Room, fresh: int
) -> tuple[list[Call], int, int]:
    """Passes, tokens and number of continuations. One goes on for as long as its own response did."""
    if not jobs:
        return [], 0, 0
    waves: dict[tuple[int, int], Job] = {}
    for job in jobs:
        known = waves.get((job.row, job.position))
        waves[job.row, job.position] = job if known is None else replace(known, samples=known.samples + job.samples)
    asked = requests_of(
        rollouts, list(waves.values()), run="cost", step=0, max_new_tokens=work.limit, fresh_budget=fresh
    )
    rows = {_name(rollouts, job): job.row for job in waves.values()}
    left = {
        request.key: max(1, int(rollouts.length[rows[request.key.prompt, request.key.sample]]) - request.key.position)
        for request in asked
    }
    calls = _slots(asked, lambda request: min(left[request.key], request.budget), room)
    generated = sum(min(left[request.key], request.budget) * request.samples for request in asked)
    return calls, generated, sum(request.samples for request in asked)


def _name(rollouts: Rollouts, job: AnyJob) -> tuple[str, int]:
    return rollouts.name(job.row), rollouts.sample[job.row]


def _slots(requests: Sequence[Request], steps: Callable[[Request], int], room: _Room) -> list[Call]:
    """`TransformersEngine`: trunks prefilled together, then slots. The first token comes from the prefill."""
    from apportion.engines.slots import trunks_of

    if not requests:
        return []
    trunks = trunks_of(requests)
    calls = []
    batch: list[int] = []
    for trunk in [*trunks, None]:
        width = max([*batch, len(trunk.ids)]) if trunk else 0
        if batch and (trunk is None or (len(batch) + 1) * width > _PREFILL):
            calls.append(padded(len(batch), max(batch), masked=False, logits=float(len(batch))))
            batch = []
        if trunk:
            batch.append(len(trunk.ids))
    longest = max(len(request.prefix_ids) + request.budget for request in requests)
    runs = [
        (len(request.prefix_ids), steps(request) - 1)
        for trunk in trunks for request in trunk.requests for _ in range(request.samples)
    ]  # fmt: skip
    return calls + list(schedule(runs, max(1, min(room.slots, room.cache // longest)), room.paged))


def _batches(lengths: Iterable[int]) -> Iterator[Call]:
    """Rows of falling length, as many in a forward as `max_tokens` allows (`Scorer.batches`)."""
    ordered = sorted(lengths, reverse=True)
    while ordered:
        count = max(1, _TOKENS // ordered[0])
        yield padded(len(ordered[:count]), ordered[0], masked=False)
        ordered = ordered[count:]


@dataclass(frozen=True)
class _Branches:
    """Answers forced on one response: the trunk's tokens, branches, a branch's cue and its answers' tokens."""

    trunk: int
    count: int
    cue: int
    answers: int

    @property
    def columns(self) -> int:
        """Tokens of a row with all of them."""
        return self.trunk + self.count * (max(1, self.cue) + self.answers)


def _branches(job: BeliefJob | ConfidenceJob, rollouts: Rollouts, tokens: Callable[[str], int], gold: int) -> _Branches:
    several = 1 if isinstance(job, BeliefJob) else 1 + min(job.samples, 2)
    return _Branches(
        _prompt(job, rollouts) + max(job.positions, default=0), len(job.positions), tokens(job.cue),
        several * max(0, gold - 1),
    )  # fmt: skip


def _forced(items: Sequence[_Branches], shape: ModelShape) -> Iterator[Call]:
    """`engines.forced`: rows of a trunk and its branches; a row that no forward holds has its branches apart."""
    ordered = sorted((item for item in items if item.count), key=lambda item: -item.columns)
    vocabulary_rows = _LOGITS // shape.vocab
    while ordered:
        first = ordered[0]
        kept = first.count * (1 + first.answers)
        count = min(_TOKENS // first.columns, vocabulary_rows // kept)
        batch, ordered = ordered[: max(1, count)], ordered[max(1, count) :]
        trunk, branches = first.trunk, first.columns - first.trunk
        if count:
            rows = len(batch)
            # The trunk is causal; its branches look at all of the row.
            pairs = rows * (trunk * trunk / 2 + branches * first.columns)
            yield Call(1, rows * first.columns, pairs, logits=rows * kept)
        else:
            yield padded(1, trunk, masked=False)
            own = branches // first.count
            limit = max(1, min(_TOKENS // own, vocabulary_rows // (1 + first.answers)))
            times = -(-first.count // limit)
            tokens = branches / times
            seen = trunk + own * min(first.count, limit)
            yield Call(times, tokens, tokens * seen, cached=trunk, copied=trunk, logits=kept / times)


def _answered(
    jobs: Sequence[ConfidenceJob], rollouts: Rollouts, work: Workload, tokens: Callable[[str], int], room: _Room
) -> tuple[list[Call], int]:
    """Short answers sampled at every position: a gold answer's tokens and a stop."""
    requests = []
    for job in jobs:
        start = int(rollouts.offsets[job.row])
        prompt = rollouts.prompt_ids[int(rollouts.group[job.row])].tolist() if rollouts.prompt_ids else []
        for position in job.positions:
            kept = rollouts.token_ids[start : start + position].tolist()
            key = Key("cost", 0, str(job.row), 0, position)
            ids = (*prompt, *kept, *([10**17] * tokens(job.cue)))
            requests.append(Request(key, ids, job.samples, job.tokens))
    taken = min(work.gold + 1, max((job.tokens for job in jobs), default=1))
    return _slots(requests, lambda request: taken, room), taken * sum(request.samples for request in requests)


def _read(job: SensitivityJob, rollouts: Rollouts) -> tuple[int, int]:
    """Tokens that the answer's distribution depends on, and columns that it is read at."""
    first = _prompt(job, rollouts) + job.answer[0]
    end = first if job.representation == "last" else _prompt(job, rollouts) + job.answer[1] - 1
    return end, end - first + 1


def _perturbed(job: SensitivityJob, rollouts: Rollouts, shape: ModelShape) -> Iterator[Call]:
    """OAR-P: a forward of the row, then suffixes from each replaced token on, over the opening's cache."""
    row, kept = _read(job, rollouts)
    yield padded(1, row, masked=False, logits=float(kept))
    at = _prompt(job, rollouts)
    end = at + job.reasoning
    at_once = min(_TOKENS // row, _LOGITS // shape.vocab // kept)
    while at < end:
        count = min(max(1, min(at_once, max((row - at) // _ROWS_SHARE, _FEW_ROWS))), end - at)
        fresh = count * (row - at)
        # The opening's keys are lent to every row and joined to the row's own.
        yield Call(1, fresh, fresh * row, cached=count * row, copied=2 * count * row, logits=float(count * kept))
        at += count
