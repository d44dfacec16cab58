"""A recorded step as an interchange file, and what `assign` makes of it.

By hand: two responses open with the tokens (1, 2) and share the state before position 2, which was probed once, under
the first of them. Rewards 1 and 0: μ = .5, σ = √.5 = .70711 (sample). Probes 1, 0: V̂ = .5; n₀ = 0, so no shrinkage.
Response 0: increments (.5 − .5, 1 − .5) = (0, .5), each /σ: 0, .70711; token mean over 4 tokens .35355, so
D̃ = ∓.35355 and A = .70711 ∓ .35355 = .35355, 1.06066. Response 1: increments 0, −.5, and A the same with the sign
turned. Without the shared state response 1 would have no pivot and the same −.70711 everywhere.

Planted faults that these tests were seen to catch: a shared state left to the response it was noted under; states of
another group taken; probes in the order of the file and not of m; a null reward as 0; the mask left out.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from apportion.cli import app
from apportion.interchange import recorded_rows
from apportion.records import RunFolder

ROOT = 1 / math.sqrt(2)


def rollout(row: int, group: str, ids: list[int], reward: float) -> dict[str, Any]:
    return {
        "row": row, "group": group, "sample": row % 2, "prompt": "p", "gold": "g", "prompt_ids": [9], "token_ids": ids,
        "mask": [True] * len(ids), "text": None, "char_start": None, "reward": reward, "verdict": "", "finish": "stop",
        "old_logprob": None, "ref_logprob": None, "entropy": [0.5] * len(ids), "boundaries": [2], "path": None,
    }  # fmt: skip


def probe(group: str, row: int, position: int, m: int, reward: float | None) -> dict[str, Any]:
    return {
        "key": f"0/1/{group}/{row}/{position}/{m}", "kind": "continuations", "group": group, "row": row,
        "position": position, "m": m, "token_ids": [3], "text": "", "reward": reward, "verdict": "", "finish": "stop",
        "rescued": False, "values": None,
    }  # fmt: skip


def credit(row: int, starts: list[int]) -> dict[str, Any]:
    names = ("start", "end", "raw", "shrunk", "stderr", "increment", "samples")
    segments = [dict.fromkeys(names, 0.0) | {"start": float(at)} for at in starts]
    return {"row": row, "method": "probepo", "segments": segments}


ROLLOUTS = [
    rollout(0, "a", [1, 2, 3, 4], 1.0), rollout(1, "a", [1, 2, 5, 6], 0.0),
    rollout(2, "b", [1, 2, 5, 6], 1.0), rollout(3, "b", [7, 2, 5, 6], math.nan),
]  # fmt: skip
EVIDENCE = [probe("a", 0, 2, 1, 0.0), probe("a", 0, 2, 0, 1.0), probe("b", 2, 2, 0, None)]
CREDIT = [credit(0, [0, 2]), credit(1, [0, 2]), credit(2, [0]), credit(3, [0])]


def states(row: dict[str, Any]) -> list[Any]:
    return [(each["position"], each["rewards"]) for each in row["evidence"]["continuations"]]


def test_a_shared_state_goes_to_every_pivot_that_it_served() -> None:
    rows = recorded_rows(ROLLOUTS, EVIDENCE, CREDIT)
    assert [states(row) for row in rows] == [[(2, [1.0, 0.0])], [(2, [1.0, 0.0])], [(2, [None])], []]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 1.0, None]
    assert rows[0]["mask"] == [1, 1, 1, 1] and "text" not in rows[0]


def test_readings_come_back_as_the_kind_they_were() -> None:
    def reading(kind: str, position: int, values: list[float]) -> dict[str, Any]:
        return {"kind": kind, "row": 0, "position": position, "values": values, "m": None, "reward": None}

    found = [
        reading("belief", 0, [-1.5]), reading("belief", 2, [-0.5]), reading("confidence", 2, [0.25, 0.75]),
        reading("steps", 0, [1.0]), reading("steps", 2, [0.0]), reading("sensitivity", 3, [0.1, 0.2, 0.0]),
    ]  # fmt: skip
    assert recorded_rows(ROLLOUTS, found, CREDIT)[0]["evidence"] == {
        "belief": [{"position": 0, "logprob": -1.5}, {"position": 2, "logprob": -0.5}],
        "confidence": [{"position": 2, "conf": 0.25, "acc": 0.75}],
        "steps": [{"start": 0, "ok": True}, {"start": 2, "ok": False}],
        "importance": [0.1, 0.2, 0.0, 0.0],
        "answer_start": 3,
    }


def test_a_response_without_an_answer_to_weigh_says_so() -> None:
    weighed = {"kind": "sensitivity", "row": 1, "position": 3, "values": [0.1, 0.2, 0.0, 0.0]}
    rows = recorded_rows(ROLLOUTS, [weighed], [{**row, "method": "oar_p"} for row in CREDIT])
    assert rows[0]["evidence"] == {"answer_start": None}
    assert rows[1]["evidence"] == {"importance": [0.1, 0.2, 0.0, 0.0], "answer_start": 3}
    # A method that is not installed here: nothing is known of what it looked for.
    assert "evidence" not in recorded_rows(ROLLOUTS, [], [{**row, "method": "elsewhere"} for row in CREDIT])[0]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = RunFolder(tmp_path / "run")
    whole = {"advantage": [0.0] * 4, "base": 0.0, "mean": 0.0, "scale": 1.0, "weight": None, "residual": None}
    about = {"method": "probepo", "settings": "{}", "invariants": "{}", "counts": "{}"}
    folder.write("rollouts", 4, ROLLOUTS)
    folder.write("evidence", 4, EVIDENCE)
    folder.write("credit", 4, [{**whole, **about, **row} for row in CREDIT])
    return folder.path


def test_assign_of_the_export_is_the_credit_worked_out_by_hand(run: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    out, done = str(tmp_path / "step.jsonl"), tmp_path / "credit.jsonl"
    assert runner.invoke(app, ["export", str(run), "-o", out]).exit_code == 0
    asked = ["assign", out, "--method", "probepo", "-o", str(done)]
    for setting in ("alpha=1", "n0=0", "epsilon=0"):
        asked += ["--set", setting]
    result = runner.invoke(app, asked)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in done.read_text().splitlines()]
    assert rows[0]["advantage"] == pytest.approx([ROOT / 2, ROOT / 2, 1.5 * ROOT, 1.5 * ROOT], abs=1e-6)
    assert rows[1]["advantage"] == pytest.approx([-ROOT / 2, -ROOT / 2, -1.5 * ROOT, -1.5 * ROOT], abs=1e-6)


def test_a_step_that_was_not_recorded_is_named(run: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(run), "--step", "3"])
    assert result.exit_code != 0
    assert "--step" in str(result.output) + str(result.exception)
