"""Rollouts and probes from one loop are what sampling first and probing after would have been.

Planted faults seen caught: a job's or a probe's row, or the rows that a job serves, not moved; prompts of a later batch
numbered from 0; a second wave with the first one's numbers, or none; truncated responses not masked in the plan; the
rollouts' cost taken for the probes'; probes and rollouts of one random stream; logs of reward functions lost, or group
by group the other way round; entropies and log-probabilities exchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import MistralConfig, MistralForCausalLM

from apportion.errors import InputError
from apportion.measure.readings import Measurement
from apportion.records import RunFolder
from apportion.train import CreditTrainer
from apportion.train.host import statistics_pass

WIDE: dict[str, Any] = {"budget": 12, "samples": 4, "min_gap": 1, "window": 2}
METHODS: dict[str, dict[str, Any]] = {
    "probepo": {"method": "probepo", **WIDE},
    "two waves": {"method": "probepo", **WIDE, "allocation": "neyman", "pilot": 2},
    "vineppo": {"method": "vineppo"},
    "fresh budget": {"method": "vineppo", "fresh_budget": 9},
    "spo_chain": {"method": "spo_chain"},
    "masked": {
        "method": "probepo", **WIDE, "mask_truncated_completions": True, "max_completion_length": 16, "max_steps": 12,
    },
    # A step has several generation batches: prompts are numbered through.
    "misaligned": {
        "method": "probepo", **WIDE, "gradient_accumulation_steps": 3, "steps_per_generation": 2,
        "per_device_train_batch_size": 4,
    },
}  # fmt: skip


def parity(completions: list[Any], answer: list[str], **rest: Any) -> list[float]:
    """Half of the texts get 1: those that hold the row's answer an odd number of times."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(text.count(gold) % 2) for text, gold in zip(texts, answer, strict=True)]


