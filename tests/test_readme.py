"""The figures that README quotes are those of the committed measurement."""

import json
from pathlib import Path
from statistics import mean, stdev

ROOT = Path(__file__).parents[1]


def test_the_table_is_the_committed_measurement() -> None:
    runs = json.loads((ROOT / "evidence" / "demo.json").read_text())
    cells = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:4]]
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.startswith("| ")
    }
    for column, method in enumerate(("grpo", "probepo")):
        end = [run["end"] for run in runs[method]]
        assert cells["held-out accuracy, start"][column] == f"{mean(run['start'] for run in runs[method]):.3f}"
        quoted = cells["held-out accuracy, end (± standard error over seeds)"][column]
        assert quoted == f"{mean(end):.3f} ± {stdev(end) / len(end) ** 0.5:.3f}"
        for label, name in (
            ("optimiser steps", "steps"), ("rollout tokens", "tokens/actor"), ("probe tokens", "probe/tokens")
        ):  # fmt: skip
            assert cells[label][column] == f"{mean(run[name] for run in runs[method]):,.0f}"


def test_the_commands_of_the_readme_exist() -> None:
    targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line}
    assert {"demo", "test", "smol", "evidence"} <= targets
