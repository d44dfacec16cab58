"""TreePO's tree: shares of each round by hand, forks, fresh responses, and a width that is always filled.

Planted faults seen caught: all finished paths counted again in each round, or none; a width that forgets finished
paths; what a division leaves over lost, or given to the last paths; forks at the prompt, at the first border only, of
the first path only, or all the same; places left empty where there is no border; a width check off by one; depth
ignored.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import ids, llama
from scripted import STOP, Scripted, chi_square, drawn, fed_once, forced, hashed, same, slow_branch

from apportion.engines.base import Key, Sampling
from apportion.engines.growing import TreeSampler
from apportion.engines.transformers import TransformersEngine
from apportion.engines.treepo import TreePORule
from apportion.engines.trees import Leaf, Node, Tree
from apportion.errors import InputError
from apportion.tasks import load_policy

PLAIN = Sampling((STOP,))
PROMPTS = [(1, 2, 4), (6,), (1, 2, 4, 5, 0, 7), (7, 7)]
NAMES = ["a", "b", "c", "d"]
RULE, LIMIT = TreePORule(width=7, depth=5, segment_tokens=3), 14

# What is to end in a round, among its branches in the order of their paths.
Ends = Callable[[int, int], Sequence[int]]


def play(rule: TreePORule, max_new_tokens: int, ends: Ends, name: str = "p") -> tuple[Tree, list[list[str]]]:
    """Grows a tree with no model: the tree, and the ids of the branches of each round."""
    limit = rule.bounds(max_new_tokens).limit
    tree = Tree(0, Key("run", 1, name, -1, 0), (1,), limit, Counter())
    nodes, rounds = tree.start(rule), []
    while nodes:
        rounds.append([".".join(map(str, node.place)) for node in nodes])
        chosen = ends(len(rounds), len(nodes))
        coming: list[Node] = []
        for number, node in enumerate(nodes):
            grown = node.budget if number not in chosen else 1
            if number in chosen:
                node.finish = "stop"
            elif len(node.parent.response) + grown == limit:
                node.finish = "length"
            node.logprobs = [0.0] * grown
            coming += tree.settle(node, [7] * (grown - 1) + [STOP if number in chosen else 7])
        nodes = coming
    return tree, rounds


def shares(rounds: list[list[str]]) -> list[list[int]]:
    """Children of each path that got some, in path order, for every round."""
    return [list(Counter(node.rpartition(".")[0] for node in nodes).values()) for nodes in rounds]


def test_a_round_doubles_the_paths_up_to_the_width() -> None:
    tree, rounds = play(TreePORule(16, 6, 2), 12, lambda number, branches: ())
    assert list(map(len, rounds)) == [2, 4, 8, 16, 16, 16]
    assert shares(rounds)[4:] == [[1] * 16] * 2
    assert [leaf.finish for leaf in tree.leaves] == ["length"] * 16
    assert tree.leaves[0].path == ("0", "0.0", "0.0.0", "0.0.0.0", "0.0.0.0.0", "0.0.0.0.0.0")


def test_shares_by_hand() -> None:
    """Width 16; the second branch ends in round 1, the first one in round 2.

    Round 2: min(16 − 1, 2·1 + 2·1) = 4, all below path 0. Round 3: 3 are active, 2 finished, 1 of them in this
    round: min(16 − 2, 2·3 + 2·1) = 8 over 3 paths, so 3, 3, 2. Round 4: min(16 − 2, 2·8 + 0) = 14 over 8 paths, so
    6 of 2 and 2 of 1. Then 14 paths go on by themselves.
    """
    _, rounds = play(TreePORule(16, 6, 2), 12, lambda number, branches: {1: [1], 2: [0]}.get(number, ()))
    assert rounds[:2] == [["0", "1"], ["0.0", "0.1", "0.2", "0.3"]]
    assert shares(rounds)[2:] == [[3, 3, 2], [2] * 6 + [1] * 2, [1] * 14, [1] * 14]
    assert rounds[2] == ["0.1.0", "0.1.1", "0.1.2", "0.2.0", "0.2.1", "0.2.2", "0.3.0", "0.3.1"]


def test_only_this_rounds_finished_paths_add_branches() -> None:
    """Width 16; one ends in round 1, none in round 2: round 3 has min(15, 2·4 + 2·0) = 8, not 2·4 + 2·1 = 10."""
    _, rounds = play(TreePORule(16, 6, 2), 12, lambda number, branches: [0] if number == 1 else ())
    assert list(map(len, rounds))[:4] == [2, 4, 8, 15]


def test_what_an_equal_division_leaves_goes_to_the_first_paths() -> None:
    _, rounds = play(TreePORule(5, 4, 2), 8, lambda number, branches: ())
    # min(5, 8) = 5 over 4 paths.
    assert shares(rounds) == [[2], [2, 2], [2, 1, 1, 1], [1] * 5]
    assert rounds[2] == ["0.0.0", "0.0.1", "0.1.0", "1.0.0", "1.1.0"]


def test_forks_fill_what_is_left() -> None:
    """Width 8; all four paths end in round 2. They have one border each, after node 0 or 1: four forks there."""
    tree, rounds = play(TreePORule(8, 4, 2), 8, lambda number, branches: range(branches) if number == 2 else ())
    assert rounds[:2] == [["0", "1"], ["0.0", "0.1", "1.0", "1.1"]]
    assert len(rounds[2]) == 4 and set(rounds[2]) <= {f"{top}.{n}" for top in (0, 1) for n in range(2, 6)}
    assert tree.counts == {"forked": 4} and len(tree.leaves) == 8
    # A fork goes on like any path: segments 3 and 4 one by one, to the limit of 8.
    assert list(map(len, rounds)) == [2, 4, 4, 4, 4]
    forked = [leaf for leaf in tree.leaves if leaf.finish == "length"]
    assert len(forked) == 4 and {leaf.starts for leaf in forked} == {(0, 2, 4, 6)}
    assert [leaf.path for leaf in tree.leaves] == sorted(leaf.path for leaf in tree.leaves)


def test_forks_take_paths_and_borders_evenly() -> None:
    """Width 16; all 8 paths end in round 3, so there are 8 forks and each path has 2 borders.

    The first is node 0 or 1, the second one of their four children: p = 1/4 for each of the two, 1/8 for each of the
    four, at the 99.9 % quantile of χ².
    """
    seen, trees = Counter(), 150
    for name in range(trees):
        _, rounds = play(
            TreePORule(16, 4, 2), 8, lambda number, branches: range(branches) if number == 3 else (), str(name)
        )
        seen.update(node.rpartition(".")[0] for node in rounds[3])
    n = trees * 8
    expected = {"0": n / 4, "1": n / 4, **{f"{a}.{b}": n / 8 for a in (0, 1) for b in (0, 1)}}
    chi2, limit = chi_square(seen, expected)
    assert chi2 < limit


def test_fresh_responses_fill_what_has_no_border() -> None:
    tree, rounds = play(TreePORule(8, 4, 2), 8, lambda number, branches: range(branches) if number == 1 else ())
    assert rounds[:2] == [["0", "1"], ["2", "3", "4", "5", "6", "7"]]
    assert tree.counts == {"fresh": 6} and len(tree.leaves) == 8
    assert shares(rounds)[2:] == [[1] * 6] * 3


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(2, 16), rate=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), seed=st.integers(0, 10_000),
    segment=st.integers(1, 3), last=st.integers(0, 2),
)  # fmt: skip
def test_the_width_is_always_filled_and_never_exceeded(
    width: int, rate: float, seed: int, segment: int, last: int
) -> None:
    fill = random.Random(seed)
    finished = []

    def ends(number: int, branches: int) -> list[int]:
        assert sum(finished) + branches <= width
        chosen = [n for n in range(branches) if fill.random() < rate]
        finished.append(len(chosen))
        return chosen

    tokens = 5 * segment - last if segment > last else 5 * segment
    tree, rounds = play(TreePORule(width, 5, segment), tokens, ends, str(seed))
    assert len(tree.leaves) == width
    assert len({leaf.path for leaf in tree.leaves}) == width
    assert sorted(node for nodes in rounds for node in nodes) == sorted({n for leaf in tree.leaves for n in leaf.path})
    for leaf in tree.leaves:
        assert leaf.starts == tuple(range(0, len(leaf.token_ids), segment)) and len(leaf.path) == len(leaf.starts)
        assert len(leaf.token_ids) == tokens if leaf.finish == "length" else leaf.token_ids[-1] == STOP


def slow_treepo(policy, prompt, number, name, rule, max_new_tokens, sampling) -> list[Leaf]:
    """TreePO as the text has it, over lists of paths; a path is its leaf so far."""
    limit, children = min(max_new_tokens, rule.depth * rule.segment_tokens), Counter()

    def grow(path: Leaf) -> Leaf:
        place = path.path[-1] if path.path else ""
        child = children[place]
        children[place] += 1
        before = len(path.token_ids)
        key = Key("run", 5, f"{name}/{place}", -1, before)
        budget = min(rule.segment_tokens, limit - before)
        new, ps, stopped = slow_branch(policy, prompt, path.token_ids, budget, sampling, key, child)
        finish = "stop" if stopped else "length" if before + len(new) == limit else ""
        return Leaf(
            number, (*path.token_ids, *new), (*path.logprobs, *ps), (*path.starts, before),
            (*path.path, f"{place}.{child}" if place else str(child)), finish,
        )  # fmt: skip

    def in_order(paths):
        return sorted(paths, key=lambda path: [int(n) for n in path.path[-1].split(".")])

    root = Leaf(number, (), (), (), (), "")
    active, finished, now = [root], [], 0
    while len(finished) < rule.width:
        branches = []
        if active:
            total = min(rule.width - len(finished), 2 * len(active) + 2 * now)
            for rank, path in enumerate(active):
                extra = 1 if rank < total % len(active) else 0
                branches += [path] * (total // len(active) + extra)
        else:
            longer = [path for path in finished if len(path.path) > 1]
            for place in range(rule.width - len(finished)):
                stream = Key("run", 5, f"{name}/choice", -1, 0).stream(place)
                u, v = np.random.Generator(np.random.Philox(key=stream)).random(2)
                if not longer:
                    branches.append(root)
                    continue
                path = longer[int(u * len(longer))]
                kept = 1 + int(v * (len(path.path) - 1))
                at = path.starts[kept]
                branches.append(
                    Leaf(number, path.token_ids[:at], path.logprobs[:at], path.starts[:kept], path.path[:kept], "")
                )
        grown = in_order([grow(path) for path in branches])
        active = [path for path in grown if not path.finish]
        now = len(grown) - len(active)
        finished += [path for path in grown if path.finish]
    return in_order(finished)


def sample(model, rule=RULE, prompts=PROMPTS, sampling=PLAIN, limit=LIMIT, names=None, ended=None, **limits):
    sampler = TreeSampler(model, 0, rule, ended=ended, **limits)
    return sampler.sample(prompts, sampling, "run", 5, limit, names=names), sampler


# Responses that end at once, soon, and late.
FILLED = [(4.0, {"fresh"}), (2.0, {"fresh", "forked"}), (-2.0, set())]


@pytest.mark.parametrize(("stop", "filled"), FILLED)
def test_equals_the_slow_tree(stop: float, filled: set[str]) -> None:
    got, sampler = sample(Scripted(hashed(stop)), names=NAMES)
    wanted = [slow_treepo(hashed(stop), p, i, NAMES[i], RULE, LIMIT, PLAIN) for i, p in enumerate(PROMPTS)]
    same(got, [leaf for leaves in wanted for leaf in leaves])
    assert Counter(leaf.prompt for leaf in got) == dict.fromkeys(range(4), RULE.width)
    assert set(sampler.counts) == filled


def test_equals_the_slow_tree_with_attention() -> None:
    model, rule, sampling = (
        llama().eval(),
        TreePORule(4, 4, 3),
        Sampling((STOP, 5, 6), 0.9, top_k=9, repetition_penalty=1.2),
    )

    @torch.no_grad()
    def policy(history):
        return model(torch.tensor([history])).logits[0, -1].tolist()

    prompts = [ids(6, 1), ids(9, 2)]
    got, _ = sample(model, rule, prompts, sampling, 10, names=["a", "b"])
    same(got, [leaf for i in (0, 1) for leaf in slow_treepo(policy, prompts[i], i, "ab"[i], rule, 10, sampling)])
    for leaf in got:
        score, _ = TransformersEngine(model, 0).score(
            [*prompts[leaf.prompt], *leaf.token_ids], len(prompts[leaf.prompt]), 0.9
        )
        torch.testing.assert_close(torch.tensor(leaf.logprobs), score, atol=1e-5, rtol=1e-6)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 999),
    max_batch=st.sampled_from([1, 3, 256]),
    prefill=st.sampled_from([1, 9, 2_048]),
    trees=st.sampled_from([104, 208, 10_000]),
    parts=st.integers(1, 2),
)
def test_order_batch_and_split_change_nothing(seed: int, max_batch: int, prefill: int, trees: int, parts: int) -> None:
    order = list(range(len(PROMPTS)))
    random.Random(seed).shuffle(order)
    got = {}
    for part in range(parts):
        here = order[part::parts]
        leaves, _ = sample(
            Scripted(hashed(2.0)), prompts=[PROMPTS[i] for i in here], names=[NAMES[i] for i in here],
            max_batch=max_batch, prefill_tokens=prefill, max_tree_tokens=trees,
        )  # fmt: skip
        for n, i in enumerate(here):
            got[i] = [(x.token_ids, x.logprobs, x.starts, x.path, x.finish) for x in leaves if x.prompt == n]
    assert [leaf for i in sorted(got) for leaf in got[i]] == [
        (x.token_ids, x.logprobs, x.starts, x.path, x.finish) for x in EXPECTED
    ]


@pytest.mark.parametrize(("stop", "filled"), FILLED)
def test_no_token_is_computed_twice_not_even_by_a_fork(stop: float, filled: set[str]) -> None:
    model = Scripted(hashed(stop))
    prompts = [(1, 2, n) for n in (0, 1, 2, 3, 4, 19)]
    leaves, sampler = sample(model, prompts=prompts, max_batch=11)
    assert Counter(model.fed) == fed_once(prompts, leaves)
    assert sampler.cost.forward_tokens == 18 + drawn(leaves) - len(leaves)
    assert sampler.cost.generated == drawn(leaves)
    assert set(sampler.counts) == filled


def test_a_lone_stop_token_is_a_segment_and_ends_the_path() -> None:
    got, sampler = sample(Scripted(forced([7, 6, STOP])), TreePORule(4, 3, 2), [(1,)], limit=6)
    assert got == [
        Leaf(0, (7, 6, STOP), (0.0,) * 3, (0, 2), path, "stop")
        for path in (("0", "0.0"), ("0", "0.1"), ("1", "1.0"), ("1", "1.1"))
    ]
    assert not sampler.counts


def test_an_ending_of_the_hosts_own_has_no_stop_token() -> None:
    asked = []

    def ended(response):
        asked.append(response)
        return "repeat" if response == (7, 6, 7, 6) else None

    got, _ = sample(Scripted(forced([7, 6, 7, 6, 7, 6, 7])), TreePORule(3, 4, 2), [(1,)], limit=8, ended=ended)
    # Rounds of 2 and min(3, 4) = 3 branches.
    assert asked == [(7, 6)] * 2 + [(7, 6, 7, 6)] * 3
    assert [(leaf.token_ids, leaf.finish, leaf.starts) for leaf in got] == [((7, 6, 7, 6), "repeat", (0, 2))] * 3


def test_depth_limits_the_response_where_it_is_the_shorter_limit() -> None:
    for depth, length in ((3, 6), (9, 8)):
        got, _ = sample(Scripted(forced([7])), TreePORule(4, depth, 2), [(1,)], limit=8)
        assert {len(leaf.token_ids) for leaf in got} == {length} and {leaf.finish for leaf in got} == {"length"}


def test_on_the_embedded_policy() -> None:
    model, tokenizer = load_policy()
    prompts = [tuple(tokenizer(f"{text}=?\n")["input_ids"]) for text in ("47+8*7-9", "12*3+4-8", "99-5+6*2")]
    leaves, sampler = sample(model, TreePORule(8, 8, 8), prompts, Sampling((tokenizer.eos_token_id,)), 64)
    assert Counter(leaf.prompt for leaf in leaves) == {0: 8, 1: 8, 2: 8}
    assert sampler.cost.forward_tokens == sum(map(len, prompts)) + drawn(leaves) - len(leaves)
    for leaf in leaves[::4]:
        prompt = prompts[leaf.prompt]
        score, _ = TransformersEngine(model, 0).score([*prompt, *leaf.token_ids], len(prompt), 1.0)
        torch.testing.assert_close(torch.tensor(leaf.logprobs), score, atol=1e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("field", "width", "depth", "segment", "limit", "says"),
    [
        ("treepo.width", 1, 4, 4, 16, "at least 2"),
        ("treepo.depth", 4, 0, 4, 16, "at least 1"),
        ("treepo.segment_tokens", 4, 4, 0, 16, "at least 1"),
        ("treepo.segment_tokens", 4, 4, 16, 16, "below max_new_tokens=16"),
        ("treepo.width", 9, 3, 4, 100, "at most 2^3 = 8"),
        ("treepo.width", 16, 14, 5, 15, "at most 2^3 = 8"),
    ],
)
def test_trees_that_cannot_be_filled_cost_nothing(
    field: str, width: int, depth: int, segment: int, limit: int, says: str
) -> None:
    model = Scripted(hashed())
    with pytest.raises(InputError) as error:
        sample(model, TreePORule(width, depth, segment), limit=limit)
    assert error.value.field == field and says in str(error.value) and not model.rows


def test_bounds_by_hand() -> None:
    assert TreePORule(8, 3, 4).bounds(100).limit == 12
    assert TreePORule(16, 14, 5).bounds(16).limit == 16, "4 rounds, the last of one token"
    bounds = TreePORule(16, 14, 512).bounds(7_168)
    assert (bounds.limit, bounds.rows, bounds.stored) == (7_168, 16, 16 * 7_168)


EXPECTED = sample(Scripted(hashed(2.0)), names=NAMES)[0]
