"""`apportion plan`, `assign` and `grade` as commands: files, pipes, exit codes, one line on stderr.

Planted faults that these tests were seen to catch: output written in place, a partial file left behind, verdicts of
a chunk in reverse, a warning about singletons for a method that compares nobody, exit code 1 for bad input.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from apportion.cli import app, shared

GOLDEN = Path(__file__).parent.parent / "golden" / "interchange"
EXACT = ["--set", "alpha=1", "--set", "ddof=0", "--set", "epsilon=0"]


def run(*arguments: str | Path, stdin: bytes | str | None = None) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


def refused(result: Result, *parts: str) -> None:
    """The command ended with code 2 and one line on stderr that holds all the parts, and printed nothing."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")
    assert all(part in result.stderr for part in parts), result.stderr


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def row(reward: float | None = 1, **more: Any) -> dict[str, Any]:
    return {"group": "q", "reward": reward, "token_ids": [5, 6, 7], **more}


def test_assign_writes_the_golden_file(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = run("assign", GOLDEN / "probepo_a.in.jsonl", "--method", "probepo", *EXACT, "-o", out)
    assert (result.exit_code, result.output) == (0, "")
    rows = objects(out.read_text())
    expected = objects((GOLDEN / "probepo_a.expected.jsonl").read_text())
    assert [r["advantage"] for r in rows] == [r["advantage"] for r in expected]
    assert rows[0]["uid"] == "first"
    assert rows[0]["settings"]["alpha"] == 1.0
    assert list(tmp_path.iterdir()) == [out]


def test_assign_through_pipes() -> None:
    given = (GOLDEN / "probepo_b.in.jsonl").read_bytes()
    piped = run("assign", "-", "-m", "grpo", "--set", "epsilon=0", "--output", "-", stdin=given)
    assert piped.exit_code == 0
    # Rewards 1, 0, 2: μ = 1, sample σ = 1.
    assert [r["advantage"] for r in objects(piped.stdout)] == [[0, 0, 0, 0], [-1, -1], [1, 1]]
    assert run("assign", GOLDEN / "probepo_b.in.jsonl", "-m", "grpo", "--set", "epsilon=0").stdout == piped.stdout


def test_output_may_be_the_input(tmp_path: Path) -> None:
    path = write(tmp_path, row(1), row(0))
    assert run("assign", path, "-m", "dr_grpo", "-o", path).exit_code == 0
    assert [r["advantage"][0] for r in objects(path.read_text())] == [0.5, -0.5]
    # Credit on top of credit: it replaces what was there.
    assert run("assign", path, "-m", "rloo", "-o", path).exit_code == 0
    assert [r["advantage"][0] for r in objects(path.read_text())] == [1.0, -1.0]


def test_nothing_is_written_when_something_is_wrong(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    bad = write(tmp_path, row(1), "\n", row(0, entropy=[1, 2]))
    refused(run("assign", bad, "-m", "grpo", "-o", out), "entropy of line 3", "got 2 values", "expected 3, one a token")
    assert not out.exists()
    out.write_text("precious")
    refused(run("assign", bad, "-m", "grpo", "-o", out), "line 3")
    refused(run("grade", bad, "-o", out), "kind of line 1")
    assert out.read_text() == "precious"
    assert {p.name for p in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["the input", "no rows"]),
        ("\n\n", ["the input", "no rows"]),
        ("[1]\n", ["line 1", "one JSON object"]),
        ('{"group": "a",\n', ["line 1", "invalid JSON"]),
        ('{"group": "a", "reward": NaN, "token_ids": []}\n', ["reward of line 1", "NaN"]),
    ],
)
def test_bad_files(text: str, parts: list[str]) -> None:
    for command in ("plan", "assign"):
        refused(run(command, "-", "-m", "grpo", stdin=text), *parts)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    path = write(tmp_path, row(1))
    refused(run("assign", tmp_path / "nowhere.jsonl", "-m", "grpo"), "nowhere.jsonl", "No such file")
    refused(run("assign", tmp_path, "-m", "grpo"), "Is a directory")
    refused(run("grade", tmp_path / "nowhere.jsonl"), "nowhere.jsonl", "No such file")
    refused(run("assign", path, "-m", "reinforce_pp", "-o", tmp_path / "no" / "out.jsonl"), "No such file")
    refused(run("assign", path, "-m", "reinforce_pp", "-o", tmp_path), "Is a directory")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["-m", "probpo"], ["method", "'probpo'", "did you mean 'probepo'?"]),
        (["-m", "probepo", "--set", "alpa=1"], ["probepo.alpa", "did you mean 'alpha'?"]),
        (["-m", "probepo", "--set", "alpha"], ["--set", "'alpha'", "key=value"]),
        (["-m", "probepo", "--set", "=1"], ["--set", "'=1'"]),
        (["-m", "probepo", "--set", "alpha=much"], ["probepo.alpha", "'much'"]),
        (["-m", "probepo", "--set", "alpha=NaN"], ["probepo.alpha", "finite"]),
        (["-m", "probepo", "--set", "budget=4", "--set", "samples=8"], ["budget: got 4", "at least samples, 8"]),
    ],
)
def test_bad_settings_are_found_before_the_file_is_read(arguments: list[str], parts: list[str]) -> None:
    for command in ("plan", "assign"):
        refused(run(command, "nowhere.jsonl", *arguments), *parts)


