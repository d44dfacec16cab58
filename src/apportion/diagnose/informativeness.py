"""Token informativeness: accuracy lost by perturbing tokens of high entropy over tokens of low entropy.

Shapes: _T tokens of a response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from apportion.diagnose.collapse import RIGHT
from apportion.diagnose.model import Bench, Prefix, in_turn, keyed
from apportion.diagnose.reading import Recorded
from apportion.diagnose.stats import Counts
from apportion.errors import InputError

SHARE = 0.2
"""Share of a response's tokens that counts as its high, or low, entropies [ours]."""


@dataclass(frozen=True)
class Pair:
    """A right response, and one position of high and one of low entropy in it."""

    recorded: Recorded
    row: int
    high: int
    low: int


@dataclass(frozen=True)
class Loss:
    """Accuracy lost by another token at the position of high, and of low, entropy of one response."""

    prompt: int
    high: float
    low: float


def pairs(recorded: Sequence[Recorded], bench: Bench) -> list[Pair]:
    """A pair for every right response with two tokens to perturb, in the order in which they are to be measured.

    One position is drawn among the fifth of highest entropies, one among the fifth of lowest, by a hash [ours]. The
    last token, stop tokens and masked ones are never perturbed. Only right responses have accuracy to lose [ours].

    Raises:
        InputError: a step without entropies.
    """
    found: list[tuple[Recorded, int, Pair]] = []
    stops = torch.tensor(bench.sampling.stop_ids, dtype=torch.int64)
    for step in recorded:
        rollouts = step.rollouts
        if rollouts.entropy is None:
            raise InputError("entropy", "none recorded", "one value a token")
        for row in (rollouts.scored & (rollouts.reward > RIGHT)).nonzero()[:, 0].tolist():
            a, b = rollouts.offsets[row], rollouts.offsets[row + 1] - 1
            usable = rollouts.mask[a:b] & ~torch.isin(rollouts.token_ids[a:b], stops)
            at = usable.nonzero()[:, 0]
            if len(at) < 2:
                continue
            # A stable sort: of equal entropies the earlier position counts as the lower one.
            rising = at[torch.argsort(rollouts.entropy[a:b][at], stable=True)].tolist()
            count = math.ceil(SHARE * len(rising))
            high = rising[-count:][keyed(bench.seed, step, row, "high") % count]
            low = rising[:count][keyed(bench.seed, step, row, "low") % count]
            found.append((step, row, Pair(step, row, high, low)))
    return in_turn(found, bench.seed)


def measure_losses(units: Sequence[Pair], bench: Bench, samples: int, budget: int) -> list[Loss]:
    """Perturbs the pairs in turn, as far as `budget` generated tokens go.

    The loss at a position is the mean reward of `samples` continuations after the token that stands there, minus
    that after another one, sampled from the policy without the token and the stop tokens [ours; the comparison is
    EP-GRPO's (arXiv 2605.04960) [note]]. A response of which a mean is missing is left out.
    """

    def most(unit: Pair) -> int:
        return 2 * samples * sum(max(0, bench.limit - position - 1) for position in (unit.high, unit.low))

    out = []
    for taken in bench.rounds(units, most, budget):
        states: list[Prefix] = []
        for unit in taken:
            for position in (unit.high, unit.low):
                before = Prefix.of(unit.recorded, unit.row, position, "swap")
                original = int(unit.recorded.rollouts.token_ids[unit.recorded.rollouts.offsets[unit.row] + position])
                other = bench.redraw(before.whole, original, bench.key(before))
                states += [before.followed([original], "kept"), before.followed([other], "swapped")]
        means = [sum(each) / len(each) if each else None for each in bench.rewards(states, samples)]
        for unit, k in zip(taken, range(0, len(means), 4), strict=True):
            high_kept, high_other, low_kept, low_other = means[k : k + 4]
            if high_kept is None or high_other is None or low_kept is None or low_other is None:
                continue
            prompt = int(unit.recorded.prompt[unit.row])
            out.append(Loss(prompt, high_kept - high_other, low_kept - low_other))
    return out


def informativeness(losses: Sequence[Loss]) -> tuple[Counts, Counts, Counts]:
    """Mean loss at high entropies minus that at low ones, and both by themselves. A unit is a response."""
    prompt = [loss.prompt for loss in losses]
    high, low = [loss.high for loss in losses], [loss.low for loss in losses]
    return (
        Counts.of([h - n for h, n in zip(high, low, strict=True)], 1.0, prompt),
        Counts.of(high, 1.0, prompt), Counts.of(low, 1.0, prompt),
    )  # fmt: skip
