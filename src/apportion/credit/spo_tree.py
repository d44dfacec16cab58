"""SPO-tree: every edge of a tree of responses gets the value of its end less the mean of its siblings.

Shapes: _N flat tokens, _R responses, _M nodes, _S segments (one an edge of a response).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveInt

from apportion.credit.boundaries import per_token
from apportion.credit.method import CreditMethod, Need
from apportion.credit.record import Conserves, Credit, Segments, nothing
from apportion.credit.tree import child_stats, edges_of, leaves_below, node_values, tree_of
from apportion.groups import Base, differ
from apportion.measure.evidence import Evidence
from apportion.rollouts import Rollouts


class SPOTree(CreditMethod):
    """SPO-tree [paper, arXiv 2505.23564]: A_edge = V(child) − V(parent), V(parent) the mean of its children.

    The mean is of the children's values and not of the leaves': a leaf of 1 beside a node with three leaves of 0
    gives .5, not .25. Every response below an edge has the edge's advantage on the edge's tokens; which of them
    trains it, and that edges with advantage 0 are left out, is the trainer's affair. An edge whose value equals its
    parent's up to rounding gets exactly 0, and so does everything in a collapsed group.

    Conserved: over the children of a node Σ A = 0 (`baseline="mean"`, `scale="none"`), and along a path
    Σ increments = V(last node) − V(prompt), which the invariant `telescoping` measures. Edges have different
    lengths and shared ones stand in several responses, so nothing holds over tokens.

    Tree [paper]: `branching`, `edges`, `wait`. `level_tokens` is [ours]: no value could be read.
    [ours]: `baseline="leave_one_out"` and `scale="siblings"` as defined by their names; abstained and
    untrainable responses are no leaves; paths that end in a node which others run through are together one more
    child of it. `raw` of a segment is V(parent), `samples` the scored responses below the parent, `stderr` σ of
    the parent's children over the root of their number [ours].

    Numbers [note]: siblings (0, .5, 1) give (−.5, 0, .5).
    """

    name: ClassVar[str] = "spo_tree"
    needs: ClassVar[frozenset[Need]] = frozenset({"tree"})
    conserves: ClassVar[Conserves] = "none"
    uses_base: ClassVar[bool] = False
    cost: ClassVar[str] = "none beyond its tree rollouts"
    paper: ClassVar[str] = "SPO-tree, arXiv 2505.23564"
    marks: ClassVar[str] = "[paper]; level_tokens, ends inside a tree, stderr [ours]"

    ddof: int = Field(0, ge=0, le=1, description="σ of siblings: 0 population, 1 sample")
    epsilon: float = Field(1e-8, ge=0, allow_inf_nan=False, description="added to σ of siblings")
    baseline: Literal["mean", "leave_one_out"] = Field("mean", description="leave_one_out: the other children's mean")
    scale: Literal["none", "siblings"] = Field("none", description="siblings: divide by σ of the siblings' values")
    branching: tuple[PositiveInt, ...] = Field((6, 6, 6), min_length=1, description="children of a node at each depth")
    level_tokens: int = Field(600, ge=1, description="tokens of an edge (M), except at the last depth")
    edges: int = Field(32, ge=1, description="edges of a prompt that train in one update")
    wait: int = Field(8, ge=0, description="updates that an edge may wait for")

    def assign(self, rollouts: Rollouts, evidence: Evidence, base: Base) -> Credit:
        tree = tree_of(rollouts, self.name)
        edges = edges_of(rollouts, tree, self.name)
        value, end = node_values(tree, rollouts.reward.double(), rollouts.scored)
        siblings = child_stats(tree, value, end, self.ddof)
        parent = tree.parent[edges.node]
        count, spread = siblings.count[parent], siblings.std[parent]
        here, start = value[edges.node], value[parent]
        apart = base.live[edges.row] & ~siblings.collapsed[parent] & differ(here, start)
        increment = torch.where(apart, here - start, 0.0)
        advantage = increment
        if self.baseline == "leave_one_out":
            advantage = advantage * count / (count - 1).clamp(min=1)
        if self.scale == "siblings":
            advantage = advantage / torch.where(apart, spread + self.epsilon, 1.0)
        segments = Segments(
            edges.row, edges.start, edges.end, start, start,
            spread / count.clamp(min=1).sqrt(), increment, leaves_below(tree, rollouts.scored)[parent],
        )  # fmt: skip
        gain = torch.zeros(len(rollouts), dtype=torch.float64).index_add_(0, edges.row, increment)
        error = (gain - (value[tree.last] - value[rollouts.group]))[rollouts.scored].abs()
        scored = rollouts.scored[edges.row]
        residual = per_token(segments, advantage)
        return Credit.form(
            rollouts, base.advantage, weight=nothing(residual), residual=residual, segments=segments,
            method=self.name, settings=self.settings, conserves=self.keeps,
            invariants={"telescoping": float(error.max()) if len(error) else 0.0},
            counts={
                "edges": len(torch.unique(edges.node[scored])),
                "zero_edges": len(torch.unique(edges.node[scored & (advantage == 0)])),
            },
        )  # fmt: skip
