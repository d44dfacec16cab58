"""Whole runs from their configuration: the run folder, the token budget, resuming, evaluation, LoRA, a user's file.

Planted faults seen caught: evaluation drawing from torch's random state, one more step after a resume at the end, the
token budget counted anew after a resume, no checkpoint where it ended the run, lines of repeated steps kept twice, a
half-written checkpoint taken, the run's defaults over the file's options.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import ASCII, save_policy, save_problems, sums
from safetensors.torch import load_file

from apportion.errors import InputError
from apportion.records import RunFolder
from apportion.train import run as running
from apportion.train import watch as watching
from apportion.train.prepare import check, prepare, resolve
from apportion.train.settings import load_config, resume_config

SMALL = {
    "run.steps": 4, "run.checkpoint_every": 2, "run.threads": 1, "run.evaluate_samples": 16,
    "data.operations": 2, "data.count": 32, "method.budget": 8, "method.samples": 4, "method.min_gap": 2,
    "method.window": 2, "trainer.per_device_train_batch_size": 16, "trainer.gradient_accumulation_steps": 1,
    "trainer.num_generations": 4, "trainer.learning_rate": 1e-3,
}  # fmt: skip


def train(folder: Path, **settings: Any) -> dict[str, float]:
    chosen = {key.replace("__", "."): value for key, value in settings.items()}
    config = load_config(None, {**chosen, "run.folder": str(folder)})
    return running.train(prepare(config))


def resumed(folder: Path) -> dict[str, float]:
    return running.train(prepare(resume_config(folder)), resume=True)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next((folder / "model").glob("*.safetensors")))


def steady(folder: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says, line by line, but for seconds; `step_time` is one of TRL's."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if "seconds" not in k and k != "step_time"} for row in rows]


def same(a: Path, b: Path) -> bool:
    texts = [(folder / "evaluations.jsonl").read_text() for folder in (a, b)]
    one, other = weights(a), weights(b)
    return (
        steady(a) == steady(b) and texts[0] == texts[1] and one.keys() == other.keys()
        and all(torch.equal(one[name], other[name]) for name in one)
    )  # fmt: skip


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "straight"
    train(folder, **SMALL)
    return folder


def test_the_run_folder(straight: Path) -> None:
    assert {path.name for path in straight.iterdir()} == {
        "config.toml", "metrics.jsonl", "evaluations.jsonl", "result.json", "rollouts", "evidence", "credit",
        "checkpoints", "model",
    }  # fmt: skip
    assert load_config(straight / "config.toml").trainer["temperature"] == 1.0
    records = RunFolder(straight)
    assert records.steps() == [1, 2, 3, 4] and [row["step"] for row in records.metrics()] == [1, 2, 3, 4]
    assert any(records.read("evidence", step) for step in records.steps())
    assert {path.name for path in (straight / "checkpoints").glob("*-*")} == {"checkpoint-2", "checkpoint-4"}
    assert {"tokenizer.json", "config.json", "model.safetensors"} <= {p.name for p in (straight / "model").iterdir()}
    result = json.loads((straight / "result.json").read_text())
    spent = sum(row["tokens/actor"] + row["probe/tokens"] for row in records.metrics())
    assert (result["steps"], result["samples"], result["tokens"]) == (4, 16, spent)
    rows = list(map(json.loads, (straight / "evaluations.jsonl").read_text().splitlines()))
    assert [row["step"] for row in rows] == [0, 4]
    assert (result["start"], result["end"]) == (rows[0]["accuracy"], rows[1]["accuracy"])
    assert any(row["grad_norm"] > 0 for row in records.metrics())


def test_evaluating_changes_nothing_of_the_training(straight: Path, tmp_path: Path) -> None:
    train(tmp_path / "often", **SMALL, run__evaluate_every=1, run__evaluate_samples=24)
    train(tmp_path / "never", **SMALL, run__evaluate_samples=0)
    assert len((tmp_path / "often" / "evaluations.jsonl").read_text().splitlines()) == 5
    assert not (tmp_path / "never" / "evaluations.jsonl").exists()
    for folder in (tmp_path / "often", tmp_path / "never"):
        assert steady(folder) == steady(straight)
        assert all(torch.equal(value, weights(straight)[name]) for name, value in weights(folder).items())


def test_a_killed_run_goes_on_from_its_last_whole_checkpoint(straight: Path, tmp_path: Path) -> None:
    # As after a kill in step 4 while checkpoint 4 was being written, with a line of metrics cut off.
    folder = tmp_path / "killed"
    shutil.copytree(straight, folder)
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "model")
    for path in (folder / "checkpoints" / "checkpoint-4").glob("generation_window_*"):
        path.unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "los')
    assert running.last_checkpoint(folder) == folder / "checkpoints" / "checkpoint-2"
    resumed(folder)
    assert same(straight, folder)


def test_a_run_stopped_after_its_last_step_only_finishes(straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "last"
    shutil.copytree(straight, folder)
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "model")
    lines = (folder / "evaluations.jsonl").read_text().splitlines(keepends=True)
    (folder / "evaluations.jsonl").write_text(lines[0])
    assert resumed(folder) == json.loads((straight / "result.json").read_text())
    assert same(straight, folder)


@pytest.mark.parametrize("where", ["load_model", "accuracy"])
def test_interrupted_before_the_first_step(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    from typer.testing import CliRunner

    from apportion.cli import app
    from apportion.train import prepare as preparing

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "run"
    settings = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]
    with monkeypatch.context() as patch:
        patch.setattr(preparing if where == "load_model" else watching, where, interrupt)
        result = CliRunner().invoke(app, ["train", "-o", str(folder), *settings])
    assert result.exit_code == 130 and f"go on with: apportion train --resume {folder}" in result.stderr
    result = CliRunner().invoke(app, ["train", "--resume", str(folder)])
    assert result.exit_code == 0, result.output
    assert "resuming: no checkpoint yet, so from the start" in result.stderr
    assert same(straight, folder)


def test_the_token_budget_stops_and_survives_a_resume(straight: Path, tmp_path: Path) -> None:
    spent = [row["tokens/actor"] + row["probe/tokens"] for row in RunFolder(straight).metrics()]
    folder = tmp_path / "budget"
    budget = int(sum(spent[:3]))
    result = train(folder, **SMALL, run__tokens=budget)
    assert (result["steps"], result["tokens"]) == (3, budget)
    assert steady(folder) == steady(straight)[:3]
    end = weights(folder)
    # Where the budget ended the run there is a checkpoint, and nothing is left to do.
    (folder / "result.json").unlink()
    assert resumed(folder) == result and len(steady(folder)) == 3
    # From an earlier one it stops in the same step.
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "checkpoint-3")
    assert resumed(folder) == result
    assert all(torch.equal(value, end[name]) for name, value in weights(folder).items())


def file_settings(tmp_path: Path, policy: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    path = save_problems(tmp_path / "problems.jsonl", rows)
    own = {key: value for key, value in SMALL.items() if key.startswith("trainer.")}
    return {**own, "model.name": str(policy), "data.path": str(path), "trainer.max_completion_length": 12}


def test_a_file_and_a_folder_of_the_user_with_lora(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy")
    before = load_file(policy / "model.safetensors")
    settings = file_settings(tmp_path, policy, sums())
    train(tmp_path / "run", **settings, model__lora=4, run__steps=3)
    saved = weights(tmp_path / "run")
    assert saved and all("lora" in name for name in saved)
    assert any(value.abs().sum() > 0 for name, value in saved.items() if "lora_B" in name)
    assert not (tmp_path / "run" / "evaluations.jsonl").exists()
    after = load_file(policy / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_gsm8k_style_rows_with_a_chat_template(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", ASCII, chat=True, context=256)
    rows = [{"question": f"Ann has {n} cats.", "solution": f"{n}\n#### {n}"} for n in range(4)]
    settings = file_settings(tmp_path, policy, rows)
    train(
        tmp_path / "run", **settings, data__problem="question", data__answer="solution", run__steps=1,
        data__system="Count.", method__name="vineppo", method__samples=1,
    )  # fmt: skip
    row = RunFolder(tmp_path / "run").read("rollouts", 1)[0]
    assert row["prompt"].startswith("[system]Count.\n[user]Ann has ") and row["gold"] in "0123"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer.lerning_rate": 1}, r"trainer\.lerning_rate: got an unknown option; .*'learning_rate'\?"),
        ({"trainer.learning_rate": "fast"}, r"trainer\.learning_rate: got 'fast'; expected float"),
        ({"trainer.num_generations": True}, r"trainer\.num_generations: got True; expected int \| None"),
        ({"trainer.beta": None}, r"trainer\.beta: got null; .*leave the option out"),
        ({"trainer.max_steps": 3}, r"trainer\.max_steps: got 3; expected run\.steps, which sets it"),
        ({"trainer.push_to_hub": True}, r"trainer\.push_to_hub: got True; expected nothing: a run stays"),
        ({"trainer.num_generations": 1}, r"trainer\.num_generations: got 1; expected at least 2"),
        ({"trainer.num_generations": 7}, r"trainer: got generation_batch_size \(16\) must be divisible"),
        (
            {"trainer.use_vllm": True},
            r"trainer\.use_vllm: got True; expected False, or probe_engine='vllm'",
        ),
        ({"trainer.importance_sampling_level": "sequence"}, r"trainer\.importance_sampling_level: got 'sequence'"),
        ({"trainer.lr_scheduler_type": "up"}, r"trainer: got up is not a valid SchedulerType"),
    ],
)
def test_refused_options(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(load_config(None, {**SMALL, **settings}))


def test_options_that_trl_documents_beside_their_declared_type() -> None:
    config = resolve(load_config(None, {**SMALL, "trainer.scale_rewards": False, "trainer.epsilon": 1}))
    assert config.trainer["scale_rewards"] is False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer.temperature": 0.0}, r"trainer\.temperature: got 0\.0; expected above 0"),
        ({"data.count": 3}, r"data: got 3 problems; expected at least 4: as many prompts as a generation batch"),
        ({"trainer.max_completion_length": 1020}, r"prompt of row 1: got \d+ tokens, with .*=1020; expected at most"),
        ({"model.name": "nowhere"}, r"model\.name: got 'nowhere'"),
    ],
)
def test_refused_before_the_model_is_loaded(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("apportion.train.prepare.load_model", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(InputError, match=message):
        prepare(load_config(None, {**SMALL, **settings, "run.folder": str(tmp_path / "run")}))
    assert not (tmp_path / "run").exists()


def test_a_prompt_outside_the_alphabet(tmp_path: Path) -> None:
    path = save_problems(tmp_path / "p.jsonl", [*sums(), {"problem": "1 cat", "answer": "1"}])
    settings = {"data.path": str(path), "model.name": str(save_policy(tmp_path / "policy"))}
    settings["trainer.max_completion_length"] = 12
    with pytest.raises(InputError, match=r"prompt of row 10: got '1 cat.n', which the model's tokenizer refuses"):
        prepare(load_config(None, {**SMALL, **settings}))


def test_what_trl_refuses_only_when_it_starts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"trainer: got .*wandb.*; expected options that TRL can combine"):
        train(tmp_path / "run", **SMALL, trainer__report_to="wandb", run__evaluate_samples=0)


@pytest.mark.parametrize(
    "row, method, message",
    [
        ({}, "step_verified", "step_verifier: got none"),
        ({}, "prpo", "`span`"),
        ({"span": "999"}, "prpo", "span of row 1: got '999'"),
        ({"span": ""}, "prpo", "span of row 1: got ''"),
        ({"answer": ""}, "grpo_vps", "answer"),
    ],
)
def test_data_that_a_method_cannot_measure_on_is_refused_by_the_dry_run(
    tmp_path: Path, row: dict[str, str], method: str, message: str
) -> None:
    path = tmp_path / "problems.jsonl"
    lines = [json.dumps({"problem": f"{n}+1=?", "answer": str(n + 1), **row}) for n in range(64)]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match=message):
        check(load_config(None, {"data.path": str(path), "method.name": method, "run.folder": str(tmp_path / "r")}))
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"method.level_tokens": 10_000}, r"^method\.level_tokens: .*max_completion_length"),
        ({"method.branching": [1, 1]}, r"^method\.branching"),
        ({"trainer.num_generations": 8}, r"^trainer\.num_generations: got 8; expected 16"),
        ({"trainer.mask_truncated_completions": True}, r"^trainer\.mask_truncated_completions"),
        ({"method.name": "treepo", "method.depth": 2}, r"^method\.width: .*at most 2\^2"),
        ({"method.name": ["spo_tree", "cw_grpo"]}, "spo_tree by itself"),
    ],
)
def test_trees_that_cannot_grow_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(load_config(None, {"method.name": "spo_tree", **changes}))
