"""What every credit method must do, for our own and for those of other packages.

    import pytest
    from apportion.testing import LAWS

    @pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
    def test_my_method(law):
        law(MyMethod())

A law takes a configured method and fails with an AssertionError. Methods declare what they are excused from:
`batch_wide` (whitened over the batch: no law on splits), `learns_when_collapsed` (gives credit in groups
whose rewards are all equal), `conserves` ("none" promises nothing).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from apportion.credit.method import CreditMethod
from apportion.errors import InputError
from apportion.measure.plan import BeliefJob, ConfidenceJob, Job, SensitivityJob
from apportion.rollouts import Rollouts
from apportion.testing.tools import (
    NAN,
    Entries,
    Work,
    assert_rows,
    by_row,
    credit,
    evidence_of,
    groups_of,
    measure,
    mixed_batch,
    on_subset,
    rows_batch,
    tensors,
    work_of,
)

Law = Callable[[CreditMethod], None]


def row_order(method: CreditMethod) -> None:
    """Law 1: rows may stand in any order."""
    rollouts = mixed_batch()
    entries = measure(method, rollouts)
    whole = by_row(rollouts, credit(method, rollouts, entries).token)
    for seed in range(3):
        rows = random.Random(seed).sample(range(len(rollouts)), len(rollouts))
        assert_rows(on_subset(method, rollouts, entries, rows), [whole[i] for i in rows])


def plan_order(method: CreditMethod) -> None:
    """Law 1 again: the states to measure do not depend on where rows stand."""
    rollouts = mixed_batch()
    rows = list(reversed(range(len(rollouts))))

    def states(batch: Rollouts, name: Callable[[int], int]) -> set[Any]:
        jobs = method.plan(batch, method.base(batch))
        return {
            (frozenset((name(row), at) for row, at in job.pivots), job.samples)
            if isinstance(job, Job)
            else replace(job, row=name(job.row))
            for job in jobs
        }

    assert states(rollouts, lambda i: i) == states(rollouts.select(rows), lambda i: rows[i])


def plan_sound(method: CreditMethod) -> None:
    """Requests name scored responses, real positions and each state once; planning twice plans the same."""
    rollouts = mixed_batch()
    base = method.base(rollouts)
    jobs = method.plan(rollouts, base)
    assert jobs == method.plan(rollouts, base)
    seen: set[tuple[str, tuple[int, ...]]] = set()
    single: set[tuple[str, int]] = set()
    for job in jobs:
        assert rollouts.scored[job.row]
        if isinstance(job, BeliefJob | ConfidenceJob):
            assert list(job.positions) == sorted({*job.positions}) and job.positions[0] >= 0
            assert job.positions[-1] <= rollouts.length[job.row]
        if isinstance(job, SensitivityJob):
            assert 0 < job.reasoning <= job.answer[0] < job.answer[1] <= rollouts.length[job.row]
        if not isinstance(job, Job):
            assert (job.kind, job.row) not in single
            single.add((job.kind, job.row))
            continue
        assert job.samples >= 1 and (job.row, job.position) == job.pivots[0]
        prefixes = set()
        for row, position in job.pivots:
            assert rollouts.scored[row] and 0 <= position < rollouts.length[row]
            start = int(rollouts.offsets[row])
            tokens = tuple(rollouts.token_ids[start : start + position].tolist())
            prefixes.add((rollouts.name(row), tokens))
        assert len(prefixes) == 1 and not prefixes & seen
        seen |= prefixes


def group_names(method: CreditMethod) -> None:
    """Law 2: a group is its id, whatever number or name it has."""
    rollouts = mixed_batch()
    entries = measure(method, rollouts)
    renamed = replace(rollouts, group=rollouts.groups - 1 - rollouts.group, names=None)
    assert_rows(
        by_row(renamed, credit(method, renamed, entries).token),
        by_row(rollouts, credit(method, rollouts, entries).token),
    )


def padding(method: CreditMethod) -> None:
    """Law 1: neither the side of the padding nor its width nor what stands in it matters, to the bit."""
    rollouts = mixed_batch()
    entries = measure(method, rollouts)
    whole = credit(method, rollouts, entries).token
    longest, length = int(rollouts.length.max()), rollouts.length[:, None]
    for side in ("left", "right"):
        for width in (longest, longest + 17):
            column = torch.arange(width)[None, :]
            present = column >= width - length if side == "left" else column < length

            def pad(values: Tensor, garbage: Any, present: Tensor = present) -> Tensor:
                out = torch.full(present.shape, garbage, dtype=values.dtype)
                out[present] = values
                return out

            assert rollouts.old_logprob is not None and rollouts.ref_logprob is not None
            assert rollouts.entropy is not None and rollouts.boundary is not None
            again = Rollouts.from_padded(
                pad(rollouts.token_ids, 5), present, rollouts.group * 10 - 3, rollouts.reward,
                mask=pad(rollouts.mask, False), old_logprob=pad(rollouts.old_logprob, NAN),
                ref_logprob=pad(rollouts.ref_logprob, NAN), entropy=pad(rollouts.entropy, NAN),
                boundary=pad(rollouts.boundary, True), names=rollouts.names, path=rollouts.path,
            )  # fmt: skip
            token = credit(method, again, entries).token
            assert torch.equal(token, whole), f"{side} padding to {width}"
            grid = again.to_padded(token, width)
            assert grid.shape == (len(rollouts), width)
            assert torch.equal(grid[torch.arange(width)[None, :] < length], whole)
            assert not grid[torch.arange(width)[None, :] >= length].any()


def micro_batches(method: CreditMethod) -> None:
    """Law 1: a batch split between groups gives the same credit."""
    rollouts = mixed_batch()
    entries = measure(method, rollouts)
    whole = by_row(rollouts, credit(method, rollouts, entries).token)
    groups = groups_of(rollouts)
    for half in (groups[:2], groups[2:], groups[::2]):
        rows = [row for group in half for row in group]
        if not method.batch_wide:
            assert_rows(on_subset(method, rollouts, entries, rows), [whole[i] for i in rows])


def one_group_alone(method: CreditMethod) -> None:
    """A group by itself gets what it gets among many, and other groups' rewards cannot reach it."""
    rollouts = mixed_batch()
    entries = measure(method, rollouts)
    whole = by_row(rollouts, credit(method, rollouts, entries).token)
    for rows in groups_of(rollouts):
        if not method.batch_wide:
            assert_rows(on_subset(method, rollouts, entries, rows), [whole[i] for i in rows])


