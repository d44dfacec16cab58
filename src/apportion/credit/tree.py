"""Trees of responses as tensors: nodes by number, values from the leaves up, and edges on tokens.

Shapes: _R responses, _M nodes, _K values, _S segments (one an edge of a response), (D, R) one row a depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from apportion.errors import InputError
from apportion.groups import GroupStats, stats_by
from apportion.rollouts import Rollouts


@dataclass(frozen=True)
class Tree:
    """The nodes that the paths of a batch run through, numbered depth by depth from the prompts on.

    A node is its group together with the whole path to it: the same id below another parent, or in another
    group, is another node. Node g is the prompt of group g.

    Attributes:
        node: (D, R) int64, the node that each path has reached at each depth, the prompt first; −1 past its end.
        parent: [M] int64, −1 for prompts.
        last: [R] int64, the node in which each path ends.
        starts: D+1 numbers: nodes of depth d are `starts[d]` … `starts[d+1]` − 1.
    """

    node: Tensor
    parent: Tensor
    last: Tensor
    starts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.parent)


@dataclass(frozen=True)
class Edges:
    """The segments of responses, each the edge into one node, in row order and then by start.

    Attributes:
        row, start, end: [S] int64, the positions `start` … `end` − 1 of response `row`.
        node: [S] int64, the node in which the edge ends.
    """

    row: Tensor
    start: Tensor
    end: Tensor
    node: Tensor


def tree_of(rollouts: Rollouts, method: str) -> Tree:
    """Numbers the nodes of `rollouts.path`, in one pass a depth.

    Raises:
        InputError: no paths, naming the method.
    """
    if rollouts.path is None:
        raise InputError(f"{method}: path", "none", "node ids from the root to the leaf", "give `path` for every row")
    rows = len(rollouts)
    node, parent = [rollouts.group], [torch.full((rollouts.groups,), -1)]
    starts = [0, rollouts.groups]
    for names in zip_longest(*rollouts.path):
        number = dict(zip(names, range(rows), strict=True))
        label = torch.tensor(list(map(number.__getitem__, names)))
        here = label != number.get(None, -1)
        key, member = torch.unique(node[-1][here] * rows + label[here], return_inverse=True)
        reached = torch.full_like(label, -1)
        reached[here] = starts[-1] + member
        node.append(reached)
        parent.append(key // rows)
        starts.append(starts[-1] + len(key))
    stacked = torch.stack(node)
    # Deeper nodes have higher numbers.
    return Tree(stacked, torch.cat(parent), stacked.amax(0), tuple(starts))


def edges_of(rollouts: Rollouts, tree: Tree, method: str) -> Edges:
    """Lays the edges of each path on its response, which `rollouts.boundary` cuts into segments.

    A path has one id a segment, or one more: the root's, which has no token. Responses without tokens have no
    segment, and how long their paths are does not matter.

    Raises:
        InputError: a path of another length (so an empty path of a response that has tokens), or one that names
            another root than its group's, or names it where they do not.
    """
    _check_marked(rollouts, method)
    opens = rollouts.position == 0
    if rollouts.boundary is not None:
        opens = opens | rollouts.boundary
    first = opens.nonzero()[:, 0]
    row, start = rollouts.row[first], rollouts.position[first]
    end = torch.cat([first[1:], rollouts.offsets[-1:]]) - rollouts.offsets[row]
    count = torch.bincount(row, minlength=len(rollouts))
    rooted = (tree.node >= 0).sum(0) - 1 - count
    _check(rollouts, tree, method, count, rooted)
    place = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
    return Edges(row, start, end, tree.node[place + 1 + rooted[row], row])


def _check_marked(rollouts: Rollouts, method: str) -> None:
    """Raises InputError for the first response of several nodes whose edges' borders nobody marked."""
    assert rollouts.path is not None
    flags = rollouts.boundary is not None
    marked = torch.full((len(rollouts),), flags) if rollouts.bounded is None else rollouts.bounded & flags
    several = torch.tensor(list(map(len, rollouts.path))) > 1
    bad = ~marked & several & (rollouts.length > 0)
    if bad.any():
        i = int(bad.nonzero()[0])
        raise InputError(
            f"{method}: boundaries of row {i}", f"none, with {len(rollouts.path[i])} nodes in its path",
            "the first token of every edge after the first", "give `boundaries`, empty where there is a single edge",
        )  # fmt: skip


def _check(rollouts: Rollouts, tree: Tree, method: str, count: Tensor, rooted: Tensor) -> None:
    """Raises InputError for the first path that does not fit its [R] `count` of segments, or its group's root."""
    assert rollouts.path is not None
    used = count > 0
    bad = used & ((rooted < 0) | (rooted > 1))
    if bad.any():
        i = int(bad.nonzero()[0])
        n = int(count[i])
        raise InputError(
            f"{method}: path of row {i}", f"{len(rollouts.path[i])} ids for {n} segments",
            f"{n}, one a segment, or {n + 1} with the root's id in front",
            "mark the first token of every segment in `boundaries`, or complete the path",
        )  # fmt: skip
    root = torch.where(rooted > 0, tree.node[:2][-1], -1)
    common = torch.full((rollouts.groups,), -1).scatter_reduce_(0, rollouts.group[used], root[used], "amax")
    odd = used & (root != common[rollouts.group])
    if odd.any():
        i = int(odd.nonzero()[0])
        got = f"root {rollouts.path[i][0]!r}" if rooted[i] > 0 else "no id for the root"
        raise InputError(
            f"{method}: path of row {i}", got, "the root that other paths of its group start with",
            "start every path of a group with the same root id, or leave it out of all",
        )  # fmt: skip


def node_values(tree: Tree, reward: Tensor, scored: Tensor) -> tuple[Tensor, Tensor]:
    """The value of every node: the mean of its children's values, and not of the leaves below it.

    Responses whose paths end in a node are together one child of it, worth the mean of their rewards. A leaf has
    no other child, so that this is its value; a node that other paths run through counts it beside them [ours].

    Args:
        reward: [R] float64.
        scored: [R] bool, the responses that count.

    Returns:
        [M] the values, and [M] what the responses that end in each node are worth; NaN where there is none.
    """
    index = tree.last[scored]

    def total(values: Tensor) -> Tensor:
        return torch.zeros(len(tree), dtype=torch.float64).index_add_(0, index, values)

    end = total(reward[scored]) / total(torch.ones_like(reward[scored]))
    ends = ~torch.isnan(end)
    worth, children = torch.where(ends, end, 0.0), ends.double()
    for low, high in reversed(list(pairwise(tree.starts))[1:]):
        value = worth[low:high] / children[low:high]
        known, parent = children[low:high] > 0, tree.parent[low:high]
        worth.index_add_(0, parent[known], value[known])
        children.index_add_(0, parent, known.double())
    return worth / children, end


def child_stats(tree: Tree, value: Tensor, end: Tensor, ddof: int) -> GroupStats:
    """Statistics of each node's children, as `node_values` counts them. All fields are [M]."""
    child, parent = torch.cat([value, end]), torch.cat([tree.parent, torch.arange(len(tree))])
    known = ~torch.isnan(child) & (parent >= 0)
    return stats_by(child[known], parent[known], len(tree), ddof)


def leaves_below(tree: Tree, scored: Tensor) -> Tensor:
    """[M] int64: how many of the `scored` responses run through each node or end in it."""
    return torch.bincount(tree.node[(tree.node >= 0) & scored], minlength=len(tree))
