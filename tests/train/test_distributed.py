"""Two processes give the same credit as one for the same rollouts, and both end by themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apportion.train.compatibility import _measuring

HERE = Path(__file__).parent


def run(command: list[str], timeout: float) -> str:
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def outputs(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    out = tmp_path_factory.mktemp("ranks")
    script = [str(HERE / "two_ranks.py"), str(policy)]
    run([sys.executable, *script, str(out / "one")], 300)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = run([*torchrun, *script, str(out / "two")], 300)
    assert "rank 0 done" in printed and "rank 1 done" in printed
    return out / "one", out / "two"


def test_zero_stage_2_gives_the_same_credit(outputs: tuple[Path, Path], policy: Path, tmp_path: Path) -> None:
    """It shards gradients and optimiser state; parameters, which measuring reads, are whole on each rank."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    script = [str(HERE / "two_ranks.py"), str(policy), str(tmp_path), "zero2"]
    run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script], 300)
    for step in (0, 1):
        alone = torch.load(outputs[0] / f"credit-{step}-0.pt", weights_only=True)
        for rank in (0, 1):
            found = torch.load(tmp_path / f"credit-{step}-{rank}.pt", weights_only=True)
            assert all(torch.equal(found[name], alone[name]) for name in ("ids", "row", "start", "raw", "token"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("as_file", [False, True])
def test_stage_3_is_refused_by_name(stage: int, as_file: bool, tmp_path: Path) -> None:
    table: Any = {"zero_optimization": {"stage": stage}}
    if as_file:
        (tmp_path / "zero.json").write_text(json.dumps(table))
        table = str(tmp_path / "zero.json")
    options = SimpleNamespace(
        deepspeed=table, fsdp=[], generation_kwargs=None, use_transformers_continuous_batching=False, use_vllm=False
    )
    refused = [field for wrong, field, *_ in _measuring(options, "probepo", False) if wrong]
    assert refused == (["deepspeed"] if stage == 3 else [])


@pytest.mark.parametrize("step", [0, 1])
def test_same_credit(outputs: tuple[Path, Path], step: int) -> None:
    one, two = outputs
    alone = torch.load(one / f"credit-{step}-0.pt", weights_only=True)
    ranks = [torch.load(two / f"credit-{step}-{rank}.pt", weights_only=True) for rank in (0, 1)]
    for rank in ranks:
        for name in ("ids", "row", "start", "raw", "token"):
            assert torch.equal(rank[name], alone[name]), name
        # Batches of another shape round differently.
        assert torch.allclose(rank["entropy"], alone["entropy"], atol=1e-5)
        assert rank["probes"] == alone["probes"] and rank["gap"] == ranks[0]["gap"] < 1e-4


def test_the_cases_are_the_hard_ones(outputs: tuple[Path, Path]) -> None:
    """First step: one pivot in all, so a rank without probes; second: ragged numbers of pivots a response."""
    first = torch.load(outputs[0] / "credit-0-0.pt", weights_only=True)
    second = torch.load(outputs[0] / "credit-1-0.pt", weights_only=True)
    assert first["probes"] == 4 and (first["start"] > 0).sum() == 1
    pivots = torch.bincount(second["row"][second["start"] > 0], minlength=8)
    assert second["probes"] > 8 and len(set(pivots.tolist())) > 2
    assert second["token"].unique().numel() > 8


def test_records_are_written_once(outputs: tuple[Path, Path]) -> None:
    from apportion.records import RunFolder

    one, two = (RunFolder(out / "run") for out in outputs)
    assert one.steps() == two.steps() == [1, 2]
    assert len(two.metrics()) == 2
    for step in (1, 2):
        mine, theirs = (sorted(run.read("evidence", step), key=lambda r: (r["key"], r["m"])) for run in (one, two))
        assert mine == theirs and mine
        assert one.read("credit", step) == two.read("credit", step)
