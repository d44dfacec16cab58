"""EP-GRPO, CW-GRPO, AVSPO and step-verified credit again, slowly: plain Python, one response and one token at a time.

Written from the published rules (methods.md) and not from the package, which it never imports. What methods.md
leaves open is decided as the methods' docstrings say.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from fractions import Fraction

from reference import Response, compared, live, scored_siblings

Rows = list[list[float]]


def eighths(batch: list[Response], seed: object) -> Rows:
    """A log-probability for each token: multiples of 1/8, which float32 holds."""
    fill = random.Random(f"{seed}/{[len(y.ids) for y in batch]}")
    return [[-fill.randrange(40) / 8 for _ in y.ids] for y in batch]


def spread_of(values: Sequence[float], ddof: int = 0) -> tuple[float, float]:
    """Mean and standard deviation."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - ddof))


def trainable(batch: list[Response]) -> list[tuple[int, int]]:
    """(row, position) of every token that counts: trainable, of a response with a reward."""
    return [(i, t) for i, y in enumerate(batch) if y.scored for t in range(len(y.ids)) if y.mask[t]]


def sign(x: float) -> int:
    return 0 if abs(x) <= 1e-6 else 1 if x > 0 else -1


def bucket_of(y: Response, t: int, buckets: int) -> int:
    """b with τ in (b/K, (b+1)/K], exactly: entropies are binary fractions."""
    seen = [Fraction(h) for h, m in zip(y.entropy, y.mask, strict=True) if m]
    until = [Fraction(h) for h, m in zip(y.entropy[: t + 1], y.mask[: t + 1], strict=True) if m]
    tau = sum(until) / sum(seen) if sum(seen) else Fraction(len(until), len(seen))
    return next(b for b in range(buckets) if tau <= Fraction(b + 1, buckets))


def ep_grpo(
    batch: list[Response],
    advantage: Sequence[float],
    logprob: Rows,
    ref: Rows,
    gamma: float = 1.0,
    lambda_: float = 1.0,
    eta: float = 0.1,
    buckets: int = 10,
    reward_threshold: float = 0.5,
    mean_gate: bool = False,
) -> Rows:
    tokens = trainable(batch)
    out = [[0.0] * len(y.ids) for y in batch]
    if not tokens:
        return out
    mu, sigma = spread_of([batch[i].entropy[t] for i, t in tokens])
    gate = {
        (i, t): 1 / (1 + math.exp(-gamma * (batch[i].entropy[t] - mu) / sigma)) if sigma >= 1e-8 else 0.5
        for i, t in tokens
    }
    if mean_gate:
        average = math.fsum(gate.values()) / len(gate)
        gate = {at: w / average for at, w in gate.items()}
    progress: dict[tuple[str, int], dict[tuple[int, int], float]] = {}
    for i, t in tokens:
        y = batch[i]
        direction = sign(advantage[i]) if live(batch, y) else sign(y.reward - reward_threshold)
        signal = lambda_ * (logprob[i][t] - ref[i][t])
        progress.setdefault((y.group, bucket_of(y, t, buckets)), {})[i, t] = direction * signal
    for members in progress.values():
        mean, deviation = spread_of(list(members.values()))
        for (i, t), p in members.items():
            z = 0.0 if len(members) == 1 or deviation < 1e-8 else (p - mean) / (deviation + 1e-6)
            out[i][t] = gate[i, t] * advantage[i] + (eta * gate[i, t] * z if compared(batch, batch[i]) else 0.0)
    return out


