"""α = 0, K = 0 and method="grpo" are TRL's GRPO, bit for bit, and probing leaves no trace in it.

Planted faults that the tests of this folder and `tests/test_loop.py` were seen to catch. Here: random streams not
frozen while probing, `log_extra` of probes kept, a sign error, advantages one token late, probing in evaluation.
test_host: groups by stride, the loss mask ignored, a pass under dropout reused, σ without ε. test_grading: a probe
graded with another row's columns, a budget over the limit. test_options: probes sampled at another temperature.
test_resume: `_step`, the buffered batch or the order of later epochs not restored. test_distributed: rank 0's rows
taken on every rank, a collective left in grading. test_loop: a second wave that repeats the first's random streams, a
key without its step.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from trl import GRPOConfig, GRPOTrainer

from apportion.train import CreditTrainer


class Seen:
    """Everything that TRL hands to the loss, with advantages apart, and the log of completions."""

    def __init__(self) -> None:
        self.batches: list[dict[str, torch.Tensor]] = []
        self.advantages: list[torch.Tensor] = []


def spied(cls: type[GRPOTrainer], seen: Seen) -> type[GRPOTrainer]:
    class Spy(cls):  # type: ignore[valid-type,misc]
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            batch = dict(inputs)
            seen.advantages.append(batch.pop("advantages"))
            seen.batches.append(batch)
            return super()._compute_loss(model, inputs)

    return Spy


def plain(policy: Path, folder: Path, seen: Seen, **changes: Any) -> GRPOTrainer:
    model = tiny.load(policy)
    return spied(GRPOTrainer, seen)(
        model=model, reward_funcs=tiny.last_digit, train_dataset=tiny.dataset(), eval_dataset=tiny.dataset(2),
        processing_class=tiny.make_tokenizer(), args=GRPOConfig(**tiny.options(folder, **changes)),
    )  # fmt: skip


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"max_steps": 5, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8},
    "reused": {"max_steps": 5, "num_iterations": 2, "gradient_accumulation_steps": 2, "beta": 0.1},
    "misaligned": {
        "max_steps": 5, "gradient_accumulation_steps": 3, "steps_per_generation": 2,
        "mask_truncated_completions": True,
    },
}  # fmt: skip

METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"method": "grpo"},
    "alpha 0": {"method": "probepo", "alpha": 0.0},
    "K = 0": {"method": "probepo", "min_gap": 1, "window": 100},
}


@pytest.fixture(scope="module", params=SETTINGS)
def reference(request: Any, policy: Path, tmp_path_factory: Any) -> tuple[dict[str, Any], Seen, Any]:
    seen = Seen()
    changes = SETTINGS[request.param]
    trainer = plain(policy, tmp_path_factory.mktemp("plain"), seen, **changes)
    trainer.train()
    return changes, seen, trainer


@pytest.mark.parametrize("method", METHODS)
def test_same_parameters_and_trajectories(
    reference: tuple[dict[str, Any], Seen, Any], method: str, policy: Path, tmp_path: Path
) -> None:
    changes, expected, host = reference
    seen = Seen()
    trainer = tiny.trainer(
        policy, tmp_path, cls=spied(CreditTrainer, seen), eval_dataset=tiny.dataset(2), **changes, **METHODS[method]
    )
    trainer.train()
    assert tiny.equal(tiny.parameters(host.model), tiny.parameters(trainer.model))
    assert len(seen.batches) == len(expected.batches)
    for ours, theirs in zip(seen.batches, expected.batches, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[k], theirs[k]) for k in theirs)
    probed = sum(row.get("probe/continuations", 0) for row in trainer.state.log_history)
    assert (probed > 0) == (method == "alpha 0")
    same = ("loss", "reward", "entropy", "completions/mean_length", "eval_reward", "num_tokens", "kl")
    for ours, theirs in zip(trainer.state.log_history, host.state.log_history, strict=True):
        assert [ours.get(key) for key in same] == [theirs.get(key) for key in same]
    assert list(trainer._logs["completion"]) == list(host._logs["completion"])
    assert list(trainer._logs["advantages"]) == list(host._logs["advantages"])


def test_advantages_are_per_token_and_zero_on_padding(policy: Path, tmp_path: Path) -> None:
    seen = Seen()
    trainer = tiny.trainer(policy, tmp_path, cls=spied(CreditTrainer, seen), max_steps=3, alpha=1.0)
    trainer.train()
    moved = 0
    for batch, token in zip(seen.batches, seen.advantages, strict=True):
        mask = batch["completion_mask"].bool()
        assert token.shape == mask.shape and token.dtype == torch.float32
        assert (token[~mask] == 0).all() and torch.isfinite(token).all()
        moved += int((token.max(1).values - token.masked_fill(~mask, 9).min(1).values > 1e-3).sum())
    assert moved > 0


def noisy(prompts: list[str], completions: list[str], log_extra: Any, log_metric: Any, **kwargs: Any) -> list[float]:
    """A reward that draws from every global stream and logs all it can."""
    log_extra("draw", [random.random() for _ in completions])
    log_metric("calls", float(len(completions)))
    np.random.random(3)
    torch.rand(3)
    return tiny.last_digit(completions, **kwargs)


def test_grading_probes_leaves_no_trace(policy: Path, tmp_path: Path) -> None:
    runs = []
    for alpha, method in ((0.0, "probepo"), (None, "grpo")):
        settings = {"method": method} if alpha is None else {"method": method, "alpha": alpha}
        trainer = tiny.trainer(policy, tmp_path / method, reward_funcs=noisy, max_steps=3, **settings)
        trainer.train()
        runs.append(trainer)
    probing, bare = runs
    assert sum(row.get("probe/continuations", 0) for row in probing.state.log_history) > 0
    assert list(probing._logs["extra"]["draw"]) == list(bare._logs["extra"]["draw"])
    assert [r.get("calls") for r in probing.state.log_history] == [r.get("calls") for r in bare.state.log_history]
    assert not probing._pending_extra_logs and not probing._pending_metrics
    assert tiny.equal(tiny.parameters(probing.model), tiny.parameters(bare.model))


def test_nothing_is_probed_in_evaluation(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny.trainer(policy, tmp_path, eval_dataset=tiny.dataset(4), per_device_eval_batch_size=8)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("probed in evaluation")

    assert trainer._measurer is not None
    monkeypatch.setattr(trainer._measurer, "measure", refuse)
    metrics = trainer.evaluate()
    assert "eval_reward" in metrics and not any(key.startswith("eval_probe") for key in metrics)
