"""The frozen batch: what it refuses, and that no constructor or selection moves a token.

Planted in a copy of the package and seen caught here: left padding read as right padding; `to_padded` with
tokens out of place; `select` with the wrong offsets or names; NaN statistics of masked tokens kept; the mean
taken over masked tokens too; half-precision statistics let through.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apportion.errors import InputError
from apportion.rollouts import Rollouts, in_blocks, keep, keep_
from strategies import Batch, batches

NAN = float("nan")


def small(**change: Any) -> Rollouts:
    """Two prompts, three responses of 2, 0 and 3 tokens."""
    fields: dict[str, Any] = {
        "token_ids": [[5, 6], [], [7, 8, 9]],
        "group": ["p", "q", "p"],
        "reward": [1.0, None, 0.5],
        "mask": [[1, 1], [], [1, 0, 1]],
        "entropy": [[0.5, 1.0], [], [2.0, NAN, 3.0]],
        "text": ("ab", "", "cde"),
        "char_start": [[0, 1], [], [0, 1, 2]],
        "path": (("r", "x"), ("r",), ("r", "y")),
    }
    return Rollouts.from_lists(**{**fields, **change})


def test_layout() -> None:
    rollouts = small()
    assert rollouts.offsets.tolist() == [0, 2, 2, 5]
    assert rollouts.row.tolist() == [0, 0, 2, 2, 2]
    assert rollouts.position.tolist() == [0, 1, 0, 1, 2]
    assert rollouts.length.tolist() == [2, 0, 3] and rollouts.trainable.tolist() == [2, 0, 2]
    assert rollouts.group.tolist() == [0, 1, 0] and rollouts.names == ("p", "q") and rollouts.groups == 2
    assert rollouts.scored.tolist() == [True, False, True]
    assert (rollouts.name(2), rollouts.name(1)) == ("p", "q")
    assert replace(rollouts, names=None).name(1) == "1"


def test_statistics_of_masked_tokens_are_stored_as_0() -> None:
    entropy = small().entropy
    assert entropy is not None and entropy.tolist() == [0.5, 1.0, 2.0, 0.0, 3.0]


def test_sums_and_means() -> None:
    rollouts = small()
    values = torch.tensor([1.0, 3.0, 4.0, 100.0, 6.0])
    assert rollouts.row_sum(values).tolist() == [4.0, 0.0, 110.0]
    # (1+3)/2, nothing, (4+6)/2: the 100 is masked.
    assert rollouts.row_mean(values).tolist() == [2.0, 0.0, 5.0]
    assert rollouts.row_mean(torch.tensor([1.0, 3.0, 4.0, NAN, 6.0])).tolist() == [2.0, 0.0, 5.0]


def test_extremes_counts_and_running_sums() -> None:
    rollouts = small()
    values = torch.tensor([1.0, 3.0, 4.0, -2.0, 6.0], dtype=torch.float64)
    assert rollouts.row_min(values).tolist() == [1.0, torch.inf, -2.0]
    assert rollouts.row_max(values).tolist() == [3.0, -torch.inf, 6.0]
    assert rollouts.row_count(values > 2).tolist() == [1.0, 0.0, 2.0]
    assert rollouts.row_count(values > -9).tolist() == [2.0, 0.0, 3.0]
    assert rollouts.running_sum(values).tolist() == [1.0, 4.0, 4.0, 2.0, 8.0]
    # float32 cannot hold 2^24 + 1, and 300 flags are more than an int8 counts.
    wide = Rollouts.from_lists([[1] * 300], ["p"], [1.0])
    ones = torch.ones(300)
    ones[0] = 2.0**24
    assert wide.row_sum(ones).tolist() == [2.0**24 + 299]
    assert wide.row_count(ones < 2).tolist() == [299.0]


def test_tokens_before_a_position() -> None:
    for position, wanted in (
        ([1, 0, 2], [True, False, True, True, False]),
        ([-1, 5, 0], [False] * 5),
        ([9, -3, 3], [True] * 5),
    ):
        assert small().before(torch.tensor(position)).tolist() == wanted


def test_keep() -> None:
    values, flags = torch.tensor([1.0, NAN, -3.0]), torch.tensor([True, False, True])
    assert keep(values, flags).tolist() == [1.0, 0.0, -3.0] and keep(values, flags, 7.0).tolist() == [1.0, 7.0, -3.0]
    assert values[1].isnan() and keep(values, ~flags | flags) is values
    assert keep_(values, flags, 2.0) is values and values.tolist() == [1.0, 2.0, -3.0]


@pytest.mark.parametrize("most", [1, 7, 1 << 16])
def test_blocks_hold_every_value_once(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a block may hold, values stand in their own row, in their order, with little behind them."""
    monkeypatch.setattr("apportion.rollouts._BLOCK", most)
    length = np.array([0, 3, 1, 0, 40, 2, 5, 5, 0, 64, 33, 1, 0])
    values = np.arange(length.sum(), dtype=np.float64)
    rows = np.split(values, length.cumsum()[:-1])
    found, seen = np.full_like(values, -1), []
    for block in in_blocks(values, length, np.inf):
        for row, laid, present in zip(block.rows, block.values, block.present, strict=True):
            assert laid[present].tolist() == rows[row].tolist() and present[: length[row]].all()
            assert (laid[length[row] :] == np.inf).all() and len(laid) < 2 * max(length[row], 1)
        seen += block.rows.tolist()
        block.values[block.present] *= 2
        block.into(found)
    assert sorted(seen) == length.nonzero()[0].tolist() and found.tolist() == (2 * values).tolist()
    assert list(in_blocks(values[:0], length[:0], 0.0)) == list(in_blocks(values[:0], length[:1], 0.0)) == []


