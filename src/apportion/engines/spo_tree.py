"""SPO's tree: every node branches, level by level."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from typing import ClassVar

from apportion.engines.trees import Bounds, Node, Tree
from apportion.errors import InputError


@dataclass(frozen=True)
class SPOTreeRule:
    """SPO-tree [paper, arXiv 2505.23564]: branch 6-6-6, M tokens a level, the last level to the end.

    Each node of a level gets independent children, which grow by `level_tokens`; those of the last level by what
    is left of the limit. A response that ends early is a leaf at its level, so a prompt gives at most the product
    of `branching` leaves. How nodes are keyed and decoded is [ours].

    Attributes:
        branching: children of a node, level by level.
        level_tokens: M, tokens of a branch on every level but the last.

    Raises:
        InputError: a setting below 1, or branching that gives a single response.
    """

    name: ClassVar[str] = "spo_tree"

    branching: tuple[int, ...]
    level_tokens: int

    def __post_init__(self) -> None:
        if self.level_tokens < 1:
            raise InputError("spo_tree.level_tokens", self.level_tokens, "at least 1")
        if min(self.branching, default=0) < 1 or prod(self.branching) < 2:
            raise InputError(
                "spo_tree.branching", list(self.branching), "numbers from 1 up, for two leaves or more"
            )  # fmt: skip

    def bounds(self, max_new_tokens: int) -> Bounds:
        """What a tree takes where responses may have `max_new_tokens`.

        Raises:
            InputError: the levels before the last leave it no token.
        """
        inner = len(self.branching) - 1
        if inner * self.level_tokens >= max_new_tokens:
            raise InputError(
                "spo_tree.level_tokens", self.level_tokens,
                f"less than max_new_tokens={max_new_tokens} after {inner} of {inner + 1} levels",
                "lower it, take fewer levels in spo_tree.branching, or raise max_new_tokens",
            )  # fmt: skip
        nodes = sum(accumulate(self.branching[:-1], mul))
        return Bounds(max_new_tokens, rows=prod(self.branching), stored=nodes * self.level_tokens)

    def grow(self, tree: Tree) -> Generator[list[Node], None, list[Node]]:
        """Level by level; see `Rule.grow`."""
        level, leaves = [tree.root], list[Node]()
        for depth, children in enumerate(self.branching, 1):
            if not level:
                break
            most = self.level_tokens if depth < len(self.branching) else tree.limit
            nodes = [node.branch(most) for node in level for _ in range(children)]
            yield nodes
            leaves += [node for node in nodes if node.finish is not None]
            level = [node for node in nodes if node.finish is None]
        return sorted(leaves, key=lambda node: node.place)