def test_settings_of_every_type(tmp_path: Path) -> None:
    path = write(tmp_path, row(1), row(0))
    chosen = ["--set", "placement=random", "--set", "budget=2", "--set", "samples=1", "--set", "seed=3"]
    result = run("plan", path, "-m", "probepo", *chosen)
    assert [set(r) for r in objects(result.stdout)] == [
        {"group", "row", "position", "samples", "kind", "score", "shared_with"}
    ] * 2
    whitened = run("assign", GOLDEN / "vineppo.in.jsonl", "-m", "vineppo", "--set", "whiten=true", "--set", "ddof=0")
    (got,) = objects(whitened.stdout)
    assert got["settings"] == {"ddof": 0, "epsilon": 1e-4, "samples": 9, "whiten": True, "fresh_budget": 0}
    # (.25, −.5, −.5, .75, .75) has mean .15 and population variance (.01 + 2·.4225 + 2·.36)/5 = .315.
    assert got["advantage"][1] == pytest.approx(-0.65 / (0.315**0.5 + 1e-4))


def test_a_response_alone_in_its_group_is_warned_of_once(tmp_path: Path) -> None:
    path = write(tmp_path, row(1), row(0), "\n", row(1, group="alone"), row(None, group="alone"), row(1, group="too"))
    result = run("assign", path, "-m", "grpo")
    assert result.exit_code == 0
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("warning: 2 responses (the first on line 4) are alone in their group")
    assert [r["advantage"][0] != 0 for r in objects(result.stdout)] == [True, True, False, False, False]
    # A method that compares nobody has nothing to warn of.
    assert run("assign", path, "-m", "reinforce_pp").stderr == ""


def test_plan_says_where_there_is_nothing_to_measure(tmp_path: Path) -> None:
    result = run("plan", write(tmp_path, row(1), row(0)), "-m", "grpo")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "grpo asks no engine" in result.stderr


def test_lost_pivots_are_told(tmp_path: Path) -> None:
    evidence = {"continuations": [{"position": 1, "rewards": [None]}, {"position": 2, "rewards": [1]}]}
    result = run("assign", write(tmp_path, row(1, evidence=evidence), row(0)), "-m", "probepo")
    assert "warning: 1 pivots without a single graded continuation were dropped" in result.stderr
    assert [s["start"] for s in objects(result.stdout)[0]["segments"]] == [0, 2]


def test_missing_evidence_names_method_line_and_field(tmp_path: Path) -> None:
    path = write(tmp_path, "\n", row(1), row(0, entropy=[1, 1, 1], boundaries=[1]))
    refused(run("plan", path, "-m", "probepo"), "probepo: entropy of line 2")
    refused(run("plan", path, "-m", "vineppo"), "vineppo: boundaries of line 2")
    refused(run("assign", path, "-m", "probepo"), "probepo: evidence.continuations of line 2")
    refused(run("assign", path, "-m", "vineppo"), "vineppo: evidence.continuations of line 2")


# ---- grade ------------------------------------------------------------------------------------------------------


def test_grade(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"kind": "exact", "gold": "x", "prediction": "x", "uid": 1},
        "\n",
        {"kind": "choice", "gold": "B", "prediction": "The answer is (C)."},
        {"kind": "math", "gold": "1/2", "prediction": "so \\boxed{0.5}", "verdict": "old"},
        {"kind": "choice", "gold": "?", "prediction": "B"},
    )
    out = tmp_path / "out.jsonl"
    assert run("grade", path, "-o", out).exit_code == 0
    rows = objects(out.read_text())
    assert [r["verdict"] for r in rows] == ["correct", "wrong", "correct", "abstain"]
    assert [r["extracted_prediction"] for r in rows[:3]] == ["x", "C", "0.5"]
    assert [r["extracted_gold"] for r in rows[:3]] == ["x", "B", "1/2"]
    assert all(r["reason"] for r in rows)
    assert rows[0]["uid"] == 1
    assert rows[1]["gold"] == "B"
    assert run("grade", "-", stdin=path.read_bytes()).stdout == out.read_text()


