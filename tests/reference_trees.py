"""SPO-chain, SPO-tree and TreePO again, slowly: plain Python, one response, one prefix and one token at a time.

Written from the published rules (methods.md, sections 4 and 5) and not from the package, which it never imports.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from reference import Measured, Response, all_equal, live, on_tokens, value, whitened


@dataclass
class Leaf(Response):
    """A response of a tree. `path` has one id an edge; `starts` are the positions where edges after the first start."""

    path: list[str] = field(default_factory=list)


def chain_cuts(y: Response, threshold: float, interval: int) -> list[int]:
    """Positions before which a state is measured. The policy's log-probabilities are minus `entropy`."""
    found = []
    seen = 0
    for t, (surprise, m) in enumerate(zip(y.entropy, y.mask, strict=True)):
        if m and math.exp(-surprise) < threshold:
            if seen % interval == 0:
                found.append(t)
            seen += 1
    return found


def spo_chain_plan(batch: list[Response], threshold: float, interval: int) -> set[frozenset[tuple[int, int]]]:
    """The states to measure, each as the (row, position) pairs that share it."""
    states: dict[tuple[str, tuple[int, ...]], set[tuple[int, int]]] = {}
    for i, y in enumerate(batch):
        if y.scored:
            for cut in chain_cuts(y, threshold, interval):
                states.setdefault((y.group, tuple(y.ids[:cut])), set()).add((i, cut))
    return {frozenset(state) for state in states.values()}


def spo_chain(batch: list[Response], measured: Measured, threshold: float, probability_mask: bool) -> list[list[float]]:
    out = []
    for i, y in enumerate(batch):
        row = [0.0] * len(y.ids)
        known = sorted(p for (r, p), rewards in measured.items() if r == i and rewards)
        unsure = [m and math.exp(-h) < threshold for h, m in zip(y.entropy, y.mask, strict=True)]
        for t in range(len(y.ids)):
            passed = [p for p in known if p <= t]
            ahead = [p for p in known if p > t]
            if not y.scored or not y.mask[t] or not passed:
                continue
            if probability_mask and any(unsure) and not unsure[t]:
                continue
            then = value(measured[i, ahead[0]]) if ahead else y.reward
            row[t] = then - value(measured[i, passed[-1]])
        out.append(row)
    return out


def below(batch: list[Leaf], group: str, prefix: list[str]) -> list[Leaf]:
    """The scored leaves of a group whose paths start with the prefix."""
    return [y for y in batch if y.group == group and y.scored and y.path[: len(prefix)] == prefix]


def child_values(batch: list[Leaf], group: str, prefix: list[str]) -> dict[str | None, float]:
    """What each child of a node is worth; paths that end in it are one more child, called None."""
    leaves = below(batch, group, prefix)
    n = len(prefix)
    found: dict[str | None, float] = {}
    for name in dict.fromkeys(y.path[n] for y in leaves if len(y.path) > n):
        children = child_values(batch, group, [*prefix, name])
        found[name] = value(list(children.values()))
    ends = [y.reward for y in leaves if len(y.path) == n]
    if ends:
        found[None] = value(ends)
    return found


def spo_tree(
    batch: list[Leaf],
    baseline: str = "mean",
    scale: str = "none",
    ddof: int = 0,
    epsilon: float = 1e-8,
) -> list[list[float]]:
    out = []
    for y in batch:
        row = [0.0] * len(y.ids)
        edges = [0, *sorted({p for p in y.starts if p > 0}), len(y.ids)]
        for k in range(len(edges) - 1) if live(batch, y) else []:
            siblings = child_values(batch, y.group, y.path[:k])
            mine = siblings[y.path[k]]
            others = [v for name, v in siblings.items() if name != y.path[k]]
            everyone = [mine, *others]
            if not others or all_equal(everyone):
                continue
            a = mine - value(others if baseline == "leave_one_out" else everyone)
            if scale == "siblings":
                mean = value(everyone)
                a /= math.sqrt(math.fsum((v - mean) ** 2 for v in everyone) / (len(everyone) - ddof)) + epsilon
            for t in range(edges[k], edges[k + 1]):
                row[t] = a if y.mask[t] else 0.0
        out.append(row)
    return out


def treepo(
    batch: list[Leaf],
    whiten: bool = True,
    size_weighted: bool = False,
    ddof: int = 1,
    epsilon: float = 1e-8,
) -> list[list[float]]:
    raw = []
    for y in batch:
        if not y.scored:
            raw.append([0.0] * len(y.ids))
            continue
        everyone = [s.reward for s in below(batch, y.group, [])]
        subgroups = [everyone]
        for depth in range(1, len(y.path) + 1):
            sharing = [s.reward for s in below(batch, y.group, y.path[:depth])]
            if 1 < len(sharing) < len(everyone):
                subgroups.append(sharing)
        gaps = [0.0 if all_equal(s) else y.reward - value(s) for s in subgroups]
        weights = [len(s) if size_weighted else 1 for s in subgroups]
        raw.append(on_tokens(y, math.fsum(w * g for w, g in zip(weights, gaps, strict=True)) / sum(weights)))
    if whiten:
        raw = whitened(batch, raw, ddof, epsilon)
    return [row if live(batch, y) else [0.0] * len(row) for y, row in zip(batch, raw, strict=True)]
