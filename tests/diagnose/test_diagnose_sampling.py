"""Fork variance, capture and token informativeness with a policy that is a table, so that every value is known.

Planted faults seen caught: ddof 0 within and between forks; noise not taken off; no floor; the top-ranked boundary in
the random one's mean or alone below; the lowest taken for the top; a fork that ended continued; a known value with an
error; a fork with one graded continuation kept; forks that share a stream; ProbePO's shortlist kept; another method's
settings used; a budget overrun, or not refilled by what is saved; the prompt counted against T_max; earlier steps
first; one group drained first; continuations in the engine's order; high entropies taken for low; half-right
responses perturbed; stop tokens, masked ones or the last one perturbed; the kept token swapped too; a loss upside
down, or one side of it alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from stepmaker import STOP, Table, batch, bench, step_of

from apportion.diagnose.forks import (
    Boundaries,
    ForkSettings,
    ForkState,
    boundaries,
    capture,
    fork_value,
    fork_variance,
    measure_forks,
)
from apportion.diagnose.informativeness import Loss, Pair, informativeness, measure_losses, pairs
from apportion.diagnose.model import Bench, Prefix, in_turn
from apportion.diagnose.reading import Recorded
from apportion.diagnose.stats import ratio
from apportion.engines.base import Request
from apportion.errors import InputError
from apportion.rollouts import Rollouts

GOOD, BAD, ODD = 5, 6, 7


def test_fork_values_by_hand() -> None:
    # v of (1, 0, 0, 0) with ddof 1: .75 · .25 · 4/3 = .25, over m = 4.
    assert fork_value([1, 0, 0, 0]) == pytest.approx((0.25, 0.0625))
    assert fork_value([1, 1]) == (1.0, 0.0)


def test_fork_variance_by_hand() -> None:
    # .25 and .75: between, ddof 1, 2 · .25²/1 = .125; minus .0625.
    assert fork_variance([0.25, 0.75], [0.0625, 0.0625]) == pytest.approx(0.0625)
    # 0, 1, .5 known but for the last: between .25; mean(v/m) = .09/3.
    assert fork_variance([0, 1, 0.5], [0, 0, 0.09]) == pytest.approx(0.22)
    assert fork_variance([0.5, 0.5], [0.0625, 0.0]) == 0.0  # the floor
    assert fork_variance([0.25, 0.75], [0.3, 0.3]) == 0.0


def test_noise_of_the_forks_values_is_taken_off() -> None:
    # Two forks worth .1 and .9 have variance (.8)²/2 = .32. Uncorrected it would come out .09/8 = .011 higher; the
    # floor is out of reach, so the mean of many estimates is the variance itself.
    fill = np.random.default_rng(0)
    rewards = fill.random((10_000, 2, 8)) < np.array([0.1, 0.9])[:, None]
    found = []
    for forks in rewards.astype(float):
        measured = [fork_value(each) for each in forks]
        found.append(fork_variance([v for v, _ in measured], [e for _, e in measured]))
    assert np.mean(found) == pytest.approx(0.32, abs=4 * np.std(found) / 100)
    assert np.std(found) / 100 < 0.0015


def made(rows: int = 1, length: int = 10, reward: Sequence[float] = (1.0,), **rest: Any) -> Rollouts:
    import torch

    return batch(
        ["a"] * rows, (list(reward) * rows)[:rows], length, prompt_ids=(torch.tensor([1, 2, 3]),), **rest
    )  # fmt: skip


def two_forks(request: Request, m: int) -> list[int]:
    """From a boundary, forks of two tokens that begin GOOD or BAD in turn; after GOOD three of four are right."""
    if request.budget == 2:
        return [GOOD if m % 2 == 0 else BAD, ODD]
    right = m < (3 if GOOD in request.prefix_ids else 1)
    return [ODD, GOOD if right else BAD, STOP]


def last_before_stop(ids: Sequence[int]) -> float:
    return float(ids[-2] == GOOD)


def unit(recorded: Recorded, *positions: int) -> Boundaries:
    return Boundaries(recorded, 0, positions, tuple(range(len(positions))))


def test_forks_are_sampled_continued_graded_and_cleared_of_noise() -> None:
    step = step_of(made())
    table = bench(two_forks, last_before_stop)
    settings = ForkSettings(forks=2, samples=4, fork_tokens=2)
    states, lost = measure_forks([unit(step, 4, 7)], table, settings, budget=10_000)
    assert lost == 0 and [s.top for s in states] == [True, False] and [s.score for s in states] == [0, 1]
    assert [s.variance for s in states] == pytest.approx([0.0625, 0.0625])
    assert {s.owner for s in states} == {(1, 0)} and {s.prompt for s in states} == {0}
    asked = table.engine.asked
    forked, gone_on = asked[:2], asked[2:]
    assert [r.prefix_ids for r in forked] == [(1, 2, 3, *[9] * 4), (1, 2, 3, *[9] * 7)]
    assert [(r.samples, r.budget) for r in forked] == [(2, 2), (2, 2)]
    # The prompt is no part of a response: T_max 20 leaves 20 − 4 − 2 and 20 − 7 − 2.
    assert Counter((r.samples, r.budget) for r in gone_on) == {(4, 14): 2, (4, 11): 2}
    assert len({r.key for r in asked}) == len(asked) == 6
    assert all(r.key.run.startswith("0/diagnose/") for r in asked)
    # 4 forks of 2 tokens, 16 continuations of 3.
    assert (table.cost.generated, table.continuations) == (4 * 2 + 16 * 3, 4 + 16)


def test_a_fork_that_ends_has_its_value_at_once() -> None:
    def policy(request: Request, m: int) -> list[int]:
        if request.budget == 3:
            return [GOOD, STOP] if m == 0 else [BAD, ODD, ODD]
        return [ODD, BAD if m else GOOD, STOP]

    step = step_of(made())
    table = bench(policy, last_before_stop)
    settings = ForkSettings(forks=2, samples=2, fork_tokens=3)
    states, _ = measure_forks([unit(step, 4)], table, settings, budget=1_000)
    # 1, known; .5 with v/m = .5/2: between .125 − mean(0, .25) = 0. With a surer second fork it shows.
    assert states[0].variance == 0
    states, _ = measure_forks([unit(step, 4)], bench(policy, lambda ids: float(ids[-3] == 9)), settings, 1_000)
    assert states[0].variance == pytest.approx(0.5)  # 1 and 0
    # At the length limit a fork is a whole response too.
    cut = bench(lambda request, m: [GOOD if m else BAD] * 3, lambda ids: float(ids[-1] == GOOD), limit=7)
    states, _ = measure_forks([unit(step, 4)], cut, settings, 1_000)
    assert states[0].variance == pytest.approx(0.5) and len(cut.engine.asked) == 1


def test_what_the_verifier_abstains_on_is_left_out() -> None:
    step = step_of(made())
    settings = ForkSettings(forks=3, samples=3, fork_tokens=2)

    def abstaining(ids: Sequence[int]) -> float | None:
        return None if ids[4] == BAD else last_before_stop(ids)

    # Three forks: GOOD, BAD, GOOD; all of BAD is lost, and the others are worth 1 each.
    states, lost = measure_forks([unit(step, 4)], bench(two_forks, abstaining), settings, 1_000)
    assert lost == 0 and states[0].variance == 0

    def thin(request: Request, m: int) -> list[int]:
        """Forks that begin GOOD, BAD, ODD; after ODD only the first continuation can be graded."""
        if request.budget == 2:
            return [(GOOD, BAD, ODD)[m], ODD]
        first = request.prefix_ids[-2]
        return [GOOD if first == GOOD or (first == ODD and m == 0) else first, STOP]

    # Worth 1 and 0; of the third no variance can be told, and it is left out as well.
    graded = bench(thin, lambda ids: None if ids[-2] == ODD else last_before_stop(ids))
    states, lost = measure_forks([unit(step, 4)], graded, settings, 1_000)
    assert lost == 0 and states[0].variance == pytest.approx(0.5)
    states, lost = measure_forks([unit(step, 4)], bench(two_forks, lambda ids: None), settings, 1_000)
    assert (states, lost) == ([], 1)


def test_the_budget_is_never_overspent_and_what_is_saved_is_spent() -> None:
    step = step_of(made())
    settings = ForkSettings(forks=2, samples=4, fork_tokens=2, states=1)
    # Each state may take 2·(2 + 4·14) = 116 and takes 2·2 + 8·3 = 28.
    for budget, measured in ((115, 0), (116, 1), (143, 1), (144, 2), (200, 4)):
        table = bench(two_forks, last_before_stop)
        units = [unit(step, 4), *(Boundaries(step_of(made(), k), 0, (4,), (0.0,)) for k in range(2, 9))]
        states, _ = measure_forks(units, table, settings, budget)
        assert len(states) == measured, budget
        assert table.cost.generated == 28 * measured <= budget


def test_capture_by_hand() -> None:
    def state(row: int, variance: float, top: bool) -> ForkState:
        return ForkState((1, row), row, 0.0, variance, top)

    states = [
        state(0, 0.3, True), state(0, 0.1, False), state(0, 0.0, False),
        state(1, 0.0, True), state(1, 0.2, False),
        state(2, 0.4, True),  # alone: no boundary to compare with
        state(3, 0.4, False),  # the top-ranked one was lost
        state(4, 0.0, True), state(4, 0.0, False),
    ]  # fmt: skip
    # 100 · ((.3 − .05) + (0 − .2) + 0) / (.4 + .2 + 0) = 5/.6.
    found = ratio(capture(states), "")
    assert found.value == pytest.approx(5 / 0.6) and found.n == 3
    assert ratio(capture(states[-2:]), "no variance").missing == "no variance"


def text_batch(entropy: Sequence[Sequence[float]], group: Sequence[str], reward: Sequence[float]) -> Rollouts:
    import torch

    flags = [[t in (3, 6, 9) for t in range(12)] for _ in group]
    count = len(set(group))
    return batch(
        list(group), list(reward), 12, boundary=flags, entropy=list(entropy),
        prompt_ids=tuple(torch.tensor([k]) for k in range(count)),
    )  # fmt: skip


def test_boundaries_are_those_of_probepo_top_ranked_first() -> None:
    one = [0.0] * 12
    one[7] = 0.875  # in the window of 6 (6, 7) and of none before with window 2
    one[4] = 0.5  # in that of 3
    flat = [0.25] * 12
    rollouts = text_batch([one, flat, flat], ["a", "a", "b"], [1, 0, 1])
    step = step_of(rollouts, settings={"window": 2, "min_gap": 1, "alpha": 0.5, "markers": ["x"]})
    found = boundaries([step], ForkSettings(), seed=0)
    # b has one response, and its group teaches nothing.
    assert {u.row for u in found} == {0, 1}
    first, second = sorted(found, key=lambda u: u.row)
    assert first.positions[0] == 6 and first.scores[0] == 0.875
    assert sorted(first.positions) == [3, 6, 9]
    assert dict(zip(first.positions, first.scores, strict=True)) == {6: 0.875, 3: 0.5, 9: 0.0}
    assert second.positions[0] == 3  # of equals the earlier one
    few = [u for u in boundaries([step], ForkSettings(states=2), seed=0) if u.row == 0]
    assert few[0].positions[0] == 6 and len(few[0].positions) == 2
    # Of the two others each is drawn by some seed.
    drawn = {
        next(u for u in boundaries([step], ForkSettings(states=2), seed) if u.row == 0).positions[1]
        for seed in range(20)
    }
    assert drawn == {3, 9}
    # Another method's runs use ProbePO's defaults: 16 tokens apart, 8 before the end.
    other = Recorded(**{**vars(step), "method": "grpo"})
    assert [u.positions for u in boundaries([other], ForkSettings(), 0)] == [(3,), (3,)]


def test_boundaries_need_entropies() -> None:
    with pytest.raises(InputError, match="entropy"):
        boundaries([step_of(batch("aa", [1, 0], 12, boundary=[[False] * 12] * 2))], ForkSettings(), 0)


def test_turns_go_over_all_groups_before_any_comes_twice() -> None:
    old, new = (step_of(batch("aaabbc", [1] * 6), number) for number in (1, 2))
    items = [(step, row, (step.step, "aaabbc"[row])) for step in (old, new) for row in range(6)]
    for seed in range(5):
        order = in_turn(items, seed)
        assert [step for step, _ in order] == [2] * 6 + [1] * 6
        assert sorted(name for _, name in order[:3]) == ["a", "b", "c"]
        assert sorted(name for _, name in order[3:5]) == ["a", "b"] and order[5] == (2, "a")
        assert in_turn(items[::-1], seed) == order
    assert len({tuple(in_turn(items, seed)) for seed in range(5)}) > 1


@pytest.mark.parametrize("wrong", [{"forks": 1}, {"samples": 1}, {"fork_tokens": 0}, {"states": 0}])
def test_settings_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        ForkSettings(**wrong)


def perturbable(length: int = 11, **rest: Any) -> Recorded:
    entropy = [[0.1 * t for t in range(length)]]
    return step_of(made(1, length, entropy=entropy, **rest))


def unused(request: Request, m: int) -> list[int]:
    raise AssertionError("nothing is sampled")


def test_pairs_come_from_the_outer_fifths_of_right_responses() -> None:
    high, low = set(), set()
    for seed in range(40):
        table = bench(unused, last_before_stop)
        table.seed = seed
        (pair,) = pairs([perturbable()], table)
        high.add(pair.high)
        low.add(pair.low)
    # Ten tokens may be perturbed, the last one not: a fifth is two.
    assert low == {0, 1} and high == {8, 9}
    # Masked tokens and stop tokens are left alone, and wrong responses have nothing to lose.
    masked = perturbable(mask=[[0, 0] + [1] * 9])
    table = bench(unused, last_before_stop)
    assert pairs([masked], table)[0].low in (2, 3)
    stops = perturbable()
    stops.rollouts.token_ids[8:10] = STOP
    assert pairs([stops], table)[0].high in (6, 7)
    assert pairs([perturbable(reward=(0.5,))], table) == [] == pairs([perturbable(2)], table)
    with pytest.raises(InputError, match="entropy"):
        pairs([step_of(made())], table)


def test_losses_by_hand() -> None:
    recorded = perturbable()
    swapped: list[tuple[tuple[int, ...], int, str]] = []

    def redraw(ids: Sequence[int], original: int, key: Any) -> int:
        swapped.append((tuple(ids), original, key.run))
        return BAD

    def policy(request: Request, m: int) -> list[int]:
        """Right in 4 of 4, 1 of 4 after another token at 9, 3 of 4 after one at 1."""
        kept, at = request.prefix_ids[-1] == 9, request.key.position
        right = 4 if kept else {10: 1, 2: 3}[at]
        return [GOOD if m < right else BAD, STOP]

    table = bench(policy, last_before_stop, redraw=redraw)
    units = [Pair(recorded, 0, high=9, low=1)]
    losses = measure_losses(units, table, samples=4, budget=1_000)
    assert losses == [Loss(0, 0.75, 0.25)]
    assert swapped == [
        ((1, 2, 3, *[9] * 9), 9, "0/diagnose/swap"), ((1, 2, 3, 9), 9, "0/diagnose/swap")
    ]  # fmt: skip
    assert {(r.prefix_ids[-1], r.key.position, r.budget) for r in table.engine.asked} == {
        (9, 10, 10), (BAD, 10, 10), (9, 2, 18), (BAD, 2, 18),
    }  # fmt: skip
    assert len({r.key for r in table.engine.asked}) == 4
    # 2 · 4 · (10 + 18) = 224 at most.
    assert measure_losses(units, bench(policy, last_before_stop, redraw=redraw), 4, budget=223) == []
    both, high, low = informativeness([*losses, Loss(1, 0.0, 0.5)])
    assert [ratio(each, "").value for each in (both, high, low)] == pytest.approx([0.0, 0.375, 0.375])
    lost = bench(policy, lambda ids: None, redraw=redraw)
    assert measure_losses(units, lost, 4, budget=1_000) == []


def test_rewards_go_to_their_states_whatever_the_order() -> None:
    step = step_of(made())
    table: Bench = bench(lambda request, m: [request.key.position, STOP], lambda ids: float(ids[-2]))
    states = [Prefix.of(step, 0, p, "x") for p in (7, 2, 5)]
    assert [[c.m for c in each] for each in table.continued(states, 3, 1)] == [[0, 1, 2]] * 3
    assert table.rewards(states, 2) == [[7.0, 7.0], [2.0, 2.0], [5.0, 5.0]]
    assert isinstance(table.engine, Table)
    # A response at its limit has no room, and nothing is asked for it.
    full = bench(unused, last_before_stop, limit=4)
    assert full.rewards([Prefix.of(step, 0, 4, "x")], 2) == [[]]
