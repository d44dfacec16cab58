"""Interchange files as a source: what `apportion assign` wrote, and what it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from foreign_records import checked, write_lines

from apportion import interchange
from apportion.credit.registry import make_method
from apportion.errors import InputError
from apportion.report.source import open_source

# The example of docs/interchange.md.
MEASURED = [
    {
        "group": "q1", "reward": 1, "token_ids": list(range(1, 11)), "prompt": "6*7?", "gold": "42",
        "evidence": {"continuations": [
            {"position": 4, "rewards": [1, 1, 1, 0]}, {"position": 7, "rewards": [1, 0, 0, None]},
        ]},
    },
    {"group": "q1", "reward": 0, "token_ids": [1, 2, 3], "text": "abc", "offsets": [0, 1, 2], "finish": "length"},
]  # fmt: skip
SETTINGS = {"alpha": 1, "n0": 4, "ddof": 0, "epsilon": 0}


def assign(path: Path, rows: list[dict[str, Any]], method: str = "probepo", settings: Any = SETTINGS) -> Path:
    """The file that `apportion assign` makes of rows."""
    batch = interchange.read(enumerate(rows, 1))
    chosen = make_method(method.split("+"), settings)
    path.write_text("".join(interchange.credit_lines(batch, interchange.assign(batch, chosen))))
    return path


def test_what_assign_wrote_is_shown_with_its_segments(tmp_path: Path) -> None:
    rows = json.loads(json.dumps(MEASURED))
    rows[0]["evidence"]["continuations"][1]["rewards"] = [1, 0, 0, 0]
    source = open_source(assign(tmp_path / "batch-3.jsonl", rows))
    assert source.steps() == [3]
    view = checked(source, 3)
    # By hand, as in the document: .925 x4, .175 x3, 1.925 x3.
    assert source.read("credit", 3)[0]["advantage"] == pytest.approx([0.925] * 4 + [0.175] * 3 + [1.925] * 3)
    assert view.summary["method"] == "probepo" and view.summary["settings"]["n0"] == 4
    detail = view.detail(0)
    assert [(s["start"], s["end"], s["before"]) for s in detail["segments"]] == [
        (0, 4, 0.5), (4, 7, 0.625), (7, 10, 0.375),
    ]  # fmt: skip
    assert [s["increment"] for s in detail["segments"]] == pytest.approx([0.125, -0.25, 0.625])
    assert all(check["error"] < 1e-6 for check in detail["checks"]) and len(detail["checks"]) == 2
    assert [item["reward"] for item in detail["continuations"]["7"]["items"]] == [1, 0, 0, 0]
    found = [(e["position"], e["m"], e["reward"]) for e in source.read("evidence", 3)]
    assert found[:5] == [(4, 0, 1), (4, 1, 1), (4, 2, 1), (4, 3, 0), (7, 0, 1)]
    group = view.summary["groups"][0]
    assert (group["prompt"], group["gold"], group["spent"]["continuations"]) == ("6*7?", "42", 8)
    first, second = source.read("rollouts", 3)
    assert (first["text"], first["finish"], second["text"], second["finish"]) == (None, None, "abc", "length")
    assert view.detail(1)["tokens"]["text"] == ["a", "b", "c"]
    assert source.metrics() == [
        {"step": 3, "reward": 0.5, "credit/zero_variance": 0.0, "completions/mean_length": 6.5}
    ]  # fmt: skip


@pytest.mark.parametrize("method", ["grpo", "vineppo", "avspo+probepo"])
def test_every_methods_output_can_be_shown(tmp_path: Path, method: str) -> None:
    rows = json.loads(json.dumps(MEASURED))
    rows[1]["evidence"] = {"continuations": [{"position": 0, "rewards": [1, 0]}]}
    # Nothing in it, nothing to train on, no reward.
    rows += [
        {"group": "q1", "reward": 0, "token_ids": []}, {"group": "q2", "reward": None, "token_ids": [4]},
        {"group": "q2", "reward": 1, "token_ids": [4, 5], "mask": [0, 0]},
    ]  # fmt: skip
    source = open_source(assign(tmp_path / "batch.jsonl", rows, method, {}))
    view = checked(source, 0)
    assert view.summary["method"] == method and len(view.rollouts) == 5
    assert source.read("credit", 0)[3]["mean"] is None


def test_rewards_alone_get_grpos_base_and_the_method_says_so(tmp_path: Path) -> None:
    rows = [{**row, "evidence": {}} for row in MEASURED]
    source = open_source(write_lines(tmp_path / "batch.jsonl", rows))
    view = checked(source, 0)
    # r = 1, 0: mean 1/2, deviation of the sample 1/sqrt(2).
    base = 0.5 / (0.5**0.5 + 1e-4)
    assert [row["base"] for row in source.read("credit", 0)] == pytest.approx([base, -base])
    assert source.read("credit", 0)[1]["advantage"] == pytest.approx([-base] * 3)
    assert view.summary["method"] == "grpo (from recorded rewards)"


def test_a_masked_token_gets_no_credit(tmp_path: Path) -> None:
    rows = [{**MEASURED[0], "mask": [1] * 8 + [0, 0], "evidence": {}}, {**MEASURED[1]}]
    (first, _) = open_source(write_lines(tmp_path / "b.jsonl", rows)).read("credit", 0)
    assert first["advantage"][8:] == [0, 0] and first["advantage"][7] > 0
    # Nor where a file says so: null or a number, it is not trained on.
    row = {
        "group": "g",
        "reward": 1,
        "token_ids": [1, 2, 3],
        "mask": [1, 0, 0],
        "advantage": [1.0, None, 5.0],
        "base": 1,
    }
    (only,) = open_source(write_lines(tmp_path / "c.jsonl", [row])).read("credit", 0)
    assert only["advantage"] == [1.0, 0.0, 0.0]


def test_other_evidence_is_kept_as_a_run_has_it(tmp_path: Path) -> None:
    rows = [
        {
            **MEASURED[1],
            "evidence": {
                "belief": [{"position": 0, "logprob": -1.5}], "confidence": [{"position": 1, "conf": 0.5, "acc": 1}],
                "steps": [{"start": 2, "ok": False}], "importance": [0.5, 0, 2], "answer_start": None,
            },
        }
    ]  # fmt: skip
    found = open_source(write_lines(tmp_path / "b.jsonl", rows)).read("evidence", 0)
    assert [(e["kind"], e["position"], e["values"]) for e in found] == [
        ("belief", 0, [-1.5]), ("confidence", 1, [0.5, 1.0]), ("steps", 2, [0.0]), ("sensitivity", -1, [0.5, 0.0, 2.0]),
    ]  # fmt: skip


def test_a_folder_of_batches_has_a_step_for_each(tmp_path: Path) -> None:
    for step in (2, 10):
        write_lines(tmp_path / f"batch-{step:04d}.jsonl", MEASURED)
    assert open_source(tmp_path).steps() == [2, 10]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"advantage": [1.0, 2.0]}, "advantage of line 1 of b.jsonl"),
        ({"advantage": [1.0, None, 2.0]}, "advantage of line 1 of b.jsonl"),
        ({"base": None}, "base of line 1 of b.jsonl"),
        ({"settings": {"n0": "4"}}, "n0 of settings of line 1 of b.jsonl"),
        ({"segments": [{"start": 0, "end": 4, "samples": 1}]}, "start of segments[0] of line 1 of b.jsonl"),
        ({"segments": [{"start": 0, "end": 3, "samples": -1}]}, "samples of segments[0] of line 1 of b.jsonl"),
        ({"token_ids": [1, 2, 2**31]}, "token_ids of line 1 of b.jsonl"),
        ({"reward": "1"}, "reward of line 1 of b.jsonl"),
        ({"weight": [1.0]}, "weight of line 1 of b.jsonl"),
    ],
)
def test_a_broken_field_is_named(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    row = {"group": "g", "reward": 1, "token_ids": [1, 2, 3], "advantage": [1.0, 1.0, 1.0], "base": 1.0, **change}
    path = write_lines(tmp_path / "b.jsonl", [row])
    with pytest.raises(InputError) as error:
        open_source(path).read("credit", 0)
    assert error.value.field == field


def test_credit_in_some_rows_only_is_refused(tmp_path: Path) -> None:
    rows = [
        {"group": "g", "reward": 1, "token_ids": [1]},
        {"group": "g", "reward": 1, "token_ids": [1], "advantage": [1.0]},
    ]
    with pytest.raises(InputError, match=r"advantage of line 1 of b\.jsonl: got nothing"):
        open_source(write_lines(tmp_path / "b.jsonl", rows)).read("credit", 0)