def cw_weights(batch: list[Response], advantage: Rows, logprob: Rows, scope: str) -> Rows:
    weights = [[1.0] * len(y.ids) for y in batch]
    scopes: dict[str, list[tuple[int, int]]] = {}
    for i, t in trainable(batch):
        scopes.setdefault(batch[i].group if scope == "group" else "", []).append((i, t))
    for tokens in scopes.values():
        xs, advantages = [logprob[i][t] for i, t in tokens], [advantage[i][t] for i, t in tokens]
        x, a = spread_of(xs)[0], spread_of(advantages)[0]
        c = [(logprob[i][t] - x) * (advantage[i][t] - a) for i, t in tokens]
        _, sigma = spread_of(c)
        if sigma < 1e-12 or any(max(v) - min(v) <= 1e-8 * max(map(abs, v)) for v in (xs, advantages, c)):
            continue
        raw = [math.exp(-(v**2) / (2 * sigma**2)) for v in c]
        for (i, t), w in zip(tokens, raw, strict=True):
            weights[i][t] = w * len(raw) / math.fsum(raw)
    return weights


def times(weights: Rows, values: Rows) -> Rows:
    return [[w * v for w, v in zip(ws, vs, strict=True)] for ws, vs in zip(weights, values, strict=True)]


def collapsed(batch: list[Response], group: str) -> bool | None:
    """None for a group that is not compared: it has fewer than two rewards."""
    rewards = [s.reward for s in scored_siblings(batch, group)]
    if len(rewards) < 2:
        return None
    equal = max(rewards) - min(rewards) <= 1e-8 * max(1.0, abs(max(rewards)))
    return equal or spread_of(rewards)[1] < 1e-6


def acr(batch: list[Response]) -> float:
    compared = [c for c in (collapsed(batch, group) for group in {y.group for y in batch}) if c is not None]
    return sum(compared) / len(compared) if compared else 0.0


def virtual_rewards(highest: float, size: int, rate: float) -> list[float]:
    """The K virtual rewards of a collapsed group of `size` rewards."""
    wanted = next(n for n in range(size + 1) if n >= size * math.sqrt(rate) - 1e-9)
    count = max(1, min(size, wanted))
    if highest > 1e-6:
        return [highest * (1 - k / (count + 1)) for k in range(1, count + 1)]
    return [0.1 * (count - k + 1) / count for k in range(1, count + 1)]


def avspo(
    batch: list[Response], advantage: Sequence[float], threshold: float, ddof: int = 0, epsilon: float = 1e-8
) -> tuple[list[float], int]:
    """Each response's advantage, and how many virtual rewards were made."""
    rewards = [y.reward for y in batch if y.scored]
    low, high = min([0.0, *rewards]), max(rewards, default=0.0)
    span = 1.0 if low == 0 or high == low else high - low
    rate, made = acr(batch), 0
    out = list(advantage)
    for group in {y.group for y in batch}:
        if rate <= threshold or not collapsed(batch, group):
            continue
        real = [(s.reward - low) / span for s in scored_siblings(batch, group)]
        virtual = virtual_rewards(max(real), len(real), rate)
        made += len(virtual)
        mean, deviation = spread_of(real + virtual, ddof)
        for i, y in enumerate(batch):
            if y.group == group and y.scored:
                out[i] = ((y.reward - low) / span - mean) / (deviation + epsilon)
    return out, made


def step_verified(
    batch: list[Response],
    advantage: Sequence[float],
    mean: Sequence[float],
    steps: Mapping[int, Sequence[tuple[int, bool]]],
    placement: str = "first",
    right: float = 1.0,
    before_failure: float = -0.05,
    from_failure: float = -0.1,
    reward_threshold: float = 0.5,
) -> Rows:
    out = []
    for i, y in enumerate(batch):
        row = [advantage[i] if m else 0.0 for m in y.mask]
        found = sorted(steps.get(i, ())) if compared(batch, y) else []
        proven = all(ok for _, ok in found) and y.reward > reward_threshold
        failed = False
        for k, (start, ok) in enumerate(found):
            failed = failed or not ok
            phi = right if proven else from_failure if failed else before_failure
            end = found[k + 1][0] if k + 1 < len(found) else len(y.ids)
            inside = [t for t in range(start, end) if y.mask[t]]
            chosen = {"first": inside[:1], "last": inside[-1:], "all": inside}[placement]
            for t in chosen:
                row[t] += phi - mean[i]
        out.append(row)
    return out
