"""How many mathematical answers a second are graded, how long one takes, and against math-verify alone.

    python benchmarks/grading.py FOLDER     reads the gzipped JSONL sets of FOLDER, writes benchmarks/grading.json

From every set, rows spread evenly: each row's own answer, the same answer spelled otherwise, and the answer of another
row. "Easy" is a set whose golds are numbers or short formulas (GSM8K, AMC, AIME, MATH-500); "all" are all named sets.
Latency is one `grade` at a time in one thread, the queue empty; the rate is `grade_many` with its own number of
workers. The ratio is to math-verify called directly in this process, both sides boxed, without any bound on time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from math_verify import parse, verify

from apportion.verify import grade, grade_many

EASY = ("gsm8k_test", "amc_83", "aime24", "math500")
HARD = ("olympiadbench", "college_math", "minerva_math")


def read(path: Path, count: int) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return rows[:: max(1, len(rows) // count)][:count]


def respelled(answer: str) -> str:
    """The same answer as another model might write it."""
    other = answer.replace(r"\frac", r"\dfrac").replace(r"\left", "").replace(r"\right", "")
    return f"{other}.0" if other.lstrip("-").isdigit() else other


def items_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Three items a row: right, right but spelled otherwise, another row's answer."""
    items = []
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        gold = row.get("answers") or row["answer"]
        for answer in (row["answer"], respelled(row["answer"]), other["answer"]):
            answer = answer.strip().strip("$")
            items.append({"kind": "math", "gold": gold, "prediction": rf"So the answer is $\boxed{{{answer}}}$."})
    return items


def alone(item: dict[str, Any]) -> bool:
    """math-verify by itself, without its alarms (they work in a main thread only, and not inside one operation)."""
    golds = item["gold"] if isinstance(item["gold"], list) else [item["gold"]]
    answer = parse(item["prediction"], parsing_timeout=None)
    return any(
        verify(parse(rf"\boxed{{{gold.strip().strip('$')}}}", parsing_timeout=None), answer, timeout_seconds=None)
        for gold in golds
    )


def latencies_ms(items: Sequence[dict[str, Any]]) -> dict[str, float]:
    took = []
    for item in items:
        start = time.perf_counter()
        grade(**item)
        took.append(1000 * (time.perf_counter() - start))
    return {name: round(float(np.percentile(took, q)), 2) for name, q in (("p50", 50), ("p90", 90), ("p99", 99))} | {
        "max": round(max(took), 2)
    }


def measure(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Rate, verdicts by kind, latency percentiles, and the ratio to math-verify alone."""
    start = time.perf_counter()
    verdicts = grade_many(items)
    ours_s = time.perf_counter() - start
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that nothing bounds it
    start = time.perf_counter()
    theirs = [alone(item) for item in items]
    theirs_s = time.perf_counter() - start
    sure = [(verdict, right) for verdict, right in zip(verdicts, theirs, strict=True) if verdict.outcome != "abstain"]
    return {
        "items": len(items),
        "per_second": round(len(items) / ours_s, 1),
        "outcomes": Counter(verdict.outcome for verdict in verdicts),
        "latency_ms": latencies_ms(items),
        "math_verify_alone_seconds_over_ours": round(theirs_s / ours_s, 2),
        "math_verify_alone_differs": sum((verdict.outcome == "correct") != right for verdict, right in sure),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=100, help="rows of each set")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    items = {name: items_of(read(options.folder / f"{name}.jsonl.gz", options.rows)) for name in EASY + HARD}
    # Starting the children is paid once a process, not per item.
    grade_many([{"kind": "math", "gold": "x", "prediction": f"y_{i}"} for i in range(8)])
    found = {
        "command": "python benchmarks/grading.py FOLDER",
        "processors": len(os.sched_getaffinity(0)),
        "easy": measure([item for name in EASY for item in items[name]]),
        "all": measure([item for name in EASY + HARD for item in items[name]]),
    }
    options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
