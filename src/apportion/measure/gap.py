"""How far an engine's log-probabilities lie from the trainer's, on every prefix that is probed.

Shapes: _T tokens of a response before its last probed position.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from apportion.engines.base import Key, Reading, Request, Scoring
from apportion.errors import InputError
from apportion.rollouts import Rollouts


@dataclass(frozen=True)
class Gap:
    """|ln p of the engine − ln p of the trainer| over trainable tokens, in nats.

    Attributes:
        largest: over the tokens. total: their sum. tokens: how many there were.
    """

    largest: float = 0.0
    total: float = 0.0
    tokens: int = 0

    @property
    def mean(self) -> float:
        """0 where there were no tokens."""
        return self.total / max(self.tokens, 1)

    def __add__(self, other: Gap) -> Gap:
        return Gap(max(self.largest, other.largest), self.total + other.total, self.tokens + other.tokens)

    def warn(self, limit: float) -> None:
        """Warns where the mean is above `limit` nats [ours]: single tokens are far apart in bfloat16 anyway."""
        if not self.mean <= limit:
            warnings.warn(
                f"the probing engine's log-probabilities are {self.mean:.3g} nats from the trainer's on average "
                f"(at most {self.largest:.3g}, {self.tokens} tokens): above {limit:g}, probes may come from another "
                "policy than the one that is trained",
                stacklevel=2,
            )


def prefixes_of(requests: Iterable[Request]) -> list[Scoring]:
    """The longest prefix of each response that is probed: it opens with the others, so each of their tokens is in it.

    Those without a token of a response are left out.
    """
    longest: dict[tuple[str, int, str, int], Request] = {}
    for request in requests:
        key = request.key
        response = (key.run, key.step, key.prompt, key.sample)
        if response not in longest or longest[response].key.position < key.position:
            longest[response] = request
    return [
        Scoring(r.key, r.prefix_ids, len(r.prefix_ids) - r.key.position) for r in longest.values() if r.key.position
    ]


def gap_of(rollouts: Rollouts, engine: Iterable[Reading], trainer: Iterable[Reading] | None = None) -> Gap:
    """The gap between two readings of `prefixes_of`, matched by key.

    Args:
        engine: log-probabilities, [T] each. trainer: the same from the trainer; left out, they are the
            rollouts' `old_logprob`, which compare with an engine's at their temperature.

    Raises:
        InputError: no `old_logprob` where `trainer` is left out; a key that is none of the rollouts' or that one
            side lacks; a number of values that is not the prefix's.
    """
    rows = {(rollouts.name(row), rollouts.sample[row]): row for row in range(len(rollouts))}
    theirs = None if trainer is None else {reading.key: reading.values for reading in trainer}
    if theirs is None and rollouts.old_logprob is None:
        raise InputError("old_logprob", "none", "the trainer's log-probabilities, to compare with")
    gap, seen = Gap(), set[Key]()
    for reading in engine:
        key = reading.key
        row = rows.get((key.prompt, key.sample), -1)
        if row < 0 or not 0 < key.position <= int(rollouts.length[row]):
            raise InputError("gap", f"a reading of {key}", "one of a prefix of the rollouts")
        kept = slice(int(rollouts.offsets[row]), int(rollouts.offsets[row]) + key.position)
        if theirs is None:
            assert rollouts.old_logprob is not None
            other = rollouts.old_logprob[kept].double()
        elif key in theirs:
            other = theirs[key].double()
        else:
            raise InputError("gap", f"no reading of {key} by the trainer", "one of each prefix")
        if len(reading.values) != key.position or len(other) != key.position:
            got = f"{len(reading.values)} and {len(other)} values"
            raise InputError(f"gap of {key}", got, f"{key.position}, one a token of the prefix")
        seen.add(key)
        apart = (reading.values.double() - other).abs()[rollouts.mask[kept]]
        if len(apart):
            gap += Gap(float(apart.max()), float(apart.sum()), len(apart))
    if theirs is not None and theirs.keys() - seen:
        raise InputError("gap", f"no reading of {next(iter(theirs.keys() - seen))} by the engine", "one of each prefix")
    return gap
