"""Trees equal slow ones that compute every token's whole history anew, and feed no token twice.

Planted faults seen caught: a piece without the last token, or a view of its slot; pieces restored at column 0, or
without the prompt's; a row moved without its cache; siblings on one stream, keys without the node, keys by place in
the call; a token fed twice; log-probabilities at temperature 1, after filters, or of another row's logits; a limit one
too long; `ended` asked with the segment alone, or after a stop token; no bound on trees or slots; training mode left
on; sliding windows accepted; starts shifted by an edge; M tokens on the last level too; ended nodes that branch on;
leaves by level; a level check off by one.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import VOCABULARY, ids, llama, mistral
from scripted import NEVER, SIZE, STOP, Scripted, chi_square, drawn, fed_once, forced, hashed, same, slow_branch

from apportion.engines.base import Key, Sampling
from apportion.engines.growing import TreeSampler
from apportion.engines.spo_tree import SPOTreeRule
from apportion.engines.transformers import TransformersEngine
from apportion.engines.trees import Leaf
from apportion.errors import InputError
from apportion.tasks import load_policy

PLAIN = Sampling((STOP,))
SETTINGS = [
    PLAIN,
    Sampling((STOP, 5), temperature=0.6, top_p=0.9),
    Sampling((STOP,), temperature=1.4, top_k=4, repetition_penalty=1.5),
    Sampling((), temperature=1.2, min_p=0.1),
]
PROMPTS = [(1, 2, 4), (6,), (1, 2, 4, 5, 0, 7), (7, 7)]
NAMES = ["a", "b", "c", "d"]
RULE, LIMIT = SPOTreeRule(branching=(3, 2, 2), level_tokens=3), 11


def slow_spo(policy, prompt, number, name, rule, limit, sampling, run="run", step=5) -> list[Leaf]:
    """SPO-tree as the text has it, depth first."""
    out = []

    def grow(place, before, logprobs, starts, path):
        children = rule.branching[len(place)]
        last = len(place) == len(rule.branching) - 1
        budget = limit - len(before) if last else min(rule.level_tokens, limit - len(before))
        key = Key(run, step, f"{name}/{'.'.join(map(str, place))}", -1, len(before))
        for child in range(children):
            new, ps, stopped = slow_branch(policy, prompt, before, budget, sampling, key, child)
            here, response = (*place, child), (*before, *new)
            row = ((*logprobs, *ps), (*starts, len(before)), (*path, ".".join(map(str, here))))
            if stopped or len(response) == limit:
                out.append(Leaf(number, response, *row, "stop" if stopped else "length"))
            else:
                grow(here, response, *row)

    grow((), (), (), (), ())
    return out


def sample(model, rule=RULE, prompts=PROMPTS, sampling=PLAIN, limit=LIMIT, names=None, ended=None, **limits):
    sampler = TreeSampler(model, 0, rule, ended=ended, **limits)
    return sampler.sample(prompts, sampling, "run", 5, limit, names=names), sampler


@pytest.mark.parametrize("sampling", SETTINGS)
def test_equals_the_slow_tree(sampling: Sampling) -> None:
    got, _ = sample(Scripted(hashed()), sampling=sampling, names=NAMES)
    wanted = [
        slow_spo(hashed(), prompt, i, NAMES[i], RULE, LIMIT, sampling) for i, prompt in enumerate(PROMPTS)
    ]  # fmt: skip
    same(got, itertools.chain(*wanted))
    assert len({leaf.finish for leaf in got}) == 1 + bool(sampling.stop_ids)
    assert len({len(leaf.path) for leaf in got}) == (3 if sampling.stop_ids else 1), "some end at each level"


@pytest.mark.parametrize("sampling", SETTINGS[:3])
def test_equals_the_slow_tree_with_attention(sampling: Sampling) -> None:
    model, rule = llama().eval(), SPOTreeRule((2, 2), 4)
    prompts = [ids(6, 1), ids(9, 2)]

    @torch.no_grad()
    def policy(history):
        return model(torch.tensor([history])).logits[0, -1].tolist()

    got, _ = sample(model, rule, prompts, sampling, 9, names=["a", "b"])
    same(got, [leaf for i in (0, 1) for leaf in slow_spo(policy, prompts[i], i, "ab"[i], rule, 9, sampling)])


def test_leaves_by_hand() -> None:
    rule = SPOTreeRule((2, 2), 2)
    four, _ = sample(Scripted(forced([7, 6, 7, 6, STOP])), rule, [(1,)], limit=8)
    paths = [("0", "0.0"), ("0", "0.1"), ("1", "1.0"), ("1", "1.1")]
    assert four == [Leaf(0, (7, 6, 7, 6, STOP), (0.0,) * 5, (0, 2), path, "stop") for path in paths]
    # A stop token at the end of the first level, inside it, and a lone one at the start of the second.
    for response, starts, tops in (((7, STOP), (0,), 1), ((STOP,), (0,), 1), ((7, 6, STOP), (0, 2), 2)):
        got, _ = sample(Scripted(forced(response)), rule, [(1,)], limit=8)
        assert [leaf.token_ids for leaf in got] == [response] * 2**tops
        assert {leaf.starts for leaf in got} == {starts} and {leaf.finish for leaf in got} == {"stop"}
    long, _ = sample(Scripted(forced([7])), rule, [(1,)], limit=5)
    assert [leaf.token_ids for leaf in long] == [(7,) * 5] * 4
    assert {leaf.finish for leaf in long} == {"length"} and {leaf.starts for leaf in long} == {(0, 2)}


def test_logprobs_are_those_of_the_temperature_before_filters() -> None:
    """Logits ln(.1, .2, .7) at temperature .5 give p ∝ (.01, .04, .49); top-k 2 leaves out the first only in draws."""
    logits = [math.log(0.1), math.log(0.2), math.log(0.7), *[NEVER] * (SIZE - 3)]
    got, _ = sample(
        Scripted(lambda history: logits), SPOTreeRule((40,), 1), [(1,)], Sampling((), temperature=0.5, top_k=2), limit=3
    )
    wanted = {1: math.log(0.04 / 0.54), 2: math.log(0.49 / 0.54)}
    assert {token for leaf in got for token in leaf.token_ids} == {1, 2}
    for leaf in got:
        assert leaf.logprobs == pytest.approx([wanted[token] for token in leaf.token_ids], abs=1e-6)


@settings(max_examples=12)
@given(
    seed=st.integers(0, 999),
    max_batch=st.sampled_from([1, 2, 7, 256]),
    cache=st.sampled_from([17, 40, 10_000]),
    prefill=st.sampled_from([1, 9, 2_048]),
    trees=st.sampled_from([33, 66, 99, 10_000]),
    parts=st.integers(1, 3),
)
def test_order_batch_and_split_change_nothing(
    seed: int, max_batch: int, cache: int, prefill: int, trees: int, parts: int
) -> None:
    order = list(range(len(PROMPTS)))
    random.Random(seed).shuffle(order)
    got = {}
    for part in range(parts):
        here = order[part::parts]
        leaves, _ = sample(
            Scripted(hashed()), prompts=[PROMPTS[i] for i in here], names=[NAMES[i] for i in here],
            max_batch=max_batch, max_cache_tokens=cache, prefill_tokens=prefill, max_tree_tokens=trees,
        )  # fmt: skip
        assert [leaf.prompt for leaf in leaves] == sorted(leaf.prompt for leaf in leaves)
        for n, i in enumerate(here):
            got[i] = [leaf for leaf in leaves if leaf.prompt == n]
    same(
        [Leaf(i, *(getattr(leaf, f) for f in ("token_ids", "logprobs", "starts", "path", "finish")))
         for i in sorted(got) for leaf in got[i]],
        EXPECTED,
    )  # fmt: skip


def test_names_left_out_are_the_prompts_themselves() -> None:
    twice = [PROMPTS[0], PROMPTS[2], PROMPTS[0]]
    first, _ = sample(Scripted(hashed()), prompts=twice)
    tokens = [[leaf.token_ids for leaf in first if leaf.prompt == i] for i in range(3)]
    assert tokens[0] != tokens[2], "the second occurrence has a tree of its own"
    turned, _ = sample(Scripted(hashed()), prompts=[PROMPTS[2], *[PROMPTS[0]] * 2])
    assert [[leaf.token_ids for leaf in turned if leaf.prompt == i] for i in range(3)] == [
        tokens[1],
        tokens[0],
        tokens[2],
    ]


def test_run_and_step_are_part_of_the_key() -> None:
    sampler = TreeSampler(Scripted(hashed()), 0, RULE)
    found = [sampler.sample(PROMPTS, PLAIN, run, step, LIMIT) for run, step in (("0", 1), ("0", 2), ("1", 1), ("0", 1))]
    assert found[0] == found[3] and found[0] != found[1] and found[0] != found[2]


@pytest.mark.parametrize("limits", [{}, {"prefill_tokens": 1, "max_batch": 3}, {"max_tree_tokens": 33}])
def test_no_token_is_computed_twice(limits: dict[str, int]) -> None:
    model = Scripted(hashed())
    prompts = [prompt for prompt in PROMPTS if len(prompt) == 6] + [(5, 6, 7, 0, 1, 2), (0, 0, 0, 0, 0, 0)]
    leaves, sampler = sample(model, prompts=prompts, **limits)
    assert Counter(model.fed) == fed_once(prompts, leaves)
    assert sampler.cost.generated == drawn(leaves)
    # Each prompt once, and each token that was drawn but the last of a response.
    assert sampler.cost.forward_tokens == 18 + drawn(leaves) - len(leaves)
    assert sampler.cost.forwards == len(model.rows)
    assert sampler.cost.generated < sum(len(leaf.token_ids) for leaf in leaves)


def test_limits_bound_what_grows_at_the_same_time() -> None:
    prompts = [(1, 2, 4, n) for n in range(8)]
    # 4 prompt tokens, and 3 + 6 nodes of 3 tokens: 31 for a tree. 15 tokens for a slot.
    for limits, at_once, prefill, rows in (
        ({}, 8, 8, 96),
        ({"max_tree_tokens": 92}, 2, 2, 24),
        ({"max_tree_tokens": 31}, 1, 1, 12),
        ({"max_batch": 5}, 8, 8, 5),
        ({"max_cache_tokens": 59}, 8, 8, 3),
        ({"prefill_tokens": 12}, 8, 3, 96),
    ):
        model, planted, together = Scripted(hashed(stop=-3)), [], []

        class Watched(TreeSampler):
            def _plant(self, waiting, most, planted=planted, together=together):
                trees = super()._plant(waiting, most)
                planted.append(trees)
                together.append(sum(tree.leaves is None for trees in planted for tree in trees))
                return trees

        Watched(model, 0, RULE, **limits).sample(prompts, PLAIN, "run", 5, LIMIT)
        assert sum(map(len, planted)) == 8 and max(map(len, planted)) == prefill
        assert max(together) == at_once
        assert max(model.decoded) <= rows


def test_siblings_and_cousins_are_independent() -> None:
    """χ² of pairs of tokens against p(x)·p(y), at the 99.9 % quantile, for children of one node and of two."""
    p, n = (0.4, 0.3, 0.2, 0.1), 800
    logits = [*map(math.log, p), *[NEVER] * (SIZE - 4)]
    leaves, _ = sample(Scripted(lambda history: logits), SPOTreeRule((2, 2), 1), [(1,)] * n, Sampling(()), limit=2)
    assert len(leaves) == 4 * n
    trees = [leaves[i : i + 4] for i in range(0, 4 * n, 4)]
    expected = {(x, y): n * p[x] * p[y] for x in range(4) for y in range(4)}
    for name, pairs in {
        "siblings of the first level": [(t[0].token_ids[0], t[2].token_ids[0]) for t in trees],
        "siblings of the second": [(t[0].token_ids[1], t[1].token_ids[1]) for t in trees],
        "cousins": [(t[0].token_ids[1], t[2].token_ids[1]) for t in trees],
        "parent and child": [t[3].token_ids for t in trees],
        "trees": [(a[0].token_ids[1], b[0].token_ids[1]) for a, b in zip(trees, [*trees[1:], trees[0]], strict=True)],
    }.items():
        chi2, limit = chi_square(Counter(pairs), expected)
        assert chi2 < limit, name


def test_an_ending_of_the_hosts_own() -> None:
    asked = []

    def ended(response):
        asked.append(response)
        return "boxed" if response[-1] == 6 else None

    got, _ = sample(Scripted(forced([7, 5, 7, 6, 7, 7])), SPOTreeRule((2, 2, 2), 2), [(1,)], limit=8, ended=ended)
    # Asked at both borders of 2 and 4 edges, with the whole response; the second one ends it, without a stop token.
    assert asked == [(7, 5)] * 2 + [(7, 5, 7, 6)] * 4
    assert [(leaf.token_ids, leaf.finish) for leaf in got] == [((7, 5, 7, 6), "boxed")] * 4
    asked.clear()
    stopped, _ = sample(Scripted(forced([7, STOP])), SPOTreeRule((2, 2), 2), [(1,)], limit=8, ended=ended)
    assert not asked and {leaf.finish for leaf in stopped} == {"stop"}
    at_limit, _ = sample(Scripted(forced([7, 7, 6])), SPOTreeRule((2, 2), 2), [(1,)], limit=3, ended=ended)
    assert {leaf.finish for leaf in at_limit} == {"boxed"}, "where both hold, it says why and not how long"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_the_engines_scores(temperature: float) -> None:
    model, prompts = llama(), [ids(5, seed) for seed in range(3)]
    sampling = Sampling((STOP,), temperature=temperature, top_k=12)
    leaves, sampler = sample(model, SPOTreeRule((3, 2), 5), prompts, sampling, 14)
    for leaf in leaves:
        prompt = prompts[leaf.prompt]
        wanted, _ = TransformersEngine(model, 0).score([*prompt, *leaf.token_ids], len(prompt), temperature)
        torch.testing.assert_close(torch.tensor(leaf.logprobs), wanted, atol=1e-5, rtol=1e-6)
    assert sampler.cost.forward_tokens == 15 + drawn(leaves) - len(leaves)


def test_on_the_embedded_policy() -> None:
    model, tokenizer = load_policy()
    prompts = [tuple(tokenizer(f"{text}=?\n")["input_ids"]) for text in ("47+8*7-9", "12*3+4-8", "99-5+6*2")]
    sampling = Sampling((tokenizer.eos_token_id,))
    leaves, sampler = sample(model, SPOTreeRule((3, 3), 12), prompts, sampling, 64)
    assert sampler.cost.forward_tokens == sum(map(len, prompts)) + drawn(leaves) - len(leaves)
    assert len(leaves) <= 27 and any(tokenizer.decode(leaf.token_ids).startswith("47+8=55\n\n") for leaf in leaves)
    for leaf in leaves[::4]:
        prompt = prompts[leaf.prompt]
        wanted, _ = TransformersEngine(model, 0).score([*prompt, *leaf.token_ids], len(prompt), 1.0)
        torch.testing.assert_close(torch.tensor(leaf.logprobs), wanted, atol=1e-5, rtol=2e-5)
    few, _ = sample(model, SPOTreeRule((3, 3), 12), prompts, sampling, 64, max_batch=4, prefill_tokens=1)
    same(few, leaves)


def test_leaves_no_trace() -> None:
    model = llama(attention_dropout=0.5).train()
    state = torch.get_rng_state()
    leaves, _ = sample(model, SPOTreeRule((2, 2), 4), [ids(6)], limit=9)
    same(leaves, sample(llama(), SPOTreeRule((2, 2), 4), [ids(6)], limit=9)[0])
    assert model.training and torch.is_grad_enabled() and torch.equal(torch.get_rng_state(), state)


def test_layers_that_keep_every_key() -> None:
    prompts = [ids(6)]
    whole, _ = sample(mistral(64), SPOTreeRule((2, 2), 4), prompts, Sampling(()), limit=9)
    assert len(whole) == 4
    with pytest.raises(InputError, match="full attention"):
        sample(mistral(8), SPOTreeRule((2, 2), 4), prompts, limit=9)


def test_nothing_asked_nothing_run() -> None:
    model = Scripted(hashed())
    assert sample(model, prompts=[])[0] == [] and not model.rows


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("prompt 1", {"prompts": [(1,), ()]}),
        ("names", {"names": ["a"]}),
        ("names", {"names": ["a", "b", "a", "c"]}),
        ("max_cache_tokens", {"max_cache_tokens": 16}),
        ("max_tree_tokens", {"max_tree_tokens": 32}),
        ("spo_tree.level_tokens", {"limit": 6}),
    ],
)
def test_what_cannot_be_sampled_costs_nothing(field: str, change: dict) -> None:
    model = Scripted(hashed())
    with pytest.raises(InputError) as error:
        sample(model, **change)
    assert error.value.field == field and not model.rows


@pytest.mark.parametrize(
    ("field", "branching", "tokens"),
    [
        ("spo_tree.branching", (), 1),
        ("spo_tree.branching", (2, 0), 1),
        ("spo_tree.branching", (1, 1), 1),
        ("spo_tree.level_tokens", (2, 2), 0),
    ],
)
def test_trees_that_are_none(field: str, branching: tuple[int, ...], tokens: int) -> None:
    with pytest.raises(InputError) as error:
        SPOTreeRule(branching, tokens)
    assert error.value.field == field


def test_bounds_by_hand() -> None:
    bounds = SPOTreeRule((6, 6, 6), 100).bounds(300)
    # 6 + 36 nodes have children; the last level has at least one token after 200.
    assert (bounds.limit, bounds.rows, bounds.stored) == (300, 216, 4_200)
    assert SPOTreeRule((6, 6, 6), 100).bounds(201).limit == 201
    with pytest.raises(InputError, match="200"):
        SPOTreeRule((6, 6, 6), 100).bounds(200)


EXPECTED = sample(Scripted(hashed()), names=NAMES)[0]
assert VOCABULARY > STOP
