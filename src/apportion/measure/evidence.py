"""What was measured on a batch: one frozen record a kind, checked on entry.

Shapes: _K measured states, _N flat tokens, _R responses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from apportion.errors import InputError
from apportion.rollouts import Rollouts
from apportion.segments import char_to_token

# Log-probabilities above 0 are impossible; bf16 engines overshoot by about this much.
_ROUNDING = 1e-2


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
            _check_state("continuations", lengths, row, position)
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
class Belief:
    """Log-probability of the whole gold answer after a cue, at K states sorted by row and then position.

    Attributes:
        row, position: [K] int64; position 0 is the prompt.
        logprob: [K] float64, nats; the largest where several answers are accepted.
        given: [R] bool, the responses that were measured. One without entries has no gold answer.
    """

    row: Tensor
    position: Tensor
    logprob: Tensor
    given: Tensor

    @classmethod
    def from_entries(
        cls, rollouts: Rollouts, entries: Sequence[tuple[int, int, float]], given: Sequence[int]
    ) -> Belief:
        """From (row, position, logprob) entries, in any order; `given` lists the rows that were measured. A position
        may be the response's own end.

        Raises:
            InputError: a row or position that is not there, a state twice, or a log-probability that is not a
                number up to 0.
        """

        def below_zero(values: Sequence[float]) -> bool:
            return values[0] <= _ROUNDING

        table = _table("belief", rollouts, entries, below_zero, "log-probabilities up to 0")
        return cls(table[0], table[1], table[2].clamp(max=0.0), _flags(rollouts, given))


@dataclass(frozen=True)
class Confidence:
    """What forced answers said after K steps (SPAE), sorted by row and then position.

    Attributes:
        row, position: [K] int64, the state after a step, which is the position where the next one starts.
        conf: [K] float64, mean of exp(−mean token entropy) over the sampled answers.
        acc: [K] float64, mean forced probability of the gold answer's tokens.
        given: [R] bool, the responses that were measured.
    """

    row: Tensor
    position: Tensor
    conf: Tensor
    acc: Tensor
    given: Tensor

    @classmethod
    def from_entries(
        cls, rollouts: Rollouts, entries: Sequence[tuple[int, int, float, float]], given: Sequence[int]
    ) -> Confidence:
        """From (row, position, conf, acc) entries, in any order. A position may be the response's own end.

        Raises:
            InputError: a row or position that is not there, a state twice, or a value outside 0 … 1.
        """

        def shares(values: Sequence[float]) -> bool:
            return all(-_ROUNDING <= v <= 1 + _ROUNDING for v in values)

        row, position, conf, acc = _table("confidence", rollouts, entries, shares, "conf and acc from 0 to 1", width=4)
        return cls(row, position, conf.clamp(0.0, 1.0), acc.clamp(0.0, 1.0), _flags(rollouts, given))


@dataclass(frozen=True)
class StepLabels:
    """A step verifier's verdicts on K steps, sorted by row and then start.

    Attributes:
        row, start: [K] int64, the first token of each step.
        ok: [K] bool.
        given: [R] bool, the responses that were checked.
    """

    row: Tensor
    start: Tensor
    ok: Tensor
    given: Tensor

    @classmethod
    def from_entries(
        cls, rollouts: Rollouts, entries: Sequence[tuple[int, int, bool]], given: Sequence[int]
    ) -> StepLabels:
        """From (row, start, ok) entries, in any order.

        Raises:
            InputError: a row or start that is not there, or a step twice.
        """
        row, start, ok = _table("steps", rollouts, entries, lambda values: True, "true or false")
        return cls(row, start, ok.bool(), _flags(rollouts, given))

    @classmethod
    def from_verdicts(cls, rollouts: Rollouts, verdicts: Sequence[Sequence[tuple[int, bool]] | None]) -> StepLabels:
        """From (character of the response's text, ok) a step, a list a response; None where it was not judged.

        A step starts at the first token that begins there or later. Two that start in one token are one, which holds
        where both do; one that starts in no token is none.
        """
        assert rollouts.char_start is not None
        found: dict[tuple[int, int], bool] = {}
        for row, steps in enumerate(verdicts):
            a, b = rollouts.offsets[row : row + 2].tolist()
            starts = char_to_token(rollouts.char_start[a:b], [character for character, _ in steps or []]).tolist()
            for start, (_, ok) in zip(starts, steps or [], strict=True):
                if start < b - a:
                    found[row, start] = found.get((row, start), True) and ok
        given = [row for row, steps in enumerate(verdicts) if steps is not None]
        return cls.from_entries(rollouts, [(*state, ok) for state, ok in found.items()], given)


@dataclass(frozen=True)
class Importance:
    """How much each token of a response bears on its answer, or hangs on what it was shown.

    Attributes:
        value: [N] float64, at least 0; 0 where nothing was measured.
        given: [R] bool, the responses that were measured.
    """

    value: Tensor
    given: Tensor

    @classmethod
    def from_rows(cls, rollouts: Rollouts, rows: Sequence[Sequence[float] | None]) -> Importance:
        """From a list of values a response; None where it was not measured. Masked tokens' values are dropped.

        Raises:
            InputError: a list whose length is not the response's, or a value that is not a number from 0.
        """
        lengths = rollouts.length.tolist()
        if len(rows) != len(lengths):
            raise InputError("evidence.importance", f"{len(rows)} lists", f"{len(lengths)}, one a response")
        for i, (values, n) in enumerate(zip(rows, lengths, strict=True)):
            if values is not None and len(values) != n:
                raise InputError(f"evidence.importance of row {i}", f"{len(values)} values", f"{n}, one a token")
        filled = [[0.0] * n if values is None else values for values, n in zip(rows, lengths, strict=True)]
        value = torch.tensor([v for values in filled for v in values], dtype=torch.float64)
        value = torch.where(rollouts.mask, value, 0.0)
        bad = ~(torch.isfinite(value) & (value >= 0))
        if bad.any():
            at = int(bad.nonzero()[0])
            row = int(rollouts.row[at])
            raise InputError(
                f"evidence.importance of row {row}, position {int(rollouts.position[at])}", float(value[at]),
                "a finite number from 0",
            )  # fmt: skip
        return cls(value, torch.tensor([values is not None for values in rows], dtype=torch.bool))


@dataclass(frozen=True)
class Evidence:
    """Everything that was measured on a batch. A field is None where that kind was not measured at all.

    Attributes:
        answer_start: [R] int64, the position where the response's own final answer begins, its cue included: its
            length where the host did not say, −1 where it has no answer.
    """

    continuations: Continuations | None = None
    belief: Belief | None = None
    confidence: Confidence | None = None
    steps: StepLabels | None = None
    importance: Importance | None = None
    answer_start: Tensor | None = None


def _table(
    kind: str,
    rollouts: Rollouts,
    entries: Sequence[tuple[float, ...]],
    holds: Callable[[Sequence[float]], bool],
    expected: str,
    width: int = 3,
) -> list[Tensor]:
    """The columns of entries (row, position, values …) sorted by state: two int64 and then float64.

    A position may be the response's end where what is measured is the state after its last token.
    """
    last = kind in ("belief", "confidence")
    lengths = rollouts.length.tolist()
    seen: set[tuple[float, ...]] = set()
    for row, position, *values in entries:
        _check_state(kind, lengths, int(row), int(position), last)
        where = f"evidence.{kind} of row {row}, position {position}"
        if (row, position) in seen:
            raise InputError(where, "the state twice", "each state once")
        seen.add((row, position))
        if not (all(abs(v) < float("inf") for v in values) and holds(values)):
            raise InputError(where, values if len(values) > 1 else values[0], expected)
    columns = torch.tensor(sorted(entries), dtype=torch.float64).reshape(-1, width).unbind(1)
    return [columns[0].long(), columns[1].long(), *columns[2:]]


def _check_state(kind: str, lengths: Sequence[int], row: int, position: int, last: bool = False) -> None:
    """Raises InputError for a row that is not there, or a position outside it; its end counts where `last`."""
    if not 0 <= row < len(lengths):
        raise InputError(f"evidence.{kind}", f"row {row}", f"one of {len(lengths)} rows, from 0")
    if not 0 <= position < lengths[row] + last:
        raise InputError(
            f"evidence.{kind} of row {row}", f"position {position}",
            f"a position from 0, {'up to' if last else 'below'} the response's {lengths[row]} tokens",
        )  # fmt: skip


def _flags(rollouts: Rollouts, rows: Sequence[int]) -> Tensor:
    given = torch.zeros(len(rollouts), dtype=torch.bool)
    given[list(rows)] = True
    return given
