"""A run with its prediction beside it: what is logged, where the figures are from, and that training does not feel it.

Planted faults seen caught: a failing prediction that stops the run, one made by every rank, no table in the result,
figures of other threads taken, a file that cannot be read ending the run, a step's generation batches averaged.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_run import SMALL, steady, train, weights
from typer.testing import CliRunner

from apportion.cli import app
from apportion.cost import Hardware, Overheads, Unpredicted, kept, predict_run
from apportion.cost.kept import kept_machine, measured_machine
from apportion.records import RunFolder
from apportion.train import beside as laying
from apportion.train.settings import load_config

MACHINE = Hardware(
    "here", {"float32": 1e11}, ((1e3, 1e9), (1e6, 1e10)), 1e10, reading=5e9, attention=0.4,
    overheads=Overheads(call=1e-3, layer=1e-4, token=1e-6), source="nowhere",
)  # fmt: skip
SHORT = {**SMALL, "run.steps": 3, "run.evaluate_samples": 0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring this machine takes no time, and draws random numbers, which the run must not feel."""

    def measure(config: Any) -> Hardware:
        torch.rand(7)
        return MACHINE

    monkeypatch.setattr(kept, "calibrate_for", measure)


def test_without_figures_a_run_says_so_and_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(tmp_path / "run", **SHORT)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("prediction: ")]
    assert len(said) == 1 and "none beside this run: this CPU has not been measured for this model" in said[0]
    assert f"`apportion cost --config {tmp_path / 'run' / 'config.toml'}`" in said[0]
    assert "beside" not in result and not any("predicted" in key for row in steady(tmp_path / "run") for key in row)


@pytest.mark.usefixtures("quick")
def test_predicted_lies_beside_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(tmp_path / "run", **SHORT, run__predict="measure")
    assert capsys.readouterr().err.count("prediction: from here, nowhere, 20") == 1
    rows = RunFolder(tmp_path / "run").metrics()
    config = load_config(None, {key: value for key, value in SHORT.items()})
    expected = predict_run(config, MACHINE)
    for row in rows:
        told = {name: value for name, value in row.items() if name.startswith("predicted/")}
        assert told == expected.metrics() and told["predicted/seconds/update"] == expected.seconds["update"] > 0
        # But for memory, which a process on a CPU has no figure of, each has its own beside it.
        assert {name.removeprefix("predicted/") for name in told} - row.keys() == {"memory/peak"}
        # Grading of generated problems is not predicted.
        assert "predicted/seconds/grade" not in row and row["seconds/grade"] > 0
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result
    table = {row["name"]: row for row in result["beside"]["rows"]}
    assert result["beside"]["steps"] == 2
    # The median of two is their mean.
    mean = sum(row["seconds/update"] for row in rows[1:]) / 2
    assert table["seconds/update"]["measured"] == pytest.approx(mean, rel=1e-4)
    assert table["seconds/update"]["ratio"] == pytest.approx(expected.seconds["update"] / mean, rel=1e-4)
    assert "tokens/actor" in table and "memory/peak" not in table
    # Later runs need no measuring.
    later = train(tmp_path / "later", **SHORT)
    assert later["beside"]["steps"] == 2


@pytest.mark.usefixtures("quick")
def test_training_does_not_feel_it(tmp_path: Path) -> None:
    # An adapter's first weights are the first that a run draws.
    settings = {**SHORT, "model.lora": 2, "run.evaluate_every": 1, "run.evaluate_samples": 8}
    train(tmp_path / "with", **settings, run__predict="measure")
    train(tmp_path / "without", **settings, run__predict="off")
    a, b = weights(tmp_path / "with"), weights(tmp_path / "without")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    plain = [{k: v for k, v in row.items() if not k.startswith("predicted/")} for row in steady(tmp_path / "with")]
    assert plain == steady(tmp_path / "without")


@pytest.mark.parametrize("error", [ZeroDivisionError("in a plug-in's\nplan"), Unpredicted("no figures"), MemoryError()])
def test_a_prediction_that_fails_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(laying, "predict_beside", fail)
    result = train(tmp_path / "run", **SHORT)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("prediction: none")]
    assert len(said) == 1 and result["steps"] == 3 and "beside" not in result


