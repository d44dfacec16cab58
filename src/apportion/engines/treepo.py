"""TreePO's tree: a fixed number of responses, whose branches are shared out anew after every segment."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from apportion.engines.trees import Bounds, Node, Tree
from apportion.errors import InputError


@dataclass(frozen=True)
class TreePORule:
    """TreePO [paper: authors' code, arXiv 2508.17445]: `width` responses, grown by segments of `segment_tokens`.

    Each round, every unfinished path gets an equal share of min(width − finished, 2·active + 2·finished this round)
    branches. What an equal division leaves over goes one branch each to the first paths in the order of their child
    numbers [ours].

    Where all paths are finished and some of the width is left, each place is filled by a fork of a finished path at
    a segment border between its own segments; path and border are drawn evenly [ours], and all places are filled in
    one round [ours]. Where no path has a border, each place is filled by a fresh response from the prompt [ours]. So
    a prompt always gives `width` leaves.

    Counts: `forked` and `fresh`, places filled so.

    Attributes:
        width: leaves of a prompt.
        depth: segments of a response; with `segment_tokens` a length limit, where it is below `max_new_tokens`.

    Raises:
        InputError: a setting below 1, or a width below 2.
    """

    name: ClassVar[str] = "treepo"

    width: int
    depth: int
    segment_tokens: int

    def __post_init__(self) -> None:
        for field, least in (("width", 2), ("depth", 1), ("segment_tokens", 1)):
            if getattr(self, field) < least:
                raise InputError(f"treepo.{field}", getattr(self, field), f"at least {least}")

    def bounds(self, max_new_tokens: int) -> Bounds:
        """What a tree takes where responses may have `max_new_tokens`.

        Raises:
            InputError: responses of one segment, which have no border, or of so few that branching into two at
                each does not give `width`.
        """
        if self.segment_tokens >= max_new_tokens:
            raise InputError(
                "treepo.segment_tokens", self.segment_tokens, f"below max_new_tokens={max_new_tokens}",
                "responses of one segment have nothing to share",
            )  # fmt: skip
        rounds, needed = min(self.depth, ceil(max_new_tokens / self.segment_tokens)), (self.width - 1).bit_length()
        if rounds < needed:
            got = f"{self.width} with {rounds} rounds (depth={self.depth}, segment_tokens={self.segment_tokens})"
            raise InputError(
                "treepo.width", got, f"at most 2^{rounds} = {2**rounds}, since paths double each round",
                f"for {needed} rounds raise treepo.depth or lower treepo.segment_tokens",
            )  # fmt: skip
        limit = min(max_new_tokens, self.depth * self.segment_tokens)
        return Bounds(limit, rows=self.width, stored=self.width * limit)

    def grow(self, tree: Tree) -> Generator[list[Node], None, list[Node]]:
        """Round by round; see `Rule.grow`."""
        active, finished, ended = [tree.root], list[Node](), 0
        while len(finished) < self.width:
            if active:
                total = min(self.width - len(finished), 2 * len(active) + 2 * ended)
                share, left = divmod(total, len(active))
                branching = [node for i, node in enumerate(active) for _ in range(share + (i < left))]
            else:
                branching = self._refill(tree, finished)
            nodes = sorted((node.branch(self.segment_tokens) for node in branching), key=lambda node: node.place)
            yield nodes
            active = [node for node in nodes if node.finish is None]
            ended = len(nodes) - len(active)
            finished += [node for node in nodes if node.finish is not None]
        return sorted(finished, key=lambda node: node.place)

    def _refill(self, tree: Tree, finished: list[Node]) -> list[Node]:
        """The states in which to branch for each place that is left."""
        places = self.width - len(finished)
        paths = [node.edges[:-1] for node in finished if len(node.edges) > 1]
        tree.counts["forked" if paths else "fresh"] += places
        if not paths:
            return [tree.root] * places
        states = []
        for place in range(places):
            path_u, border_u = tree.choices(place, 2)
            borders = paths[int(path_u * len(paths))]
            states.append(borders[int(border_u * len(borders))])
        return states