class Kept(CreditTrainer):
    """Keeps every batch with what was measured of it, and has it measured again the other way."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: list[tuple[Any, Measurement, Measurement]] = []
        self.passes_of_trl: list[tuple[torch.Tensor, ...]] = []
        super().__init__(*args, **kwargs)
        measure = self._measurer.measure

        def both(batch: Any, step: int, streamed: Any = None) -> Measurement:
            assert streamed is not None
            found = measure(batch, step, streamed)
            self.seen.append((batch, found, measure(batch, step)))
            return found

        self._measurer.measure = both

    def _credited(self, capture: Any, output: dict[str, Any]) -> dict[str, Any]:
        self.passes_of_trl.append((*statistics_pass(self, output), output["completion_mask"].bool()))
        return super()._credited(capture, output)


def kept(policy: Path, folder: Path, **changes: Any) -> Kept:
    options = {"max_steps": 4, "learning_rate": 1e-3, "reward_funcs": parity, **changes}
    trainer = tiny.trainer(policy, folder, cls=Kept, stream=True, **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", METHODS)
def test_the_same_is_measured_as_after_the_rollouts(policy: Path, tmp_path: Path, name: str) -> None:
    """Same plan, same probes by key, same rewards: the batch frozen first, planned whole and probed from prefills."""
    trainer = kept(policy, tmp_path, **METHODS[name])
    probes = 0
    for _, streamed, after in trainer.seen:
        order = [sorted(found.probes, key=lambda p: (p.row, p.position, p.m)) for found in (streamed, after)]
        assert order[0] == order[1]
        probes += len(order[0])
        ours, theirs = streamed.evidence.continuations, after.evidence.continuations
        for field in ("row", "position", "count", "mean"):
            assert torch.equal(getattr(ours, field), getattr(theirs, field)), field
    assert probes > 20
    assert any(found.gap.tokens for _, found, _ in trainer.seen)
    assert all(found.gap.largest < 1e-5 for _, found, _ in trainer.seen)


@pytest.mark.parametrize("rows", [dict(), dict(mask_truncated_completions=True), dict(temperature=0.7, top_k=4)])
def test_the_batch_is_what_trl_makes_of_the_responses(policy: Path, tmp_path: Path, rows: dict[str, Any]) -> None:
    """Rewards graded a group at a time are those of the whole; numbers read while drawing those of a pass."""
    trainer = kept(policy, tmp_path, **{**METHODS["probepo"], **rows})
    for (batch, _, _), (logprob, entropy, mask) in zip(trainer.seen, trainer.passes_of_trl, strict=True):
        rollouts = batch.rollouts
        width = mask.shape[1]
        real = torch.arange(width) < rollouts.length[:, None]
        torch.testing.assert_close(rollouts.old_logprob, logprob[real], atol=1e-5, rtol=0)
        torch.testing.assert_close(rollouts.entropy, entropy[real], atol=1e-5, rtol=0)
        assert torch.equal(rollouts.mask, mask[real])
        rewards = parity(
            [trainer.processing_class.decode(ids, skip_special_tokens=True) for ids in _split(rollouts)],
            [row["answer"] for row in batch.rows],
        )
        assert rollouts.reward.tolist() == rewards
    assert any(row["loss"] != 0 for row in trainer.state.log_history if "loss" in row)


def _split(rollouts: Any) -> list[list[int]]:
    return [ids.tolist() for ids in rollouts.token_ids.split(rollouts.length.tolist())]


@pytest.mark.parametrize("chat", [False, True])
def test_what_reward_functions_log_keeps_the_order_of_the_rows(policy: Path, tmp_path: Path, chat: bool) -> None:
    """A group at a time, in whatever order groups end; columns come out by row, and probes log nothing."""
    groups: list[list[str]] = []

    def reward(completions: list[Any], answer: list[str], log_extra: Any, log_metric: Any, **rest: Any) -> list[float]:
        groups.append(answer)
        log_extra("gold", list(answer))
        log_metric("asked", float(len(answer)))
        return parity(completions, answer)

    columns: list[list[str]] = []

    class Reading(CreditTrainer):
        def _calculate_rewards(self, inputs: Any, *rest: Any) -> torch.Tensor:
            found = super()._calculate_rewards(inputs, *rest)
            if self._capture is not None:
                columns.append(list(self._pending_extra_logs["gold"]))
                columns.append([row["answer"] for row in inputs])
                assert self._pending_metrics["asked"] == [4.0, 4.0]
            return found

    trainer = tiny.trainer(
        policy, tmp_path, cls=Reading, stream=True, max_steps=1, reward_funcs=reward,
        train_dataset=tiny.dataset(chat=chat), log_completions=False, **METHODS["vineppo"],
    )  # fmt: skip
    trainer.train()
    assert len(columns) == 2 and columns[0] == columns[1] and len(columns[0]) == 8
    assert len(groups) > 2, "probes were graded too"


def test_nothing_but_rollouts_of_our_own_engine_where_nothing_varies(policy: Path, tmp_path: Path) -> None:
    """All rewards equal: no group is live, no probe is asked for, and all advantages are 0."""
    trainer = tiny.trainer(
        policy, tmp_path, stream=True, reward_funcs=lambda completions, **_: [1.0] * len(completions)
    )
    trainer.train()
    batch, credit = trainer.last_credit
    assert not credit.token.any() and not batch.base.live.any()
    assert all(row["probe/tokens"] == 0 for row in trainer.state.log_history if "loss" in row)


def test_costs_are_the_probes_alone(policy: Path, tmp_path: Path) -> None:
    """One forward token for each probed token: none is prefilled; and no pass over the batch."""
    trainer = tiny.trainer(
        policy, tmp_path, stream=True, reward_funcs=parity, run_folder=str(tmp_path), **METHODS["vineppo"]
    )  # fmt: skip
    trainer.train()
    rows = RunFolder(tmp_path).metrics()
    assert sum(row["probe/tokens"] for row in rows) > 100
    for row in rows:
        # One prefix is scored again for the gap: all of a response's tokens, at most the limit and the prompt.
        assert 0 <= row["measure/forward_tokens"] - row["probe/tokens"] <= 24 + 4
        assert row["tokens/actor"] == sum(
            len(r["token_ids"]) for r in RunFolder(tmp_path).read("rollouts", row["step"])
        )


def test_an_error_in_grading_ends_the_run(policy: Path, tmp_path: Path) -> None:
    def broken(completions: list[Any], **rest: Any) -> list[float]:
        raise ZeroDivisionError("reward")

    trainer = tiny.trainer(policy, tmp_path, stream=True, reward_funcs=broken)
    with pytest.raises(ZeroDivisionError):
        trainer.train()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"method": "grpo"}, "stream"),
        ({"method": "grpo_vps"}, "stream"),
        ({"method": ["probepo", "cw_grpo"]}, "stream"),
        ({"rescue_cue": "="}, "stream"),
        ({"probe_engine": "vllm"}, "stream"),
        ({"probe_stop": "("}, "probe_stop"),
        ({"probe_stop": "x*"}, "probe_stop"),
        ({"probe_stop": 5}, "probe_stop"),
        ({"stream": "no"}, "stream"),
        ({"method": "grpo", "stream": False, "probe_stop": "x"}, "probe_stop"),
        ({"use_vllm": True}, "stream"),
        ({"probe_stop": "x", "probe_engine": "vllm", "stream": False}, "probe_stop"),
    ],
)
def test_what_cannot_be_streamed_is_refused(policy: Path, tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=field):
        tiny.trainer(policy, tmp_path, **{"stream": True, "credit": {}, **changes})


@pytest.mark.parametrize("stream", [False, True])
def test_probes_end_where_their_text_decides(policy: Path, tmp_path: Path, stream: bool) -> None:
    """A probe whose new text holds two equal signs ends at the next multiple of eight tokens; rollouts do not."""
    trainer = tiny.trainer(
        policy, tmp_path, stream=stream, probe_stop="=.*=", run_folder=str(tmp_path), reward_funcs=parity,
        **METHODS["vineppo"],
    )  # fmt: skip
    trainer.train()
    rows = [row for step in (1, 2) for row in RunFolder(tmp_path).read("evidence", step)]
    decode = trainer.decode
    for row in rows:
        cuts = [n for n in range(8, len(row["token_ids"]) + 1, 8) if decode(row["token_ids"][:n]).count("=") >= 2]
        if row["finish"] == "decided":
            assert cuts == [len(row["token_ids"])]
        else:
            assert not cuts or cuts == [len(row["token_ids"])]
    assert {row["finish"] for row in rows} >= {"decided", "stop"}


def test_numbers_that_are_not_the_trainers_are_told(policy: Path, tmp_path: Path) -> None:
    """What was read while drawing is held against the trainer's own pass, here one of other weights."""

    class Other(CreditTrainer):
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            found = list(super()._get_per_token_logps_and_entropies(*args, **kwargs))
            return (found[0] - 0.5, *found[1:])

    trainer = tiny.trainer(
        policy, tmp_path, cls=Other, stream=True, reward_funcs=parity, probe_gap=0.3, beta=0.0, **METHODS["vineppo"]
    )  # fmt: skip
    with pytest.warns(UserWarning, match=r"0\.5 nats from the trainer's"):
        trainer.train()


