"""What is read from TRL: its base to the bit, its statistics in float32, its rows in order."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import trl.trainer.grpo_trainer as grpo_trainer
from trl import GRPOTrainer

from apportion.engines.rng import frozen_rng
from apportion.train.host import Capture, evaluating, statistics_pass, token_statistics, trl_base

NAN = float("nan")


def test_trl_base_by_hand() -> None:
    """r = [1,0,0,0]: μ .25, sample σ .5, so A = ±(r − .25)/.5001: 1.4997, −.4999 (methods.md, law 7)."""
    rewards = torch.tensor([[1.0], [0.0], [0.0], [0.0], [1.0], [NAN], [0.0], [NAN]])
    reward, mean, scale, advantage = trl_base(rewards, torch.ones(1), 4, "group")
    assert advantage[:4].tolist() == pytest.approx([1.4997, -0.4999, -0.4999, -0.4999], abs=1e-4)
    # The second group has two scored members, 1 and 0: μ .5, σ √.5.
    assert mean[4:].tolist() == [0.5] * 4
    assert scale[4:].tolist() == pytest.approx([0.5**0.5 + 1e-4] * 4)
    assert advantage[5] == advantage[7] == 0 and torch.isnan(reward[5])
    _, _, scale, advantage = trl_base(rewards[:4], torch.tensor([2.0]), 4, "none")
    assert scale.tolist() == [1.0] * 4 and advantage.tolist() == [1.5, -0.5, -0.5, -0.5]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_base_is_trls(policy: Path, tmp_path: Path, scale: str) -> None:
    """The check inside passes, and credit's own base is TRL's advantage."""
    trainer = tiny.trainer(
        policy, tmp_path, scale_rewards=scale, reward_funcs=[tiny.last_digit, abstaining], reward_weights=[1.0, 0.3]
    )
    trainer.train()
    batch, credit = trainer.last_credit
    assert torch.equal(credit.base, batch.base.advantage)
    rollouts, base = batch.rollouts, batch.base
    assert base.live.any()
    for row, group in enumerate(rollouts.group.tolist()):
        assert trainer.decode(rollouts.prompt_ids[group]) == batch.prompts[row] == batch.rows[row]["prompt"]
        same = rollouts.reward[rollouts.group == group]
        assert base.mean[row] == pytest.approx(float(same[~same.isnan()].mean()), abs=1e-6)
    expected = (rollouts.reward - base.mean) / base.scale
    assert torch.allclose(base.advantage.double()[base.live], expected[base.live], atol=1e-6)


def abstaining(completions: list[str], **kwargs: Any) -> list[float | None]:
    return [None if len(c) % 2 else 0.5 for c in completions]


def test_another_rule_in_trl_stops_the_run(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from apportion.train import host

    monkeypatch.setattr(host, "_EPSILON", 1e-6)
    with pytest.raises(RuntimeError, match="no longer computes advantages"):
        tiny.trainer(policy, tmp_path, method="grpo").train()


def test_all_equal_rewards_are_not_live_whatever_trls_epsilon_makes_of_them(policy: Path, tmp_path: Path) -> None:
    trainer = tiny.trainer(policy, tmp_path, reward_funcs=lambda completions, **_: [0.9] * len(completions))
    trainer.train()
    batch, _ = trainer.last_credit
    assert not batch.base.live.any()
    last = trainer.state.log_history[-2]
    assert last["probe/continuations"] == 0 and last["credit/acr"] == 1 and last["credit/zero_variance"] == 1


def inside(trainer: Any) -> tuple[Capture, dict[str, Any]]:
    """One generation batch as TRL makes it, before credit."""
    trainer.model.train()
    rows = list(trainer.train_dataset.select([0] * 4 + [1] * 4))
    trainer._capture = capture = Capture()
    output = GRPOTrainer._generate_and_score_completions(trainer, rows)
    trainer._capture = None
    return capture, output


def test_trls_own_pass_is_reused_and_equals_ours(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny.trainer(policy, tmp_path, gradient_accumulation_steps=3, steps_per_generation=2,
                           per_device_train_batch_size=4, temperature=0.5)  # fmt: skip
    capture, output = inside(trainer)
    logprob, entropy = statistics_pass(trainer, output)
    from apportion.train import host

    monkeypatch.setattr(host, "statistics_pass", lambda *_: pytest.fail("made a pass of its own"))
    stats = token_statistics(trainer, capture, output)
    assert stats["old_logprob"] is output["old_per_token_logps"]
    assert torch.allclose(stats["entropy"], entropy, atol=1e-6) and stats["entropy"].dtype == torch.float32
    assert torch.allclose(stats["old_logprob"], logprob, atol=1e-6)


def test_statistics_equal_a_row_by_itself_at_the_sampling_temperature(policy: Path, tmp_path: Path) -> None:
    """Left-padded batch against each row alone (faults.md, 12 and 17), from the model's own logits."""
    trainer = tiny.trainer(policy, tmp_path, temperature=0.5)
    _, output = inside(trainer)
    logprob, entropy = statistics_pass(trainer, output)
    checked = 0
    for i in range(8):
        prompt = output["prompt_ids"][i][output["prompt_mask"][i].bool()]
        ids = output["completion_ids"][i][output["completion_mask"][i].bool()]
        with torch.no_grad(), evaluating(trainer.model):
            logits = trainer.model(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
        log_p = (logits.double() / 0.5).log_softmax(-1)
        assert torch.allclose(logprob[i, : len(ids)].double(), log_p.gather(1, ids[:, None])[:, 0], atol=1e-5)
        assert torch.allclose(entropy[i, : len(ids)].double(), -(log_p.exp() * log_p).sum(-1), atol=1e-5)
        checked += len(ids)
    assert checked > 20


def test_a_pass_under_dropout_is_not_reused(tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path / "dropout", dropout=0.5)
    trainer = tiny.trainer(folder, tmp_path / "out", gradient_accumulation_steps=3, steps_per_generation=2,
                           per_device_train_batch_size=4)  # fmt: skip
    capture, output = inside(trainer)
    assert [drew for _, _, drew in capture.passes] == [True]
    first = token_statistics(trainer, capture, output)
    again = token_statistics(trainer, capture, output)
    assert torch.equal(first["entropy"], again["entropy"]) and trainer.model.training
    assert not torch.allclose(first["old_logprob"], output["old_per_token_logps"], atol=1e-3)


def test_bf16_autocast_still_gives_float32_statistics(policy: Path, tmp_path: Path) -> None:
    trainer = tiny.trainer(policy, tmp_path, bf16=True, max_steps=3)
    trainer.train()
    assert trainer.last_credit[0].rollouts.entropy.dtype == torch.float32
    gaps = [row["probe/logprob_gap"] for row in trainer.state.log_history if "probe/logprob_gap" in row]
    # bfloat16 keeps 8 bits: logits of a few units differ by some hundredths between batch shapes.
    assert gaps and max(gaps) < 0.2


def test_truncated_rows_are_frozen_whole_and_untrainable(policy: Path, tmp_path: Path) -> None:
    trainer = tiny.trainer(policy, tmp_path, max_completion_length=6, mask_truncated_completions=True)
    trainer.train()
    batch, credit = trainer.last_credit
    rollouts = batch.rollouts
    assert rollouts.truncated.any() and not rollouts.truncated.all()
    assert (rollouts.length[rollouts.truncated] == 6).all()
    cut = rollouts.truncated[rollouts.row]
    assert not rollouts.mask[cut].any() and rollouts.mask[~cut].all()
    assert (credit.token[cut] == 0).all() and not rollouts.scored[rollouts.truncated].any()


def test_frozen_rng_restores_every_stream() -> None:
    import random

    import numpy as np

    def draw() -> list[float]:
        return [random.random(), float(np.random.random()), float(torch.rand(()))]

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with frozen_rng():
        first = draw()
    assert draw() == first


CONTRACT = {
    "_generate_and_score_completions": ["self", "inputs"],
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    "_get_per_token_logps_and_entropies": [
        "self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy",
    ],
    "_get_train_sampler": ["self", "dataset"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "log": ["self", "logs", "start_time"],
}  # fmt: skip

# Pieces of TRL's source that the wrapping relies on: method → text that has to be in it, and what for.
RELIED_ON = {
    "_calculate_rewards": {
        "rewards_per_func = gather(rewards_per_func)": "grading turns this gather off",
        "self._log_completion_extra": "grading catches log_extra", "self._log_metric": "grading catches log_metric",
    },
    "_log_completion_extra": {"self._pending_extra_logs": "grading swaps it"},
    "_log_metric": {"self._pending_metrics": "grading swaps it"},
    "_generate_and_score_completions": {
        'output["old_per_token_logps"] = old_per_token_logps': "the pass is recognised by identity",
        "self._calculate_rewards(inputs, prompts, completions, completion_ids_list)": "rows are captured there",
        "rewards.view(-1, num_generations)": "groups are laid side by side",
        '"completion_mask": completion_mask': "the loss mask",
    },
    "_prepare_inputs": {
        "self._step % generate_every": "resume restores _step",
        "self._buffered_inputs[self._step % self.args.steps_per_generation]": "resume restores the buffer",
        'mode = "train" if self.model.training': "probing is off in evaluation",
    },
    "_compute_loss": {"if advantages.dim() == 1": "(B, T) advantages are taken as they are"},
    "_generate": {"skip_special_tokens=True": "probes are decoded alike",
                  "parse_response(self._tokenizer, ids, prefix=prompt_ids[i]": "probes are parsed alike"},
}  # fmt: skip


def test_contract_with_trl() -> None:
    """Names every signature or statement of TRL that moved."""
    moved = []
    for name, expected in CONTRACT.items():
        function = getattr(GRPOTrainer, name, None)
        found = list(inspect.signature(function).parameters) if function else []
        if found[: len(expected)] != expected:
            moved.append(f"GRPOTrainer.{name}: parameters {found}, expected {expected}")
    for name, pieces in RELIED_ON.items():
        source = inspect.getsource(getattr(GRPOTrainer, name))
        moved += [f"GRPOTrainer.{name}: no {piece!r} ({why})" for piece, why in pieces.items() if piece not in source]
    moved += [f"trl.trainer.grpo_trainer.{n} is gone" for n in ("gather", "nanstd") if not hasattr(grpo_trainer, n)]
    assert not moved, "\n".join(moved)