def masked_tokens(method: CreditMethod) -> None:
    """Masked tokens get exactly 0, never NaN, and what stands in them changes nothing."""
    rollouts = mixed_batch()
    entries = measure(method, rollouts)
    token = credit(method, rollouts, entries).token
    assert torch.isfinite(token).all()
    assert not token[~rollouts.mask].any()
    noise: dict[str, Any] = {
        name: torch.where(rollouts.mask, getattr(rollouts, name), NAN)
        for name in ("entropy", "old_logprob", "ref_logprob")
    }
    other_ids = torch.where(rollouts.mask, rollouts.token_ids, 1)
    again = replace(rollouts, token_ids=other_ids, **noise)
    assert torch.equal(credit(method, again, entries).token, token)


def untrainable_rows(method: CreditMethod) -> None:
    """Law 4: an empty or wholly masked response gets nothing and, whatever its reward, moves no sibling."""
    rows: list[dict[str, Any]] = [
        {"group": "a", "reward": 1.0, "length": 40, "uid": 0},
        {"group": "a", "reward": 0.0, "length": 35, "uid": 1},
        {"group": "a", "reward": 0.5, "length": 1, "uid": 2},
    ]
    extra: list[dict[str, Any]] = [
        {"group": "a", "reward": 9.0, "mask": []},
        {"group": "a", "reward": 7.0, "mask": [0] * 24},
    ]
    rollouts, with_extra = rows_batch(rows), rows_batch([extra[0], *rows, extra[1]])
    plain = by_row(rollouts, credit(method, rollouts).token)
    got = by_row(with_extra, credit(method, with_extra).token)
    assert_rows(got[1:4], plain)
    assert not got[4].any() and len(got[0]) == 0


def abstained(method: CreditMethod) -> None:
    """Law 4: a response without a reward gets exactly 0 and its siblings what they get without it."""
    rows: list[dict[str, Any]] = [
        {"group": "a", "reward": 1.0, "length": 40, "uid": 0},
        {"group": "a", "reward": None, "length": 30, "uid": 1},
        {"group": "a", "reward": 0.0, "length": 35, "uid": 2},
        {"group": "b", "reward": None, "length": 20, "uid": 3},
        {"group": "c", "reward": None, "length": 20, "uid": 4},
        {"group": "c", "reward": 1.0, "length": 20, "uid": 5},
    ]
    rollouts = rows_batch(rows)
    kept = [0, 2, 5]
    without = rows_batch([rows[i] for i in kept])
    got = by_row(rollouts, credit(method, rollouts).token)
    assert_rows([got[i] for i in kept], by_row(without, credit(method, without).token))
    for i in (1, 3, 4):
        assert not got[i].any()
    if not method.learns_when_collapsed:
        assert not got[5].any()


