"""ProbePO: where it measures, its ablations and its settings.

Planted in a copy of the package and seen caught here: a host boundary at position 0 taken as a candidate; a
candidate kept with less than a window behind it; candidates not merged; a window that crosses into the next
response; the shortlist rounded down, or up by floating point; ties broken the other way within and between
responses; responses probed that are not live; a value at the prompt taken for a pivot; random placement by row
number, without the seed, at masked tokens or at the prompt; α = 0 that still asks for evidence; abstentions of
the pilot not counted as spent.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from apportion.credit.probepo import ProbePO, forward_max
from apportion.credit.registry import make_method
from apportion.errors import InputError
from apportion.groups import Base
from apportion.measure.evidence import Evidence
from apportion.measure.plan import Job
from apportion.rollouts import Rollouts
from apportion.testing.tools import Entries, answered, evidence_of


def plan(method: ProbePO, rollouts: Rollouts) -> list[Job]:
    return method.plan(rollouts, method.base(rollouts))


def pivots(method: ProbePO, rollouts: Rollouts) -> list[tuple[int, int]]:
    return [(job.row, job.position) for job in plan(method, rollouts)]


def batch(
    entropy: list[list[float]], starts: list[list[int]], reward: list[float] | None = None, **rest: Any
) -> Rollouts:
    """Responses of one prompt whose tokens all differ, so that no state is shared."""
    ids = [[100 * (i + 1) + t for t in range(len(row))] for i, row in enumerate(entropy)]
    flags = [[t in at for t in range(len(row))] for row, at in zip(entropy, starts, strict=True)]
    rewards = [float(i % 2) for i in range(len(entropy))] if reward is None else reward
    return Rollouts.from_lists(
        rest.pop("token_ids", ids), ["p"] * len(ids), rewards, entropy=entropy, boundary=flags, **rest
    )


SMALL = {"window": 2, "min_gap": 2, "samples": 1}


def test_forward_window_stops_at_the_response_and_skips_masked_tokens() -> None:
    rollouts = batch([[1, 5, 2, 3], [9, 0, 4, 1]], [[], []], mask=[[1, 1, 1, 1], [1, 1, 0, 1]])
    # Row 0: max(1,5), max(5,2), max(2,3), 3 and not the 9 of row 1. Row 1 without its 4: 9, 0, 1, 1.
    assert forward_max(rollouts, 2).tolist() == [5, 5, 3, 3, 9, 0, 1, 1]
    assert forward_max(rollouts, 1).tolist() == [1, 5, 2, 3, 9, 0, -torch.inf, 1]
    assert forward_max(rollouts, 99).tolist() == [5, 5, 3, 3, 9, 1, 1, 1]


def test_rank_is_joint_over_the_group_and_budget_is_floored() -> None:
    rollouts = batch([[0, 1, 0, 2, 0, 0], [0, 3, 0, 0.5, 0, 0]], [[1, 3], [1, 3]])
    method = ProbePO(**SMALL, budget=7, shortlist=1.0)
    assert pivots(method, rollouts) == [(1, 1), (0, 3), (0, 1), (1, 3)]
    assert [job.score for job in plan(method, rollouts)] == [3, 2, 1, 0.5]
    assert pivots(ProbePO(window=2, min_gap=2, samples=3, budget=8, shortlist=1.0), rollouts) == [(1, 1), (0, 3)]


def test_shortlist_is_of_each_response_rounded_up() -> None:
    # Three candidates in row 0, all above row 1's only one: ⌈1.5⌉ = 2 of row 0 are kept, and 1 of row 1.
    rollouts = batch([[0, 7, 0, 8, 0, 9, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]], [[1, 3, 5], [1]])
    method = ProbePO(**SMALL, budget=9)
    assert pivots(method, rollouts) == [(0, 5), (0, 3), (1, 1)]
    # .07 · 100 is 7.000000000000001 in floating point, and its ceiling is 7 all the same.
    starts = list(range(1, 201, 2))
    rollouts = batch([[t % 50 for t in range(204)], [0.0]], [starts, []])
    assert len(pivots(ProbePO(**SMALL, budget=99, shortlist=0.07), rollouts)) == 7


def test_ties_go_to_the_lower_response_and_then_the_earlier_position() -> None:
    flat = [[1.0] * 8, [1.0] * 8]
    rollouts = batch(flat, [[2, 5], [2, 5]])
    assert pivots(ProbePO(**SMALL, budget=9, shortlist=1.0), rollouts) == [(0, 2), (0, 5), (1, 2), (1, 5)]
    assert pivots(ProbePO(**SMALL, budget=9), rollouts) == [(0, 2), (1, 2)]


def test_candidates() -> None:
    # 0 is the prompt's state; 3 is nearer than 2 to 2; 6 has but one token left for a window of two.
    rollouts = batch([[1.0] * 7, [1.0]], [[0, 2, 3, 4, 6], []])
    assert pivots(ProbePO(**SMALL, budget=9, shortlist=1.0), rollouts) == [(0, 2), (0, 4)]
    # A boundary at the start must not swallow the next one by `min_gap`.
    rollouts = batch([[1.0] * 20, [1.0]], [[0, 5], []])
    assert pivots(ProbePO(window=2, min_gap=16, samples=1, shortlist=1.0), rollouts) == [(0, 5)]


def test_candidates_from_text() -> None:
    # Tokens "a", "\n", "\n", "b", "c": the step starts at character 3, which begins token 3.
    text = ("a\n\nbc", "d")
    rollouts = Rollouts.from_lists(
        [[1, 2, 3, 4, 5], [6]], ["p", "p"], [1.0, 0.0], entropy=[[1.0] * 5, [1.0]],
        text=text, char_start=[[0, 1, 2, 3, 4], [0]],
    )  # fmt: skip
    assert pivots(ProbePO(**SMALL), rollouts) == [(0, 3)]
    # One token "\nb" holds the end of the break: the next token starts the segment.
    rollouts = Rollouts.from_lists(
        [[1, 2, 3, 4, 5], [6]], ["p", "p"], [1.0, 0.0], entropy=[[1.0] * 5, [1.0]],
        text=("a\n\nbcde", "d"), char_start=[[0, 1, 2, 4, 5], [0]],
    )  # fmt: skip
    assert pivots(ProbePO(**SMALL), rollouts) == [(0, 3)]


def test_collapsed_and_unscored_responses_are_not_probed() -> None:
    flat = [[1.0] * 8] * 3
    assert pivots(ProbePO(**SMALL), batch(flat, [[3]] * 3, [1.0, 1.0, 1.0])) == []
    rollouts = batch(flat, [[3]] * 3, [1.0, float("nan"), 0.0])
    assert pivots(ProbePO(**SMALL), rollouts) == [(0, 3), (2, 3)]


def test_shared_openings_are_measured_once_and_count_once() -> None:
    ids = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 9], [1, 2, 4, 4, 5, 6]]
    rollouts = batch([[0, 0, 0, 1, 0, 0], [0, 0, 0, 5, 0, 0], [0, 0, 0, 2, 0, 0]], [[3]] * 3, token_ids=ids)
    jobs = plan(ProbePO(**SMALL, budget=2), rollouts)
    # Rows 0 and 1 share the prefix 1 2 3; the job stands where its best score does.
    assert [job.pivots for job in jobs] == [((1, 3), (0, 3)), ((2, 3),)]
    assert [job.score for job in jobs] == [5, 2]


def test_position_weight_is_a_hook() -> None:
    class Late(ProbePO):
        def position_weight(self, position: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
            return position / length

    rollouts = batch([[0, 3, 0, 0, 2, 0, 0], [0.0]], [[1, 4], []])
    assert pivots(ProbePO(**SMALL, shortlist=1.0), rollouts) == [(0, 1), (0, 4)]
    assert pivots(Late(**SMALL, shortlist=1.0), rollouts) == [(0, 4), (0, 1)]


def test_random_placement_is_over_interior_trainable_tokens_and_by_content() -> None:
    mask = [[1] * 9, [1, 1, 1, 0, 0, 0, 1, 1, 1]]
    rollouts = batch([[1.0] * 9] * 2, [[], []], mask=mask)
    count: Counter[tuple[int, int]] = Counter()
    for seed in range(300):
        method = ProbePO(placement="random", seed=seed, budget=8, samples=4)
        chosen = pivots(method, rollouts)
        assert len(chosen) == 2 and chosen == pivots(method, rollouts)
        flipped = rollouts.select([1, 0])
        assert {(1 - row, at) for row, at in pivots(method, flipped)} == set(chosen)
        count.update(chosen)
    allowed = {(0, t) for t in range(1, 9)} | {(1, t) for t in (1, 2, 6, 7, 8)}
    assert set(count) == allowed
    # 600 draws over 13 states: 46 each; 6 standard deviations are 39.
    assert all(8 <= n <= 85 for n in count.values())


def test_evidence_at_the_prompt_is_no_pivot() -> None:
    rollouts = batch([[1.0] * 4] * 2, [[], []])
    method = ProbePO(alpha=1)
    base = method.base(rollouts)
    credit = method.assign(rollouts, evidence_of(rollouts, Entries([(0, 0, [1.0, 1.0])])), base)
    assert torch.equal(credit.token, base.advantage[rollouts.row]) and credit.counts["pivots"] == 0


def test_a_collapsed_group_may_come_without_a_scale() -> None:
    rollouts = batch([[1.0] * 4] * 2, [[], []], [1.0, 1.0])
    none = torch.zeros(2, dtype=torch.float64)
    base = Base(none.float(), none + torch.nan, none, none.bool())
    assert not ProbePO(alpha=1).assign(rollouts, evidence_of(rollouts, Entries([(0, 2, [0.0])])), base).token.any()


def test_lost_pivots_are_dropped_and_counted() -> None:
    rollouts = batch([[1.0] * 4] * 2, [[], []])
    method = ProbePO(alpha=1)
    base = method.base(rollouts)
    lost = method.assign(rollouts, evidence_of(rollouts, Entries([(0, 2, [None]), (0, 3, [1.0])])), base)
    kept = method.assign(rollouts, evidence_of(rollouts, Entries([(0, 3, [1.0])])), base)
    assert torch.equal(lost.token, kept.token)
    assert lost.counts == {"pivots": 1, "dropped_pivots": 1}


def test_missing_evidence_and_entropy_are_named() -> None:
    rollouts = batch([[1.0] * 4] * 2, [[], []])
    base = ProbePO().base(rollouts)
    with pytest.raises(InputError, match=r"probepo: evidence\.continuations of row 0"):
        ProbePO().assign(rollouts, Evidence(), base)
    assert torch.equal(ProbePO(alpha=0).assign(rollouts, Evidence(), base).token, base.advantage[rollouts.row])
    bare = Rollouts.from_lists([[1], [2]], ["p", "p"], [0.0, 1.0])
    with pytest.raises(InputError, match="probepo: entropy"):
        plan(ProbePO(), bare)
    no_steps = Rollouts.from_lists([[1], [2]], ["p", "p"], [0.0, 1.0], entropy=[[1.0], [1.0]])
    with pytest.raises(InputError, match="probepo: boundaries"):
        plan(ProbePO(), no_steps)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"budget": 7}, "budget: got 7; expected at least samples"),
        ({"allocation": "neyman", "pilot": 9}, "pilot: got 9; expected at most samples, 8"),
        ({"n0": -1}, "probepo.n0"),
        ({"alpha": "nan"}, "probepo.alpha"),
        ({"shortlist": 0}, "probepo.shortlist"),
        ({"ddof": 2}, "probepo.ddof"),
        ({"epsilon": -1e-4}, "probepo.epsilon"),
        ({"alhpa": 1}, "did you mean 'alpha'"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_method("probepo", settings)


def test_settings_as_a_command_line_gives_them() -> None:
    method = make_method("probepo", {"alpha": "0.25", "ddof": "0", "budget": "24", "allocation": "neyman"})
    assert method.settings["alpha"] == 0.25 and method.settings["ddof"] == 0


@pytest.mark.parametrize("abstain", [False, True])
def test_neyman_spends_the_budget_and_no_more(abstain: bool) -> None:
    """A pilot of every pivot, then the rest: together samples × pivots, whatever came back of the pilot."""
    rollouts = batch([[1.0] * 40] * 4, [[8, 20], [8, 20], [10], [12, 30]])
    method = ProbePO(allocation="neyman", window=2, min_gap=2, samples=6, budget=40, pilot=2, shortlist=1.0)
    first = plan(method, rollouts)
    assert [job.samples for job in first] == [2] * 6
    entries = answered(rollouts, first)
    if abstain:
        entries.continuations = [(row, at, [rewards[0] or 0.0, None]) for row, at, rewards in entries.continuations]
    second = method.refine(rollouts, method.base(rollouts), evidence_of(rollouts, entries))
    assert sum(job.samples for job in first + second) == 36
    assert ProbePO().refine(rollouts, method.base(rollouts), evidence_of(rollouts, entries)) == []
