"""What other trainers got wrong, one test a kind: the rows of the fault list that concern the core.

Rows on loss denominators, engines, graders and evaluation are tested beside those parts. Planted in a copy of
the package and seen caught here: the equality test on rewards left out; variance in one pass; NaN rewards taken
for 0; one token whitened by n − 1 = 0; a mask guessed from the pad id; ties given to the higher response.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from apportion.credit.registry import make_method
from apportion.credit.reinforce_pp import whiten
from apportion.errors import InputError
from apportion.groups import group_stats, grpo_base
from apportion.measure.evidence import Evidence
from apportion.rollouts import Rollouts

NAN = float("nan")
GROUPED = ["grpo", "dr_grpo", "rloo", "opo", "reinforce_pp_baseline", "probepo"]


def batch(*rewards: float | None, groups: str | None = None, dtype: torch.dtype = torch.float64) -> Rollouts:
    """One-token responses, of one prompt or of those that `groups` spells."""
    ids = torch.arange(len(rewards))[:, None]
    values = torch.tensor([NAN if r is None else r for r in rewards], dtype=dtype)
    group = torch.tensor([ord(g) for g in groups or "p" * len(rewards)])
    return Rollouts.from_padded(ids, torch.ones_like(ids, dtype=torch.bool), group, values)


def advantages(name: str, rollouts: Rollouts, **settings: Any) -> list[float]:
    method = make_method(name, settings)
    base = method.base(rollouts)
    if name == "probepo":  # without a pivot it is its base
        settings = {**settings, "alpha": 0}
    return make_method(name, settings).assign(rollouts, Evidence(), base).token.tolist()


def test_row_1_leave_one_out_never_divides_by_a_vanishing_deviation() -> None:
    assert advantages("rloo", batch(1, 0, 0, 0)) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert advantages("rloo", batch(0, *[0.95] * 7))[0] == pytest.approx(-0.95)
    assert advantages("rloo", batch(0, *[0.95] * 7, dtype=torch.float32))[0] == pytest.approx(-0.95)


def test_row_1_variance_is_taken_in_two_passes() -> None:
    # Seven equal rewards leave exactly 0; beside an offset of 1e4 a spread of 1e-3 survives.
    assert group_stats(batch(*[0.95] * 7, dtype=torch.float32)).std.item() == 0
    spread = group_stats(batch(1e4, 1e4 + 1e-3), ddof=0).std.item()
    assert spread == pytest.approx(5e-4, rel=1e-6)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("epsilon", [0.0, 1e-8, 1e-6, 1e-4])
def test_row_2_equal_rewards_give_exactly_0_at_any_epsilon(name: str, epsilon: float) -> None:
    for dtype in (torch.float32, torch.float64):
        rollouts = batch(*[0.9] * 15, 1.0, 0.0, groups="p" * 15 + "qq", dtype=dtype)
        assert advantages(name, rollouts, epsilon=epsilon)[:15] == [0.0] * 15


@pytest.mark.parametrize("name", GROUPED)
def test_row_3_a_missing_reward_is_no_zero(name: str) -> None:
    high, middle, low = advantages(name, batch(1, None, 0))
    assert high > 0 > low and high == pytest.approx(-low) and middle == 0
    assert group_stats(batch(1, None, 0)).mean.item() == 0.5
    assert advantages(name, batch(None, None, None)) == [0, 0, 0]


@pytest.mark.parametrize("name", GROUPED)
def test_row_4_a_single_response_gets_0_and_no_probe(name: str) -> None:
    for alone in (batch(1.0), batch(1.0, None)):
        assert not any(advantages(name, alone))
        assert not grpo_base(alone).live.any()
        method = make_method(name)
        assert name == "probepo" or method.plan(alone, method.base(alone)) == []


def test_row_5_whitening_one_token_or_none() -> None:
    values = torch.tensor([3.0, 5.0, 7.0], dtype=torch.float64)
    one, none = torch.tensor([False, True, False]), torch.zeros(3, dtype=torch.bool)
    assert whiten(values, one, ddof=1, epsilon=1e-8).tolist() == [0, 5, 0]
    assert whiten(values, none, ddof=1, epsilon=1e-8).tolist() == [0, 0, 0]
    assert whiten(torch.full((3,), 0.1).double(), ~none, ddof=1, epsilon=0.0).tolist() == [0, 0, 0]
    assert whiten(values[:0], none[:0], ddof=1, epsilon=1e-8).tolist() == []


def test_rows_6_and_21_statistics_count_tokens_and_not_shards_or_ranks() -> None:
    # Shards [1, 1] and [-1, -1, -1, -1]: the mean is −1/3 on both, not 0.
    shards = torch.tensor([1.0, 1, -1, -1, -1, -1], dtype=torch.float64)
    white = whiten(shards, torch.ones(6, dtype=torch.bool), ddof=0, epsilon=0.0)
    sigma = math.sqrt((2 * (4 / 3) ** 2 + 4 * (2 / 3) ** 2) / 6)
    assert white.tolist() == pytest.approx([4 / 3 / sigma] * 2 + [-2 / 3 / sigma] * 4)
    # Ranks [1] and [3, 3, 3]: the mean is 2.5, not 2; the deviation is 1 (Σ = 2.25 + 3·.25, over 3).
    ranks = torch.tensor([1.0, 3, 3, 3], dtype=torch.float64)
    white = whiten(ranks, torch.ones(4, dtype=torch.bool), ddof=1, epsilon=0.0)
    assert white.tolist() == pytest.approx([-1.5, 0.5, 0.5, 0.5])
    # The same through a method: one response of 1 token, one of 3.
    rollouts = Rollouts.from_lists([[1], [1, 2, 3]], ["p", "q"], [1.0, 3.0])
    assert advantages("reinforce_pp", rollouts) == pytest.approx([-1.5, 0.5, 0.5, 0.5])


def test_row_7_the_eos_is_an_action_even_where_pad_is_eos() -> None:
    ids = torch.tensor([[5, 7, 0, 0, 0]])
    present = torch.arange(5)[None, :] < torch.tensor([[3]])
    rollouts = Rollouts.from_padded(ids, present, torch.tensor([0]), torch.tensor([1.0]))
    assert rollouts.token_ids.tolist() == [5, 7, 0] and rollouts.trainable.tolist() == [3]
    assert rollouts.to_padded(rollouts.mask, 5).int().tolist() == [[1, 1, 1, 0, 0]]


def test_row_8_padding_of_a_truncated_response_is_not_counted() -> None:
    ids = torch.tensor([[5, 6, 7, 0, 0]])
    present = torch.arange(5)[None, :] < torch.tensor([[3]])
    truncated = torch.tensor([True])
    rollouts = Rollouts.from_padded(ids, present, torch.tensor([0]), torch.tensor([1.0]), truncated=truncated)
    assert rollouts.to_padded(rollouts.mask, 5).int().tolist() == [[1, 1, 1, 0, 0]]
    assert rollouts.truncated.tolist() == [True]


def test_row_10_a_masked_response_keeps_its_length() -> None:
    rollouts = Rollouts.from_lists([[1, 2, 3]], ["p"], [0.0], mask=[[0, 0, 0]], truncated=[True])
    assert rollouts.length.tolist() == [3] and rollouts.trainable.tolist() == [0]


@pytest.mark.parametrize("field", ["old_logprob", "ref_logprob", "entropy", "mask", "boundary"])
@pytest.mark.parametrize("size", [1, 3])
def test_row_11_lists_of_another_length_are_refused_and_not_trimmed(field: str, size: int) -> None:
    fields: dict[str, Any] = {field: [[0] * size]}
    with pytest.raises(InputError, match=f"{field} of row 0: got {size} values; expected 2"):
        Rollouts.from_lists([[5, 6]], ["p"], [1.0], **fields)


def test_row_13_a_state_is_its_token_ids() -> None:
    """ "a" "b" and "ab" are one text and two states: neither shares the other's measurement."""
    rollouts = Rollouts.from_lists(
        [[0, 1, 3, 3], [2, 3, 3, 3]], ["p", "p"], [1.0, 0.0], entropy=[[1.0] * 4] * 2,
        boundary=[[0, 0, 1, 0], [0, 1, 0, 0]], text=("abcc", "abccc"), char_start=[[0, 1, 2, 3], [0, 2, 3, 4]],
    )  # fmt: skip
    method = make_method("probepo", {"window": 1, "samples": 1})
    jobs = method.plan(rollouts, method.base(rollouts))
    assert [job.pivots for job in jobs] == [((0, 2),), ((1, 1),)]


