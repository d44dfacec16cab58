"""`apportion evaluate` and `apportion compare-evaluations`: the embedded policy from end to end, Ctrl-C, bad input.

The faults that were planted in what these commands call are listed in tests/evaluate.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from apportion.cli import app
from apportion.engines.base import Continuation, Request, Sampling
from apportion.engines.transformers import TransformersEngine
from apportion.tasks import parse_problem, verify

CHAIN = ["--model", "embedded", "--bench", "chain", "--limit", "6", "--n", "4", "--batch", "8"]


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), result.stderr
    assert all(part in result.stderr for part in parts), result.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation of the embedded policy, from start to end."""
    output = tmp_path_factory.mktemp("evaluation") / "whole"
    result = command("evaluate", *CHAIN, "--k", "1,4", "-o", output)
    assert result.exit_code == 0, (result.output, result.exception)
    return output


def rows(output: Path) -> dict[tuple[str, int], dict[str, Any]]:
    paths = (output / "samples" / "chain").glob("*.parquet")
    return {(row["id"], row["m"]): row for path in paths for row in pq.read_table(path).to_pylist()}


def test_the_embedded_policy_from_end_to_end(whole: Path) -> None:
    result = command("evaluate", *CHAIN, "--k", "1,4", "-o", whole, "--json")
    assert result.exit_code == 0 and result.stderr == f"records: {whole}\n"
    found = json.loads(result.stdout)
    assert found == json.loads((whole / "evaluation.json").read_text())
    # The numbers once more, from the texts on disk.
    right = {key: verify(row["text"], parse_problem(row["prompt"])) for key, row in rows(whole).items()}
    assert len(right) == 24
    metrics = found["sets"][0]["metrics"]
    assert metrics["avg@4"]["value"] == metrics["pass@1"]["value"] == pytest.approx(100 * sum(right.values()) / 24)
    solved = {key for (key, _), ok in right.items() if ok}
    assert metrics["pass@4"]["value"] == pytest.approx(100 * len(solved) / 6)
    # The policy solves about 37 % of such chains (its card), so 24 samples hold both kinds.
    assert 0 < sum(right.values()) < 24
    table = command("evaluate", *CHAIN, "--k", "1,4", "-o", whole).stdout
    assert table.startswith("embedded\n\n| set | problems | n | avg@n | pass@1 | maj@1 | pass@4 | maj@4 |")
    assert "| chained arithmetic | 6 | 4 | " in table


@pytest.mark.parametrize("name", ["evaluate", "compare-evaluations"])
def test_help_can_be_shown(name: str) -> None:
    result = command(name, "--help")
    assert result.exit_code == 0 and "--json" in result.stdout


def test_ctrl_c_keeps_finished_batches(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, given = TransformersEngine.continuations, []

    def stopping(self: TransformersEngine, requests: Sequence[Request], sampling: Sampling) -> Iterator[Continuation]:
        for each in real(self, requests, sampling):
            given.append(each)
            if len(given) == 12:
                raise KeyboardInterrupt
            yield each

    monkeypatch.setattr(TransformersEngine, "continuations", stopping)
    output = tmp_path / "out"
    result = command("evaluate", *CHAIN, "--k", "1,4", "-o", output)
    assert result.exit_code == 130 and f"stopped: finished batches are in {output}" in result.stderr
    assert len(rows(output)) == 8
    given.clear()
    monkeypatch.setattr(TransformersEngine, "continuations", real)
    assert command("evaluate", *CHAIN, "--k", "1,4", "-o", output).exit_code == 0
    assert rows(output) == rows(whole)
    assert (output / "evaluation.json").read_text() == (whole / "evaluation.json").read_text()


def test_two_evaluations_side_by_side(whole: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert command("evaluate", *CHAIN, "--temperature", "0.3", "-o", other).exit_code == 0
    result = command("compare-evaluations", whole, other)
    assert result.exit_code == 0 and result.stderr == ""
    assert result.stdout.count(f"| {other} |") == 2 and "temperature differs: 1.0 and 0.3" in result.stdout
    found = json.loads(command("compare-evaluations", whole, other, "--json").stdout)
    (row,) = found["pairs"][0]["sets"]
    values = [each["sets"][0]["metrics"]["avg@4"]["value"] for each in found["evaluations"].values()]
    assert row["difference"]["value"] == pytest.approx(values[0] - values[1])
    assert row["wins"] + row["losses"] + row["ties"] == 6
    refused(command("compare-evaluations", whole), "two or more")
    refused(command("compare-evaluations", whole, tmp_path), "evaluation.json")


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    problems = tmp_path / "gsm8k.jsonl"
    ask = ["evaluate", "--model", "embedded", "-o", tmp_path / "out"]
    refused(command(*ask, "--bench", "gsm8k"), "--data: got nothing for gsm8k")
    problems.write_text('{"id": 1, "problem": "47+8=?", "answer": "55"}\n{"id": 1, "problem": "1", "answer": "2"}\n')
    refused(command(*ask, "--bench", "gsm8k", "--data", tmp_path), "gsm8k: ", "line 2", "'id'", "each id once")
    problems.write_text('{"id": 1, "problem": "47+8=?"}\n')
    refused(command(*ask, "--bench", "gsm8k", "--data", tmp_path), "gsm8k: ", "'answer'", "--answer-column")
    refused(command(*ask, "--bench", "gsm9k", "--data", tmp_path), "did you mean 'gsm8k'")
    refused(command(*ask, "--bench", "chain", "--n", "2", "--k", "4"), "--k: got 4", "n = 2")
    refused(command(*ask, "--bench", "chain", "--k", "a"), "--k: got 'a'", "1,8")
    refused(command(*ask, "--bench", "chain", "--prompt", "chat"), "--prompt: got chat")
    refused(command(*ask, "--bench", "chain", "--dtype", "int8"), "--dtype")
    refused(command("evaluate", "--model", tmp_path, "--bench", "chain"), "--model", "config.json")
    problems.write_text('{"id": 1, "problem": "47+8=?", "answer": "55"}\n')
    refused(command(*ask, "--bench", "gsm8k", "--data", tmp_path, "--prompt", "chat"), "no chat template")
