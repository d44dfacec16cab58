"""verl's rows as a batch and back: by key, without padding rows, in an order that balancing does not change.

By hand, verl's GRPO (sample σ, ε = 1e-6): rewards 1, 0, 0, 0 have μ = .25, σ = .5; A = 1.499997, −.499999. Among
1, 0 and one without a verdict: μ = .5, σ = .70711, A = ±.707106, and 0.

Planted faults that these tests were seen to catch: padding rows counted; the base computed in our order; indices and
sessions sorted as text; advantages read, or tokens trained, where the mask is 0; truncation by length or by stop token
alone; a NaN left in the group; a worked solution as gold answer; groups of one prompt under one name; columns of the
data set lost; advantages under verl's keys in our order; who is left alone paid as a group of one; a base in the
wrong order.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apportion.errors import InputError

pytest.importorskip("verl", reason="verl is not installed: make cluster has an environment with it")

from tensordict import TensorDict
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from apportion.integrations.verl import rows as module
from apportion.integrations.verl.rows import Reader, versions, write_advantages

NAN = float("nan")


class Queue:
    """TransferQueue as the module uses it: rows by key, answered in the order that was asked for."""

    def __init__(self, rows: dict[str, dict[str, Any]]) -> None:
        self.rows, self.put = rows, []

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str] | None = None) -> TensorDict:
        assert partition_id == "train"
        found = [self.rows[key] for key in keys]
        wanted = select_fields or list(found[0])
        return list_of_dict_to_tensordict([{name: row[name] for name in wanted if name in row} for row in found])

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> None:
        self.put.append((keys, fields))


def decode(ids: Any) -> str:
    return "".join(chr(96 + i) for i in ids)


def row(uid: str, prompt: list[int], response: list[int], reward: float, index: int, **more: Any) -> dict[str, Any]:
    n = len(response)
    scores = torch.zeros(n)
    scores[-1] = reward
    return {
        "uid": uid, "prompts": torch.tensor(prompt), "responses": torch.tensor(response),
        "response_mask": torch.ones(n, dtype=torch.int64), "rm_scores": scores, "index": index, "data_source": "d",
        "reward_model": {"ground_truth": "7"}, "extra_info": {"index": index, "answer": "long"}, "column": f"c{index}",
        "entropy": torch.arange(n).float() + 10 * index, "old_log_probs": -torch.ones(n),
        "ref_log_prob": -2 * torch.ones(n), **more,
    }  # fmt: skip


def with_advantages(rows: dict[str, dict[str, Any]], normalised: bool = True) -> None:
    """verl's own, of its own function, in its order."""
    width = max(len(each["responses"]) for each in rows.values())
    mask, scores = torch.zeros(len(rows), width), torch.zeros(len(rows), width)
    for i, each in enumerate(rows.values()):
        n = len(each["responses"])
        mask[i, :n], scores[i, :n] = each["response_mask"], each["rm_scores"]
    import numpy as np

    groups = np.array([each["uid"] for each in rows.values()], dtype=object)
    found, _ = compute_grpo_outcome_advantage(scores, mask, groups, norm_adv_by_std_in_grpo=normalised)
    for i, each in enumerate(rows.values()):
        each["advantages"] = found[i, : len(each["responses"])]


@pytest.fixture
def reader() -> Reader:
    return Reader(decode, frozenset({5}), limit=4, normalised=True, text=True)


def meta(rows: dict[str, dict[str, Any]], padding: set[str] = frozenset()) -> Any:
    tags = [{"is_padding": True} if key in padding else {"min_global_steps": 3, "max_global_steps": 4} for key in rows]
    return SimpleNamespace(keys=list(rows), tags=tags, partition_id="train")


def batch_of(reader: Reader, rows: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, **about: Any) -> Any:
    monkeypatch.setattr(module, "tq", Queue(rows))
    return reader.read(meta(rows, **about))


def two_groups() -> dict[str, dict[str, Any]]:
    return {
        "x_0_0": row("x", [1, 2], [3, 4, 5], 1.0, 20), "x_1_0": row("x", [1, 2], [3, 5], 0.0, 20),
        "x_2_0": row("x", [1, 2], [4, 4, 4, 4], 0.0, 20), "x_3_0": row("x", [1, 2], [4, 4, 4, 5], 0.0, 20),
        "y_0_0": row("y", [2], [3, 4], 0.0, 3), "y_10_0": row("y", [2], [4, 5], 1.0, 3),
        "y_2_0": row("y", [2], [3, 3, 5], 1.0, 3),
    }  # fmt: skip


