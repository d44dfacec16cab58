"""What tree rollouts take: a method's own rule grows trees of the expected lengths, without a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from apportion.cost.roofline import Call, decode, padded
from apportion.cost.standin import Workload, lengths_of
from apportion.credit.method import CreditMethod
from apportion.credit.pipeline import stages_of
from apportion.credit.spo_tree import SPOTree
from apportion.engines.base import Key
from apportion.engines.trees import Node, Tree


@dataclass(frozen=True)
class Grown:
    """Passes of one generation batch, tokens generated (shared ones once), and rows that are trained, 0 for all."""

    calls: list[Call]
    generated: float
    trained: float


def grown(method: CreditMethod, work: Workload, slots: int) -> Grown | None:
    """The trees of a method that samples trees; None for others.

    SPO-tree trains single edges: as many as one update may take of a prompt, or all where there are fewer.
    """
    own = next((stage for stage in stages_of(method) if "tree" in stage.needs), None)
    if own is None:
        return None
    from apportion.train.trees import tree_rule

    rule, _ = tree_rule(own)
    lengths = lengths_of(work)
    tree = Tree(0, Key("cost", 0, "0", -1, 0), (0,), work.limit, Counter())
    # The limit of a tree may lie below that of a response.
    rule.bounds(work.limit)
    nodes, turns, edges, generated = tree.start(rule), list[tuple[int, int, float]](), 0, 0
    while nodes:
        made = 0
        for number, node in enumerate(nodes):
            made = max(made, _grow(node, lengths[(edges + number) % len(lengths)]))
        turns.append((made, len(nodes), max(len(node.response) for node in nodes)))
        edges += len(nodes)
        generated += sum(len(node.token_ids) for node in nodes)
        for node in nodes:
            following = tree.settle(node, node.token_ids)
        nodes = following
    prompts = work.rows / work.size
    calls = [padded(prompts, work.longest_prompt, masked=False, logits=prompts)]
    for made, count, length in turns:
        rows = count * prompts
        at_once = min(rows, slots)
        calls.append(decode(made * rows / at_once, at_once, work.longest_prompt + length - made / 2, "slots"))
    trained = prompts * min(own.edges, edges) if isinstance(own, SPOTree) else 0.0
    return Grown(calls, generated * prompts, trained)


def _grow(node: Node, length: int) -> int:
    """Grows a branch as far as its budget or a response of `length` tokens goes. Returns its tokens."""
    before = len(node.response)
    made = max(1, min(node.budget, length - before))
    node.token_ids = (1,) * made
    if before + made >= min(length, node.tree.limit):
        node.finish = "stop"
    return made
