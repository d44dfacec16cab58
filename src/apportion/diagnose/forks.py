"""Action-fork variance: how much it matters what the policy does next, by state, and whether H_max finds it.

Shapes: _K states, _A forks of a state, _M continuations of a fork, _R responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from apportion.credit.probepo import ProbePO, forward_max
from apportion.diagnose.model import Bench, Prefix, in_turn, keyed
from apportion.diagnose.reading import Recorded
from apportion.diagnose.stats import Counts
from apportion.errors import InputError


@dataclass(frozen=True)
class ForkSettings:
    """How fork variance is measured; every default is [ours].

    Attributes:
        forks: short continuations a state (a), at least 2. fork_tokens: the most tokens of each.
        samples: continuations a fork (m), at least 2.
        states: the most boundaries a response: the top-ranked one, and others drawn by a hash.

    Raises:
        InputError: a number below those.
    """

    forks: int = 4
    samples: int = 4
    fork_tokens: int = 8
    states: int = 4

    def __post_init__(self) -> None:
        for name, low in (("forks", 2), ("samples", 2), ("fork_tokens", 1), ("states", 1)):
            if getattr(self, name) < low:
                why = "; a variance needs two" if low == 2 else ""
                raise InputError(name, getattr(self, name), f"at least {low}{why}")


@dataclass(frozen=True)
class Boundaries:
    """The candidate boundaries of one response that are to be measured, the top-ranked one first."""

    recorded: Recorded
    row: int
    positions: tuple[int, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class ForkState:
    """A measured state: of which response, H_max in nats, action-fork variance, and whether it was top-ranked."""

    owner: tuple[int, int]
    prompt: int
    score: float
    variance: float
    top: bool


def fork_value(rewards: Sequence[float]) -> tuple[float, float]:
    """A fork's value, the mean of its m ≥ 2 rewards, and v/m, with v their sample variance (ddof 1).

    With ddof 1, v/m has the variance of that mean as its expectation.
    """
    values = np.asarray(rewards, dtype=np.float64)
    return float(values.mean()), float(values.var(ddof=1) / len(values))


def fork_variance(values: Sequence[float], errors: Sequence[float]) -> float:
    """Action-fork variance of a state [ours]: between-fork variance (ddof 1) − mean(v/m), floored at 0.

    Both terms have ddof 1, so that before the floor the expectation is the variance of the forks' true values.

    Args:
        values: of at least two forks. errors: v/m of each, 0 where a fork's value is known.

    Numbers: rewards (1, 0, 0, 0) and (1, 1, 1, 0): values .25, .75, v/m .0625 each: .125 − .0625 = .0625.
    """
    between = float(np.var(np.asarray(values, dtype=np.float64), ddof=1))
    return max(0.0, between - float(np.mean(errors)))


def boundaries(recorded: Sequence[Recorded], settings: ForkSettings, seed: int) -> list[Boundaries]:
    """The candidates of every response of a live group, in the order in which they are to be measured (`in_turn`).

    Candidates are ProbePO's before its shortlist: with the run's settings where ProbePO trained it, else its
    defaults. The boundaries beside the top-ranked one are drawn by a hash [ours].

    Raises:
        InputError: no entropies, or neither boundaries nor text to find them in.
    """
    found: list[tuple[Recorded, int, Boundaries]] = []
    for step in recorded:
        own = step.settings if step.method == ProbePO.name else {}
        kept = {name: own[name] for name in ("window", "min_gap", "markers") if name in own}
        method = ProbePO(**kept, shortlist=1.0, samples=1, budget=len(step.rollouts.token_ids) + 1)
        jobs = method.plan(step.rollouts, method.base(step.rollouts))
        by_row: dict[int, list[int]] = {}
        for row, position in (pivot for job in jobs for pivot in job.pivots):
            by_row.setdefault(row, []).append(position)
        if not by_row:
            continue
        highest = forward_max(step.rollouts, method.window)
        for row, positions in by_row.items():
            start = int(step.rollouts.offsets[row])
            score = {position: float(highest[start + position]) for position in positions}
            top = min(sorted(score), key=lambda position: -score[position])
            others = sorted(score.keys() - {top}, key=partial(_draw, seed, step, row))
            chosen = (top, *others[: settings.states - 1])
            found.append((step, row, Boundaries(step, row, chosen, tuple(score[position] for position in chosen))))
    return in_turn(found, seed)


def measure_forks(
    units: Sequence[Boundaries], bench: Bench, settings: ForkSettings, budget: int
) -> tuple[list[ForkState], int]:
    """Measures the states of the responses in turn, as far as `budget` generated tokens go.

    A fork that ends its response has a known value. One with fewer than two graded continuations is left out, and
    so is a state with fewer than two forks.

    Returns:
        the measured states, and how many were left out.
    """

    a, m, short = settings.forks, settings.samples, settings.fork_tokens

    def most(unit: Boundaries) -> int:
        rooms = [max(0, bench.limit - position) for position in unit.positions]
        return sum(a * (min(short, room) + m * max(0, room - short)) for room in rooms)

    states, lost = [], 0
    for taken in bench.rounds(units, most, budget):
        where = [(unit, k) for unit in taken for k in range(len(unit.positions))]
        for (unit, k), measured in zip(where, _fork_values(where, bench, settings), strict=True):
            if len(measured) < 2:
                lost += 1
                continue
            variance = fork_variance([value for value, _ in measured], [error for _, error in measured])
            owner, prompt = (unit.recorded.step, unit.row), int(unit.recorded.prompt[unit.row])
            states.append(ForkState(owner, prompt, unit.scores[k], variance, k == 0))
    return states, lost


def capture(states: Sequence[ForkState]) -> Counts:
    """Points of fork variance that the top-ranked boundary of a response captures over a random one [ours].

    100·Σ(V_top − mean V of the other measured boundaries) / Σ V of all of them, both sums over the responses with
    at least two measured boundaries, the top-ranked one among them. The random boundary is thus one of the response's
    other candidates, taken in expectation. A unit is a response.
    """
    by_response: dict[tuple[int, int], list[ForkState]] = {}
    for state in states:
        by_response.setdefault(state.owner, []).append(state)
    gain, total, prompt = [], [], []
    for members in by_response.values():
        top = [state.variance for state in members if state.top]
        others = [state.variance for state in members if not state.top]
        if top and others:
            gain.append(100 * (top[0] - float(np.mean(others))))
            total.append(top[0] + sum(others))
            prompt.append(members[0].prompt)
    return Counts.of(gain, total, prompt)


def _fork_values(
    where: Sequence[tuple[Boundaries, int]], bench: Bench, settings: ForkSettings
) -> list[list[tuple[float, float]]]:
    """For each state the value and v/m of each of its forks."""
    roots = [Prefix.of(unit.recorded, unit.row, unit.positions[k], "fork") for unit, k in where]
    forks: list[tuple[int, Prefix, bool]] = []
    for k, found in enumerate(bench.continued(roots, settings.forks, settings.fork_tokens)):
        for c in found:
            fork = roots[k].followed(c.token_ids, f"fork/{c.m}")
            forks.append((k, fork, c.finish == "stop" or not bench.room(fork)))
    out: list[list[tuple[float, float]]] = [[] for _ in where]
    ended, going = ([(k, fork) for k, fork, over in forks if over is side] for side in (True, False))
    for (k, _), reward in zip(ended, bench.graded([fork for _, fork in ended]), strict=True):
        if reward is not None:
            out[k].append((reward, 0.0))
    for (k, _), rewards in zip(going, bench.rewards([fork for _, fork in going], settings.samples), strict=True):
        if len(rewards) >= 2:
            out[k].append(fork_value(rewards))
    return out


def _draw(seed: int, recorded: Recorded, row: int, position: int) -> int:
    return keyed(seed, recorded, row, f"boundary {position}")
