"""The [reward] section: the kind's settings, and who judges steps.

Planted faults seen caught here: settings that do not reach the verifier or the check of golds; a missing `lean` or
statement found only while training; the arithmetic verifier left out.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from apportion.cli import app
from apportion.errors import InputError
from apportion.train.data import load_data
from apportion.train.settings import load_config, to_toml
from apportion.verify.lean import LeanVerifier

THEOREM = "theorem one : 1 + 1 = 2 :="


def load(tmp_path: Path, rows: list[dict[str, Any]], chat: bool = False, **settings: Any):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_data(load_config(None, {"data.path": str(path), **settings}), chat)


@pytest.fixture
def lean() -> Iterator[str]:
    """A stand-in for Lean that proves everything, in a folder that `nobody` may read."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "lean"
        said = {"severity": "information", "pos": {"line": 5, "column": 0}, "data": "does not depend on any axioms"}
        path.write_text(f"#!/bin/sh\n[ \"$1\" = --print-prefix ] && exit 1\necho '{json.dumps(said)}'\n")
        path.chmod(0o755)
        yield str(path)


def test_settings_reach_the_verifier(tmp_path: Path) -> None:
    rows = [{"problem": "?", "answer": "4,5"}]
    given = {"completions": ["5, 4"], "answer": ["4,5"]}
    assert load(tmp_path, rows).reward(**given) == [1.0]
    assert load(tmp_path, rows, **{"reward.settings.order": "given"}).reward(**given) == [0.0]
    assert load(tmp_path, rows).reward.__name__ == "reward"
    # Golds are checked under the same settings.
    letters = {"reward.kind": "choice", "reward.settings.letters": "AB"}
    with pytest.raises(InputError, match=r"row 1, column 'answer': got 'C'"):
        load(tmp_path, [{"problem": "?", "answer": "C"}], **letters)


def test_settings_come_back_from_a_runs_file(tmp_path: Path) -> None:
    config = load_config(None, {"reward.settings.order": "given", "reward.steps": "arithmetic"})
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "c.toml").reward == config.reward
    over = load_config(tmp_path / "c.toml", {"reward.settings.rel_tol": 0.1})
    assert over.reward.settings == {"order": "given", "rel_tol": 0.1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward.settings.oder": "given"}, r"reward.settings: math settings: got 'oder'.*did you mean 'order'"),
        ({"reward.settings.order": "gven"}, r"reward.settings: order: got 'gven'.*did you mean 'given'"),
        ({"reward.settings.wall_s": "5"}, r"reward.settings: math settings: wall_s: got '5'"),
        ({"reward.kind": "lean"}, r"reward.settings: allow_local_code: got False.*Fix: allow_local_code=True"),
        ({"reward.kind": "lean", "reward.settings.allow_local_code": True}, r"reward.settings: binary: got 'lean'"),
        ({"reward.steps": "lean"}, r"reward.step_settings: allow_local_code: got False"),
        ({"reward.steps": "arithmetic", "reward.step_settings.mark": True}, r"reward.step_settings: got .*'mark'"),
        ({"reward.step_settings.marks": True}, r"reward.step_settings: got .*expected nothing without reward.steps"),
        ({"reward.kind.x": 1}, r"reward.kind"),
        ({"reward.setings.x": 1}, r"reward.setings: got an unknown key.*did you mean 'settings'"),
    ],
)
def test_refused_before_anything_starts(
    tmp_path: Path, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("APPORTION_ALLOW_LOCAL_CODE", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=message):
        load(tmp_path, [{"problem": "?", "answer": "4"}], **settings)


@pytest.mark.parametrize("key", ["settings.order", "step_settings.marks", "steps"])
def test_generated_problems_have_a_check_of_their_own(key: str) -> None:
    with pytest.raises(InputError, match=rf"reward.{key.split('.')[0]}: got .*generated|reward.*own check"):
        load_data(load_config(None, {f"reward.{key}": "arithmetic"}), False)


def test_a_key_below_a_value_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[method]\nname = "grpo"\n[reward]\nkind = "math"\n')
    for key in ("method.name.x", "reward.kind.x"):
        with pytest.raises(InputError, match=rf"--set: got '{key}'.*is no table"):
            load_config(tmp_path / "c.toml", {key: 1})


def test_lean_as_reward_and_as_steps(tmp_path: Path, lean: str) -> None:
    rows = [{"question": "?", "formal_statement": THEOREM}]
    columns = {"data.problem": "question", "data.answer": "formal_statement"}
    kind = {"reward.kind": "lean", "reward.settings.binary": lean, "reward.settings.allow_local_code": True}
    steps = {"reward.steps": "lean", "reward.step_settings.binary": lean, "reward.step_settings.allow_local_code": True}
    problems = load(tmp_path, rows, **columns, **kind, **steps)
    response = f"{THEOREM} by\n  rfl"
    assert problems.reward(completions=[response, ":= by sorry"], answer=[THEOREM] * 2) == [1.0, 0.0]
    assert isinstance(problems.steps, LeanVerifier)
    assert problems.steps(["?"], [response], problems.train) == [[(response.index("rfl"), True)]]
    # Beside another reward the statement is a column of its own, which every row must have.
    other = [{"problem": "?", "answer": "2", "formal_statement": THEOREM}]
    assert load(tmp_path, other, **steps).steps is not None
    with pytest.raises(InputError, match=r"p.jsonl, row 2: formal_statement: got NoneType"):
        load(tmp_path, [*other, {"problem": "?", "answer": "2"}], **steps)
    with pytest.raises(InputError, match=r"row 1, column 'answer': got '2'; expected an answer that the lean"):
        load(tmp_path, [{"problem": "?", "answer": "2"}], **kind)


def test_step_verified_trains_on_a_file(policy: Path, tmp_path: Path) -> None:
    rows = [{"problem": text, "answer": "1"} for text in ("ab", "bc")]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = {
        "trainer.per_device_train_batch_size": 8, "trainer.gradient_accumulation_steps": 1,
        "trainer.num_generations": 4, "trainer.max_completion_length": 12, "run.threads": 1,
        "reward.kind": "exact", "reward.steps": "arithmetic",
    }  # fmt: skip
    sets = [part for key, value in small.items() for part in ("--set", f"{key}={value}")]
    run = ["train", "--model", policy, "--data", tmp_path / "p.jsonl", "--method", "step_verified", "--steps", 1, *sets]
    result = CliRunner().invoke(app, [str(part) for part in [*run, "-o", tmp_path / "run"]])
    assert result.exit_code == 0, (result.output, result.exception)
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert "credit/steps" in row and row["rewards/reward/abstained"] == 0
