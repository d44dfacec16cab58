"""Edges of a tree once each, and a queue that gives every prompt its number, drops what is old, and survives a file.

Planted faults seen caught: edges by id without their group, or once a row; advantages of unscored rows; a prefix that
holds the edge; masked tokens let through; newest first; a wait of one update more or less; one number for all prompts;
edges of advantage 0 kept; float32 in the file; counts lost.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from apportion.credit.record import Credit
from apportion.credit.spo_tree import SPOTree
from apportion.errors import InputError
from apportion.groups import grpo_base
from apportion.measure.evidence import Evidence
from apportion.rollouts import Rollouts
from apportion.train.replay import Edge, EdgeReplay, edges_of

# Two prompts. The first has two nodes with two leaves each, edges of 2 and 1 tokens; the second two leaves under the
# ids of the first. Rewards 1, 0, 0, 0 make the values .5 and 0 of nodes 0 and 1, and .25 of the prompt.
ROWS = [
    ("x", ("0", "0.0"), (10, 11, 12), 1.0), ("x", ("0", "0.1"), (10, 11, 13), 0.0),
    ("x", ("1", "1.0"), (20, 21, 22), 0.0), ("x", ("1", "1.1"), (20, 21, 23), 0.0),
    ("y", ("0", "0.0"), (30, 31, 32), 0.0), ("y", ("0", "0.1"), (30, 31, 33), 1.0),
]  # fmt: skip
PROMPTS = {"x": (1, 2), "y": (3,)}
BY_HAND = {
    ((1, 2), (), (10, 11)): 0.25,
    ((1, 2), (10, 11), (12,)): 0.5,
    ((1, 2), (10, 11), (13,)): -0.5,
    ((1, 2), (), (20, 21)): -0.25,
    ((1, 2), (20, 21), (22,)): 0.0,
    ((1, 2), (20, 21), (23,)): 0.0,
    ((3,), (), (30, 31)): 0.0,
    ((3,), (30, 31), (32,)): -0.5,
    ((3,), (30, 31), (33,)): 0.5,
}


def logprob(token: int) -> float:
    """Of the tests' tokens when they were sampled; float32 holds it exactly."""
    return -token / 64


def batch(rows=ROWS, **change) -> Rollouts:
    names = tuple(dict.fromkeys(group for group, *_ in rows))
    return Rollouts.from_lists(
        [ids for _, _, ids, _ in rows],
        [group for group, *_ in rows],
        [reward for *_, reward in rows],
        **{
            "boundary": [[0, 0, 1]] * len(rows),
            "old_logprob": [[logprob(token) for token in ids] for _, _, ids, _ in rows],
            "prompt_ids": tuple(torch.tensor(PROMPTS[name]) for name in names),
            "path": tuple(path for _, path, _, _ in rows),
            **change,
        },
    )


def credited(rollouts: Rollouts) -> Credit:
    return SPOTree().assign(rollouts, Evidence(), grpo_base(rollouts))


def table(edges: list[Edge]) -> dict[tuple, float]:
    out = {(e.prompt_ids, e.prefix_ids, e.token_ids): e.advantage for e in edges}
    assert len(out) == len(edges)
    return out


def test_every_edge_once_by_hand() -> None:
    rollouts = batch()
    edges = edges_of(rollouts, credited(rollouts), update=7)
    assert table(edges) == BY_HAND
    assert [e.token_ids for e in edges[:4]] == [(10, 11), (12,), (13,), (20, 21)]
    for e in edges:
        assert e.born == 7 and e.old_logprob == tuple(map(logprob, e.token_ids))