def one_token(method: CreditMethod) -> None:
    """Responses of one token are ordinary responses."""
    rewards = {"a": [1.0, 0.0, 0.5], "b": [0.0, 1.0]}
    rows = [{"group": g, "reward": r, "length": 1} for g, values in rewards.items() for r in values]
    rollouts = rows_batch(rows)
    token = credit(method, rollouts).token
    assert token.shape == (5,) and torch.isfinite(token).all()
    if method.grouped:
        assert token[0] > token[2] > token[1] and token[4] > token[3], "a better answer got no more credit"


def group_of_one(method: CreditMethod) -> None:
    """Law 4: with nobody to be compared with, credit is exactly 0 and no probe is spent.

    Methods that compare nobody (`grouped` False) are excused.
    """
    rollouts = rows_batch([{"group": g, "reward": r, "length": 40} for g, r in (("a", 1.0), ("b", 0.0))])
    token = credit(method, rollouts).token
    assert torch.isfinite(token).all()
    if method.grouped:
        assert not token.any() and list(method.plan(rollouts, method.base(rollouts))) == []


def equal_rewards(method: CreditMethod) -> None:
    """Law 3: fifteen float32 rewards of .9 give exactly 0, not .947; no probe is spent either."""
    rollouts = rows_batch([{"group": "a", "reward": 0.9, "length": 30} for _ in range(15)])
    for reward in (rollouts.reward, rollouts.reward.float()):
        batch = replace(rollouts, reward=reward)
        token = credit(method, batch).token
        assert torch.isfinite(token).all()
        if not method.learns_when_collapsed:
            assert not token.any() and method.plan(batch, method.base(batch)) == []


def no_rewards(method: CreditMethod) -> None:
    """With every reward missing, and with no response at all, there is no credit and no error."""
    rollouts = rows_batch([{"group": g, "reward": None, "length": 20} for g in "aab"])
    assert not credit(method, rollouts).token.any()
    empty = mixed_batch().select([])
    assert credit(method, empty).token.shape == (0,)


def non_finite(method: CreditMethod) -> None:
    """Infinite rewards, NaN statistics of trainable tokens, NaN evidence and a NaN base are refused."""
    rollouts = mixed_batch()
    infinite = rollouts.reward.clone()
    infinite[3] = torch.inf
    with pytest.raises(InputError, match="reward"):
        replace(rollouts, reward=infinite)
    for name in ("entropy", "old_logprob", "ref_logprob"):
        for bad in (NAN, torch.inf, -torch.inf):
            values = getattr(rollouts, name).clone()
            values[3] = bad
            with pytest.raises(InputError, match=name):
                replace(rollouts, **{name: values})
    for bad in (NAN, torch.inf):
        with pytest.raises(InputError, match="evidence"):
            credit(method, rollouts, Entries(continuations=[(0, 5, [1.0, bad])]))
        for entries in (
            Entries(belief=[(0, 5, bad)]), Entries(confidence=[(0, 5, bad, 0.5)]), Entries(importance={3: [bad]}),
        ):  # fmt: skip
            with pytest.raises(InputError, match="evidence"):
                evidence_of(rollouts, entries)
        with pytest.raises(InputError, match="base"):
            base = method.base(rollouts)
            credit(method, rollouts, base=replace(base, advantage=base.advantage + bad))


def reward_precision(method: CreditMethod) -> None:
    """Exact float32 rewards give the same bits as float64; others the same to float32's precision."""
    rollouts = mixed_batch()
    entries = measure(method, rollouts)
    for scale, tolerance in ((1.0, 0.0), (0.9, 1e-5)):
        exact = replace(rollouts, reward=rollouts.reward * scale)
        single = replace(exact, reward=exact.reward.float())
        one, other = (credit(method, batch, entries).token for batch in (exact, single))
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        assert one.dtype == other.dtype == torch.float32


def conservation(method: CreditMethod) -> None:
    """What the method declares to keep is kept, and the record says how well."""
    rollouts = mixed_batch()
    result = credit(method, rollouts)
    if method.keeps == "none":
        assert "conserved" not in result.invariants
        return
    gaps, in_group = [], dict.fromkeys(range(rollouts.groups), 0.0)
    for row, values in enumerate(by_row(rollouts, result.token)):
        trainable = int(by_row(rollouts, rollouts.mask)[row].sum())
        gap = values.double().sum().item() - result.base[row].item() * trainable
        gaps.append(gap / max(trainable, 1) if method.keeps == "token_mean" else gap)
        in_group[int(rollouts.group[row])] += gap
    worst = max(map(abs, in_group.values() if method.keeps == "group_sum" else gaps))
    assert worst < 1e-5
    assert result.invariants["conserved"] == pytest.approx(worst, abs=1e-6)