def test_one_long_response_pads_no_other() -> None:
    """Rows as wide as the longest would be 4,000 times 20,000 numbers."""
    length = [20_000] + [10] * 3_999
    rollouts = Rollouts.from_lists([[1] * n for n in length], [0] * 4_000, [1.0] * 4_000)
    ones = torch.ones(sum(length), dtype=torch.float64)
    tracemalloc.start()
    try:
        summed = rollouts.running_sum(ones)
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert torch.equal(summed, rollouts.position + 1.0) and held < 8 * ones.nbytes


def test_select_in_any_order() -> None:
    part = small().select([2, 0])
    assert part.token_ids.tolist() == [7, 8, 9, 5, 6] and part.offsets.tolist() == [0, 3, 5]
    assert part.reward.tolist() == [0.5, 1.0] and part.mask.tolist() == [True, False, True, True, True]
    assert part.names == ("p",) and part.group.tolist() == [0, 0]
    assert part.text == ("cde", "ab") and part.path == (("r", "y"), ("r", "x"))
    assert part.char_start is not None and part.char_start.tolist() == [0, 1, 2, 0, 1]
    assert small().select([1]).names == ("q",)
    assert len(small().select([])) == 0 and small().select([]).groups == 0


@given(batch=batches(), data=st.data())
def test_select_keeps_every_field(batch: Batch, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(batch.responses) - 1), max_size=6))
    part = batch.rollouts().select(rows)
    wanted = Batch([batch.responses[i] for i in rows], []).rollouts()
    for field in ("token_ids", "offsets", "reward", "mask", "entropy", "old_logprob", "boundary"):
        torch.testing.assert_close(getattr(part, field), getattr(wanted, field), equal_nan=True)
    assert [part.name(i) for i in range(len(rows))] == [wanted.name(i) for i in range(len(rows))]


@given(batch=batches(), side=st.sampled_from(["left", "right"]), extra=st.integers(0, 9))
def test_padded_and_back(batch: Batch, side: str, extra: int) -> None:
    rollouts = batch.rollouts()
    width = max([len(y.ids) for y in batch.responses]) + extra
    ids = torch.full((len(rollouts), width), 0)
    entropy = torch.full((len(rollouts), width), NAN)
    present = torch.zeros((len(rollouts), width), dtype=torch.bool)
    for i, y in enumerate(batch.responses):
        start = width - len(y.ids) if side == "left" else 0
        for t, token in enumerate(y.ids):
            ids[i, start + t], present[i, start + t], entropy[i, start + t] = token, True, y.entropy[t]
    # Group numbers need not be dense, nor in order.
    again = Rollouts.from_padded(ids, present, 50 - 3 * rollouts.group, rollouts.reward, entropy=entropy)
    assert torch.equal(again.token_ids, rollouts.token_ids) and torch.equal(again.offsets, rollouts.offsets)
    same = rollouts.group[:, None] == rollouts.group[None, :]
    assert torch.equal(again.group[:, None] == again.group[None, :], same)
    grid = rollouts.to_padded(rollouts.token_ids, width)
    for i, y in enumerate(batch.responses):
        assert grid[i].tolist() == y.ids + [0] * (width - len(y.ids))


def test_to_padded_takes_the_longest_response_as_width() -> None:
    rollouts = small()
    assert rollouts.to_padded(rollouts.token_ids).tolist() == [[5, 6, 0], [0, 0, 0], [7, 8, 9]]
    with pytest.raises(InputError, match="width: got 2; expected at least the longest response, 3"):
        rollouts.to_padded(rollouts.token_ids, 2)
    with pytest.raises(InputError, match="values"):
        rollouts.to_padded(torch.zeros(4))


