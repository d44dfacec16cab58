"""TRL's options under per-token credit: the losses are linear in each token's advantage, and the others train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_host import inside

from apportion.records import RunFolder
from apportion.train import CreditTrainer

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo"]


def gradient(trainer: CreditTrainer, output: dict[str, Any], advantages: torch.Tensor) -> torch.Tensor:
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    trainer._compute_loss(trainer.model, {**output, "advantages": advantages}).backward()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_takes_each_tokens_own_advantage(policy: Path, tmp_path: Path, loss: str) -> None:
    """On policy ∂loss/∂θ = −Σ_t w_t A_t ∇log π_t with weights w of the loss type: (B, T) constant is (B,) bit for
    bit, the gradient is additive in single tokens' advantages, and each token's share is its own."""
    trainer = tiny.trainer(policy, tmp_path, loss_type=loss)
    _, output = inside(trainer)
    mask = output["completion_mask"]
    row = output["advantages"] + torch.arange(8) / 8
    whole = gradient(trainer, output, row)
    assert torch.equal(whole, gradient(trainer, output, row[:, None].expand(mask.shape).contiguous() * mask))
    torch.manual_seed(0)
    token = torch.rand(mask.shape) * mask
    first = torch.zeros_like(token)
    first[:, :3] = token[:, :3]
    parts = gradient(trainer, output, first) + gradient(trainer, output, token - first)
    assert torch.allclose(parts, gradient(trainer, output, token), atol=1e-5)
    one = torch.zeros_like(token)
    at = int(mask.sum(1).argmax())
    one[at, 2] = 1.0
    assert gradient(trainer, output, one).abs().max() > 0
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
    attention = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
    logprob, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, mask.size(1))
    trainer.model.zero_grad()
    (-logprob[at, 2]).backward()
    alone = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    weight = gradient(trainer, output, one).norm() / alone.norm()
    assert torch.allclose(gradient(trainer, output, one), weight * alone, atol=1e-6)


CASES: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "misaligned": {"gradient_accumulation_steps": 3, "steps_per_generation": 2, "per_device_train_batch_size": 4},
    "iterations": {"num_iterations": 2, "max_steps": 4},
    "long window": {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4,
                    "max_steps": 5},
    "beta": {"beta": 0.1},
    "top entropy": {"top_entropy_quantile": 0.5},
    "checkpointing": {"gradient_checkpointing": True},
    "neyman": {"allocation": "neyman", "pilot": 2},
    "vineppo": {"method": "vineppo", "samples": 2},
    "rloo": {"method": "rloo"},
    "chat": {"train_dataset": tiny.dataset(chat=True)},
    "filters": {"top_k": 8, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "temperature": 0.7},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_option_trains(policy: Path, tmp_path: Path, case: str) -> None:
    changes = {"max_steps": 3, **CASES[case]}
    trainer = tiny.trainer(policy, tmp_path, run_folder=str(tmp_path / "run"), **changes)
    before = tiny.parameters(trainer.model)
    trainer.train()
    assert not tiny.equal(before, tiny.parameters(trainer.model))
    metrics = RunFolder(tmp_path / "run").metrics()
    assert [row["step"] for row in metrics] == list(range(1, changes["max_steps"] + 1))
    if changes.get("method") != "rloo":
        assert sum(row.get("probe/continuations", 0) for row in metrics) > 0
        # Two independent float32 paths through a small network.
        assert max(row["probe/logprob_gap"] for row in metrics if "probe/logprob_gap" in row) < 1e-4
    if changes.get("method") != "vineppo":
        assert max(row.get("credit/error/conserved", 0) for row in metrics) < 1e-5


def test_lora_with_reference(policy: Path, tmp_path: Path) -> None:
    """The adapters alone train, and with beta > 0 the reference pass through the same model is not taken for ours."""
    peft = pytest.importorskip("peft")
    trainer = tiny.trainer(
        policy, tmp_path, beta=0.1, max_steps=3, gradient_accumulation_steps=3, steps_per_generation=2,
        per_device_train_batch_size=4,
        peft_config=peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, lora_dropout=0.0),
    )  # fmt: skip
    capture, _ = inside(trainer)
    assert len(capture.passes) == 2
    before = tiny.parameters(trainer.model)
    trainer.train()
    changed = {n for n, p in tiny.parameters(trainer.model).items() if not torch.equal(p, before[n])}
    assert changed and all("lora_" in name for name in changed)
    gaps = [row["probe/logprob_gap"] for row in trainer.state.log_history if "probe/logprob_gap" in row]
    assert gaps and max(gaps) < 1e-4


def test_run_folder_holds_every_step(policy: Path, tmp_path: Path) -> None:
    trainer = tiny.trainer(policy, tmp_path, run_folder=str(tmp_path / "run"), max_steps=4, record_every=2)
    trainer.train()
    run = RunFolder(tmp_path / "run")
    assert run.steps() == [2, 4]
    rollouts, evidence, credit = (run.read(kind, 4) for kind in ("rollouts", "evidence", "credit"))
    batch, assigned = trainer.last_credit
    assert [row["token_ids"] for row in rollouts] == [
        batch.rollouts.token_ids[a:b].tolist()
        for a, b in zip(batch.rollouts.offsets, batch.rollouts.offsets[1:], strict=False)
    ]
    assert [v for row in credit for v in row["advantage"]] == assigned.token.tolist()
    last = run.metrics()[-1]
    assert last["probe/continuations"] == len(evidence) and last["probe/tokens"] == sum(
        len(row["token_ids"]) for row in evidence
    )
    assert last["tokens/actor"] == sum(len(row["token_ids"]) for row in rollouts)
    assert last["probe/ratio"] == last["probe/tokens"] / last["tokens/actor"]
    assert last["reward"] == sum(row["reward"] for row in rollouts) / 8
    assert {"gold", "prompt"} <= rollouts[0].keys() and rollouts[0]["gold"] in "123"
    assert all(e["group"] == rollouts[e["row"]]["group"] for e in evidence)
    for phase in ("generate", "probe", "grade", "credit", "update"):
        assert last[f"seconds/{phase}"] >= 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["step"] for line in lines) and len(lines) == 4
