"""A run on disk: open formats only, one Parquet file a step and kind.

    RUN/config.toml                     the resolved configuration
    RUN/metrics.jsonl                   one object a step
    RUN/rollouts/step-000001.parquet    one row a response: ids, text, reward, verdict
    RUN/evidence/step-000001.parquet    one row a continuation or reading: key, kind, ids, text, verdict, values
    RUN/credit/step-000001.parquet      one row a response: advantages, base, segments, invariants

Rows of `rollouts` and `credit` of a step stand in the same order, and `row` in `evidence` counts in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from apportion.credit.record import Credit, Segments
from apportion.errors import InputError
from apportion.rollouts import Rollouts

_IDS, _FLOATS = pa.list_(pa.int32()), pa.list_(pa.float32())

ROLLOUTS = pa.schema(
    {
        "row": pa.int32(), "group": pa.string(), "sample": pa.int32(), "prompt": pa.string(), "gold": pa.string(),
        "prompt_ids": _IDS, "token_ids": _IDS, "mask": pa.list_(pa.bool_()), "text": pa.string(),
        "char_start": _IDS, "reward": pa.float64(), "verdict": pa.string(), "finish": pa.string(),
        "old_logprob": _FLOATS, "ref_logprob": _FLOATS, "entropy": _FLOATS, "boundaries": _IDS,
        "path": pa.list_(pa.string()),
    }
)  # fmt: skip

# `kind` is that of the job (`measure.plan`) or "steps", a step verifier's verdicts. Continuations have `m` to
# `rescued`; the others have `values` at `position`: belief [logprob]; confidence [conf, acc]; steps [1 for ok];
# sensitivity and divergence one value a token of the row, with the position where its answer starts, −1 for none.
EVIDENCE = pa.schema(
    {
        "key": pa.string(), "kind": pa.string(), "group": pa.string(), "row": pa.int32(), "position": pa.int32(),
        "m": pa.int32(), "token_ids": _IDS, "text": pa.string(), "reward": pa.float64(), "verdict": pa.string(),
        "finish": pa.string(), "rescued": pa.bool_(), "values": pa.list_(pa.float64()),
    }
)  # fmt: skip

_SEGMENT = pa.struct({f.name: pa.float64() for f in fields(Segments) if f.name != "row"})

CREDIT = pa.schema(
    {
        "row": pa.int32(), "advantage": _FLOATS, "base": pa.float32(), "mean": pa.float64(), "scale": pa.float64(),
        "weight": _FLOATS, "residual": _FLOATS, "segments": pa.list_(_SEGMENT),
        "method": pa.string(), "settings": pa.string(), "invariants": pa.string(), "counts": pa.string(),
    }
)  # fmt: skip


def verdict_of(reward: float | None) -> str:
    """How a reward reads: abstain for None or NaN, correct for 1, wrong for 0, else `partial`."""
    if reward is None or reward != reward:
        return "abstain"
    return {1.0: "correct", 0.0: "wrong"}.get(float(reward), "partial")


def rollout_rows(rollouts: Rollouts, prompts: Sequence[str], golds: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a step's `rollouts` file. `prompts` and `golds` hold one text a response."""
    rows = []
    for i, (a, b) in enumerate(_spans(rollouts)):
        group = int(rollouts.group[i])
        reward = float(rollouts.reward[i])
        rows.append(
            {
                "row": i, "group": rollouts.name(i), "sample": rollouts.sample[i],
                "prompt": prompts[i], "gold": golds[i],
                "prompt_ids": rollouts.prompt_ids[group].tolist() if rollouts.prompt_ids else None,
                "token_ids": rollouts.token_ids[a:b].tolist(), "mask": rollouts.mask[a:b].tolist(),
                "text": rollouts.text[i] if rollouts.text else None,
                "char_start": _part(rollouts.char_start, a, b), "reward": reward, "verdict": verdict_of(reward),
                "finish": "length" if rollouts.truncated[i] else "stop",
                "old_logprob": _part(rollouts.old_logprob, a, b), "ref_logprob": _part(rollouts.ref_logprob, a, b),
                "entropy": _part(rollouts.entropy, a, b),
                "boundaries": None if rollouts.boundary is None else rollouts.boundary[a:b].nonzero()[:, 0].tolist(),
                "path": list(rollouts.path[i]) if rollouts.path else None,
            }
        )  # fmt: skip
    return rows