# Each entry: a change to `small`, and what the one error must name.
BAD_LISTS: list[tuple[dict[str, Any], str]] = [
    ({"mask": [[1, 1], [], [1, 0]]}, "mask of row 2: got 2 values; expected 3"),
    ({"entropy": [[0.5, 1.0], []]}, "entropy: got 2 rows; expected 3"),
    ({"entropy": [[0.5, NAN], [], [2.0, 0.0, 3.0]]}, "entropy: got nan at row 0, position 1"),
    ({"entropy": [[0.5, None], [], [2.0, 0.0, 3.0]]}, "entropy: got nan at row 0, position 1"),
    ({"entropy": [[0.5, -1.0], [], [2.0, 0.0, 3.0]]}, "entropy: got -1.0 at row 0, position 1"),
    ({"old_logprob": [[-1.0, -1.0], [], [-1.0, 0.0, 0.5]]}, "old_logprob: got 0.5 at row 2, position 2"),
    ({"ref_logprob": [[-1.0, -torch.inf], [], [-1.0, 0.0, 0.0]]}, "ref_logprob: got -inf at row 0"),
    ({"reward": [1.0, None]}, r"reward: got shape \(2,\); expected shape \(3,\)"),
    ({"group": ["p", "q"]}, r"group: got shape \(2,\); expected shape \(3,\)"),
    ({"reward": [1.0, torch.inf, 0.0]}, "reward of row 1: got inf"),
    ({"token_ids": [[5, 6.5], [], [7, 8, 9]]}, "token_ids: got fractions"),
    ({"token_ids": [[5, None], [], [7, 8, 9]]}, "token_ids: got fractions or missing values"),
    ({"text": None}, "text: got nothing; expected the text that `char_start` counts in"),
    ({"text": ("ab", "")}, "text: got 2 entries; expected 3"),
    ({"path": ((), ())}, "path: got 2 entries; expected 3"),
    ({"prompt_ids": (torch.tensor([1]),)}, "prompt_ids: got 1 entries; expected 2"),
    ({"char_start": [[0, 1], [], [0, 2, 1]]}, "char_start of row 2"),
    ({"truncated": [False]}, r"truncated: got shape \(1,\)"),
]


@pytest.mark.parametrize("change, message", BAD_LISTS, ids=lambda v: v[:40] if isinstance(v, str) else "")
def test_one_clear_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        small(**change)


def test_falling_text_starts_between_responses_are_fine() -> None:
    assert small(char_start=[[0, 1], [], [0, 0, 2]]).char_start is not None


BAD_TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"offsets": torch.tensor([0, 2, 1, 5])}, "offsets"),
    ({"offsets": torch.tensor([1, 2, 2, 5])}, "offsets"),
    ({"offsets": torch.tensor([0, 2, 2, 4])}, "offsets"),
    ({"offsets": torch.tensor([], dtype=torch.int64)}, "offsets"),
    ({"group": torch.tensor([0, 2, 0])}, "group"),
    ({"group": torch.tensor([0, -1, 0])}, "group"),
    ({"reward": torch.tensor([1, 0, 1])}, "reward: got dtype int64; expected float32 or float64"),
    ({"entropy": torch.zeros(5, dtype=torch.bfloat16)}, "entropy: got dtype bfloat16"),
    ({"mask": torch.ones(5, dtype=torch.int64)}, "mask: got dtype int64; expected bool"),
    ({"token_ids": torch.zeros(5, dtype=torch.int32)}, "token_ids: got dtype int32"),
    ({"token_ids": torch.zeros((1, 5), dtype=torch.int64)}, r"token_ids: got shape \(1, 5\)"),
    ({"entropy": torch.zeros(5, device="meta")}, "entropy: got a tensor on meta; expected one on the CPU"),
]


@pytest.mark.parametrize("change, message", BAD_TENSORS, ids=lambda v: v[:30] if isinstance(v, str) else "")
def test_one_clear_error_for_tensors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(small(), **change)


def test_padded_tensors_must_have_one_shape() -> None:
    ids, present = torch.zeros((2, 3), dtype=torch.int64), torch.ones((2, 3), dtype=torch.bool)
    group, reward = torch.tensor([0, 0]), torch.tensor([1.0, 0.0])
    for field, value in (("mask", present[:, :2]), ("entropy", torch.zeros(2, 4)), ("boundary", present[:1])):
        with pytest.raises(InputError, match=field):
            Rollouts.from_padded(ids, present, group, reward, **{field: value})
    with pytest.raises(InputError, match="token_ids"):
        Rollouts.from_padded(ids[:, :2], present, group, reward)
    with pytest.raises(InputError, match="present"):
        Rollouts.from_padded(ids[0], present[0], group, reward)
    with pytest.raises(InputError, match="reward"):
        Rollouts.from_padded(ids, present, group, reward[:1])


def test_select_refuses_a_mask() -> None:
    with pytest.raises(InputError, match="rows: got booleans"):
        small().select(torch.tensor([True, False, True]))


def test_rounding_of_an_engine_is_let_through() -> None:
    """bf16 engines report log-probabilities a hair above 0."""
    rollouts = small(old_logprob=[[1e-3, -1.0], [], [0.0, NAN, -2.0]])
    assert rollouts.old_logprob is not None and rollouts.old_logprob[0] > 0
