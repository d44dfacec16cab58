"""A run that was stopped and resumed is, bit for bit, the run that was not."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny

from apportion.records import RunFolder
from apportion.train import CreditTrainer


# Seconds differ, and `step_time` is one of TRL's.
def steady(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if "seconds" not in k and k != "step_time"} for row in metrics]


CASES: dict[str, dict[str, Any]] = {
    # 8 prompts and 2 a step: an epoch has 4 steps, so the checkpoint at 3 and the end at 6 are in two epochs.
    "step": {},
    "second epoch": {"max_steps": 9, "stop": 6},
    "epoch's end": {"max_steps": 6, "stop": 4},
    "inside a window": {"num_iterations": 2, "steps_per_generation": 2, "per_device_train_batch_size": 4, "stop": 3},
    "stream": {
        "stream": True, "max_steps": 10, "num_iterations": 2, "steps_per_generation": 2,
        "per_device_train_batch_size": 4, "stop": 3,
    },
    "misaligned": {
        "gradient_accumulation_steps": 3, "steps_per_generation": 2, "per_device_train_batch_size": 4, "stop": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_is_the_straight_run(policy: Path, tmp_path: Path, case: str) -> None:
    changes = {"max_steps": 6, **CASES[case]}
    stop = changes.pop("stop", 3)
    straight = tiny.trainer(policy, tmp_path / "a", run_folder=str(tmp_path / "a"), **changes)
    straight.train()
    first = tiny.trainer(
        policy, tmp_path / "b", run_folder=str(tmp_path / "b"), callbacks=[tiny.StopAfter(stop)],
        **{**changes, "save_strategy": "steps", "save_steps": stop},
    )  # fmt: skip
    first.train()
    assert first.state.global_step == stop
    second = tiny.trainer(policy, tmp_path / "b", run_folder=str(tmp_path / "b"), **changes)
    second.train(resume_from_checkpoint=str(tmp_path / "b" / f"checkpoint-{stop}"))
    assert tiny.equal(tiny.parameters(straight.model), tiny.parameters(second.model))
    a, b = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    assert steady(a.metrics()) == steady(b.metrics()) and len(a.metrics()) == changes["max_steps"]
    assert any(row.get("probe/continuations") for row in a.metrics()[stop:])
    assert a.steps() == b.steps()
    for kind in ("rollouts", "evidence", "credit"):
        assert all(repr(a.read(kind, step)) == repr(b.read(kind, step)) for step in a.steps())


class _PressCtrlC(CreditTrainer):
    """Gets SIGINT in the middle of its third step."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(*args, **kwargs)


def test_ctrl_c_finishes_the_step_and_can_be_resumed(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = tiny.trainer(policy, tmp_path / "a", max_steps=5)
    straight.train()
    handler = signal.getsignal(signal.SIGINT)
    stopped = tiny.trainer(policy, tmp_path / "b", cls=_PressCtrlC, max_steps=5)
    with pytest.raises(KeyboardInterrupt, match="after step 3"):
        stopped.train()
    assert signal.getsignal(signal.SIGINT) is handler
    assert "Stopping after this step" in capsys.readouterr().err
    assert (tmp_path / "b" / "checkpoint-3").is_dir()
    resumed = tiny.trainer(policy, tmp_path / "b", max_steps=5)
    resumed.train(resume_from_checkpoint=True)
    assert tiny.equal(tiny.parameters(straight.model), tiny.parameters(resumed.model))
