"""Problems as the Parquet files that verl trains on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apportion.errors import InputError, nearest
from apportion.evaluate.prompts import INSTRUCTION
from apportion.tasks import load_problems
from apportion.verify import check_gold

STYLES = ("qwen", "chat", "bare")


def messages(problem: str, style: str) -> list[dict[str, str]]:
    """A problem as verl hands it to the model's chat template. [ours]

    qwen: the instruction as system message, as `apportion evaluate` asks Qwen models; chat: the instruction after the
    problem, as it asks all others; bare: the problem alone, where template or model bring the instruction.
    """
    if style == "qwen":
        return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": problem}]
    return [{"role": "user", "content": problem if style == "bare" else f"{problem}\n{INSTRUCTION}"}]


def to_rows(problems: Sequence[dict[str, Any]], source: str, style: str, split: str) -> list[dict[str, Any]]:
    """Rows in verl's columns: data_source, prompt, ability, reward_model, extra_info with the row's index."""
    return [
        {
            "data_source": source, "prompt": messages(row["problem"], style), "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": index, "split": split},
        }
        for index, row in enumerate(problems)
    ]  # fmt: skip


def write_data(
    data: Path,
    output: Path,
    *,
    style: str = "chat",
    problem_column: str = "problem",
    answer_column: str = "answer",
    kind: str = "math",
    held_out: int | None = None,
    drop_unreadable: bool = False,
) -> dict[str, int]:
    """Writes train.parquet and test.parquet, which has the last `held_out` rows, into the folder `output`.

    verl wants a file for validation whether it validates or not. By default a tenth of the rows is held out, 128 at
    most and 1 at least. [ours]

    Args:
        data: a file of problems, see `apportion.tasks.load_problems`.
        style: see `messages`. kind: the verifier that will judge the answers.
        drop_unreadable: rows whose answer it cannot read are left out, not refused.

    Returns:
        rows of each file, and how many were dropped.

    Raises:
        InputError: an unknown style, a file or row that cannot be used, an answer that cannot be read, too few rows
            for as many to be held out.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if style not in STYLES:
        raise InputError("--prompt", repr(style), f"one of {', '.join(STYLES)}{nearest(style, STYLES)}")
    problems = load_problems(data, problem_column, answer_column)
    kept = []
    for number, row in enumerate(problems, 1):
        reason = check_gold(kind, row["answer"])
        if reason is None:
            kept.append(row)
        elif not drop_unreadable:
            raise InputError(
                f"{data}, row {number}, column {answer_column!r}", repr(row["answer"])[:80],
                f"an answer that the {kind} verifier can judge against ({reason})",
                "correct the row, or leave such rows out with --drop-unreadable",
            )  # fmt: skip
    held_out = max(1, min(128, len(kept) // 10)) if held_out is None else held_out
    if not 1 <= held_out < len(kept):
        raise InputError("--held-out", held_out, f"1 or more, and less than the {len(kept)} rows that there are")
    source = data.name.partition(".")[0]
    parts = {"train": kept[: len(kept) - held_out], "test": kept[len(kept) - held_out :]}
    output.mkdir(parents=True, exist_ok=True)
    for split, rows in parts.items():
        part = output / f".{split}.{os.getpid()}.part"
        pq.write_table(pa.Table.from_pylist(to_rows(rows, source, style, split)), part)
        os.replace(part, output / f"{split}.parquet")
    return {split: len(rows) for split, rows in parts.items()} | {"dropped": len(problems) - len(kept)}