def test_row_19_half_precision_statistics_are_refused() -> None:
    """2.001 and 2.006 are one number in bf16, so a ranking by them would be a tie: they must come upcast."""
    entropy = torch.tensor([[2.001, 2.006]])
    present = torch.ones((1, 2), dtype=torch.bool)
    parts = torch.tensor([[1, 2]]), present, torch.tensor([0]), torch.tensor([1.0])
    for half in (torch.bfloat16, torch.float16):
        with pytest.raises(InputError, match="entropy: got dtype"):
            Rollouts.from_padded(*parts, entropy=entropy.to(half))
    kept = Rollouts.from_padded(*parts, entropy=entropy).entropy
    assert kept is not None and kept[1] > kept[0]


def test_row_20_one_poisoned_token_is_named_and_never_ranked() -> None:
    with pytest.raises(InputError, match="entropy: got nan at row 1, position 1"):
        Rollouts.from_lists([[1], [1, 2]], ["p", "p"], [1.0, 0.0], entropy=[[0.5], [0.5, NAN]])


def test_row_22_credit_does_not_change_with_the_micro_batch() -> None:
    """Groups of 1 and 3 tokens: alone or together a group's credit is the same, so any split sums to the same."""
    rollouts = Rollouts.from_lists([[1], [1, 2, 3], [1], [1, 2, 3]], list("aabb"), [1.0, 0.0, 0.0, 0.5])
    for name in ("grpo", "dr_grpo", "rloo", "opo"):
        whole = advantages(name, rollouts)
        halves = [advantages(name, rollouts.select(rows)) for rows in ([0, 1], [2, 3])]
        assert whole == halves[0] + halves[1]


def test_a_collapsed_group_is_found_by_its_rewards_and_not_by_a_float_deviation() -> None:
    """The trap of ACR: in float32 the deviation of equal rewards may come out above 0."""
    assert group_stats(batch(*[0.9] * 15, dtype=torch.float32)).collapsed.tolist() == [True]
    assert group_stats(batch(1.0, 1.0 + 1e-5)).collapsed.tolist() == [False]
