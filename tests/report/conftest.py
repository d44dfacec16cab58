"""One realistic run for the whole folder; a run of hand-made rows for exact numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from synthetic import write_run

from apportion.records import RunFolder


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_run(tmp_path_factory.mktemp("runs") / "chain-7", steps=3, prompts=3, group=8, logged=12)


@pytest.fixture
def handmade(tmp_path: Path) -> Callable[..., RunFolder]:
    """Writes a run of one step from rows that hold only what a test cares about."""

    def write(
        responses: Sequence[Mapping[str, Any]],
        evidence: Sequence[Mapping[str, Any]] = (),
        name: str = "run",
        metrics: Mapping[str, Any] | None = None,
        **credit: Any,
    ) -> RunFolder:
        folder = RunFolder(tmp_path / name)
        folder.log({"step": 1, "reward": 0.5, **(metrics or {})})
        rollouts, credits = [], []
        for i, given in enumerate(responses):
            n = len(given["token_ids"])
            row = {
                "row": i, "group": "g", "sample": i, "prompt": "p", "gold": "1", "mask": [True] * n,
                "finish": "stop", "verdict": "correct", "reward": 1.0, **given,
            }  # fmt: skip
            shared = {
                "method": "probepo",
                "settings": '{"n0": 4}',
                "invariants": '{"conserved": 0.0, "telescoping": 0.0}',
            }
            credits.append(
                {
                    "row": i, "base": 0.0, "mean": 0.5, "scale": 0.5, "advantage": [0.0] * n, "segments": [],
                    "counts": "{}", **shared, **{k: json.dumps(v) for k, v in credit.items()},
                    **{k: given[k] for k in ("advantage", "base", "mean", "segments") if k in given},
                }
            )  # fmt: skip
            rollouts.append(row)
        folder.write("rollouts", 1, rollouts)
        folder.write("evidence", 1, evidence)
        folder.write("credit", 1, credits)
        return folder

    return write


@pytest.fixture
def segment() -> Callable[..., dict[str, float]]:
    def make(start: int, end: int, raw: float, shrunk: float, stderr: float, increment: float, samples: int) -> Any:
        return {
            "start": start, "end": end, "raw": raw, "shrunk": shrunk, "stderr": stderr,
            "increment": increment, "samples": samples,
        }  # fmt: skip

    return make
