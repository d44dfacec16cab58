"""What a method asks an engine to measure, and the evidence that comes back.

Shapes: _K pivots, _J jobs (distinct prefixes), _N flat tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from apportion.errors import InputError
from apportion.rollouts import Rollouts


@dataclass(frozen=True)
class Job:
    """One prefix to continue: the tokens of response `row` before `position`, after its prompt.

    `samples` continuations are asked for; `pivots` lists every (row, position) that they serve, the job's own
    first. Several responses of a group may open with the same tokens: that state is measured once. `score`
    says why it was chosen, NaN where nothing ranked it.
    """

    row: int
    position: int
    samples: int
    pivots: tuple[tuple[int, int], ...]
    score: float = field(default=float("nan"), compare=False)


def jobs_of(rollouts: Rollouts, row: Tensor, position: Tensor, samples: int, score: Tensor) -> list[Job]:
    """Folds K pivots, in their order of preference, into jobs with distinct prefixes within each group."""
    digest = prefix_digests(rollouts, row, position)
    pivots: dict[tuple[int, bytes], list[int]] = {}
    for k, state in enumerate(zip(rollouts.group[row].tolist(), digest, strict=True)):
        pivots.setdefault(state, []).append(k)
    where, scores = list(zip(row.tolist(), position.tolist(), strict=True)), score.tolist()
    return [Job(*where[ks[0]], samples, tuple(where[k] for k in ks), scores[ks[0]]) for ks in pivots.values()]


def prefix_digests(rollouts: Rollouts, row: Tensor, position: Tensor) -> list[bytes]:
    """For each of K pivots a digest of its response's tokens before it. Linear in the tokens of each row."""
    ids = rollouts.token_ids.numpy()
    first = rollouts.offsets[:-1][row]
    out = [b""] * len(row)
    at, seen = -1, 0
    for start, end, k in sorted(zip(first.tolist(), (first + position).tolist(), range(len(row)), strict=True)):
        if start != at:
            at, seen, state = start, start, hashlib.blake2b(digest_size=16)
        state.update(ids[seen:end].tobytes())
        seen = end
        out[k] = state.digest()
    return out


@dataclass(frozen=True)
class Continuations:
    """Measured values of K states, at most one entry a (row, position), sorted by row and then position.

    Attributes:
        row, position: [K] int64.
        mean: [K] float64, mean reward of the continuations that came back with one.
        stderr: [K] float64, √(population variance / count): at most 0.5/√M for rewards in [0, 1], and 0 where
            all continuations agree, which says "no spread seen", not "no doubt".
        count: [K] int64, continuations behind the mean, at least 1.
        dropped: pivots for which no continuation came back with a reward.
    """

    row: Tensor
    position: Tensor
    mean: Tensor
    stderr: Tensor
    count: Tensor
    dropped: int = 0

    @classmethod
    def from_rewards(
        cls, rollouts: Rollouts, entries: Sequence[tuple[int, int, Sequence[float | None]]]
    ) -> Continuations:
        """Pools (row, position, rewards) entries; None rewards (abstained, lost) are left out of the mean.

        Rewards are added up in rising order: that in which they came back cannot change a bit.

        Raises:
            InputError: a row that is not there, a position outside its response, or a reward that is not
                finite.
        """
        lengths = rollouts.length.tolist()
        pooled: dict[tuple[int, int], list[float]] = {}
        for row, position, rewards in entries:
            if not 0 <= row < len(lengths):
                raise InputError("evidence.continuations", f"row {row}", f"one of {len(lengths)} rows, from 0")
            if not 0 <= position < lengths[row]:
                raise InputError(
                    f"evidence.continuations of row {row}", f"position {position}",
                    f"a position from 0, below the response's {lengths[row]} tokens",
                )  # fmt: skip
            pool = pooled.setdefault((row, position), [])
            for reward in rewards:
                if reward is None:
                    continue
                if not abs(reward) < float("inf"):
                    raise InputError(
                        f"evidence.continuations of row {row}, position {position}", reward,
                        "finite rewards, or null where the verifier abstained",
                    )  # fmt: skip
                pool.append(float(reward))
        kept = sorted((key, sorted(pool)) for key, pool in pooled.items() if pool)
        size = torch.tensor([len(pool) for _, pool in kept], dtype=torch.int64)
        flat = torch.tensor([r for _, pool in kept for r in pool], dtype=torch.float64)
        owner = torch.repeat_interleave(torch.arange(len(kept)), size)

        def mean(values: Tensor) -> Tensor:
            return torch.zeros(len(kept), dtype=torch.float64).index_add_(0, owner, values) / size

        average = mean(flat)
        variance = mean((flat - average[owner]) ** 2)
        key = torch.tensor([key for key, _ in kept], dtype=torch.int64).reshape(-1, 2)
        return cls(key[:, 0], key[:, 1], average, (variance / size).sqrt(), size, len(pooled) - len(kept))


@dataclass(frozen=True)
class Evidence:
    """Everything that was measured on a batch. A field is None where that kind was not measured at all."""

    continuations: Continuations | None = None
