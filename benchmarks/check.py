"""Whether fresh results of the benchmarks are worse than the committed ones by more than a shared machine explains.

    python benchmarks/check.py FOLDER        FOLDER has JSON of the benchmarks' names, as their `-o` writes them

Only ratios of two things that ran side by side are compared, and counts. A bound is far from the committed value on the
bad side: it is there to catch a lost cache or a loop over rows, not a busy neighbour.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# Where in a benchmark's JSON a number is, which side is bad, and how many times worse is too much.
BOUNDS = [
    ("grading", "easy/math_verify_alone_seconds_over_ours", "low", 3.0),
    ("continuations", "embedded/probing_over_decoding", "high", 1.5),
    ("continuations", "embedded/prefilled_tokens", "high", 1.1),
    ("continuations", "smollm2/probing_over_decoding", "high", 1.5),
    ("continuations", "embedded/text_over_probing_per_token", "low", 2.0),
    ("scoring", "belief/random_6M/packed_over_plain/median", "high", 1.5),
    ("scoring", "belief/random_6M/largest_difference", "high", 100.0),
    ("scoring", "perturbed/2/batched_over_ours/median", "low", 1.5),
    ("scoring", "gradient/peak_mib_above_the_model/512x16/ours", "high", 2.0),
    ("scoring", "memory/ours_mib/8192", "high", 2.0),
    ("step", "step/over", "high", 1.5),
    ("cluster_schedule", "qwen3-4b/weak/512/efficiency", "low", 1.05),
    ("page", "bytes_per_token", "high", 1.5),
    ("page", "opening_over_plain/median", "high", 2.0),
    ("credit_maths", "methods/grpo/memory_over_batch", "high", 2.0),
    ("credit_maths", "methods/probepo/over_pass", "high", 3.0),
]


def at(found: Any, path: str) -> float | None:
    for part in path.split("/"):
        if isinstance(found, list):
            found = found[int(part)] if int(part) < len(found) else None
        else:
            found = found.get(part) if isinstance(found, dict) else None
    return found


def worse(folder: Path) -> Iterator[str]:
    """A line for each number that is out of its bound or missing; benchmarks that FOLDER has no JSON of are skipped."""
    for name, path, bad, times in BOUNDS:
        fresh = folder / f"{name}.json"
        if not fresh.exists():
            continue
        was, now = (at(json.loads(file.read_text()), path) for file in (HERE / fresh.name, fresh))
        if was is None or now is None:
            yield f"{name}: {path} is missing ({was} committed, {now} now)"
        elif now > was * times if bad == "high" else now < was / times:
            yield f"{name}: {path} was {was} and is {now}: more than {times} times worse"


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python benchmarks/check.py FOLDER, a folder with fresh JSON of the benchmarks")
    found = list(worse(Path(sys.argv[1])))
    print("\n".join(found) or "no ratio is worse than its bound")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
