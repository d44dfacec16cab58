"""The sampler of tree rollouts: one prefill a prompt, branches decoded together, caches handed from node to node.

Shapes: _T trees of one prefill, _W columns, _E ends of prompts, _B branches, _V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from apportion.engines.base import Key, Request, Sampling
from apportion.engines.rows import Run, runs_of
from apportion.engines.slots import SlotCache, SlotLayer, piece_of
from apportion.engines.transformers import TransformersEngine
from apportion.engines.trees import Leaf, Node, Piece, Rule, Tree
from apportion.errors import InputError
from apportion.measure.tokens import token_logprobs_and_entropies

# Asked with a response's token ids at the end of a segment without a stop token: why it ends there, or None.
Ended = Callable[[tuple[int, ...]], str | None]


@dataclass
class Branch:
    """A node that is being grown."""

    node: Node
    run: Run

    @property
    def grown(self) -> bool:
        """Whether the response ends here, or the state after the branch is kept."""
        return self.node.finish is not None or self.node.logits is not None


class TreeCache(SlotCache):
    """Slots that start from the pieces of a path; what is grown there is cut out as the next piece."""

    def restore(self, slots: list[int], pieces: Iterable[Piece]) -> None:
        """Gives these slots the tokens of the pieces, one piece behind the other."""
        at = 0
        for piece in pieces:
            self.layers = self.layers or [SlotLayer(layer, self.slots, self.width) for layer in piece]
            for layer, source in zip(self.layers, piece, strict=True):
                columns = slice(at, at + source.keys.shape[2])
                layer.keys[slots, :, columns], layer.values[slots, :, columns] = source.keys, source.values
            at = columns.stop


class TreeSampler(TransformersEngine):
    """Grows the trees of a rule with a causal language model of transformers, plain or PEFT-wrapped.

    A prompt is prefilled once for all its responses. A branch starts in a slot from copies of the keys and values
    of its path and draws its first token from the logits that its parent ended with; a node that can go on
    leaves its own keys, values and last logits behind. So no token is fed twice, and a response's last one never
    is. Branches of all trees that grow at the same time are decoded in one batch, and a slot whose branch ends is
    handed to the next one.

    Tokens are drawn from `uniforms`, keyed by run, step, prompt name and node, so neither the order of the prompts
    nor the batch changes them, up to rounding of logits in batches of another shape.

    Args:
        model, pad_id, max_batch, max_cache_tokens, prefill_tokens: see `TransformersEngine`.
        max_tree_tokens: tokens of prompts and nodes that are kept for children; caps the trees that grow at the
            same time.
        ended: asked at the end of every segment that has no stop token. An answer other than None ends the
            response there and becomes the leaf's `finish`.

    Attributes:
        cost: what was spent so far. counts: what happened, by name (see the rule).

    Raises:
        InputError: see `TransformersEngine`.
    """

    def __init__(
        self,
        model: nn.Module,
        pad_id: int,
        rule: Rule,
        *,
        max_batch: int = 256,
        max_cache_tokens: int = 131_072,
        prefill_tokens: int = 2_048,
        max_tree_tokens: int = 262_144,
        ended: Ended | None = None,
    ) -> None:
        super().__init__(
            model, pad_id, max_batch=max_batch, max_cache_tokens=max_cache_tokens, prefill_tokens=prefill_tokens
        )
        self.rule, self.name, self.ended, self.max_tree_tokens = rule, rule.name, ended, max_tree_tokens
        self.counts = Counter[str]()

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
        """The leaves of every prompt, in the order of the prompts and of their paths; see `RolloutSampler`.

        Raises:
            InputError: the rule cannot be filled; a prompt without a token; names that are not one a prompt, or
                not unique; a response that does not fit `max_cache_tokens` or a tree `max_tree_tokens`; a model
                with layers that do not keep every key of a sequence (sliding window, linear attention).
        """
        bounds = self.rule.bounds(max_new_tokens)
        names = _named(prompts, names)
        if not prompts:
            return []
        longest = max(map(len, prompts))
        width, need = longest + bounds.limit, longest + bounds.stored
        for limit, got, least in (
            ("max_cache_tokens", self.max_cache_tokens, width),
            ("max_tree_tokens", self.max_tree_tokens, need),
        ):
            if got < least:
                raise InputError(limit, got, f"at least {least}, which one tree of {self.name} may need")
        if not self.scorer.sliceable(width):
            raise InputError("model", type(self.model).__name__, "full attention in every layer, for tree rollouts")
        trees = [
            Tree(i, Key(run, step, name, sample=-1, position=0), tuple(ids), bounds.limit, self.counts)
            for i, (ids, name) in enumerate(zip(prompts, names, strict=True))
        ]
        at_once = min(len(trees), self.max_tree_tokens // need)
        slots = min(at_once * bounds.rows, self.max_batch, self.max_cache_tokens // width)
        with self.scorer.measuring():
            self._grow(deque(trees), at_once, TreeCache(slots, width), sampling)
        return [leaf for tree in trees for leaf in tree.leaves or ()]

    def _grow(self, waiting: deque[Tree], at_once: int, cache: TreeCache, sampling: Sampling) -> None:
        """Continuous batching of the branches of at most `at_once` trees."""
        growing, pending, running = list[Tree](), deque[Node](), dict[int, Branch]()

        def settle(branches: Iterable[Branch]) -> None:
            for branch in branches:
                pending.extend(branch.node.tree.settle(branch.node, branch.run.tokens))

        while True:
            free = [slot for slot in range(cache.slots) if slot not in running]
            growing = [tree for tree in growing if tree.leaves is None]
            if free and pending:
                nodes = [pending.popleft() for _ in range(min(len(free), len(pending)))]
                branches = self._start(nodes, sampling)
                going = [branch for branch in branches if not branch.grown]
                for parent, siblings in groupby(zip(free, going, strict=False), key=lambda pair: pair[1].node.parent):
                    assert parent is not None
                    placed = dict(siblings)
                    cache.restore(list(placed), [node.piece for node in (parent.tree.root, *parent.edges)])
                    running |= placed
                settle(branch for branch in branches if branch.grown)
            elif free and waiting and len(growing) < at_once:
                planted = self._plant(waiting, at_once - len(growing))
                growing += planted
                for tree in planted:
                    pending.extend(tree.start(self.rule))
            elif running:
                # Nothing waits for slots that are still free: the last rows move there and the batch shrinks.
                for hole in free:
                    last = max(running)
                    if last < hole:
                        break
                    cache.move(last, hole, running[last].run.cached)
                    running[hole] = running.pop(last)
                self._advance(cache, [running[slot] for slot in range(len(running))], sampling)
                settle([running.pop(slot) for slot in sorted(running) if running[slot].grown])
            else:
                return

    def _plant(self, waiting: deque[Tree], most: int) -> list[Tree]:
        """Prefills the prompts of the next trees, at most that many, in one forward."""
        trees = [waiting.popleft()]
        width = len(trees[0].prompt)
        while waiting and len(trees) < most:
            width = max(width, len(waiting[0].prompt))
            if (len(trees) + 1) * width > self.prefill_tokens:
                break
            trees.append(waiting.popleft())
        width = max(len(tree.prompt) for tree in trees)
        ids_TW = torch.tensor([[*tree.prompt, *[self.pad_id] * (width - len(tree.prompt))] for tree in trees])
        # No mask: padding is on the right, where causal attention does not look.
        ends = sorted({len(tree.prompt) - 1 for tree in trees})
        keep = torch.tensor(ends, device=self.scorer.device)
        logits_TEV, cache = self.forward(ids_TW, DynamicCache(), logits_to_keep=keep)
        for row, tree in enumerate(trees):
            tree.root.piece = piece_of(cache, row, 0, len(tree.prompt))
            tree.root.logits = logits_TEV[row, ends.index(len(tree.prompt) - 1)].clone()
        return trees

    def _start(self, nodes: Sequence[Node], sampling: Sampling) -> list[Branch]:
        """Branches with their first token, drawn from the logits of their parents."""
        branches, logits = [], []
        for node in nodes:
            parent = node.parent
            assert parent is not None and parent.logits is not None
            prefix = (*node.tree.prompt, *parent.response)
            request = Request(parent.key, prefix, samples=1, budget=node.budget, first=node.place[-1])
            (run,) = runs_of(request, sampling, len(parent.logits), self.scorer.device)
            branches.append(Branch(node, run))
            logits.append(parent.logits)
        self._draw(branches, torch.stack(logits), sampling)
        return branches

    def _advance(self, cache: TreeCache, branches: Sequence[Branch], sampling: Sampling) -> None:
        """Feeds the last token of every branch. Those without budget left are grown by it, the others draw."""
        last_B, cached_B = np.array([(branch.run.tokens[-1], branch.run.cached) for branch in branches]).T
        logits_BV = self.step(cache, last_B.copy(), cached_B.copy())
        drawing = [row for row, branch in enumerate(branches) if not branch.run.over]
        for row, branch in enumerate(branches):
            if branch.run.over:
                branch.node.logits = logits_BV[row].clone()
                branch.node.piece = piece_of(cache, row, len(branch.run.request.prefix_ids), branch.run.cached + 1)
        if drawing:
            self._draw([branches[row] for row in drawing], logits_BV[drawing], sampling)

    def _draw(self, branches: Sequence[Branch], logits_BV: Tensor, sampling: Sampling) -> None:
        """Draws a token for each branch, and ends the responses that it ends."""
        self._extend([branch.run for branch in branches], logits_BV, sampling)
        tokens_B = torch.tensor([branch.run.tokens[-1] for branch in branches], device=logits_BV.device)
        logprob_B, _ = token_logprobs_and_entropies(logits_BV, tokens_B, sampling.temperature)
        self.cost.generated += len(branches)
        for branch, logprob in zip(branches, logprob_B.tolist(), strict=True):
            node, run = branch.node, branch.run
            node.logprobs.append(logprob)
            if run.finish == "stop":
                node.finish = "stop"
            elif run.over:
                response = tuple(run.request.prefix_ids[len(node.tree.prompt) :]) + tuple(run.tokens)
                node.finish = self.ended(response) if self.ended else None
                if node.finish is None and len(response) == node.tree.limit:
                    node.finish = "length"


def _named(prompts: Sequence[Sequence[int]], names: Sequence[str] | None) -> list[str]:
    """A name for each prompt, see `RolloutSampler.sample`.

    Raises:
        InputError: see `TreeSampler.sample`.
    """
    seen = Counter[tuple[int, ...]]()
    found = []
    for i, ids in enumerate(map(tuple, prompts)):
        if not ids:
            raise InputError(f"prompt {i}", "no token", "at least one")
        digest = hashlib.blake2b(",".join(map(str, ids)).encode(), digest_size=8).hexdigest()
        found.append(f"{digest}#{seen[ids]}")
        seen[ids] += 1
    if names is None:
        return found
    if len(names) != len(prompts):
        raise InputError("names", f"{len(names)} names", f"{len(prompts)}, one a prompt")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise InputError("names", f"{twice[0]!r} twice", "one name a prompt", "number a prompt's occurrences")
    return list(names)
