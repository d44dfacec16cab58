"""Tree rollouts: responses that share their openings, grown segment by segment from one prefill a prompt.

A rule (`spo_tree`, `treepo`) says which nodes branch and how often; `growing.TreeSampler` decodes what it asks for.
Shapes: a piece of n tokens is (1, H, n, D) a layer, with heads H and head size D; V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import ClassVar, Protocol

import numpy as np
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from apportion.engines.base import Cost, Key, Sampling
from apportion.engines.sampling import uniforms

# The keys and values of consecutive tokens, a layer of the model each.
Piece = list[DynamicLayer]


@dataclass(frozen=True)
class Leaf:
    """One response of a tree, token ids only.

    Attributes:
        prompt: number of its prompt in the call.
        token_ids: the response, its stop token included.
        logprobs: log-probability, in nats, of each token when it was sampled: float32 logits at the sampling
            temperature, before repetition penalty, top-k, top-p and min-p.
        starts: the position at which each edge starts, the first 0.
        path: a node id for each edge. An id holds those of the edges before it ("0", "0.3", "0.3.1"), so that
            two leaves of a prompt share an edge exactly where they share its id.
        finish: "stop" for a stop token, "length" at the token limit, else what `ended` answered: then the
            response has no stop token either.
    """

    prompt: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    starts: tuple[int, ...]
    path: tuple[str, ...]
    finish: str


class RolloutSampler(Protocol):
    """Samples the responses to train on where they are not independent samples of each prompt."""

    name: str
    cost: Cost
    counts: Counter[str]

    def sample(
        self,
        prompts: Sequence[tuple[int, ...]],
        sampling: Sampling,
        run: str,
        step: int,
        max_new_tokens: int,
        *,
        names: Sequence[str] | None = None,
    ) -> list[Leaf]:
        """The leaves of every prompt, in the order of the prompts, which may have different numbers of them.

        Args:
            prompts: token ids, never text.
            run: the run's seed or name; step: optimiser step.
            max_new_tokens: the length limit of a response.
            names: what random streams are keyed by, beside run, step and path: a name for each prompt that no
                other has in the step, in whatever call or rank it is. Left out, it is the prompt's token ids and
                its occurrence in this call, which is enough where a step makes one call.
        """
        ...


@dataclass(frozen=True)
class Bounds:
    """The most that the tree of one prompt can take.

    Attributes:
        limit: tokens of a response.
        rows: branches that grow at the same time.
        stored: tokens of nodes that have children or may get some, the prompt's not counted.
    """

    limit: int
    rows: int
    stored: int


class Rule(Protocol):
    """Which nodes of a tree branch, and how often."""

    name: ClassVar[str]

    def bounds(self, max_new_tokens: int) -> Bounds:
        """What a tree takes where responses may have `max_new_tokens`.

        Raises:
            InputError: no tree can be filled with these settings.
        """
        ...

    def grow(self, tree: Tree) -> Generator[list[Node], None, list[Node]]:
        """Yields the next branches, one or more; resumed when all are grown; returns the leaves in order."""
        ...


@dataclass(eq=False)
class Tree:
    """The tree of one prompt while it grows.

    Attributes:
        number: of the prompt in the call. key: of the prompt, see `Node.key`.
        limit: tokens of a response. counts: what happened, by name, over all trees of a sampler.
        leaves: the responses, once the tree is complete.
    """

    number: int
    key: Key
    prompt: tuple[int, ...]
    limit: int
    counts: Counter[str]
    root: Node = field(init=False)
    leaves: list[Leaf] | None = None
    _growth: Generator[list[Node], None, list[Node]] | None = None
    _outstanding: int = 0

    def __post_init__(self) -> None:
        self.root = Node(self)

    def start(self, rule: Rule) -> list[Node]:
        """The first branches."""
        self._growth = rule.grow(self)
        return self._next()

    def settle(self, node: Node, token_ids: Sequence[int]) -> list[Node]:
        """Takes a grown branch. The next ones, or none while others grow and when the tree is complete."""
        node.token_ids = tuple(token_ids)
        self._outstanding -= 1
        return [] if self._outstanding else self._next()

    def choices(self, m: int, count: int) -> np.ndarray:
        """[count] uniforms for a choice m of the rule, from a stream that draws no token."""
        return uniforms(replace(self.key, prompt=f"{self.key.prompt}/choice"), m, count)

    def _next(self) -> list[Node]:
        assert self._growth is not None
        try:
            nodes = next(self._growth)
        except StopIteration as end:
            self.leaves = [node.leaf() for node in end.value]
            # With these go the nodes, their keys and values.
            self._growth, self.root, nodes = None, Node(self), []
        self._outstanding = len(nodes)
        return nodes


@dataclass(eq=False)
class Node:
    """A state of a tree: its prompt, or where a branch from the parent's state ended.

    Attributes:
        place: child numbers from the root, which has ().
        budget: tokens that the branch may have.
        token_ids: of the branch, once it is grown; logprobs: of these.
        finish: why the response ends here; None where it can go on.
        children: how many were asked for.
        piece: keys and values of `token_ids` (the root's: of the prompt), and logits: [V] after them. Both come
            once it is grown, where it can go on.
    """

    tree: Tree
    parent: Node | None = None
    place: tuple[int, ...] = ()
    budget: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    children: int = 0
    piece: Piece = field(default_factory=list)
    logits: Tensor | None = None

    def branch(self, most: int) -> Node:
        """The next child: to be grown by `most` tokens, or up to the limit."""
        child = Node(self.tree, self, (*self.place, self.children), min(most, self.tree.limit - len(self.response)))
        self.children += 1
        return child

    @property
    def edges(self) -> list[Node]:
        """The nodes from a child of the root to this one."""
        return [*self.parent.edges, self] if self.parent else []

    @property
    def response(self) -> tuple[int, ...]:
        """The response's tokens up to this state."""
        return tuple(token for node in self.edges for token in node.token_ids)

    @property
    def key(self) -> Key:
        """Names this state; child n is its continuation n. Sample −1 keeps its streams apart from probes'."""
        place = ".".join(map(str, self.place))
        return replace(self.tree.key, prompt=f"{self.tree.key.prompt}/{place}", position=len(self.response))

    def leaf(self) -> Leaf:
        """The response that ends here."""
        assert self.finish is not None
        edges = self.edges
        return Leaf(
            self.tree.number, self.response, tuple(p for node in edges for p in node.logprobs),
            tuple(accumulate((len(node.token_ids) for node in edges[:-1]), initial=0)),
            tuple(".".join(map(str, node.place)) for node in edges), self.finish,
        )  # fmt: skip
