"""Recorded steps made by hand, and a bench whose policy is a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from apportion.credit.record import Segments
from apportion.diagnose.model import Bench
from apportion.diagnose.reading import Recorded
from apportion.engines.base import Continuation, Request, Sampling
from apportion.rollouts import Rollouts

STOP = 0


def batch(
    group: Sequence[str], reward: Sequence[float | None], lengths: int | Sequence[int] = 4, **rest: Any
) -> Rollouts:
    """Responses of some length, all tokens alike."""
    sizes = [lengths] * len(group) if isinstance(lengths, int) else list(lengths)
    return Rollouts.from_lists([[9] * n for n in sizes], list(group), list(reward), **rest)


def prompts(rollouts: Rollouts) -> np.ndarray:
    """One prompt a group."""
    return rollouts.group.numpy()


def laid(pieces: Sequence[tuple[int, int, int, float, float, float, float, int]]) -> Segments:
    """Segments of (row, start, end, raw, shrunk, stderr, increment, samples)."""
    columns = list(zip(*pieces, strict=True))
    whole = (0, 1, 2, 7)
    return Segments(
        *(torch.tensor(c, dtype=torch.int64 if k in whole else torch.float64) for k, c in enumerate(columns))
    )


def step_of(rollouts: Rollouts, number: int = 1, settings: Mapping[str, Any] | None = None) -> Recorded:
    """The batch as a recorded step, with nothing measured on it."""
    seen: dict[int, int] = {}
    sample = []
    for group in rollouts.group.tolist():
        sample.append(seen.get(group, 0))
        seen[group] = sample[-1] + 1
    count = len(rollouts)
    empty = Segments(*(torch.zeros(0, dtype=torch.int64) for _ in range(8)))
    return Recorded(
        number, rollouts, torch.zeros(len(rollouts.token_ids), dtype=torch.float64), torch.zeros(count),
        empty, "probepo", dict(settings or {}), tuple(sample), tuple(f"p{g}" for g in rollouts.group.tolist()),
        ("gold",) * count, prompts(rollouts), [],
    )  # fmt: skip


class Table:
    """An engine that says what `policy` says: (request, m) → new token ids, cut to the budget."""

    def __init__(self, policy: Callable[[Request, int], Sequence[int]]) -> None:
        self.policy = policy
        self.asked: list[Request] = []

    def continuations(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Continuation]:
        self.asked += requests
        for request in reversed(requests):  # any order
            for m in reversed(range(request.samples)):
                ids = tuple(self.policy(request, m))[: request.budget]
                yield Continuation(request.key, m, ids, "stop" if ids[-1] == STOP else "length")


def bench(
    policy: Callable[[Request, int], Sequence[int]],
    reward: Callable[[Sequence[int]], float | None],
    limit: int = 20,
    redraw: Callable[[Sequence[int], int, Any], int] = lambda ids, original, key: 8,
) -> Bench:
    """A bench with that policy; `reward` is of a response's token ids."""

    def grade(prompts: Sequence[str], ids: Sequence[Sequence[int]], golds: Sequence[str]) -> list[float | None]:
        assert set(golds) == {"gold"} and len(prompts) == len(ids)
        return [reward(each) for each in ids]

    return Bench("table", Table(policy), redraw, grade, Sampling((STOP,)), limit)
