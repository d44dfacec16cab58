"""`apportion methods`, `doctor`, `--version`, `--help`, and what `import apportion` costs.

Planted fault that these tests were seen to catch: a doctor that never fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import apportion
import apportion.tasks
from apportion.cli import app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_version() -> None:
    assert run("--version").stdout == metadata.version("apportion") + "\n"


def test_methods_as_json_lists_everything_registered() -> None:
    found = {m["name"]: m for m in json.loads(run("methods", "--json").stdout)}
    assert list(found) == apportion.method_names()
    for name, method in found.items():
        assert method["paper"], name
        assert method["marks"], name
        assert set(method["settings"]) == set(apportion.make_method(name).settings)
        assert all(setting["meaning"] for setting in method["settings"].values()), name
    assert found["probepo"]["needs"] == ["continuations", "entropy", "steps"]
    assert found["probepo"]["conserves"] == "token_mean"
    assert found["probepo"]["settings"]["alpha"]["default"] == 0.5


def test_methods_table_keeps_names_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    table = run("methods").stdout
    for name in apportion.method_names():
        assert f" {name} " in table
    assert max(map(len, table.splitlines())) <= 80
    assert "…" not in table  # nothing is cut short
    monkeypatch.setenv("COLUMNS", "200")
    table = run("methods").stdout
    # [paper] is printed and not taken for markup.
    shown = set(table.split())
    for method in json.loads(run("methods", "--json").stdout):
        for key in ("conserves", "cost", "paper", "marks"):
            assert set(method[key].split()) <= shown, (method["name"], key)


def test_settings_of_one_method() -> None:
    table = run("methods", "vineppo").stdout
    assert "fresh_budget" in table
    assert "whiten" in table
    wrong = run("methods", "vinepo")
    assert wrong.exit_code == 2
    assert "did you mean 'vineppo'?" in wrong.stderr


def test_doctor_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(apportion.tasks, "policy_path", lambda: tmp_path)
    result = run("doctor")
    assert result.exit_code == 0, result.output
    for name in ("python", "torch", "transformers", "trl", "math-verify", "devices", "threads", "code sandbox"):
        assert any(line[6:].startswith(name) for line in result.stdout.splitlines()), name
    assert "FAIL" not in result.stdout


def test_doctor_fails_with_a_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing() -> Path:
        raise FileNotFoundError("nothing there")

    monkeypatch.setattr(apportion.tasks, "policy_path", missing)
    needs = ["torch>=2.6", "no-such-package>=1", "rich<1", "no-such-extra; extra == 'smol'"]
    monkeypatch.setattr(metadata, "requires", lambda name: needs)
    result = run("doctor")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert "FAIL  no-such-package: missing. Fix: pip install 'no-such-package>=1'" in lines
    assert f"FAIL  rich: {metadata.version('rich')}, expected <1. Fix: pip install 'rich<1'" in lines
    assert "--    no-such-extra [smol]: missing. Fix: pip install 'no-such-extra'" in lines
    assert any(line.startswith("FAIL  embedded policy: missing. Fix: ") for line in lines)
    assert any(line.startswith("ok    torch: ") for line in lines)


def test_an_optional_part_alone_fails_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(apportion.tasks, "policy_path", lambda: tmp_path)
    monkeypatch.setattr(metadata, "requires", lambda name: ["no-such-extra; extra == 'smol'"])
    assert run("doctor").exit_code == 0


def test_help_names_every_command() -> None:
    text = run("--help").stdout
    assert all(name in text for name in ("plan", "assign", "grade", "methods", "doctor"))
    assert "did you mean" in run("asign").stderr.lower()


@pytest.mark.parametrize(
    "statement", ["import apportion", "import apportion.cli", "from apportion.cli import app; app(['--help'])"]
)
def test_starts_light(statement: str) -> None:
    # Processor time, so that a busy machine does not fail the test.
    code = (
        "import atexit, sys, time\n"
        "def report():\n"
        "    heavy = [m for m in ('torch', 'transformers', 'trl', 'numpy', 'pydantic') if m in sys.modules]\n"
        "    print(heavy, time.process_time(), file=sys.stderr)\n"
        f"atexit.register(report)\n{statement}\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy, seconds = done.stderr.rsplit(maxsplit=1)
    assert heavy == "[]"
    assert float(seconds) < 1.0, f"{seconds} s of processor time, {time.monotonic() - began:.1f} s in all"


def test_public_names_are_all_there() -> None:
    for name in apportion.__all__:
        assert getattr(apportion, name) is not None
    assert dir(apportion) == sorted(apportion.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Rolouts'"):
        apportion.Rolouts  # noqa: B018 - the access itself is tested
    assert apportion.Rollouts.__module__ == "apportion.rollouts"
