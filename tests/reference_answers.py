"""OAR, PRPO, GRPO-VPS and SPAE again, slowly: plain Python, one response and one token at a time.

Written from the published rules and not from the package, which it never imports. `Text` and the `drawn_*` functions
make what these methods read, at random.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise

from reference import Response, compared, dr_grpo, grpo, whitened

WORDS = ("x", " y ", "7", "é", "\n\n", "\nStep 2: ", "1. ", "\\boxed{7}", "\\boxed{\\frac{\\sqrt{3}}{2}}", "\\boxed{}")
BROKEN = ("\\boxed{", "}", "{", "\\boxed{1 \\boxed{2}}")

# A value by (row, position), such as a log-probability or (conf, acc).
States = dict[tuple[int, int], float]
Pairs = dict[tuple[int, int], tuple[float, float]]


@dataclass
class Text:
    """What a response says, and the character at which each of its tokens starts.

    Tokens that start at the same character hold parts of it. `stopped`: the last token is EOS.
    """

    text: str
    starts: list[int]
    stopped: bool

    def holds(self, t: int, character: int) -> bool:
        later = [s for s in self.starts if s > self.starts[t]]
        return self.starts[t] <= character < (min(later) if later else len(self.text))

    @property
    def own(self) -> int:
        """Tokens without EOS."""
        return max(0, len(self.starts) - self.stopped)


def drawn_text(fill: random.Random, tokens: int) -> Text:
    """Random words cut into this many tokens at random characters."""
    text = "".join(fill.choice(WORDS if fill.random() < 0.8 else BROKEN) for _ in range(fill.randrange(9)))
    stopped = fill.random() < 0.7
    cuts = sorted(fill.randrange(len(text) + 1) for _ in range(max(tokens - 1 - stopped, 0)))
    starts = [0, *cuts, len(text)] if stopped else [0, *cuts]
    return Text(text, starts[:tokens], stopped)


def stated(y: Text) -> tuple[int, int, int] | None:
    """The last boxed answer's cue, first token and end: braces are counted, character by character."""
    found, at = None, 0
    while at < len(y.text):
        opened, close = at + len("\\boxed{"), None
        if y.text.startswith("\\boxed{", at):
            depth = 1
            for c in range(opened, len(y.text)):
                depth += (y.text[c] == "{") - (y.text[c] == "}")
                if depth == 0:
                    close = c
                    break
        if close is None or close == opened:
            at += 1
            continue
        tokens = [t for t in range(y.own) if any(y.holds(t, c) for c in range(opened, close))]
        if tokens:
            cue = next(t for t in range(len(y.starts)) if y.holds(t, at))
            found = (cue, tokens[0], tokens[-1] + 1)
        at = close + 1
    return found


def reasoning_end(y: Text) -> int:
    answer = stated(y)
    return y.own if answer is None else answer[0]


def quantile(values: list[float], q: float) -> float:
    """Between order statistics, linearly."""
    ranked = sorted(values)
    place = q * (len(ranked) - 1)
    below = min(int(place), len(ranked) - 1)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (place - below) * (ranked[above] - ranked[below])


def minmax(values: list[float]) -> list[float]:
    span = max(values) - min(values)
    return [(v - min(values)) / (span if span > 0 else 1.0) for v in values]


def oar_weights(importance: list[float], beta: float, q: float, floor: float, normalize: bool) -> list[float]:
    n = minmax([math.log1p(i) for i in importance])
    theta = quantile(n, q)
    w = [max(v / (theta + 1e-8), floor) if v < theta else 1 + beta * (v - theta) / (1 - theta + 1e-8) for v in n]
    return [v * len(w) / math.fsum(w) for v in w] if normalize else w


def prpo_weights(importance: list[float], beta: float, threshold: float) -> list[float]:
    n = minmax([math.log1p(i) for i in importance])
    w = [1 + beta * (v - threshold) / (1 - threshold) if v >= threshold else 1.0 for v in n]
    return [v * len(w) / math.fsum(w) for v in w]


def weighted(batch: list[Response], weights: list[dict[int, float]]) -> list[list[float]]:
    """GRPO's advantage times each token's weight, 1 where none is given."""
    return [
        [a * w.get(t, 1.0) for t, a in enumerate(row)] for row, w in zip(grpo(batch), weights, strict=True)
    ]  # fmt: skip


def oar(
    batch: list[Response],
    importance: dict[int, list[float]],
    answer_start: list[int],
    beta: float = 1.0,
    q: float = 0.25,
    floor: float = 0.1,
    normalize: bool = True,
) -> list[list[float]]:
    weights: list[dict[int, float]] = []
    for i, y in enumerate(batch):
        tokens = [t for t in range(max(answer_start[i], 0)) if y.mask[t]] if i in importance else []
        values = [importance[i][t] for t in tokens]
        weights.append(dict(zip(tokens, oar_weights(values, beta, q, floor, normalize), strict=True)) if tokens else {})
    return weighted(batch, weights)