def determinism(method: CreditMethod) -> None:
    """The same input gives the same bits."""
    first, second = (credit(method, mixed_batch()) for _ in range(2))
    assert torch.equal(first.token, second.token) and first.invariants == second.invariants
    assert measure(method, mixed_batch()) == measure(method, mixed_batch())


def inputs_untouched(method: CreditMethod) -> None:
    """Neither planning nor assigning writes into what it was given."""
    rollouts = mixed_batch()
    base = method.base(rollouts)
    evidence = evidence_of(rollouts, measure(method, rollouts))
    kinds = [getattr(evidence, f.name) for f in fields(evidence)]
    given = tensors(rollouts, base, *(kind for kind in kinds if is_dataclass(kind)))
    before = [value.clone() for value in given]
    method.plan(rollouts, base)
    method.refine(rollouts, base, evidence)
    method.assign(rollouts, evidence, base)
    for value, copy in zip(given, before, strict=True):
        torch.testing.assert_close(value, copy, rtol=0, atol=0, equal_nan=True)


def evidence_order(method: CreditMethod) -> None:
    """Evidence may come back in any order and in pieces, to the bit."""
    rollouts = mixed_batch()
    entries = measure(method, rollouts)
    # Tenths: sums of them do depend on their order.
    entries.continuations = [
        (row, at, [None if r is None else r * 0.1 + m / 7 for m, r in enumerate(rewards)])
        for row, at, rewards in entries.continuations
    ]
    whole = credit(method, rollouts, entries).token
    for seed in range(2):
        assert torch.equal(credit(method, rollouts, entries.shuffled(seed)).token, whole)


def detached(method: CreditMethod) -> None:
    """No gradient leads out of the credit, even where the host's tensors carry one."""
    rollouts = mixed_batch()
    attached = {
        name: getattr(rollouts, name).clone().requires_grad_()
        for name in ("reward", "entropy", "old_logprob", "ref_logprob")
    }
    batch = replace(rollouts, **attached)
    base = method.base(rollouts)
    base = replace(base, advantage=base.advantage.clone().requires_grad_())
    result = credit(method, batch, base=base)
    assert not any(value.requires_grad for value in tensors(result))
    assert result.token.dtype == torch.float32 and result.token.shape == rollouts.token_ids.shape


def record(method: CreditMethod) -> None:
    """A = weight·base + residual on trainable tokens; the record names its method and settings as JSON."""
    rollouts = mixed_batch()
    result = credit(method, rollouts)
    weight = 1.0 if result.weight is None else result.weight
    residual = 0.0 if result.residual is None else result.residual
    formed = result.base.double()[rollouts.row] * weight + residual
    assert torch.equal(torch.where(rollouts.mask, formed, 0.0).float(), result.token)
    assert result.method == method.name
    assert json.loads(json.dumps(dict(result.settings))) == json.loads(method.model_dump_json())
    if (cut := result.segments) is not None:
        covered = [
            (row, position)
            for row, start, end in zip(cut.row.tolist(), cut.start.tolist(), cut.end.tolist(), strict=True)
            for position in range(start, end)
        ]
        assert covered == list(zip(rollouts.row.tolist(), rollouts.position.tolist(), strict=True))


def no_loop_over_responses(method: CreditMethod) -> None:
    """`assign` does as many tensor operations and Python instructions for 96 responses as for 12."""

    def work(copies: int) -> Work:
        rows = [
            {"group": f"{c}/{g}", "reward": r, "mask": [1] * 30 + [0] * 5 + [1] * 10 * i}
            for c in range(copies)
            for g in range(2)
            for i, r in enumerate((1.0, 0.0, 0.25))
        ]
        rollouts = rows_batch(rows)
        base = method.base(rollouts)
        evidence = evidence_of(rollouts, measure(method, rollouts))
        return work_of(lambda: method.assign(rollouts, evidence, base))

    assert work(2) == work(16)


LAWS: tuple[Law, ...] = (
    row_order, plan_order, plan_sound, group_names, padding, micro_batches, one_group_alone, masked_tokens,
    untrainable_rows, abstained, one_token, group_of_one, equal_rewards, no_rewards, non_finite,
    reward_precision, conservation, determinism, inputs_untouched, evidence_order, detached, record,
    no_loop_over_responses,
)  # fmt: skip
