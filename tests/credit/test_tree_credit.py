"""SPO-tree and TreePO: hand-worked trees, both layouts of a path, their slow references and their properties.

Planted in a copy of the package and seen caught here: a node worth the sum of its children, or the mean of its
leaves; a node known by group and id without its prefix; keys of nodes that collide; a prompt that is another's
child; the edge laid on its start instead of its end; a root id read as an edge; a node without ends given one worth
0; ends left out of the siblings; no tolerance for equal values; ddof or ε ignored; a response's first token that
opens no segment; a path too long for its response; empty responses checked; roots compared across groups; abstained
responses paid, counted as 0, or counted among the leaves or the edges; an edge at its parent's value up to rounding
not 0; the sign; the leave-one-out factor upside down; TreePO without depth 0, with the whole group twice, with a leaf
as its own subgroup, with the size switch reversed; whitening over masked tokens or without collapsed groups;
collapsed groups paid; `batch_wide` denied.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference_trees
from apportion.credit.baselines import GRPO, RLOO, DrGRPO
from apportion.credit.method import CreditMethod
from apportion.credit.record import Credit
from apportion.credit.reinforce_pp import ReinforcePPBaseline
from apportion.credit.spo_tree import SPOTree
from apportion.credit.treepo import TreePO
from apportion.errors import InputError
from apportion.measure.evidence import Evidence
from apportion.rollouts import Rollouts
from apportion.testing.laws import LAWS, Law
from reference_trees import Leaf
from strategies import NAN, REWARDS, Batch, batches

METHODS: list[CreditMethod] = [
    SPOTree(),
    SPOTree(baseline="leave_one_out"),
    SPOTree(scale="siblings"),
    SPOTree(baseline="leave_one_out", scale="siblings", ddof=1),
    TreePO(),
    TreePO(size_weighted=True, ddof=0),
    TreePO(whiten=False),
    TreePO(whiten=False, size_weighted=True),
]


def named(value: Any) -> str:
    changed = {k: v for k, v in value.settings.items() if v != type(value).model_fields[k].default}
    return "-".join([value.name, *map(str, changed.values())])


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("method", METHODS, ids=named)
def test_law(method: CreditMethod, law: Law) -> None:
    law(method)


def leaf(path: str, reward: float | None, lengths: list[int] | None = None, group: str = "q", **rest: Any) -> Leaf:
    """A response by its path, one letter an edge, and the number of tokens of each edge (1)."""
    lengths = lengths or [1] * len(path)
    n = sum(lengths)
    starts = [sum(lengths[:k]) for k in range(1, len(lengths))]
    mask = rest.get("mask", [True] * n)
    return Leaf([0] * n, group, NAN if reward is None else reward, mask, [0.0] * n, starts, list(path))


def batch_of(leaves: list[Leaf], root: str | None = None) -> Rollouts:
    """One id an edge, or with `root` in front of every path."""
    return Rollouts.from_lists(
        [y.ids for y in leaves], [y.group for y in leaves], [y.reward for y in leaves],
        mask=[y.mask for y in leaves], boundary=[[t in y.starts for t in range(len(y.ids))] for y in leaves],
        path=tuple((*([] if root is None else [root]), *y.path) for y in leaves),
    )  # fmt: skip


def credit_of(method: CreditMethod, rollouts: Rollouts) -> Credit:
    return method.assign(rollouts, Evidence(), method.base(rollouts))


def rows_of(method: CreditMethod, leaves: list[Leaf]) -> list[list[float]]:
    """Advantages by response, which must be the same to the bit in both layouts."""
    bare, rooted = (credit_of(method, batch_of(leaves, root)).token for root in (None, "0"))
    assert torch.equal(bare, rooted)
    return [row.tolist() for row in bare.split([len(y.ids) for y in leaves])]


def flat(method: CreditMethod, leaves: list[Leaf]) -> list[float]:
    return [a for row in rows_of(method, leaves) for a in row]


SIBLINGS = [leaf("a", 0.0), leaf("b", 0.5), leaf("c", 1.0)]
# σ = √(.5/3) = .4082483 over the population, √(.5/2) = .5 over the sample.
SCALED = [
    ({}, [-0.5, 0, 0.5]),
    # 0 − (.5 + 1)/2; .5 − (0 + 1)/2; 1 − (0 + .5)/2.
    ({"baseline": "leave_one_out"}, [-0.75, 0, 0.75]),
    ({"scale": "siblings"}, [-1.2247449, 0, 1.2247449]),
    ({"scale": "siblings", "ddof": 1}, [-1, 0, 1]),
    ({"scale": "siblings", "epsilon": 0.5, "ddof": 1}, [-0.5, 0, 0.5]),
    ({"scale": "siblings", "baseline": "leave_one_out", "ddof": 1}, [-1.5, 0, 1.5]),
]


@pytest.mark.parametrize("settings_, wanted", SCALED, ids=str)
def test_three_siblings(settings_: dict[str, Any], wanted: list[float]) -> None:
    assert flat(SPOTree(**settings_), SIBLINGS) == pytest.approx(wanted, abs=1e-6)


# A leaf of 1 beside a node with three leaves of 0: V = (1 + 0)/2 = .5, where the mean of the leaves is .25.
LOPSIDED = [leaf("a", 1.0), *(leaf("b" + c, 0.0, [2, 1]) for c in "xyz")]


def test_a_value_is_the_mean_of_children_and_not_of_leaves() -> None:
    assert rows_of(SPOTree(), LOPSIDED) == [[0.5], *([[-0.5, -0.5, 0]] * 3)]
    credit = credit_of(SPOTree(), batch_of(LOPSIDED))
    cut = credit.segments
    assert cut is not None
    assert cut.raw.tolist() == cut.shrunk.tolist() == [0.5, 0.5, 0, 0.5, 0, 0.5, 0]
    assert cut.increment.tolist() == [0.5, -0.5, 0, -0.5, 0, -0.5, 0]
    assert cut.samples.tolist() == [4, 4, 3, 4, 3, 4, 3]
    # σ of the prompt's children (1, 0) is .5, over √2; the three leaves agree.
    assert cut.stderr.tolist() == pytest.approx([0.3535534, *([0.3535534, 0] * 3)])
    # Edges a, b, bx, by, bz: the last three have advantage 0.
    assert credit.counts == {"edges": 5, "zero_edges": 3}
    # TreePO: 1 − .25; 0 − .25 and 0 − 0, averaged.
    assert flat(TreePO(whiten=False), LOPSIDED) == pytest.approx([0.75, *[-0.125] * 9])


def test_a_path_that_ends_inside_the_tree_is_one_more_child() -> None:
    """V(a) = (1 + 0 + .5)/3 = .5, V(b) = 0, V = .25. The end has no token, and row 2 has the edge into a."""
    leaves = [leaf("ax", 1.0), leaf("ay", 0.0), leaf("a", 0.5), leaf("b", 0.0)]
    assert rows_of(SPOTree(), leaves) == [[0.25, 0.5], [0.25, -0.5], [0.25], [-0.25]]
    # Two such ends are together one child, worth .5: V(a) = (1 + .5)/2 = .75, V = .375.
    leaves = [leaf("ax", 1.0), leaf("a", 1.0), leaf("a", 0.0), leaf("b", 0.0)]
    assert rows_of(SPOTree(), leaves) == [[0.375, 0.25], [0.375], [0.375], [-0.375]]
    # TreePO: group mean .5, and 2/3 for the three that share a: ((1 − .5) + (1 − 2/3))/2, ((0 − .5) + (0 − 2/3))/2.
    assert flat(TreePO(whiten=False), leaves) == pytest.approx([5 / 12, 5 / 12, 5 / 12, -7 / 12, -0.5])


def test_values_that_only_rounding_tells_apart_are_equal() -> None:
    """V(a) = (.1 + .2 + .3)/3 is .20000000000000004. Divided by σ = 1.4e-17 the edges a and b would get 1 and −1."""
    leaves = [leaf("ax", 0.1), leaf("ay", 0.2), leaf("az", 0.3), leaf("b", 0.2)]
    got = rows_of(SPOTree(scale="siblings", epsilon=0), leaves)
    assert [row[0] for row in got] == [0, 0, 0, 0]
    # σ of (.1, .2, .3) is √(.02/3).
    assert [row[-1] for row in got[:3]] == pytest.approx([-1.2247449, 0, 1.2247449], abs=1e-6)
    assert credit_of(SPOTree(), batch_of(leaves)).counts == {"edges": 5, "zero_edges": 3}


def test_responses_that_end_in_one_node_are_one_leaf() -> None:
    """V(a) = (1 + 0)/2; V = (.5 + 1)/2 = .75."""
    assert rows_of(SPOTree(), [leaf("a", 1.0), leaf("a", 0.0), leaf("b", 1.0)]) == [[-0.25], [-0.25], [0.25]]


def test_what_has_no_reward_or_no_trainable_token_is_no_leaf() -> None:
    """Of a, b, c only a and c count: V = .5. Below d and e nobody does, and nobody else moves."""
    none = [False, False]
    rest = [leaf("b", None), leaf("dx", None), leaf("e", 9.0, [2], mask=none), leaf("c", 9.0, [2], mask=none)]
    leaves = [leaf("a", 1.0), *rest, leaf("c", 0.0)]
    for method in (SPOTree(), TreePO(whiten=False)):
        assert rows_of(method, leaves) == [[0.5], [0], [0, 0], [0, 0], [0, 0], [-0.5]]
    credit = credit_of(SPOTree(), batch_of(leaves))
    assert credit.counts == {"edges": 2, "zero_edges": 0}
    cut = credit.segments
    assert cut is not None and cut.samples.tolist() == [2, 2, 2, 0, 2, 2, 2] and not cut.stderr.isnan().any()


def test_masked_tokens_of_an_edge_get_nothing() -> None:
    leaves = [leaf("ax", 1.0, [2, 2], mask=[True, False, False, True]), leaf("ay", 0.0), leaf("b", 0.0)]
    assert rows_of(SPOTree(), leaves) == [[0.25, 0, 0, 0.5], [0.25, -0.5], [-0.25]]


def test_nodes_are_told_apart_by_group_and_prefix() -> None:
    """The id x stands below a, below b, and in another group."""
    leaves = [leaf("ax", 1.0), leaf("bx", 0.0), leaf("ax", 0.0, group="p"), leaf("bx", 1.0, group="p")]
    assert rows_of(SPOTree(), leaves) == [[0.5, 0], [-0.5, 0], [-0.5, 0], [0.5, 0]]
    assert rows_of(TreePO(whiten=False), leaves) == [[0.5, 0.5], [-0.5, -0.5], [-0.5, -0.5], [0.5, 0.5]]


PAIRS = [leaf("ax", 1.0, [1, 1]), leaf("ay", 0.0, [1]), leaf("bx", 0.0, [1]), leaf("by", 0.0, [1])]


@pytest.mark.parametrize(
    "settings_, wanted",
    [
        # (.75 + .5)/2; (−.25 − .5)/2; (−.25 + 0)/2.
        ({"whiten": False}, [0.625, -0.375, -0.125, -0.125]),
        # Weights 4 and 2: (3 + 1)/6; (−1 − 1)/6; (−1 + 0)/6.
        ({"whiten": False, "size_weighted": True}, [0.6666667, -0.3333333, -0.1666667, -0.1666667]),
        # Tokens .625, .625, −.375, −.125, −.125: mean .125, squares .25·3 + .0625·2 = .875, σ = √(.875/4) = .4677072.
        ({}, [1.0690450, -1.0690450, -0.5345225, -0.5345225]),
    ],
    ids=str,
)
def test_treepo_two_pairs(settings_: dict[str, Any], wanted: list[float]) -> None:
    for root in (None, "0"):
        path = tuple((*([] if root is None else [root]), *y.path) for y in PAIRS)
        # Nothing but the path counts: no boundary is given.
        rollouts = replace(batch_of(PAIRS), boundary=None, path=path)
        credit = credit_of(TreePO(**settings_), rollouts)
        assert credit.base.tolist() == pytest.approx(wanted, abs=1e-6)
        assert torch.equal(credit.token, credit.base[rollouts.row])


def test_treepo_counts_every_depth_that_some_share_and_the_whole_group_once() -> None:
    """All share r: the group again. Two share ra and rac: ((1 − 1/3) + .5 + .5)/3, ((0 − 1/3) − .5 − .5)/3."""
    leaves = [leaf("racx", 1.0), leaf("racy", 0.0), leaf("rb", 0.0)]
    credit = credit_of(TreePO(whiten=False), batch_of(leaves))
    assert credit.base.tolist() == pytest.approx([5 / 9, -4 / 9, -1 / 3])


def test_a_collapsed_group_counts_in_the_whitening_and_gets_nothing() -> None:
    """Tokens .5, −.5, 0, 0: mean 0, σ = √(.5/3) = .4082483."""
    leaves = [leaf("a", 1.0), leaf("b", 0.0), leaf("a", 1.0, group="p"), leaf("b", 1.0, group="p")]
    assert flat(TreePO(), leaves) == pytest.approx([1.2247449, -1.2247449, 0, 0])
    shifted = [leaf("a", 1.0, [3]), *leaves[1:]]
    assert rows_of(TreePO(), shifted)[2:] == [[0], [0]], "the mean is not 0 here, and they still get nothing"


@pytest.mark.parametrize("method", [SPOTree(), TreePO()], ids=named)
def test_a_batch_without_paths_is_refused(method: CreditMethod) -> None:
    with pytest.raises(InputError, match=f"{method.name}: path: got none"):
        credit_of(method, replace(batch_of(SIBLINGS), path=None))


@pytest.mark.parametrize(
    "paths, message",
    [
        ((("a", "x"), ("b",)), r"path of row 1: got 1 ids for 2 segments; expected 2, one a segment, or 3 with the ro"),
        ((("r", "q", "a", "x"), ("r", "b", "x")), r"path of row 0: got 4 ids for 2 segments"),
        (((), ("b", "x")), r"path of row 0: got 0 ids for 2 segments"),
        ((("r", "a", "x"), ("s", "b", "x")), r"path of row 0: got root 'r'; expected the root that other paths"),
        ((("r", "a", "x"), ("b", "x")), r"path of row 1: got no id for the root"),
    ],
    ids=str,
)
def test_a_path_that_does_not_fit_its_response_is_refused(paths: tuple[tuple[str, ...], ...], message: str) -> None:
    rollouts = batch_of([leaf("ax", 1.0), leaf("bx", 0.0)])
    with pytest.raises(InputError, match="spo_tree: " + message):
        credit_of(SPOTree(), replace(rollouts, path=paths))


def test_groups_may_differ_in_layout_and_empty_responses_in_anything() -> None:
    rollouts = batch_of([leaf("a", 1.0), leaf("b", 0.0), leaf("a", 1.0, group="p"), leaf("b", 0.0, group="p")])
    mixed = replace(rollouts, path=(("a",), ("b",), ("r", "a"), ("r", "b")))
    assert credit_of(SPOTree(), mixed).token.tolist() == [0.5, -0.5, 0.5, -0.5]
    empty = replace(batch_of([leaf("a", 1.0), leaf("b", 0.0), leaf("", 1.0)]), path=(("a",), ("b",), ("x", "y", "z")))
    for method in (SPOTree(), TreePO(whiten=False)):
        assert credit_of(method, empty).token.tolist() == [0.5, -0.5]


@pytest.mark.parametrize("bad", [{"branching": ()}, {"branching": (6, 0)}, {"level_tokens": 0}, {"edges": 0}])
def test_settings_of_the_tree_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SPOTree(**bad)


@st.composite
def trees(draw: st.DrawFn) -> list[Leaf]:
    """Up to three trees of up to four levels. Ids are reused in every branch; some paths end inside, or together."""
    fill = random.Random(draw(st.integers(0, 2**32)))
    widest = draw(st.sampled_from([1, 2, 3]))
    masked = draw(st.sampled_from([0.0, 0.3, 0.9]))
    found: list[Leaf] = []

    def grow(group: str, path: list[str], lengths: list[int]) -> None:
        branches = fill.randrange(widest + 1) if 0 < len(path) < 4 else widest * (not path)
        for name in "abc"[:branches]:
            grow(group, [*path, name], [*lengths, fill.choice([1, 1, 2, 5])])
        for _ in range(fill.choice([0, 0, 0, 1, 2]) if branches else fill.choice([1, 1, 1, 2])):
            if path and fill.random() < 0.9:
                n = sum(lengths)
                y = leaf("".join(path), fill.choice(REWARDS), lengths, group)
                y.mask = [fill.random() >= masked for _ in range(n)]
                # A boundary at a response's own start opens nothing.
                y.starts += [0] * fill.randrange(2)
                found.append(y)
            elif path:
                found.append(replace(leaf("", 1.0, [], group), path=path))

    for group in range(draw(st.integers(1, 3))):
        grow(f"g{group}", [], [])
    fill.shuffle(found)
    # The reference walks the tree once an edge.
    return found[:30]


def settings_of(method: CreditMethod) -> dict[str, Any]:
    names = ("baseline", "scale", "whiten", "size_weighted", "ddof", "epsilon")
    return {name: value for name, value in method.settings.items() if name in names}


@pytest.mark.parametrize("method", METHODS, ids=named)
@settings(max_examples=40)
@given(leaves=trees(), root=st.sampled_from([None, "0", "a"]))
def test_equals_reference(method: CreditMethod, leaves: list[Leaf], root: str | None) -> None:
    token = credit_of(method, batch_of(leaves, root)).token
    slow = getattr(reference_trees, method.name)(leaves, **settings_of(method))
    torch.testing.assert_close(token, torch.tensor([a for row in slow for a in row]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", METHODS[::3], ids=named)
@settings(max_examples=30)
@given(leaves=trees(), seed=st.integers(0, 99))
def test_names_of_nodes_and_order_of_rows_do_not_matter(method: CreditMethod, leaves: list[Leaf], seed: int) -> None:
    token = credit_of(method, batch_of(leaves)).token
    renamed = [replace(y, path=[f"{seed}/{y.group}/{y.path[: k + 1]}" for k in range(len(y.path))]) for y in leaves]
    assert torch.equal(credit_of(method, batch_of(renamed)).token, token)
    order = random.Random(seed).sample(range(len(leaves)), len(leaves))
    got = credit_of(method, batch_of(leaves).select(order)).token.split([len(leaves[i].ids) for i in order])
    rows = token.split([len(y.ids) for y in leaves])
    torch.testing.assert_close(torch.cat([*got, token[:0]]), torch.cat([*(rows[i] for i in order), token[:0]]))


@settings(max_examples=40)
@given(leaves=trees(), root=st.sampled_from([None, "0"]))
def test_spo_tree_telescopes_and_siblings_sum_to_0(leaves: list[Leaf], root: str | None) -> None:
    rollouts = batch_of(leaves, root)
    credit = credit_of(SPOTree(), rollouts)
    cut = credit.segments
    assert cut is not None and credit.invariants["telescoping"] < 1e-7
    assert torch.isfinite(cut.stderr).all()
    edge: dict[tuple[str, ...], float] = {}
    place = 0
    for row, y in enumerate(leaves):
        for k in range(int((cut.row == row).sum())):
            if y.scored:
                gain = edge.setdefault((y.group, *y.path[: k + 1]), cut.increment[place].item())
                assert gain == cut.increment[place].item(), "one edge, two advantages"
            place += 1
    for parent in {key[:-1] for key in edge}:
        ended = [y.reward for y in leaves if y.scored and (y.group, *y.path) == parent]
        if not ended:
            assert sum(gain for key, gain in edge.items() if key[:-1] == parent) == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize(
    "method, same",
    [
        (SPOTree(), DrGRPO()),
        (SPOTree(baseline="leave_one_out"), RLOO()),
        (SPOTree(scale="siblings"), GRPO(ddof=0, epsilon=1e-8)),
        (TreePO(whiten=False), DrGRPO()),
        (TreePO(whiten=False, size_weighted=True), DrGRPO()),
        (TreePO(), ReinforcePPBaseline()),
    ],
    ids=named,
)
@settings(max_examples=30)
@given(batch=batches())
def test_a_tree_that_never_branches_twice_is_a_known_method(
    method: CreditMethod, same: CreditMethod, batch: Batch
) -> None:
    bush = replace(batch.rollouts(), boundary=None, path=tuple((str(i),) for i in range(len(batch.responses))))
    torch.testing.assert_close(credit_of(method, bush).token, credit_of(same, bush).token, rtol=1e-5, atol=1e-6)
