"""What the trainers do around verl's own step: when replicas sleep, what a checkpoint keeps.

Planted faults that these tests were seen to catch: replicas put to sleep before their probes, or left awake when
measuring fails; weights of the step's own number handed out before it is trained; an asynchronous run not resumed; a
state that is not read back, or read back for another method.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: make cluster has an environment with it")

from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync, get_trainer_cls
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from apportion.credit.registry import make_method
from apportion.errors import InputError
from apportion.integrations.verl import plugin
from apportion.integrations.verl.measuring import Measurer
from apportion.integrations.verl.settings import CreditSettings

MODES = {
    "apportion_sync": PPOTrainerSync, "apportion_colocate_async": PPOTrainerColocateAsync,
    "apportion_separate_async": PPOTrainerSeparateAsync,
}  # fmt: skip


def made(mode: str, replicas: str, method: str = "probepo", fails: bool = False) -> tuple[Any, list[Any]]:
    """A trainer without a cluster, and what it does, in order."""
    cls = get_trainer_cls(mode)
    trainer = cls.__new__(cls)
    done: list[Any] = []

    def measure(*_: Any) -> tuple[str, str]:
        done.append("measure")
        if fails:
            raise RuntimeError("no answer")
        return "measured", "cost"

    trainer.credit_settings = CreditSettings.of({"method": method, "probe": {"replicas": replicas}})
    trainer.credit_method = trainer.credit_settings.make_method()
    trainer._probes = "continuations" in trainer.credit_method.needs
    trainer._awake = trainer._probes and cls.colocated and replicas == "awake"
    trainer.global_steps, trainer.curr_step_profile = 7, False
    trainer.measurer = SimpleNamespace(measure=measure)
    trainer.checkpoint_manager = SimpleNamespace(
        sleep_replicas=lambda: done.append("sleep"), abort_replicas=lambda: done.append("abort"),
        update_weights=lambda version: done.append(f"weights {version}"),
        resume_generation_replicas=lambda: done.append("resume"),
    )  # fmt: skip
    trainer._sample_start = trainer._step_sample_wait_seconds = 0.0
    return trainer, done


def step(trainer: Any, done: list[Any]) -> list[Any]:
    trainer.on_sample_end()
    done.append("log-probabilities")
    trainer._measure("rows", {})
    return done


@pytest.mark.parametrize(
    ("mode", "replicas", "expected"),
    [
        ("apportion_sync", "awake", ["log-probabilities", "measure", "sleep"]),
        ("apportion_sync", "wake_again", ["sleep", "log-probabilities", "weights 6", "measure", "sleep"]),
        ("apportion_colocate_async", "awake", ["log-probabilities", "measure", "abort", "sleep"]),
        ("apportion_colocate_async", "wake_again",
         ["abort", "sleep", "log-probabilities", "weights 6", "resume", "measure", "abort", "sleep"]),
        ("apportion_separate_async", "awake", ["log-probabilities", "measure"]),
    ],
)  # fmt: skip
def test_replicas_are_awake_while_they_are_probed_and_asleep_after(
    mode: str, replicas: str, expected: list[str]
) -> None:
    assert step(*made(mode, replicas)) == expected


def test_methods_that_probe_nothing_leave_the_replicas_to_verl() -> None:
    assert step(*made("apportion_sync", "awake", "grpo")) == ["sleep", "log-probabilities", "measure"]


def test_replicas_sleep_even_where_measuring_fails() -> None:
    trainer, done = made("apportion_sync", "awake", fails=True)
    with pytest.raises(RuntimeError, match="no answer"):
        step(trainer, done)
    assert done[-1] == "sleep"


@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_is_verls_own_with_credit_before_it(mode: str) -> None:
    cls = get_trainer_cls(mode)
    assert plugin.trainer and issubclass(cls, MODES[mode])
    order = [each.__name__ for each in cls.__mro__]
    assert order.index("CreditSteps") < order.index(MODES[mode].__name__)


def test_a_checkpoint_keeps_what_the_method_remembers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", lambda self: None)
    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", lambda self: None)
    folder = tmp_path / "global_step_7"
    folder.mkdir()
    saved, _ = made("apportion_sync", "awake", "avspo")
    saved.config = SimpleNamespace(
        trainer=SimpleNamespace(default_local_dir=str(tmp_path), resume_mode="auto", resume_from_path=None)
    )
    saved.credit_method = make_method("avspo", {"threshold": 0.37})
    saved._save_checkpoint()
    assert json.loads((folder / "apportion.json").read_text())["settings"]["threshold"] == 0.37
    again, _ = made("apportion_sync", "awake", "avspo")
    again.config = saved.config
    again._load_checkpoint()
    assert again.credit_method.threshold == 0.37
    other, _ = made("apportion_sync", "awake", "probepo")
    other.config = saved.config
    other._load_checkpoint()
    assert other.credit_method.name == "probepo"


def test_a_resumed_path_brings_its_own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", lambda self: None)
    folder = tmp_path / "elsewhere" / "global_step_7"
    folder.mkdir(parents=True)
    (folder / "apportion.json").write_text('{"method": "avspo", "settings": {"threshold": 0.21}}')
    trainer, _ = made("apportion_sync", "awake", "avspo")
    trainer.config = SimpleNamespace(
        trainer=SimpleNamespace(
            default_local_dir=str(tmp_path), resume_mode="resume_path", resume_from_path=str(folder)
        )
    )
    trainer._load_checkpoint()
    assert trainer.credit_method.threshold == 0.21


def test_records_of_another_run_are_not_mixed_with(tmp_path: Path) -> None:
    (tmp_path / "credit").mkdir()
    (tmp_path / "credit" / "step-000001.parquet").touch()
    trainer, _ = made("apportion_sync", "awake", "grpo")
    trainer.credit_settings = CreditSettings.of({"method": "grpo", "run_folder": str(tmp_path)})
    trainer.global_steps = 0
    with pytest.raises(InputError, match=r"apportion\.run_folder"):
        trainer.fit(None)


@pytest.mark.parametrize(
    ("about", "field"),
    [
        ({"agent_name": "tool_agent"}, "agent_name of row x_0_0"),
        ({"raw_prompt": [{"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image"}]}]},
         "prompt of row x_0_0"),
    ],
)  # fmt: skip
def test_rows_that_a_probe_cannot_continue_are_named(about: dict[str, Any], field: str) -> None:
    rows = SimpleNamespace(keys=["x_0_0"], about=[about])
    with pytest.raises(InputError) as refused:
        Measurer._check_rows(SimpleNamespace(), rows)
    assert refused.value.field == field
    plain = [{"raw_prompt": [{"role": "user", "content": "?"}]}, {"agent_name": "single_turn_agent"}, {}]
    Measurer._check_rows(SimpleNamespace(), SimpleNamespace(keys=["a", "b", "c"], about=plain))