def test_what_the_engine_cannot_keep_is_sampled_by_trl(policy: Path, tmp_path: Path) -> None:
    """A window of 26 tokens holds responses of 24 to prompts of 2, not of 3 and 4: those batches are TRL's."""
    config = MistralConfig(**{**tiny.load(policy).config.to_dict(), "sliding_window": 26, "head_dim": 8})
    config.layer_types = None
    ways: list[bool] = []

    class Seen(CreditTrainer):
        def _credited(self, capture: Any, output: dict[str, Any]) -> dict[str, Any]:
            ways.append((capture.streamed is not None) == (output["prompt_ids"].shape[1] == 2))
            ways.append(capture.streamed is not None)
            return super()._credited(capture, output)

    torch.manual_seed(0)
    trainer = tiny.trainer(
        policy, tmp_path, cls=Seen, model=MistralForCausalLM(config), stream=True, max_steps=4,
        train_dataset=tiny.dataset(6), per_device_train_batch_size=4, reward_funcs=parity, **METHODS["vineppo"],
    )  # fmt: skip
    trainer.train()
    assert all(ways[::2]) and set(ways[1::2]) == {True, False}
    with pytest.raises(InputError, match="stream: got True with MistralForCausalLM"):
        config.sliding_window = 20
        tiny.trainer(policy, tmp_path, model=MistralForCausalLM(config), stream=True)
