"""Every core method again, slowly: plain Python, one response and one token at a time.

Written from the published rules (methods.md) and not from the package, which it never imports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Rewards of the continuations that came back from a state, by (row, position).
Measured = Mapping[tuple[int, int], Sequence[float]]


@dataclass
class Response:
    """One response. `reward` is NaN where the verifier abstained; `starts` are positions of new steps."""

    ids: list[int]
    group: str
    reward: float
    mask: list[bool]
    entropy: list[float]
    starts: list[int]

    @property
    def scored(self) -> bool:
        return not math.isnan(self.reward) and any(self.mask)

    @property
    def trainable(self) -> int:
        return sum(self.mask)


def scored_siblings(batch: list[Response], group: str) -> list[Response]:
    return [other for other in batch if other.group == group and other.scored]


def all_equal(rewards: list[float]) -> bool:
    return max(rewards) - min(rewards) <= 1e-8 * max(1.0, abs(max(rewards)))


def live(batch: list[Response], response: Response) -> bool:
    """Whether the response has something to be compared with: laws 3 and 4."""
    rewards = [s.reward for s in scored_siblings(batch, response.group)]
    return response.scored and len(rewards) > 1 and not all_equal(rewards)


def mean_of(batch: list[Response], group: str) -> float:
    rewards = [s.reward for s in scored_siblings(batch, group)]
    return math.fsum(rewards) / len(rewards)


def deviation_of(batch: list[Response], group: str, ddof: int) -> float:
    rewards = [s.reward for s in scored_siblings(batch, group)]
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - ddof))


def on_tokens(response: Response, value: float) -> list[float]:
    return [value if m else 0.0 for m in response.mask]


def grpo(batch: list[Response], ddof: int = 1, epsilon: float = 1e-4) -> list[list[float]]:
    out = []
    for y in batch:
        a = 0.0
        if live(batch, y):
            a = (y.reward - mean_of(batch, y.group)) / (deviation_of(batch, y.group, ddof) + epsilon)
        out.append(on_tokens(y, a))
    return out


def dr_grpo(batch: list[Response]) -> list[list[float]]:
    return [on_tokens(y, y.reward - mean_of(batch, y.group) if live(batch, y) else 0.0) for y in batch]


def rloo(batch: list[Response]) -> list[list[float]]:
    """The reward minus the mean of the others, as the name says."""
    out = []
    for y in batch:
        a = 0.0
        if live(batch, y):
            others = [s.reward for s in scored_siblings(batch, y.group) if s is not y]
            a = y.reward - math.fsum(others) / len(others)
        out.append(on_tokens(y, a))
    return out


def opo(batch: list[Response]) -> list[list[float]]:
    out = []
    for y in batch:
        a = 0.0
        if live(batch, y):
            siblings = scored_siblings(batch, y.group)
            weighted = math.fsum(s.trainable * s.reward for s in siblings)
            a = y.reward - weighted / sum(s.trainable for s in siblings)
        out.append(on_tokens(y, a))
    return out


def compared(batch: list[Response], response: Response) -> bool:
    """Scored, and not alone in its group."""
    return response.scored and len(scored_siblings(batch, response.group)) > 1


def whitened(
    batch: list[Response], values: list[list[float]], ddof: int, epsilon: float, among: int = 1
) -> list[list[float]]:
    """Values of the trainable tokens of responses in groups of `among` scored members or more, standardised over the
    batch; 0 on all others."""
    use = [y.scored and len(scored_siblings(batch, y.group)) >= among for y in batch]
    used = [v for u, y, row in zip(use, batch, values, strict=True) if u for v, m in zip(row, y.mask, strict=True) if m]
    mean, scale = 0.0, 1.0
    if len(used) > 1:
        mean = math.fsum(used) / len(used)
        scale = math.sqrt(math.fsum((v - mean) ** 2 for v in used) / (len(used) - ddof)) + epsilon
    flat = len(used) > 1 and all_equal(used)
    return [
        [(v - mean) / scale if m and u and not flat else 0.0 for v, m in zip(row, y.mask, strict=True)]
        for u, y, row in zip(use, batch, values, strict=True)
    ]


def reinforce_pp(batch: list[Response], gamma: float, ddof: int = 1, epsilon: float = 1e-8) -> list[list[float]]:
    """The return is discounted backwards from the last trainable token."""
    returns = []
    for y in batch:
        row, running = [0.0] * len(y.ids), y.reward if y.scored else 0.0
        for t in reversed(range(len(y.ids))):
            if y.mask[t]:
                row[t] = running
                running *= gamma
        returns.append(row)
    return whitened(batch, returns, ddof, epsilon)


def reinforce_pp_baseline(batch: list[Response], ddof: int = 1, epsilon: float = 1e-8) -> list[list[float]]:
    out = whitened(batch, dr_grpo(batch), ddof, epsilon)
    return [row if live(batch, y) else [0.0] * len(row) for y, row in zip(batch, out, strict=True)]


def vineppo(batch: list[Response], measured: Measured) -> list[list[float]]:
    """V(next) − V(here) on the tokens of each step; the last ends at the reward."""
    out = []
    for i, y in enumerate(batch):
        row = [0.0] * len(y.ids)
        cuts = sorted(p for (r, p), rewards in measured.items() if r == i and rewards) if y.scored else []
        for k, cut in enumerate(cuts):
            here = value(measured[i, cut])
            last = k + 1 == len(cuts)
            then = y.reward if last else value(measured[i, cuts[k + 1]])
            for t in range(cut, len(y.ids) if last else cuts[k + 1]):
                row[t] = then - here if y.mask[t] else 0.0
        out.append(row)
    return out


def value(rewards: Sequence[float]) -> float:
    return math.fsum(rewards) / len(rewards)


def probepo_plan(
    batch: list[Response], budget: int, samples: int, window: int, shortlist: float, min_gap: int
) -> list[set[tuple[int, int]]]:
    """The states to measure, each as the set of (row, position) that share it."""
    chosen = []
    for group in dict.fromkeys(y.group for y in batch):
        pool = []
        for i, y in enumerate(batch):
            if y.group != group or not live(batch, y):
                continue
            starts: list[int] = []
            for p in sorted(set(y.starts)):
                if p > 0 and (not starts or p - starts[-1] >= min_gap):
                    starts.append(p)
            scores = []
            for p in starts:
                seen = [y.entropy[t] for t in range(p, min(p + window, len(y.ids))) if y.mask[t]]
                if p + window <= len(y.ids) and seen:
                    scores.append((-max(seen), i, p))
            # The smallest whole number that is at least the share, and at least one.
            keep = next(n for n in range(1, len(y.ids) + 2) if n >= shortlist * len(scores) - 1e-9)
            pool += sorted(scores)[:keep]
        states: dict[tuple[int, ...], set[tuple[int, int]]] = {}
        for _, i, p in sorted(pool):
            states.setdefault(tuple(batch[i].ids[:p]), set()).add((i, p))
        chosen += list(states.values())[: budget // samples]
    return chosen


def probepo(
    batch: list[Response],
    measured: Measured,
    alpha: float,
    n0: float,
    ddof: int = 1,
    epsilon: float = 1e-4,
) -> list[list[float]]:
    out = []
    for i, (y, base) in enumerate(zip(batch, grpo(batch, ddof, epsilon), strict=True)):
        if not live(batch, y):
            out.append([0.0] * len(y.ids))
            continue
        mu, sigma = mean_of(batch, y.group), deviation_of(batch, y.group, ddof) + epsilon
        taus, values = [0], [mu]
        for (r, p), rewards in sorted(measured.items()):
            if r == i and p > 0 and rewards:
                m = len(rewards)
                taus.append(p)
                values.append((m * value(rewards) + n0 * mu) / (m + n0))
        taus.append(len(y.ids))
        values.append(y.reward)
        d = [0.0] * len(y.ids)
        for k in range(1, len(taus)):
            for t in range(taus[k - 1], taus[k]):
                d[t] = (values[k] - values[k - 1]) / sigma
        centre = math.fsum(v for v, m in zip(d, y.mask, strict=True) if m) / y.trainable
        out.append([a + alpha * (v - centre) if m else 0.0 for a, v, m in zip(base, d, y.mask, strict=True)])
    return out


def neyman(p: list[float], weight: list[float]) -> list[float]:
    roots = [math.sqrt(w * q * (1 - q)) for q, w in zip(p, weight, strict=True)]
    return [root / sum(roots) if sum(roots) else 1 / len(roots) for root in roots]


def reach(length: int, cuts: list[int], k: int, sigma: float) -> float:
    """(len_k + len_{k+1})/(T σ²): the tokens on both sides of the k-th of a response's cuts."""
    edges = [0, *cuts, length]
    return ((edges[k + 1] - edges[k]) + (edges[k + 2] - edges[k + 1])) / (length * sigma**2)