def credit_rows(
    rollouts: Rollouts, credit: Credit, mean: Sequence[float], scale: Sequence[float]
) -> list[dict[str, Any]]:
    """The rows of a step's `credit` file. `mean` and `scale` are the host's μ and divisor of each response."""
    pieces = credit.segments.by_row(len(rollouts)) if credit.segments else [[] for _ in range(len(rollouts))]
    common = {
        "method": credit.method, "settings": json.dumps(dict(credit.settings)),
        "invariants": json.dumps(dict(credit.invariants)), "counts": json.dumps(dict(credit.counts)),
    }  # fmt: skip
    return [
        {
            "row": i, "advantage": credit.token[a:b].tolist(), "base": float(credit.base[i]),
            "mean": mean[i], "scale": scale[i], "weight": _part(credit.weight, a, b),
            "residual": _part(credit.residual, a, b), "segments": pieces[i], **common,
        }
        for i, (a, b) in enumerate(_spans(rollouts))
    ]  # fmt: skip


class RunFolder:
    """Writes and reads the files of one run. Each file appears whole or not at all."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def write(self, kind: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes the `rollouts`, `evidence` or `credit` rows of a step."""
        schema = {"rollouts": ROLLOUTS, "evidence": EVIDENCE, "credit": CREDIT}[kind]
        target = self._file(kind, step)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".part")
        pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), partial, compression="zstd")
        os.replace(partial, target)

    def read(self, kind: str, step: int) -> list[dict[str, Any]]:
        """The rows that `write` wrote; none where the step has no such file."""
        target = self._file(kind, step)
        return pq.read_table(target).to_pylist() if target.exists() else []

    def steps(self) -> list[int]:
        """The steps with recorded credit, rising."""
        numbers = (path.stem.removeprefix("step-") for path in (self.path / "credit").glob("step-*.parquet"))
        return sorted(int(number) for number in numbers if number.isascii() and number.isdigit())

    def recorded_steps(self) -> list[int]:
        """The same.

        Raises:
            InputError: there are none.
        """
        if steps := self.steps():
            return steps
        raise InputError(
            "RUN", str(self.path), "the folder of a run, with credit/step-*.parquet in it",
            "train with `apportion train`, which records every step",
        )  # fmt: skip

    def log(self, metrics: Mapping[str, float]) -> None:
        """Appends one step's metrics. Flushed at once, so that a stopped run keeps them."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(dict(metrics)) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Every step's metrics; where a resumed run repeated a step, its last. A line being written is none yet.

        Raises:
            InputError: there is no such file, or a line of it is not the metrics of a step.
        """
        path = self.path / "metrics.jsonl"
        if not path.exists():
            raise InputError("RUN", str(self.path), "the folder of a run, with metrics.jsonl in it")
        by_step = {}
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                by_step[row["step"]] = row
            except (ValueError, KeyError, TypeError):
                if number == len(lines) or not line.strip():
                    continue
                where = f"{path}, line {number}"
                raise InputError(where, repr(line[:80]), "a JSON object with `step` in it") from None
        return [by_step[step] for step in sorted(by_step)]

    def _file(self, kind: str, step: int) -> Path:
        return self.path / kind / f"step-{step:06d}.parquet"


def json_lines(path: Path) -> list[Any]:
    """The values of a JSONL file, none where there is no file; a line cut off by a kill, or being written, ends it."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _spans(rollouts: Rollouts) -> list[tuple[int, int]]:
    return list(pairwise(rollouts.offsets.tolist()))


def _part(values: Any, a: int, b: int) -> list[Any] | None:
    return None if values is None else values[a:b].tolist()