def test_grade_keeps_order_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from apportion.cli import interchange

    monkeypatch.setattr(interchange, "CHUNK", 3)
    rows = [{"kind": "exact", "gold": str(i % 2), "prediction": "1", "uid": i} for i in range(10)]
    result = run("grade", "-", stdin="".join(json.dumps(r) + "\n" for r in rows))
    assert [(r["uid"], r["verdict"]) for r in objects(result.stdout)] == [
        (i, "correct" if i % 2 else "wrong") for i in range(10)
    ]


def test_grade_settings() -> None:
    line = json.dumps({"kind": "exact", "gold": "X", "prediction": "x"}) + "\n"
    assert objects(run("grade", "-", stdin=line).stdout)[0]["verdict"] == "wrong"
    assert objects(run("grade", "-", "--set", "case=false", stdin=line).stdout)[0]["verdict"] == "correct"
    # A whole number is a number; the setting belongs to other kinds than the file's.
    assert run("grade", "-", "--set", "wall_s=3", stdin=line).exit_code == 0
    refused(run("grade", "-", "--set", "caze=false", stdin=line), "--set caze", "did you mean 'case'?")
    refused(run("grade", "-", "--set", "case=maybe", stdin=line), "--set case", "'maybe'", "such as True")
    refused(run("grade", "-", "--set", "percent=some", stdin=line), "percent", "'some'")
    refused(run("grade", "-", "--set", "sandbox=x", stdin=line), "--set sandbox")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"kind": "mth"}, "line 2: kind: got 'mth'"),
        ({"kind": None}, "kind of line 2: got null"),
        ({"kind": ["math"]}, "kind of line 2"),
        ({"prediction": None}, "line 2: prediction"),
        ({"prediction": {}}, "line 2: prediction"),
    ],
)
def test_grade_names_bad_rows(change: dict[str, Any], part: str) -> None:
    line = json.dumps({"kind": "exact", "gold": "1", "prediction": "1", **change})
    refused(run("grade", "-", stdin="\n" + line), part)


def test_grade_needs_every_field() -> None:
    for field in ("kind", "gold", "prediction"):
        line = {"kind": "exact", "gold": "1", "prediction": "1"}
        del line[field]
        refused(run("grade", "-", stdin=json.dumps(line)), "line 1", field)


def test_code_runs_only_where_it_was_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("APPORTION_ALLOW_LOCAL_CODE", raising=False)
    line = json.dumps({"kind": "code", "gold": "assert f(1) == 2", "prediction": "def f(x):\n    return x + 1"})
    assert objects(run("grade", "-", stdin=line).stdout)[0]["verdict"] == "abstain"
    assert objects(run("grade", "-", "--allow-local-code", stdin=line).stdout)[0]["verdict"] == "correct"


# ---- the shell --------------------------------------------------------------------------------------------------


def shell(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "apportion", *arguments], input=stdin, capture_output=True, check=False
    )


def test_python_m_apportion() -> None:
    given = (GOLDEN / "probepo_a.in.jsonl").read_bytes()
    done = shell("assign", "-", "-m", "probepo", *EXACT, stdin=given)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"\n") == 2
    assert b"0.925, 0.175" in done.stdout
    wrong = shell("assign", "-", "-m", "probepo", stdin=b"{}\n")
    assert (wrong.returncode, wrong.stdout) == (2, b"")
    assert wrong.stderr == b"error: group of line 1: got nothing; expected a value: this field must be there\n"


def test_a_device_is_written_to_and_not_replaced() -> None:
    device = Path("/dev/stdout")
    if not device.exists():
        pytest.skip("this system has no /dev/stdout")
    line = json.dumps({"kind": "exact", "gold": "1", "prediction": "1"}).encode()
    done = shell("grade", "-", "-o", "/dev/stdout", stdin=line)
    assert done.returncode == 0
    assert json.loads(done.stdout)["verdict"] == "correct"


# ---- progress ---------------------------------------------------------------------------------------------------


def test_progress_shows_only_when_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert list(shared.tracked(range(5), "rows read")) == [0, 1, 2, 3, 4]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(shared, "PATIENCE", 0.0)

    def slow() -> Iterator[int]:
        for i in range(5):
            time.sleep(0.01)
            yield i

    assert list(shared.tracked(slow(), "rows read")) == [0, 1, 2, 3, 4]
    shown = capsys.readouterr()
    assert "rows read" in shown.err
    assert shown.out == ""