def prpo(
    batch: list[Response], importance: dict[int, list[float]], beta: float = 2.0, threshold: float = 0.4
) -> list[list[float]]:
    weights: list[dict[int, float]] = []
    for i, y in enumerate(batch):
        tokens = [t for t, m in enumerate(y.mask) if m] if i in importance else []
        values = [importance[i][t] for t in tokens]
        weights.append(dict(zip(tokens, prpo_weights(values, beta, threshold), strict=True)) if tokens else {})
    return weighted(batch, weights)


def cutpoints(y: Response, q: float, end: int) -> list[int]:
    tau = quantile([h for h, m in zip(y.entropy, y.mask, strict=True) if m], q)
    return [t for t in range(end) if y.mask[t] and y.entropy[t] >= tau]


def grpo_vps(
    batch: list[Response], belief: States, answer_start: list[int], alpha: float = 1.2
) -> list[list[float]]:  # fmt: skip
    out = dr_grpo(batch)
    for i, y in enumerate(batch):
        at = sorted(p for row, p in belief if row == i)
        if not compared(batch, y):
            continue
        for before, after in pairwise(at):
            change = math.exp(belief[i, after]) - math.exp(belief[i, before])
            for t in range(before, after):
                if y.mask[t] and not 0 <= answer_start[i] <= t:
                    out[i][t] += alpha * change
    return out


def potential(conf: float, acc: float) -> float:
    return 1.5 * acc * conf + 0.5 * acc - conf


def spae(
    batch: list[Response],
    states: Pairs,
    answer_start: list[int],
    alpha: float = 0.5,
    xi: float = 0.5,
    threshold: float = 0.9,
    first: str = "prompt",
    whiten: bool = True,
    ddof: int = 1,
    epsilon: float = 1e-8,
) -> list[list[float]]:
    rewarded = dr_grpo(batch)
    f: list[dict[int, float]] = []
    shaped: list[dict[int, float]] = []
    for i, y in enumerate(batch):
        f.append({})
        change: dict[int, float] = {}
        ends = sorted(p for row, p in states if row == i and p > 0) if compared(batch, y) else []
        phi = [potential(*states[i, p]) for p in ends]
        for k, end in enumerate(ends):
            begin = ends[k - 1] if k else 0
            before = phi[k - 1] if k else phi[0] if first == "zero" else potential(*states[i, 0])
            delta = phi[k] - before
            solved = len([p for p in phi[:k] if p > threshold])
            for t in range(begin, end):
                if y.mask[t] and not 0 <= answer_start[i] <= t:
                    change[t] = delta
                    f[i][t] = 1 - alpha * (1 - math.exp(-solved))
        scaled = minmax(list(change.values())) if change else []
        shaped.append(dict(zip(change, [math.exp(v) for v in scaled], strict=True)))
    every = [g for row in shaped for g in row.values()]
    mean = math.fsum(every) / len(every) if every else 0.0
    values = [
        [a * f[i].get(t, 1.0) + xi * (shaped[i][t] - mean if t in shaped[i] else 0.0) for t, a in enumerate(row)]
        for i, row in enumerate(rewarded)
    ]
    return whitened(batch, values, ddof, epsilon, among=2) if whiten else values


def drawn_importance(fill: random.Random, batch: list[Response]) -> dict[int, list[float]]:
    """Values of every response; some are 0 throughout, and few are different, so that they tie."""
    few = (0.0, 0.0, 0.1, 0.5, 2.0)
    return {
        i: [0.0] * len(y.ids) if fill.random() < 0.1 else [fill.choice((*few, fill.random())) for _ in y.ids]
        for i, y in enumerate(batch)
    }


def drawn_answers(fill: random.Random, batch: list[Response]) -> list[int]:
    """Where each response's answer starts: nowhere, at its end or anywhere."""
    return [fill.choice((-1, len(y.ids), fill.randrange(len(y.ids) + 1))) for y in batch]


def drawn_positions(fill: random.Random, batch: list[Response]) -> list[tuple[int, int]]:
    """States at the prompt and at up to six other positions, the end included; none for a fifth of the responses."""
    out = []
    for i, y in enumerate(batch):
        if fill.random() < 0.8:
            others = fill.sample(range(1, len(y.ids) + 1), min(fill.randrange(7), len(y.ids)))
            out += [(i, p) for p in (0, *others)]
    fill.shuffle(out)
    return out
