"""Abstentions end to end: they are counted, leave the group's statistics and get no advantage; and TRL's own trainer.

Planted faults seen caught here: an abstention as 0.0; the count of abstentions left out.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from trl import GRPOConfig, GRPOTrainer
from typer.testing import CliRunner

from apportion.cli import app
from apportion.train import CreditTrainer
from apportion.verify.rewards import combine, format_reward, verifier_reward


class Seen(CreditTrainer):
    """Keeps TRL's batch of every step."""

    outputs: Any = ()

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        self.outputs = [*self.outputs, (self.last_credit, output)]
        return output


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", ["grpo", "probepo", "vineppo"])
def test_an_unreadable_gold_and_a_verifier_that_fails(policy: Path, tmp_path: Path, method: str) -> None:
    """Row 0's gold cannot be read; of row 1's responses every second one is lost by the sandbox."""

    class Lost:
        def call(self, job: Any, limits: Any) -> Any:
            raise ConnectionError("no route to host")

        stdin = call

    choice_part = verifier_reward("choice")
    code_part = verifier_reward("code", "tests", sandbox=Lost())
    assert code_part(completions=["x"], tests=["assert f(1) == 1"]) == [None]

    def reward(completions: list[str], answer: list[str], tests: list[str], **columns: Any) -> list[float | None]:
        judged = choice_part(completions, answer=answer, **columns)
        # An empty program is wrong, whoever would run it.
        lost = code_part([f"x{text}" for text in completions], tests=tests, **columns)
        return [
            judged[i] if gold == "?" else lost[i] if i % 2 else float(len(completions[i]) % 3)
            for i, gold in enumerate(answer)
        ]

    data = tiny.dataset(2).remove_columns("answer")
    data = data.add_column("answer", ["?", "B"]).add_column("tests", ["assert f(1) == 1"] * 2)
    trainer = tiny.trainer(
        policy, tmp_path, cls=Seen, reward_funcs=reward, train_dataset=data, method=method, max_steps=2,
        run_folder=str(tmp_path / "run"),
    )  # fmt: skip
    trainer.train()
    metrics = lines(tmp_path / "run")
    assert len(metrics) == 2 and all(math.isfinite(row["loss"]) for row in metrics)
    for (batch, credit), output in trainer.outputs:
        answers = [row["answer"] for row in batch.rows]
        reward_R = batch.rollouts.reward
        for row, gold in enumerate(answers):
            lost = gold == "?" or row % 2 == 1
            assert bool(torch.isnan(reward_R[row])) == lost
            if lost:
                assert not credit.token[batch.rollouts.row == row].any()
        # μ of the scored members alone.
        scored = [float(r) for r, gold in zip(reward_R, answers, strict=True) if gold == "B" and r == r]
        mean = sum(scored) / len(scored)
        kept = [i for i, gold in enumerate(answers) if gold == "B"]
        assert batch.base.mean[kept].tolist() == pytest.approx([mean] * len(kept))
        assert not torch.isnan(output["advantages"]).any()
    # Of 8 responses the 4 of the unreadable gold abstained, and the sandbox lost all programs.
    for row in metrics:
        assert row["rewards/choice_reward/abstained"] == 4.0 and row["rewards/code_reward/abstained"] == 8.0


def test_the_command_counts_abstentions(policy: Path, tmp_path: Path) -> None:
    """Child processes without memory to start in: what needs computer algebra has no verdict. Long answers are wrong
    without it."""
    rows = [{"problem": "ab", "answer": "1"}, {"problem": "bc", "answer": "2"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = {
        "trainer.per_device_train_batch_size": 8, "trainer.gradient_accumulation_steps": 1,
        "trainer.num_generations": 4, "trainer.max_completion_length": 12, "run.threads": 1,
        "reward.settings.memory_mb": 1, "reward.settings.max_chars": 5, "method.budget": 8, "method.samples": 4,
        "method.min_gap": 1, "method.window": 1,
    }  # fmt: skip
    sets = [part for key, value in small.items() for part in ("--set", f"{key}={value}")]
    command = ["train", "--model", policy, "--data", tmp_path / "p.jsonl", "--steps", 2, "-o", tmp_path / "run", *sets]
    result = CliRunner().invoke(app, [str(part) for part in command])
    assert result.exit_code == 0, (result.output, result.exception)
    metrics = lines(tmp_path / "run")
    assert len(metrics) == 2 and all(math.isfinite(row["loss"]) for row in metrics)
    assert all(0 < row["rewards/reward/abstained"] < 8 and row["reward"] == 0 for row in metrics)


def test_an_unreadable_gold_in_a_file_is_named(policy: Path, tmp_path: Path) -> None:
    rows = [{"problem": "ab", "answer": "1"}, {"problem": "bc", "answer": r"\frac{"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["train", "--model", str(policy), "--data", str(tmp_path / "p.jsonl"), "-o", str(tmp_path / "run")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2 and "row 2, column 'answer'" in result.stderr and not (tmp_path / "run").exists()


@pytest.mark.parametrize("chat", [False, True])
def test_a_verifier_drops_into_trl(policy: Path, tmp_path: Path, chat: bool) -> None:
    """TRL's own trainer, plain and conversational, with a verifier alone and in a composition."""
    given = []

    def spy(completions: list[Any], **columns: Any) -> list[float]:
        given.append((completions, columns["answer"]))
        return [0.0] * len(completions)

    both = combine([verifier_reward("math"), format_reward(think=False, box=False)], [1.0, 0.5])
    args = GRPOConfig(**tiny.options(tmp_path, max_steps=1))
    trainer = GRPOTrainer(
        model=tiny.load(policy), reward_funcs=[verifier_reward("math"), both, spy], args=args,
        train_dataset=tiny.dataset(chat=chat), processing_class=tiny.make_tokenizer(),
    )  # fmt: skip
    trainer.train()
    completions, golds = given[0]
    assert isinstance(completions[0], list) == chat
    wanted = verifier_reward("math")(completions=completions, answer=golds)
    log = next(row for row in trainer.state.log_history if "loss" in row)
    assert math.isfinite(log["loss"])
    known = [value for value in wanted if value is not None]
    assert log["rewards/math_reward/mean"] == pytest.approx(sum(known) / len(known))
    assert log["rewards/math_reward+format_reward/mean"] == pytest.approx(sum(known) / len(known) + 0.5)
    assert log["rewards/math_reward/abstained"] == wanted.count(None)