def test_off_and_other_ranks_predict_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(laying, "predict_beside", lambda *_, **__: pytest.fail("predicted"))
    for predict, rank in (("off", 0), ("auto", 1), ("measure", 3)):
        config = load_config(None, {"run.predict": predict})
        run: Any = SimpleNamespace(config=config, args=SimpleNamespace(process_index=rank, world_size=4))
        assert laying.predicted_for(run) is None
    assert capsys.readouterr().err == ""


def test_on_a_gpu_the_peak_of_memory_is_logged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    reset = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 123)
    device = torch.device("cuda", 1)
    model: Any = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=device)]))
    found = predict_run(load_config(None, {"method.name": "grpo"}), MACHINE)
    row = laying.Beside(found, model)()
    assert reset == [device] and row == {"memory/peak": 123.0, **found.metrics()}


@pytest.mark.usefixtures("quick")
def test_figures_are_kept_for_the_same_kind_of_run(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, {"run.threads": 1})
    assert kept_machine(config) is None
    machine, stored = measured_machine(config)
    assert stored and [path.suffix for path in (cache / "apportion").iterdir()] == [".json"]
    found = kept_machine(load_config(None, {"run.threads": 1, "method.name": "grpo", "run.steps": 7}))
    assert found == machine == replace(MACHINE, source=machine.source)
    for other in ({"run.threads": 2}, {"run.threads": 1, "model.dtype": "bfloat16"}):
        assert kept_machine(load_config(None, other)) is None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9")
        assert kept_machine(config) is None
    file = next((cache / "apportion").iterdir())
    whole = file.read_text()
    for broken in (
        whole[:-40],
        "[]",
        whole.replace('"devices"', '"divices"'),
        whole.replace('"threads": 1', '"threads": 4'),
    ):
        file.write_text(broken)
        assert kept_machine(config) is None
    file.write_text(whole)
    assert kept_machine(config) == machine


@pytest.mark.usefixtures("quick")
def test_a_cache_that_cannot_be_written(cache: Path, tmp_path: Path) -> None:
    today = datetime.date.today().isoformat()
    cache.write_text("a file where the folder should be")
    assert measured_machine(load_config(None, {})) == (replace(MACHINE, source=f"nowhere, {today}"), False)
    (tmp_path / "c.toml").write_text("")
    done = CliRunner().invoke(app, ["cost", "--config", str(tmp_path / "c.toml")])
    assert done.exit_code == 0 and "note: the figures could not be kept" in done.stderr, done.output


@pytest.mark.usefixtures("quick")
def test_the_commands_one_after_the_other(tmp_path: Path) -> None:
    settings = [part for key, value in SHORT.items() for part in ("--set", f"{key}={value}")]
    (tmp_path / "c.toml").write_text("")
    done = CliRunner().invoke(app, ["cost", "--config", str(tmp_path / "c.toml"), *settings])
    assert done.exit_code == 0 and done.stderr.strip() in ("", "Measuring this machine"), done.output
    done = CliRunner().invoke(app, ["train", "-o", str(tmp_path / "run"), *settings])
    assert done.exit_code == 0, done.output
    assert "prediction: from here" in done.stderr
    shown = done.stdout.splitlines()
    head = next(i for i, line in enumerate(shown) if line.startswith("A step, median of 2 "))
    assert shown[head].split()[5:] == ["measured", "predicted", "ratio"]
    assert shown[head + 1].startswith("seconds/generate ") and "beside" not in done.stdout.replace(str(tmp_path), "")
    assert any(line.startswith("seconds, predicted phases ") for line in shown) and shown[-1].startswith("records: ")
    again = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "run")])
    assert again.exit_code == 0 and again.stdout == done.stdout


def test_a_step_of_several_generation_batches_spends_their_sum(tmp_path: Path) -> None:
    train(
        tmp_path / "run", **{**SHORT, "trainer.gradient_accumulation_steps": 2, "run.steps": 2},
        trainer__steps_per_generation=1,
    )  # fmt: skip
    for row in RunFolder(tmp_path / "run").metrics():
        # Two batches of 16 responses of that mean length.
        assert row["tokens/actor"] == pytest.approx(32 * row["completions/mean_length"])
        assert row["probe/ratio"] < 5 and row["probe/continuations"] == int(row["probe/continuations"])


def test_importing_the_commands_loads_nothing_of_it() -> None:
    code = "import sys, apportion.cli.training, apportion.cli.cost; print('apportion.cost' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
