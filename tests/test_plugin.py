"""A method of another package: the example of docs/add-a-method.md, installed into a new environment and trained with.

The laws on its class stand beside it, in plugins/apportion-ramp/test_ramp.py. Planted faults seen caught there: masked
tokens counted, places not counted within the response, a ramp whose mean is not 1, a division by 0; here: a ramp that
falls, a registry that lets a taken name pass.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from apportion.records import RunFolder

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "tests" / "plugins" / "apportion-ramp"
GUIDE = ROOT / "docs" / "add-a-method.md"

Command = Callable[..., CompletedProcess[str]]


def run(command: Sequence[str | Path], path: Path | None = None) -> CompletedProcess[str]:
    """Runs a command in a process of its own that sees this one's environment variables, but for `PYTHONPATH`."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"COLUMNS": "120"} | ({"PYTHONPATH": str(path)} if path else {})
    return subprocess.run(
        [str(part) for part in command], env=environment, capture_output=True, text=True, timeout=300
    )  # fmt: skip


@pytest.fixture(scope="module")
def apportion(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """`apportion` in a new environment into which the plug-in was installed with pip, without a network.

    Everything else (apportion, torch, setuptools) is read from the environment of this process.
    """
    folder = tmp_path_factory.mktemp("plugin")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    variables = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=variables))
    # Not a plain path: the paths that an editable install adds are followed only this way.
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "here.pth").write_text("\n".join(lines) + "\n")
    # setuptools leaves build/ beside what it builds.
    shutil.copytree(PLUGIN, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
    done = run([*install, "--no-build-isolation", folder / "source"])
    assert done.returncode == 0, done.stderr
    assert (packages / "apportion_ramp.py").is_file()
    return lambda *arguments: run([python, "-m", "apportion", *arguments])


def test_the_package_has_fewer_than_40_lines() -> None:
    files = [PLUGIN / "pyproject.toml", PLUGIN / "apportion_ramp.py"]
    assert sum(len(file.read_text().splitlines()) for file in files) < 40


def test_the_guide_shows_the_files_themselves() -> None:
    shown = dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", GUIDE.read_text(), flags=re.M | re.S))
    assert shown.keys() == {"pyproject.toml", "apportion_ramp.py", "test_ramp.py"}
    for name, text in shown.items():
        assert text == (PLUGIN / name).read_text(), name


def test_it_is_listed_with_its_settings(apportion: Command) -> None:
    listed = apportion("methods", "ramp", "--json")
    assert listed.returncode == 0, listed.stderr
    (about,) = json.loads(listed.stdout)
    assert (about["name"], about["needs"], about["conserves"]) == ("ramp", [], "token_mean")
    assert about["settings"]["slope"] == {
        "default": 0.5, "meaning": "what the last token gains; below 0 the first gains it"
    }  # fmt: skip


def test_it_assigns_credit_to_a_file(apportion: Command, tmp_path: Path) -> None:
    """μ = .5 and the population's σ = .5, so A = 1 and −1 with ε = 0.

    Three tokens: w = 1 − .5, 1, 1 + .5. Two trainable tokens around a masked one: w = .5, –, 1.5.
    """
    rows = [
        {"group": "q", "reward": 1, "token_ids": [5, 6, 7]},
        {"group": "q", "reward": 0, "token_ids": [5, 6, 7], "mask": [1, 0, 1]},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ("--set", "ddof=0", "--set", "epsilon=0")
    done = apportion("assign", tmp_path / "in.jsonl", "--method", "ramp", *settings, "-o", tmp_path / "out.jsonl")
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert first["advantage"] == [0.5, 1.0, 1.5] and second["advantage"] == [-0.5, 0.0, -1.5]
    assert first["method"] == "ramp" and first["settings"] == {"ddof": 0, "epsilon": 0.0, "slope": 0.5}


def test_it_trains(apportion: Command, tmp_path: Path) -> None:
    """One step on the embedded task; the record names the method, and every token has A_i·w_t."""
    small = {
        "run.evaluate_samples": 0, "run.threads": 1, "data.count": 64, "method.slope": -1,
        "trainer.per_device_train_batch_size": 16, "trainer.gradient_accumulation_steps": 1,
    }  # fmt: skip
    settings = [part for key, value in small.items() for part in ("--set", f"{key}={value}")]
    done = apportion("train", "--method", "ramp", "--steps", "1", *settings, "-o", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    folder = RunFolder(tmp_path / "run")
    (metrics,) = folder.metrics()
    assert metrics["step"] == 1 and metrics["credit/error/conserved"] < 1e-6
    credit, rollouts = folder.read("credit", 1), folder.read("rollouts", 1)
    assert {row["method"] for row in credit} == {"ramp"} and json.loads(credit[0]["settings"])["slope"] == -1
    assert len(credit) == 16 and any(row["base"] for row in credit), "no response had anything to learn from"
    for row, response in zip(credit, rollouts, strict=True):
        last = sum(response["mask"]) - 1
        assert last > 0
        wanted = [row["base"] * (2 - 2 * k / last) for k in range(last + 1)]
        given = [a for a, trainable in zip(row["advantage"], response["mask"], strict=True) if trainable]
        assert given == pytest.approx(wanted, abs=1e-6)


def offer(folder: Path, package: str, entry: str) -> None:
    """What pip leaves of an installed package that offers one method."""
    information = folder / f"{package}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[apportion.methods]\n{entry}\n")


@pytest.mark.parametrize(
    "entries, taken, owner",
    [
        (["grpo = apportion_own:GRPO"], "grpo", "apportion.credit.baselines:GRPO"),
        (["ramp = one:Ramp", "ramp = two:Ramp"], "ramp", r"(one|two):Ramp"),
    ],
)
def test_a_name_that_is_taken_is_one_clear_error(
    tmp_path: Path, entries: list[str], taken: str, owner: str
) -> None:  # fmt: skip
    for number, entry in enumerate(entries):
        offer(tmp_path, f"other{number}", entry)
    done = run([sys.executable, "-m", "apportion", "methods"], path=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(
        rf"error: entry point apportion\.methods:{taken}: got \w+:\w+; expected a name not taken yet\. "
        rf"Fix: rename it; '{taken}' is {owner}\n",
        done.stderr,
    ), done.stderr
