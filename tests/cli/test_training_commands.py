"""`apportion train` and `apportion demo` as commands: bad input, dry runs, Ctrl-C, resume, the demo.

Planted faults seen caught: a resume that starts over, a dry run that leaves the trainer's defaults out, a finished run
trained again, a demo that does its runs again, runs of a stopped demo not waited for, a log's first line shown.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from apportion.cli import app
from apportion.cli.shared import read_settings
from apportion.errors import InputError
from apportion.train import demo

SMALL = {
    "run.checkpoint_every": 100, "run.threads": 1, "run.evaluate_samples": 16, "data.operations": 2,
    "data.count": 64, "method.budget": 8, "method.samples": 4, "method.min_gap": 2, "method.window": 2,
    "trainer.per_device_train_batch_size": 16, "trainer.gradient_accumulation_steps": 1,
    "trainer.num_generations": 4, "trainer.learning_rate": 1e-3,
}  # fmt: skip
TRAIN = ["train", *(part for key, value in SMALL.items() for part in ("--set", f"{key}={value}"))]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def refused(result: Result, *parts: str) -> None:
    """Exit code 2 and one line on stderr that holds all the parts."""
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), result.stderr
    assert all(part in result.stderr for part in parts), result.stderr


def test_dry_run_prints_a_file_that_says_the_same(tmp_path: Path) -> None:
    first = run(*TRAIN, "--dry-run", "--method", "vineppo", "--set", 'data.system=a"b\n', "-o", tmp_path / "run")
    refused(first, "vineppo.budget: got an unknown setting; expected one of ddof, ")
    first = run("train", "--dry-run", "--method", "vineppo", "--set", 'data.system=a"b', "--steps", 7)
    assert first.exit_code == 0 and first.stderr == ""
    assert (
        "[trainer]\n" in first.stdout
        and "num_generations = 8\n" in first.stdout
        and "steps = 7\n" in first.stdout
        and "samples = 9\n" in first.stdout
    )
    (tmp_path / "c.toml").write_text(first.stdout)
    second = run("train", tmp_path / "c.toml", "--dry-run")
    assert second.stdout == first.stdout
    assert not (tmp_path / "run").exists()


def test_bad_input_is_one_line_before_any_work(tmp_path: Path) -> None:
    out = ("-o", tmp_path / "run")
    (tmp_path / "p.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n{"problem": "1+2?", "answer": " "}\n')
    refused(run("train", *out, tmp_path / "no.toml"), "config: got ", "no.toml; expected a TOML file that exists")
    refused(run("train", *out, "--set", "run.stepz=3"), "run.stepz: got an unknown key", "did you mean 'steps'?")
    refused(run("train", *out, "--set", "run.steps"), "--set: got 'run.steps'; expected key=value")
    refused(run("train", *out, "--method", "probpo"), "did you mean 'probepo'?")
    refused(run("train", *out, "--set", "method.budget=4"), "budget", "at least samples, 8")
    refused(run("train", *out, "--set", "trainer.lerning_rate=1"), "trainer.lerning_rate", "'learning_rate'?")
    refused(run("train", *out, "--set", "trainer.use_vllm=true"), "trainer.use_vllm: got True; expected False")
    refused(run("train", *out, "--set", "trainer.num_generations=1"), "trainer.num_generations: got 1")
    refused(run("train", *out, "--model", tmp_path / "no"), "model.name: got ", "config.json")
    refused(run("train", *out, "--data", tmp_path / "no.jsonl"), "no.jsonl: got no such file")
    refused(run("train", *out, "--data", tmp_path / "p.jsonl"), "line 2, column 'answer': got empty text")
    refused(
        run("train", *out, "--data", tmp_path / "p.jsonl", "--set", "data.answer=anser"),
        "got no column 'anser'", "did you mean 'answer'?", "data.answer",
    )  # fmt: skip
    refused(run("train", "--resume", tmp_path), "--resume: got ", "with config.toml in it")
    refused(run("train", "--resume", tmp_path, "--steps", 3), "--resume: got other settings beside it")
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


def steady(folder: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if "seconds" not in k and k != "step_time"} for row in rows]


def wait_until(condition: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_ctrl_c_and_resume_is_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    assert run(*TRAIN, "--steps", 16, "-o", a).exit_code == 0
    command = [sys.executable, "-m", "apportion", *TRAIN, "--steps", "16", "-o", str(b)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    metrics = b / "metrics.jsonl"
    wait_until(lambda: process.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") >= 2))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, (out, err)
    assert "Stopping after this step" in err and f"stopped: go on with: apportion train --resume {b}" in err
    assert "Traceback" not in err
    kept = metrics.read_text()
    done = len(steady(b))
    assert 2 <= done < 16 and (b / "checkpoints" / f"checkpoint-{done}").is_dir()
    refused(run(*TRAIN, "-o", b), "run.folder: got ", f"--resume {b} goes on with it")
    result = run("train", "--resume", b)
    assert result.exit_code == 0 and f"resuming: from checkpoint-{done}" in result.stderr
    assert steady(a) == steady(b)
    # With the seconds of the first process: what it had done was not done again.
    assert metrics.read_text().startswith(kept)
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (a, b))
    assert all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys()
    assert (a / "evaluations.jsonl").read_text() == (b / "evaluations.jsonl").read_text()
    # Complete, and resumed once more: nothing happens.
    before = (b / "model" / "model.safetensors").stat().st_mtime_ns
    again = run("train", "--resume", b)
    assert again.exit_code == 0 and f"complete: {b} has nothing left to do" in again.stderr
    assert again.stdout == result.stdout and "steps: 16" in again.stdout
    assert (b / "model" / "model.safetensors").stat().st_mtime_ns == before


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    console = Console(file=text, width=120)
    settings = {key: value for key, value in SMALL.items() if not key.startswith("method.")}
    results = demo.run_demo(tmp_path, tokens=2_000, settings=settings, console=console)
    assert json.loads((tmp_path / "demo.json").read_text()) == results
    for method, [result] in results.items():
        assert result["tokens"] >= 2_000 and result["tokens/actor"] + result["probe/tokens"] == result["tokens"]
        assert 0 <= result["start"] <= 1 and result["samples"] == 16
        assert (result["probe/continuations"] > 0) == (method == "probepo")
    assert "<html" in (tmp_path / "page.html").read_text()
    said = text.getvalue()
    assert "held-out accuracy, end" in said and "seconds, probe" in said and "page.html" in said
    # Done runs are not done again, and other settings are not mixed with them.
    monkeypatch.setattr(demo, "_start", lambda child: pytest.fail(f"{child} was started again"))
    assert demo.run_demo(tmp_path, tokens=2_000, settings=settings, console=console) == results
    refused(run("demo", "-o", tmp_path, "--tokens", 3_000), "a folder without a demo of other settings")


def stand_in(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    def start(child: demo.Child) -> subprocess.Popen[bytes]:
        with child.log.open("ab") as log:
            return subprocess.Popen([sys.executable, "-c", code, str(child.run)], stdout=log, stderr=log)

    monkeypatch.setattr(demo, "_start", start)


def test_demo_shows_the_last_line_of_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "print('first words'); print('error: last words'); exit(3)")
    result = run("demo", "-o", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: grpo, seed 0: error: last words (log: ")
    assert "first words" not in result.output


def test_demo_stops_its_runs_and_waits_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(
        monkeypatch,
        "import signal, sys, time, pathlib\n"
        "def stop(*_): time.sleep(.3); pathlib.Path(sys.argv[1] + '.saved').touch(); sys.exit(130)\n"
        "signal.signal(signal.SIGINT, stop)\n"
        "pathlib.Path(sys.argv[1] + '.pid').touch()\n"
        "while True: time.sleep(.05)\n",
    )

    def interrupt(seconds: float) -> None:
        wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, seconds=30)
        raise KeyboardInterrupt

    sleep = time.sleep
    monkeypatch.setattr(demo.time, "sleep", lambda s: interrupt(s) if s == 0.5 else sleep(s))
    result = run("demo", "-o", tmp_path)
    assert result.exit_code == 130 and "stopped: the same command goes on" in result.stderr
    assert {path.name for path in tmp_path.glob("*.saved")} == {"grpo-0.saved", "probepo-0.saved"}


def test_demo_refuses_what_a_run_would(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run\.stepz: got an unknown key"):
        demo.run_demo(tmp_path, settings={"run.stepz": 1})
    assert not any(tmp_path.iterdir())


def test_demo_started_as_a_command_can_be_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "apportion", "demo", "-o", str(tmp_path), "--tokens", "100000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    wait_until(lambda: process.poll() is not None or len(list(tmp_path.glob("*.log"))) == 2)
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    # Whatever was started is gone, however early the interrupt came.
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])]
    assert left == []


def test_quotation_marks_that_are_no_json_are_told() -> None:
    """A pattern of which the shell kept the marks would match nothing, silently."""
    with pytest.raises(InputError, match="quotation mark"):
        read_settings([r'trainer.probe_stop="\boxed\{"'])
    assert read_settings([r"trainer.probe_stop=\\boxed\{", 'a="b"']) == {"trainer.probe_stop": r"\\boxed\{", "a": "b"}


WITHOUT_TRL = """
import sys
class NoTRL:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "trl":
            raise ModuleNotFoundError("No module named 'trl'", name="trl")
sys.meta_path.insert(0, NoTRL())
from apportion.cli import app
app(["train", "--method", "grpo", "--dry-run"])
"""


def test_without_trl_training_says_what_to_install() -> None:
    """TRL is an extra: beside verl it may not be installed."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRL], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "pip install 'apportion[trl]'" in done.stderr