def test_groups_are_formed_by_key_whatever_verls_order(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = two_groups()
    padding = row("pad1", [5] * 4, [5], 0.0, 20)
    padding["response_mask"] = torch.zeros(1, dtype=torch.int64)
    shuffled = [*rows.items(), ("pad1_0_0", padding)]
    random.Random(3).shuffle(shuffled)
    rows = dict(shuffled)
    with_advantages(rows)
    found = batch_of(reader, rows, monkeypatch, padding={"pad1_0_0"})
    # By the data set's index, as a number, then by session, as a number.
    assert found.keys == ["y_0_0", "y_2_0", "y_10_0", "x_0_0", "x_1_0", "x_2_0", "x_3_0"]
    rollouts, base = found.batch.rollouts, found.batch.base
    assert rollouts.group.tolist() == [0, 0, 0, 1, 1, 1, 1] and rollouts.names == ("3", "20")
    assert [ids.tolist() for ids in rollouts.prompt_ids] == [[2], [1, 2]]
    assert base.advantage[3:].tolist() == pytest.approx([1.499997, -0.499999, -0.499999, -0.499999])
    assert base.mean[3:].tolist() == [0.25] * 4 and base.scale[3:].tolist() == pytest.approx([0.500001] * 4)
    # Cut off is who used up the limit without a stop token; the first one ends early by some other rule.
    assert rollouts.truncated.tolist() == [False] * 5 + [True, False]
    assert rollouts.text[0] == "cd" and rollouts.entropy[:5].tolist() == [30, 31, 30, 31, 32]
    assert set(rollouts.old_logprob.tolist()) == {-1} and set(rollouts.ref_logprob.tolist()) == {-2}
    assert versions(found.tags) == [(3, 4)] * 7


def test_a_row_keeps_every_column_of_its_data_set(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = two_groups()
    with_advantages(rows)
    found = batch_of(reader, rows, monkeypatch)
    assert found.about[0]["column"] == "c3" and found.about[-1]["column"] == "c20"
    assert found.about[0]["reward_model"] == {"ground_truth": "7"} and "responses" not in found.about[0]
    # The gold answer is what is graded by, and not a worked solution that the data set has beside it.
    assert found.batch.golds == ["7"] * 7


def test_two_groups_of_one_prompt_have_two_names(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {f"{uid}_{i}_0": row(uid, [1], [3, 5], float(i), 9) for uid in ("u", "v") for i in range(2)}
    with_advantages(rows)
    found = batch_of(reader, rows, monkeypatch)
    assert found.batch.rollouts.names == ("9", "9.1")
    monkeypatch.setattr(module, "tq", Queue(rows))
    assert reader.read(meta(rows), part=2).batch.rollouts.names == ("9.2.0", "9.2.1")


def test_advantages_go_back_under_their_keys(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = two_groups()
    with_advantages(rows)
    found = batch_of(reader, rows, monkeypatch)
    queue = Queue(rows)
    monkeypatch.setattr(module, "tq", queue)
    token = torch.arange(len(found.batch.rollouts.token_ids), dtype=torch.float64)
    write_advantages(meta(rows), found.keys, found.batch.rollouts, token)
    [(keys, fields)] = queue.put
    assert keys == found.keys and list(fields.keys()) == ["advantages"]
    pieces = dict(zip(keys, fields["advantages"].unbind(), strict=True))
    assert pieces["y_0_0"].tolist() == [0, 1] and pieces["y_2_0"].tolist() == [2, 3, 4]
    assert pieces["x_3_0"].tolist() == [16, 17, 18, 19] and pieces["x_3_0"].dtype == torch.float32


def test_an_advantage_of_zero_alpha_is_verls_own_bit_for_bit(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    from apportion.credit.registry import make_method
    from apportion.measure.evidence import Continuations, Evidence

    rows = two_groups()
    rewards = [0.3, 0.7, 0.1, 1.0, 0.2, 0.9, 0.4]
    for each, reward in zip(rows.values(), rewards, strict=True):
        each["rm_scores"][-1] = reward
    with_advantages(rows)
    batch = batch_of(reader, rows, monkeypatch).batch
    method = make_method("probepo", {"alpha": 0, "min_gap": 1})
    probes = Continuations.from_rewards(batch.rollouts, [(0, 1, [1.0, 0.0]), (4, 1, [1.0])])
    credit = method.assign(batch.rollouts, Evidence(probes), batch.base)
    ours = dict(
        zip(batch_of(reader, rows, monkeypatch).keys, credit.token.split(batch.rollouts.length.tolist()), strict=True)
    )
    for key, each in rows.items():
        assert torch.equal(ours[key], each["advantages"])


def test_without_a_verdict_a_response_counts_in_nothing(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {f"x_{i}_0": row("x", [1], [3, 5], reward, 1) for i, reward in enumerate((1.0, NAN, 0.0))}
    with_advantages(rows)
    assert all(torch.isnan(each["advantages"]).all() for each in rows.values())
    base = batch_of(reader, rows, monkeypatch).batch.base
    assert base.advantage.tolist() == pytest.approx([0.707106, 0, -0.707106], abs=1e-6)
    assert base.live.tolist() == [True, False, True]


def test_who_is_left_alone_by_abstentions_gets_nothing(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {f"x_{i}_0": row("x", [1], [3, 5], reward, 1) for i, reward in enumerate((1.0, NAN))}
    # A group of one from the start has what verl gives it: its reward.
    rows["y_0_0"] = row("y", [1], [3, 5], 1.0, 2)
    with_advantages(rows)
    base = batch_of(reader, rows, monkeypatch).batch.base
    assert base.advantage.tolist() == pytest.approx([0, 0, 0.999999]) and not base.live.any()


def test_the_mask_is_verls_even_where_it_rejects_tokens(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = two_groups()
    rows["x_0_0"]["response_mask"] = torch.tensor([0, 1, 1])
    rows["x_1_0"]["response_mask"] = torch.tensor([0, 0])
    with_advantages(rows)
    batch = batch_of(reader, rows, monkeypatch).batch
    assert batch.rollouts.mask[7:12].tolist() == [False, True, True, False, False]
    assert batch.base.advantage[3] == pytest.approx(1.499997)


def test_advantages_of_another_estimator_are_refused(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = two_groups()
    with_advantages(rows)
    rows["x_0_0"]["advantages"] = rows["x_0_0"]["advantages"] + 0.1
    with pytest.raises(RuntimeError, match="verl"):
        batch_of(reader, rows, monkeypatch)
    rows["x_0_0"]["advantages"] = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(RuntimeError, match="differ between the tokens"):
        batch_of(reader, rows, monkeypatch)


def test_several_outputs_of_a_session_are_refused_by_name(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"x_0_0": row("x", [1], [3, 5], 1.0, 1), "x_0_1": row("x", [1], [3, 5], 1.0, 1)}
    with_advantages(rows)
    with pytest.raises(InputError, match="row x_0_1"):
        batch_of(reader, rows, monkeypatch)
