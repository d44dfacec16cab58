"""Probing on the host, with a fake engine that misbehaves in every allowed way, and with the real one.

Planted faults seen caught: budget without the position; jobs without budget kept; `first` dropped; a response's
number that does not count; the prompt in the graded text at position 0; only a job's own pivot served; second
waves ignored; duplicates counted twice; abstention as 0; cue outside the reserve; rescue near the limit; answered
continuations rescued; shards by number instead of cost.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from apportion.engines.base import Continuation, Key, Request, Sampling
from apportion.engines.transformers import TransformersEngine
from apportion.errors import InputError
from apportion.measure.plan import Job
from apportion.measure.probe import Rescue, evidence_of, probe
from apportion.measure.wave import Probe, requests_of, shard
from apportion.rollouts import Rollouts

SAMPLING = Sampling((9,))
LIMIT = 10


def batch() -> Rollouts:
    """Two groups whose rows alternate; rows 0 and 2 open with the same two tokens."""
    return Rollouts.from_lists(
        [[1, 2, 3, 4, 9], [5, 6, 7, 9], [1, 2, 8, 9], [5, 5, 5, 5, 5, 5, 5, 5, 5, 5]],
        ["a", "b", "a", "b"],
        [1.0, 0.0, 0.0, None],
        prompt_ids=(torch.tensor([11, 12]), torch.tensor([13])),
    )


JOBS = [
    Job(0, 2, 3, ((0, 2), (2, 2))),
    Job(1, 0, 2, ((1, 0),)),
    Job(2, 3, 2, ((2, 3),)),
]


@dataclass
class FakeEngine:
    """Continuation m of any state is the token 20 + m and, unless the budget is 1, a stop token."""

    lose: Sequence[tuple[int, int]] = ()
    twice: bool = False
    order: int = 0
    asked: tuple[Request, ...] = ()

    def continuations(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Continuation]:
        self.asked += tuple(requests)
        out = [
            Continuation(r.key, m, (20 + m, 9)[: r.budget], "stop" if r.budget > 1 else "length")
            for r in requests for m in range(r.first, r.first + r.samples) if (r.key.position, m) not in self.lose
        ]  # fmt: skip
        random.Random(self.order).shuffle(out)
        yield from out + (out if self.twice else [])


def decode(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def grade(rows: list[int], responses: list[list[int]], texts: list[str]) -> list[float | None]:
    """Even m right, odd m wrong; m = 2 gets no verdict."""
    assert texts == [decode(ids) for ids in responses]
    return [None if 22 in ids else float(20 in ids or 24 in ids) for ids in responses]


def ask(engine, jobs: Sequence[Job] = JOBS, **change) -> list[Probe]:
    settings = dict(run="run", step=4, max_new_tokens=LIMIT) | change
    return probe(batch(), jobs, engine, SAMPLING, grade, decode, **settings)


def test_requests_carry_ids_budgets_and_keys() -> None:
    got = requests_of(batch(), [*JOBS, Job(3, 9, 1, ((3, 9),))], run="run", step=4, max_new_tokens=LIMIT, first=5)
    assert got == [
        Request(Key("run", 4, "a", 0, 2), (11, 12, 1, 2), 3, 8, 5),
        Request(Key("run", 4, "b", 0, 0), (13,), 2, 10, 5),
        Request(Key("run", 4, "a", 1, 3), (11, 12, 1, 2, 8), 2, 7, 5),
        Request(Key("run", 4, "b", 1, 9), (13, 5, 5, 5, 5, 5, 5, 5, 5, 5), 1, 1, 5),
    ]


def test_a_fresh_budget_is_every_continuations_own() -> None:
    """As in VinePPO's released code: 7 tokens for each, also where a response of the limit's length leaves none."""
    jobs = [*JOBS, Job(3, 9, 1, ((3, 9),))]
    asked = requests_of(batch(), jobs, run="r", step=1, max_new_tokens=9, fresh_budget=7)
    assert [r.budget for r in asked] == [7, 7, 7, 7]
    assert [r.budget for r in requests_of(batch(), jobs, run="r", step=1, max_new_tokens=9)] == [7, 9, 6]


def test_a_job_without_budget_is_dropped_and_counted() -> None:
    jobs = [*JOBS, Job(3, 9, 1, ((3, 9),))]
    engine = FakeEngine()
    probes = ask(engine, jobs, max_new_tokens=9)
    assert all(r.budget >= 1 for r in engine.asked) and len(engine.asked) == 3
    assert evidence_of(batch(), jobs, probes).dropped == 1


def test_waves_share_no_random_stream() -> None:
    one = requests_of(batch(), JOBS, run="r", step=0, max_new_tokens=LIMIT)
    two = requests_of(batch(), JOBS, run="r", step=0, max_new_tokens=LIMIT, first=3)
    streams = [r.key.stream(m) for r in one + two for m in range(r.first, r.first + r.samples)]
    assert len(set(streams)) == len(streams)


@pytest.mark.parametrize(
    ("jobs", "change", "field"),
    [
        ([Job(0, 5, 1, ((0, 5),))], {}, "job of row 0"),
        ([JOBS[0], JOBS[0]], {}, "job of row 0"),
        (JOBS, {"prompt_ids": None}, "prompt_ids"),
        (JOBS, {"names": ("a", "a")}, "names"),
    ],
)
def test_requests_name_bad_input(jobs: list[Job], change: dict, field: str) -> None:
    with pytest.raises(InputError, match=field):
        requests_of(replace(batch(), **change), jobs, run="r", step=0, max_new_tokens=LIMIT)


@given(cost=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 50)), max_size=12), world=st.integers(1, 5))
def test_shards_cover_everything_once_and_balance(cost: list[tuple[int, int]], world: int) -> None:
    asked = [Request(Key("r", 0, "p", i, 0), (1,), n, budget) for i, (n, budget) in enumerate(cost)]
    parts = [shard(asked, rank, world) for rank in range(world)]
    assert sorted(r.key.sample for part in parts for r in part) == list(range(len(asked)))
    for part in parts:
        assert [r.key.sample for r in part] == sorted(r.key.sample for r in part)
    loads = [sum(r.samples * r.budget for r in part) for part in parts]
    # Greedy: the fullest rank was the emptiest before its last request.
    assert max(loads) - min(loads) <= max((n * budget for n, budget in cost), default=0)


def test_shard_by_hand() -> None:
    # Costs 4, 18, 6, 6 on two ranks: 18 → 0, then 6, 6 and 4 → 1.
    asked = [Request(Key("r", 0, "p", i, 0), (1,), 2, c) for i, c in enumerate((2, 9, 3, 3))]
    assert [[r.key.sample for r in shard(asked, rank, 2)] for rank in (0, 1)] == [[1], [0, 2, 3]]
    with pytest.raises(InputError, match="rank"):
        shard(asked, 2, 2)


def test_probes_hold_full_responses_in_the_order_of_the_jobs() -> None:
    got = ask(FakeEngine(order=3, twice=True))
    assert [(p.row, p.position, p.m, p.reward) for p in got] == [
        (0, 2, 0, 1.0), (0, 2, 1, 0.0), (0, 2, 2, None), (1, 0, 0, 1.0), (1, 0, 1, 0.0), (2, 3, 0, 1.0), (2, 3, 1, 0.0),
    ]  # fmt: skip
    assert [p.text for p in got[:2]] == ["1 2 20 9", "1 2 21 9"], "kept tokens and continuation, no prompt"
    assert got[3].text == "20 9" and got[5].text == "1 2 8 20 9"
    assert got[0].token_ids == (20, 9) and got[0].key == Key("run", 4, "a", 0, 2)
    assert not any(p.rescued for p in got)


@given(order=st.integers(0, 99), twice=st.booleans(), world=st.integers(1, 4))
def test_order_duplicates_and_ranks_change_nothing(order: int, twice: bool, world: int) -> None:
    wanted = evidence_of(batch(), JOBS, ask(FakeEngine()))
    probes = [p for rank in range(world) for p in ask(FakeEngine(order=order, twice=twice), rank=rank, world=world)]
    probes += [replace(p) for p in probes if twice]
    random.Random(order).shuffle(probes)
    got = evidence_of(batch(), JOBS, probes)
    for field in ("row", "position", "mean", "stderr", "count"):
        assert torch.equal(getattr(got, field), getattr(wanted, field))


def test_evidence_reaches_every_pivot_of_a_job() -> None:
    got = evidence_of(batch(), JOBS, ask(FakeEngine()))
    # Rewards 1, 0 and an abstention at the shared state: mean ½, standard error √(¼/2), in rows 0 and 2.
    assert list(zip(got.row.tolist(), got.position.tolist(), strict=True)) == [(0, 2), (1, 0), (2, 2), (2, 3)]
    assert got.mean.tolist() == [0.5] * 4 and got.count.tolist() == [2] * 4
    assert got.stderr.tolist() == pytest.approx([math.sqrt(0.125)] * 4)
    assert got.dropped == 0


def test_a_lost_job_drops_its_pivots_and_nothing_else() -> None:
    lost = FakeEngine(lose=[(2, 0), (2, 1), (2, 2), (3, 1)])
    got = evidence_of(batch(), JOBS, ask(lost))
    assert list(zip(got.row.tolist(), got.position.tolist(), strict=True)) == [(1, 0), (2, 3)]
    assert got.count.tolist() == [2, 1] and got.mean.tolist() == [0.5, 1.0]
    assert got.dropped == 2


def test_a_pivot_that_only_abstained_is_dropped() -> None:
    got = evidence_of(batch(), JOBS[:1], [replace(p, reward=None) for p in ask(FakeEngine(), JOBS[:1])])
    assert len(got.row) == 0 and got.dropped == 2


def test_waves_are_pooled() -> None:
    # m = 0, 1 give 1, 0; the second wave's m = 3, 4, 5 give 0, 1, 0; both serve the state of rows 0 and 2.
    first, second = [replace(JOBS[0], samples=2)], [replace(JOBS[0], samples=3)]
    probes = ask(FakeEngine(), first) + ask(FakeEngine(), second, first=3)
    got = evidence_of(batch(), first + second, probes)
    assert got.count.tolist() == [5, 5] and got.mean.tolist() == pytest.approx([0.4, 0.4])


def test_evidence_of_an_unknown_state_is_refused() -> None:
    with pytest.raises(InputError, match="probe of row 1"):
        evidence_of(batch(), JOBS[:1], ask(FakeEngine()))


def test_nothing_to_do_calls_nobody() -> None:
    def never(*args):
        raise AssertionError("graded nothing")

    engine = FakeEngine()
    assert probe(batch(), [], engine, SAMPLING, never, decode, run="r", step=0, max_new_tokens=9) == []
    assert ask(engine, JOBS[:1], rank=1, world=2) == []
    assert not engine.asked


def test_nan_is_an_abstention_and_counts_must_match() -> None:
    def nan(rows, responses, texts):
        return [math.nan] * len(rows)

    settings = dict(run="r", step=0, max_new_tokens=9)
    got = probe(batch(), JOBS, FakeEngine(), SAMPLING, nan, decode, **settings)
    assert {p.reward for p in got} == {None}
    with pytest.raises(InputError, match="grade"):
        probe(batch(), JOBS, FakeEngine(), SAMPLING, lambda *_: [1.0], decode, **settings)


@pytest.mark.parametrize(
    "answer",
    [
        Continuation(Key("run", 4, "z", 0, 2), 0, (9,), "stop"),
        Continuation(Key("run", 4, "a", 0, 2), 7, (9,), "stop"),
        Continuation(Key("run", 4, "a", 0, 2), 0, (1,) * 9, "length"),
        Continuation(Key("run", 4, "a", 0, 2), 0, (), "stop"),
    ],
)
def test_answers_that_break_the_contract_are_refused(answer: Continuation) -> None:
    class Broken:
        def continuations(self, requests, sampling):
            yield answer

    with pytest.raises(InputError, match="continuation"):
        ask(Broken())


@dataclass
class CutEngine:
    """Sampled: m = 0 stops at once, m = 1 runs on with an answer (30), m = 2 without. Greedy: answers, stops."""

    calls: list[tuple[tuple[Request, ...], Sampling]]

    def continuations(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Continuation]:
        self.calls.append((tuple(requests), sampling))
        for r in requests:
            for m in range(r.first, r.first + r.samples):
                if sampling.top_k == 1:
                    yield Continuation(r.key, m, (30, 9), "stop")
                elif m == 0:
                    yield Continuation(r.key, m, (21, 9), "stop")
                else:
                    yield Continuation(r.key, m, ((30 if m == 1 else 21),) * r.budget, "length")


def test_cutoff_rescue() -> None:
    rescue = Rescue(tokens=4, cue_ids=(40, 41), has_answer=lambda text: "30" in text)
    # The state at 7 leaves 3 tokens, fewer than are reserved: it is continued to the limit, without rescue.
    jobs = [Job(0, 2, 3, ((0, 2),)), Job(3, 7, 3, ((3, 7),))]
    engine = CutEngine([])
    sampling = Sampling((9,), temperature=0.7, top_p=0.9, repetition_penalty=1.1)

    def has(rows, responses, texts):
        return [float(30 in ids) for ids in responses]

    got = probe(batch(), jobs, engine, sampling, has, decode, run="r", step=0, max_new_tokens=LIMIT, rescue=rescue)
    (sampled, first), (cued, second) = engine.calls
    assert [r.budget for r in sampled] == [4, 3] and first == sampling
    key = Key("r", 0, "a", 0, 2)
    assert cued == (Request(key, (11, 12, 1, 2, 21, 21, 21, 21, 40, 41), 1, 2, 2),)
    assert second == Sampling((9,), temperature=0.7, top_k=1, repetition_penalty=1.1)
    assert [(p.m, p.reward, p.rescued, p.finish) for p in got[:3]] == [
        (0, 0.0, False, "stop"), (1, 1.0, False, "length"), (2, 1.0, True, "stop"),
    ]  # fmt: skip
    assert got[2].token_ids == (21, 21, 21, 21, 40, 41, 30, 9)
    assert got[2].text == "1 2 21 21 21 21 40 41 30 9"
    assert [(p.reward, p.rescued) for p in got[3:]] == [(0.0, False), (1.0, False), (0.0, False)]
    assert all(p.position + len(p.token_ids) <= LIMIT for p in got), "the limit holds with the cue"


def test_a_rescue_needs_room_for_an_answer() -> None:
    with pytest.raises(InputError, match=r"rescue\.tokens"):
        Rescue(tokens=2, cue_ids=(1, 2), has_answer=bool)


def test_with_the_real_engine_on_one_rank_or_three() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.4,
        )
    )  # fmt: skip
    rollouts = batch()
    before = {name: getattr(rollouts, name).clone() for name in ("token_ids", "offsets", "mask")}

    def length(rows, responses, texts):
        return [float(len(ids) % 2) for ids in responses]

    def measure(rank: int, world: int, max_batch: int) -> list[Probe]:
        engine = TransformersEngine(model, 0, max_batch=max_batch)
        return probe(
            rollouts, JOBS, engine, SAMPLING, length, decode,
            run="r", step=0, max_new_tokens=LIMIT, rank=rank, world=world,
        )  # fmt: skip

    whole = measure(0, 1, 64)
    assert len(whole) == 7 and len({p.token_ids for p in whole}) > 3
    split = [p for rank in range(3) for p in measure(rank, 3, 2)]
    assert sorted(split, key=lambda p: (p.row, p.m)) == sorted(whole, key=lambda p: (p.row, p.m))
    assert all(p.position + len(p.token_ids) <= LIMIT for p in whole)
    assert all(torch.equal(getattr(rollouts, name), value) for name, value in before.items())
