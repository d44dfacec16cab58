"""verl's real trainer on this machine's CPU: Ray, two FSDP2 ranks on gloo, two replicas, three steps of each run.

What a run recorded is worked out again by `apportion assign` from its own files, which knows nothing of verl: its
advantages have to be the run's. A run takes one to two minutes, so these are `make cluster`'s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: make cluster has an environment with it")

from typer.testing import CliRunner
from verl_run import overrides, run

from apportion.cli import app
from apportion.records import RunFolder

STEPS = 3
ANSWER = '{answer_pattern:"#([0-9]+)"}'
PROBEPO = "{budget:8,samples:2,min_gap:4}"
# verl's σ is the sample deviation, and it adds 1e-6.
VERLS = ("--set", "ddof=1", "--set", "epsilon=1e-6")
SEPARATE = [
    "actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=apportion_ray",
    "trainer.v1.separate_async.parameter_sync_step=1", "trainer.n_gpus_per_node=1",
]  # fmt: skip


def trained(folder: Path, method: str, settings: str, *more: str, mode: str = "apportion_sync") -> RunFolder:
    records = folder / "records"
    asked = [f"+apportion.method={method}", f"+apportion.settings={settings}", f"+apportion.run_folder={records}"]
    done = run(overrides(folder, mode=mode, steps=STEPS, more=[*asked, *more]))
    assert done.returncode == 0, done.stdout[-4000:]
    return RunFolder(records)


def assert_assign_agrees(records: RunFolder, tmp_path: Path) -> None:
    """To 1e-5, on every token of every step; and the run had something to spread."""
    assert records.steps() == list(range(1, STEPS + 1))
    runner, largest = CliRunner(), 0.0
    for step in records.steps():
        credit = records.read("credit", step)
        out, again = str(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
        assert runner.invoke(app, ["export", str(records.path), "--step", str(step), "-o", out]).exit_code == 0
        given = [
            part for key, value in json.loads(credit[0]["settings"]).items() if value is not None
            for part in ("--set", f"{key}={json.dumps(value)}")
        ]  # fmt: skip
        # SPAE's ε is that of its whitening, and its base its own.
        base = () if credit[0]["method"] == "spae" else VERLS
        asked = ["assign", out, "--method", credit[0]["method"], *given, *base, "-o", str(again)]
        result = runner.invoke(app, asked)
        assert result.exit_code == 0, result.output
        ours = [json.loads(line)["advantage"] for line in again.read_text().splitlines()]
        for row, expected in zip(credit, ours, strict=True):
            assert row["advantage"] == pytest.approx(expected, abs=1e-5)
            largest = max(largest, *map(abs, expected))
    assert largest > 0.1


def last(records: RunFolder) -> dict[str, Any]:
    return records.metrics()[-1]


@pytest.mark.parametrize("replicas", ["awake", "wake_again"])
def test_probepo_trains_and_assign_agrees(replicas: str, tmp_path: Path) -> None:
    records = trained(tmp_path / "run", "probepo", PROBEPO, f"+apportion.probe.replicas={replicas}")
    assert_assign_agrees(records, tmp_path)
    for metrics in records.metrics():
        assert metrics["probe/asked"] == metrics["probe/accepted"] > 0 and metrics["probe/lost"] == 0
        # Probes are of the weights that are trained: version s − 1 in step s, and the actors' own probabilities.
        assert metrics["probe/version_min"] == metrics["probe/version_max"] == metrics["step"] - 1
        assert metrics["probe/logprob_gap"] < 1e-4
        assert metrics["credit/error/conserved"] < 1e-6
    for row in records.read("evidence", 2):
        assert row["text"] and len(row["token_ids"]) >= 1 and row["reward"] in (0.0, 1.0)


def test_without_a_residual_the_advantages_are_verls_own_bit_for_bit(tmp_path: Path) -> None:
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    records = trained(tmp_path / "run", "probepo", PROBEPO[:-1] + ",alpha:0}")
    for step in records.steps():
        rollouts, credit = records.read("rollouts", step), records.read("credit", step)
        reward = torch.tensor([row["reward"] for row in rollouts], dtype=torch.float32)[:, None]
        import numpy as np

        groups = np.array([row["group"] for row in rollouts], dtype=object)
        verls, _ = compute_grpo_outcome_advantage(reward, torch.ones_like(reward), groups)
        assert verls.abs().max() > 0.5
        for row, value in zip(credit, verls[:, 0], strict=True):
            assert torch.equal(torch.tensor(row["advantage"]), value.expand(len(row["advantage"])))


def test_grpo_vps_reads_the_actors_and_assign_agrees(tmp_path: Path) -> None:
    records = trained(tmp_path / "run", "grpo_vps", '{cue:"#",per_segment:2}')
    assert_assign_agrees(records, tmp_path)
    assert last(records)["measure/forward_tokens"] > 0
    beliefs = [row for row in records.read("evidence", 3) if row["kind"] == "belief"]
    assert beliefs and all(row["values"][0] < 0 for row in beliefs)


def test_grpo_through_the_trainer_and_verls_own(tmp_path: Path) -> None:
    records = trained(tmp_path / "run", "grpo", "{}")
    assert_assign_agrees(records, tmp_path)
    plain = run(overrides(tmp_path / "plain", mode="sync", steps=STEPS))
    assert plain.returncode == 0, plain.stdout[-4000:]
    # Ordinary estimators: verl's own trainer, one name in its configuration.
    local = run(
        overrides(tmp_path / "local", mode="sync", steps=STEPS, more=["algorithm.adv_estimator=apportion_rloo"])
    )
    assert local.returncode == 0, local.stdout[-4000:]


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        # Not EP-GRPO: verl keeps a reference model in pinned memory, which there is none of without an accelerator.
        ("vineppo", "{samples:2}"), ("spo_chain", "{samples:2,interval:2}"), ("cw_grpo", "{}"),
        ("oar_p", ANSWER), ("oar_g", ANSWER), ("spae", '{cue:"#",samples:2}'), ("avspo", "{}"),
    ],
)  # fmt: skip
def test_the_other_methods_train_too(method: str, settings: str, tmp_path: Path) -> None:
    records = trained(tmp_path / "run", method, settings)
    assert records.steps() == list(range(1, STEPS + 1))
    assert_assign_agrees(records, tmp_path)


def test_responses_that_go_on_into_the_next_step(tmp_path: Path) -> None:
    records = trained(tmp_path / "run", "probepo", PROBEPO, mode="apportion_colocate_async")
    assert_assign_agrees(records, tmp_path)
    # Later responses are of older weights than their probes, and the run's files say so.
    lines = [json.loads(line) for line in (records.path / "versions.jsonl").read_text().splitlines()]
    assert [line["probes"][0]["version"] for line in lines] == [0, 1, 2]
    assert any(row["first"] < lines[-1]["probes"][0]["version"] for row in lines[-1]["rollouts"])


def test_replicas_of_their_own(tmp_path: Path) -> None:
    records = trained(tmp_path / "run", "probepo", PROBEPO, *SEPARATE, mode="apportion_separate_async")
    assert_assign_agrees(records, tmp_path)
    lines = [json.loads(line) for line in (records.path / "versions.jsonl").read_text().splitlines()]
    assert len(lines) == STEPS and all(line["probes"] for line in lines)


def test_a_combination_that_cannot_work_ends_before_any_work(tmp_path: Path) -> None:
    asked = ["+apportion.method=probepo", "algorithm.adv_estimator=rloo"]
    done = run(overrides(tmp_path, mode="apportion_sync", more=asked))
    assert done.returncode != 0
    assert "algorithm.adv_estimator: got 'rloo'; expected 'grpo'" in done.stdout
    assert "actor_rollout_init_model" not in done.stdout