@settings(max_examples=25)
@given(st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing(shuffle: random.Random) -> None:
    rows = ROWS.copy()
    shuffle.shuffle(rows)
    rollouts = batch(rows)
    assert table(edges_of(rollouts, credited(rollouts), 0)) == BY_HAND


def test_an_unscored_response_says_nothing_of_its_edges() -> None:
    """Without the first response, node 0 is worth 0; then all of x is alike. y's first row has no say, nor its edge."""
    rows = [
        ("x", ("0", "0.0"), (10, 11, 12), None), ("x", ("0", "0.1"), (10, 11, 13), 1.0),
        ("x", ("1", "1.0"), (20, 21, 22), 0.0), ("x", ("2",), (20, 25, 22), None),
    ]  # fmt: skip
    rollouts = batch(rows, boundary=[[0, 0, 1]] * 3 + [[0, 0, 0]])
    # V(0) = 1, V(1) = 0, V(x) = .5; the only children that are scored are worth what their parents are.
    assert table(edges_of(rollouts, credited(rollouts), 0)) == {
        ((1, 2), (), (10, 11)): 0.5,
        ((1, 2), (10, 11), (13,)): 0.0,
        ((1, 2), (), (20, 21)): -0.5,
        ((1, 2), (20, 21), (22,)): 0.0,
    }


def test_a_response_that_is_masked_as_a_whole_is_left_out() -> None:
    mask = [[1, 1, 1]] * 5 + [[0, 0, 0]]
    rollouts = batch(mask=mask)
    got = table(edges_of(rollouts, credited(rollouts), 0))
    assert ((3,), (30, 31), (33,)) not in got and len(got) == 8


def test_what_cannot_be_cut_into_edges() -> None:
    rollouts = batch()
    flat = torch.zeros(18)
    part = flat.clone()
    part[1] = 0.5

    def credit(token: torch.Tensor) -> Credit:
        return Credit(token, torch.zeros(6), "spo_tree", {})

    with pytest.raises(InputError, match="credit of row 0: got several advantages"):
        edges_of(rollouts, credit(part), 0)
    with pytest.raises(InputError, match="mask of row 1"):
        edges_of(batch(mask=[[1, 1, 1], [1, 1, 0], *[[1, 1, 1]] * 4]), credit(flat), 0)
    for field in ("path", "prompt_ids", "old_logprob"):
        with pytest.raises(InputError, match=field):
            edges_of(batch(**{field: None}), credit(flat), 0)
    with pytest.raises(InputError, match="path of row 0"):
        edges_of(batch(boundary=[[0, 1, 1]] * 6), credit(flat), 0)


def edge(number: int, prompt: int = 1, born: int = 0, advantage: float = 1.0) -> Edge:
    return Edge((prompt,), (5,) * (number % 3), (number, 4), (-0.1 * number, -1 / 3), advantage, born)


def numbers(taken: list[list[Edge]]) -> list[list[int]]:
    return [[e.token_ids[0] for e in edges] for edges in taken]


def test_at_most_so_many_of_a_prompt_and_older_ones_first() -> None:
    queue = EdgeReplay(edges=3, wait=8)
    queue.add([edge(n, prompt) for n in range(5) for prompt in (1, 2)])
    assert len(queue) == 10
    assert numbers(queue.take(0)) == [[0, 1, 2]] * 2
    queue.add([edge(9, 2, born=1), edge(8, 3, born=1)])
    # Two of prompt 1; the two old ones of prompt 2 and the new one share its three; prompt 3 came last.
    assert numbers(queue.take(1)) == [[3, 4], [3, 4, 9], [8]]
    assert queue.take(2) == [] and len(queue) == 0
    assert queue.counts == {"trained": 12, "expired": 0}


def test_the_papers_numbers() -> None:
    """300 edges of one prompt: 32 in each of the updates 0 to 8, the other 12 are dropped."""
    queue = EdgeReplay()
    queue.add([edge(n) for n in range(300)])
    counts = [sum(map(len, queue.take(update))) for update in range(10)]
    assert counts == [32] * 9 + [0]
    assert queue.counts == {"trained": 288, "expired": 12} and len(queue) == 0


def test_an_edge_waits_so_many_updates_and_not_one_more() -> None:
    for gap, found in ((8, [[0]]), (9, [])):
        queue = EdgeReplay()
        queue.add([edge(0, born=5)])
        assert numbers(queue.take(5 + gap)) == found
        assert queue.counts["expired"] == (not found)
    now = EdgeReplay(edges=1, wait=0)
    now.add([edge(0), edge(1)])
    assert numbers(now.take(0)) == [[0]] and now.take(1) == [] and now.counts["expired"] == 1
    mixed = EdgeReplay(edges=2, wait=1)
    mixed.add([edge(0), edge(1, born=2), edge(2, born=2)])
    assert numbers(mixed.take(2)) == [[1, 2]], "one that is dropped takes no place"


def test_edges_without_advantage_are_dropped_when_they_come() -> None:
    queue = EdgeReplay(edges=2)
    queue.add([edge(0, advantage=0.0), edge(1), edge(2, advantage=-0.0), edge(3, advantage=-1e-30)])
    assert queue.counts["zero"] == 2 and numbers(queue.take(0)) == [[1, 3]]
    rollouts = batch()
    queue.add(edges_of(rollouts, credited(rollouts), 1))
    assert queue.counts["zero"] == 5 and len(queue) == 6


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_bit_equal_after_a_file(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    fill, path = random.Random(seed), tmp_path_factory.getbasetemp() / "replay.safetensors"
    queue, again = EdgeReplay(edges=3, wait=2), EdgeReplay(edges=3, wait=2)
    for update in range(4):
        queue.add(
            Edge(
                tuple(fill.choices(range(2**40), k=fill.choice((1, 1, 4)))) if fill.random() < 0.3 else (7, 8),
                tuple(fill.choices(range(9), k=fill.randrange(4))),
                tuple(fill.choices(range(9), k=n)),
                tuple(math.log(fill.random()) for _ in range(n)),
                fill.choice((0.0, fill.gauss(0, 1), 1e-300, 0.1)), update,
            )
            for _ in range(fill.randrange(9))
            for n in [fill.randrange(1, 5)]
        )  # fmt: skip
        tensors, metadata = queue.state_dict()
        save_file(tensors, path, metadata=metadata)
        with safe_open(path, framework="pt") as file:
            again.load_state_dict(load_file(path), file.metadata())
        assert len(again) == len(queue) and again.counts == queue.counts
        copy, same = again.take(update), queue.take(update)
        assert copy == same
        assert again.state_dict()[1] == queue.state_dict()[1]
        for name, tensor in queue.state_dict()[0].items():
            assert torch.equal(again.state_dict()[0][name], tensor)


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("edges", lambda: EdgeReplay(edges=0)),
        ("wait", lambda: EdgeReplay(wait=-1)),
        ("edge.old_logprob", lambda: Edge((1,), (), (2,), (), 1.0, 0)),
        ("edge.old_logprob", lambda: Edge((1,), (), (), (), 1.0, 0)),
        ("edge.old_logprob", lambda: Edge((1,), (), (2,), (math.nan,), 1.0, 0)),
        ("edge.advantage", lambda: Edge((1,), (), (2,), (-1.0,), math.inf, 0)),
    ],
)
def test_what_is_refused(field: str, call) -> None:
    with pytest.raises(InputError) as error:
        call()
    assert error.value.field == field


def test_updates_do_not_go_back() -> None:
    queue = EdgeReplay()
    queue.add([edge(0, born=3)])
    with pytest.raises(InputError, match="update: got 2; expected at least 3"):
        queue.take(2)
