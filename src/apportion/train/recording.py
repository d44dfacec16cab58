"""One generation batch into the run folder's Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

from apportion.credit.record import Credit
from apportion.measure.batch import Batch
from apportion.measure.readings import Measurement
from apportion.measure.wave import Probe
from apportion.records import RunFolder, credit_rows, rollout_rows, verdict_of
from apportion.rollouts import Rollouts


def record_batch(
    folder: RunFolder,
    step: int,
    batch: Batch,
    measured: Measurement,
    credit: Credit,
    decode: Callable[[Sequence[int]], str],
) -> None:
    """Writes the step's rollouts, evidence and credit. Where nothing was measured, the evidence file is empty."""
    rollouts = batch.rollouts
    folder.write("rollouts", step, rollout_rows(rollouts, batch.prompts, batch.golds))
    evidence = [probe_row(rollouts, probe, decode) for probe in measured.probes]
    folder.write("evidence", step, [*evidence, *measured.read])
    folder.write("credit", step, credit_rows(rollouts, credit, batch.base.mean.tolist(), batch.base.scale.tolist()))


def probe_row(rollouts: Rollouts, probe: Probe, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """A graded continuation as a row of `records.EVIDENCE`."""
    return {
        "key": "/".join(map(str, astuple(probe.key))), "kind": "continuations", "group": rollouts.name(probe.row),
        "row": probe.row, "position": probe.position, "m": probe.m, "token_ids": list(probe.token_ids),
        "text": decode(probe.token_ids), "reward": probe.reward, "verdict": verdict_of(probe.reward),
        "finish": probe.finish, "rescued": probe.rescued,
    }  # fmt: skip
