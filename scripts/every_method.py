"""Trains the embedded policy 20 steps with every method and says what a step of each costs.

    python scripts/every_method.py                       all methods, into runs/methods and evidence/methods.json
    python scripts/every_method.py probepo avspo         only these
    python scripts/every_method.py --steps 3 -o /tmp/x   fewer steps, elsewhere

Each method is one `apportion train` with the same problems, seed and batch of 64 responses. A complete run is not
repeated, so the command goes on where it was stopped. Per step: tokens of rollouts and of measuring, passes for
measuring (a decoding step is a forward) and seconds by phase; and the lines of `apportion diagnose` with intervals.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from apportion.credit.registry import method_names
from apportion.records import RunFolder

PIPELINE = "avspo,probepo,cw_grpo"
# Responses of nine-character steps: probes at every step are few, or they would be most of the run.
SETTINGS = {
    "probepo": ["method.budget=16", "method.samples=4", "method.min_gap=4", "method.n0=2.0"],
    "vineppo": ["method.samples=2"],
    "spo_chain": ["method.samples=2", "method.interval=5"],
    "avspo": ["method.threshold=0.1"],
    PIPELINE: ["method.avspo.threshold=0.1", "method.probepo.budget=16", "method.probepo.samples=4",
               "method.probepo.min_gap=4"],
}  # fmt: skip
COMMON = [
    "run.threads=1", "run.evaluate_samples=0", "run.record_every=5", "data.count=1024", "run.checkpoint_every=1000",
    "trainer.per_device_train_batch_size=64", "trainer.gradient_accumulation_steps=1",
]  # fmt: skip
_SHOWN = ("tokens/", "probe/", "measure/", "seconds/", "credit/", "tree/")


def train(method: str, folder: Path, steps: int) -> Path:
    """Runs `apportion train` unless the folder holds a complete run. Returns the run folder."""
    run = folder / method.replace(",", "+")
    if not (run / "result.json").exists():
        command = [sys.executable, "-m", "apportion", "train", "--method", method, "--steps", str(steps)]
        for setting in [*COMMON, *SETTINGS.get(method, [])]:
            command += ["--set", setting]
        resume = (run / "config.toml").exists()
        command = [*command[:4], "--resume", str(run)] if resume else [*command, "-o", str(run)]
        subprocess.run(command, check=True)
    return run


def summary(run: Path) -> dict[str, Any]:
    """Means over the steps of what a step costs, the mean reward of the last five, and what `diagnose` says."""
    metrics = RunFolder(run).metrics()
    names = sorted({name for row in metrics for name in row if name.startswith(_SHOWN)})
    found = {name: mean(row[name] for row in metrics if name in row) for name in names}
    command = [sys.executable, "-m", "apportion", "diagnose", str(run), "--json"]
    lines = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["lines"]
    said = {line["name"]: [line["value"], line["interval"]] for line in lines if line["value"] is not None}
    reward = mean(row["reward"] for row in metrics[-5:])
    return {"steps": len(metrics), "reward, last 5": reward, **found, "diagnose": said}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=[*method_names(), PIPELINE])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/methods"))
    parser.add_argument("--json", type=Path, default=Path("evidence/methods.json"))
    options = parser.parse_args(arguments)
    found = {}
    for method in options.methods:
        print(f"{method}: ", end="", flush=True)
        found[method] = summary(train(method, options.output, options.steps))
        print(json.dumps({k: round(v, 3) for k, v in found[method].items() if k.startswith(("rew", "tok", "probe/t"))}))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    command = "python scripts/every_method.py" + (f" --steps {options.steps}" if options.steps != 20 else "")
    options.json.write_text(json.dumps({"command": command, "methods": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
