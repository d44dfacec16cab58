"""One generation batch into the run folder's Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple

from apportion.credit.record import Credit
from apportion.records import RunFolder, credit_rows, rollout_rows, verdict_of
from apportion.train.host import Batch
from apportion.train.measuring import Measurement


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
    evidence = [
        {
            "key": "/".join(map(str, astuple(p.key))), "kind": "continuations", "group": rollouts.name(p.row),
            "row": p.row, "position": p.position, "m": p.m, "token_ids": list(p.token_ids),
            "text": decode(p.token_ids), "reward": p.reward, "verdict": verdict_of(p.reward), "finish": p.finish,
            "rescued": p.rescued,
        }
        for p in measured.probes
    ]  # fmt: skip
    folder.write("evidence", step, [*evidence, *measured.read])
    folder.write("credit", step, credit_rows(rollouts, credit, batch.base.mean.tolist(), batch.base.scale.tolist()))
