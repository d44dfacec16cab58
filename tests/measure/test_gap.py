"""The gap between an engine's and the trainer's log-probabilities, by hand.

Planted faults seen caught: the mask ignored; the first prefix of a response instead of the longest; readings matched
by place; the prompt's tokens compared; a mean over prefixes instead of tokens; a NaN that raises no warning.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from apportion.engines.base import Key, Reading, Request
from apportion.errors import InputError
from apportion.measure.gap import Gap, gap_of, prefixes_of
from apportion.rollouts import Rollouts


def batch(**change) -> Rollouts:
    """Two responses of one prompt and one of another; the second token of the first is not trained."""
    return Rollouts.from_lists(
        [[1, 2, 3, 4], [5, 6], [7, 8, 9]],
        ["a", "a", "b"],
        [1.0, 0.0, 1.0],
        mask=[[True, False, True, True], [True] * 2, [True] * 3],
        prompt_ids=(torch.tensor([11, 12]), torch.tensor([13])),
        **{"old_logprob": [[-1.0, -2.0, -3.0, -4.0], [-0.5, -0.25], [-1.5, -2.5, -3.5]], **change},
    )


def key(rollouts: Rollouts, row: int, position: int) -> Key:
    return Key("r", 3, rollouts.name(row), rollouts.sample[row], position)


def reading(rollouts: Rollouts, row: int, *values: float) -> Reading:
    return Reading(key(rollouts, row, len(values)), torch.tensor(values, dtype=torch.float64))


def test_the_longest_prefix_of_each_response() -> None:
    rollouts = batch()
    asked = [
        Request(key(rollouts, row, at), prefix, 8, 5)
        for row, at, prefix in (
            (0, 1, (11, 12, 1)), (2, 0, (13,)), (0, 3, (11, 12, 1, 2, 3)), (0, 0, (11, 12)), (1, 1, (11, 12, 5)),
        )
    ]  # fmt: skip
    found = prefixes_of(asked)
    assert {(s.key, s.ids, s.prompt) for s in found} == {
        (key(rollouts, 0, 3), (11, 12, 1, 2, 3), 2), (key(rollouts, 1, 1), (11, 12, 5), 2),
    }  # fmt: skip
    assert prefixes_of(asked[1:2]) == [], "the prompt alone holds no token of a response"
    other = [Request(Key("r", 4, "a", 0, 1), (11, 12, 1), 8, 5), *asked]
    assert len(prefixes_of(other)) == 3, "another step's response is another"


def test_largest_mean_and_tokens() -> None:
    """|Δ| .5, (masked), .25 and .125 over three tokens."""
    rollouts = batch()
    read = [reading(rollouts, 0, -1.5, 9.0, -2.75), reading(rollouts, 1, -0.625)]
    for order in (read, read[::-1]):
        gap = gap_of(rollouts, order)
        assert gap == Gap(0.5, 0.875, 3)
        assert gap.mean == 0.875 / 3
    assert gap_of(rollouts, []) == Gap(0.0, 0.0, 0) and Gap().mean == 0


def test_sums_are_over_tokens_and_not_over_prefixes_or_ranks() -> None:
    """One token 3 apart and three 1 apart are 1.5 apart on average, not 2."""
    both = Gap(3.0, 3.0, 1) + Gap(1.0, 3.0, 3)
    assert both == Gap(3.0, 6.0, 4) and both.mean == 1.5
    assert sum([both], Gap()) == both


def test_the_trainers_own_readings() -> None:
    rollouts = batch(old_logprob=None)
    ours = [reading(rollouts, 0, -1.0, -1.0), reading(rollouts, 2, -1.0)]
    theirs = [reading(rollouts, 2, -3.0), reading(rollouts, 0, -1.25, -9.0)]
    assert gap_of(rollouts, ours, theirs) == Gap(2.0, 2.25, 2)


def test_what_does_not_match() -> None:
    rollouts = batch()
    with pytest.raises(InputError, match="old_logprob"):
        gap_of(batch(old_logprob=None), [])
    with pytest.raises(InputError, match="by the trainer"):
        gap_of(rollouts, [reading(rollouts, 0, -1.0)], [])
    with pytest.raises(InputError, match="by the engine"):
        gap_of(rollouts, [], [reading(rollouts, 0, -1.0)])
    with pytest.raises(InputError, match="one of a prefix"):
        gap_of(rollouts, [Reading(Key("r", 3, "c", 0, 1), torch.zeros(1))])
    with pytest.raises(InputError, match="one of a prefix"):
        gap_of(rollouts, [reading(rollouts, 1, -1.0, -1.0, -1.0)])
    for values in ([-1.0], [-1.0] * 3):
        with pytest.raises(InputError, match="2, one a token"):
            gap_of(rollouts, [Reading(key(rollouts, 0, 2), torch.tensor(values))])


@pytest.mark.parametrize(("total", "warned"), [(0.1, False), (0.2, False), (0.21, True), (float("nan"), True)])
def test_the_warning_is_about_the_mean(total: float, warned: bool) -> None:
    gap = Gap(5.0, total, 2)
    if warned:
        with pytest.warns(UserWarning, match="another policy"):
            gap.warn(0.1)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gap.warn(0.1)
