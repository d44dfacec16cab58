"""A whole ProbePO step against a GRPO step and the decoding of its probe tokens; and grading beside decoding.

    python benchmarks/step.py                 into benchmarks/step.json

The embedded policy trains on its own task with a learning rate of 0, so that all ways see rollouts of one policy, in
turns and on one thread: GRPO and ProbePO over rollouts that TRL samples, and ProbePO with `stream`, where our engine
samples them too. "decoding" repeats the forwards of one token that probing after TRL's rollouts made, with the same
rows and columns, and nothing else. `over` is a ProbePO step over a GRPO step plus decoding, of the medians of all steps
but each run's first. `probes_before_the_last_rollout` is the share of a stream's probes that had ended when its last
rollout did.

`overlap` gives the same probes to a verifier that takes a while a response in another process (it sleeps, as a call to
a service would): grading after decoding, and while decoding goes on.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback

from apportion.engines.base import Continuation, Rollout
from apportion.engines.stream import Stream
from apportion.measure.ahead import ahead
from apportion.measure.wave import requests_of
from apportion.records import RunFolder
from apportion.train import CreditTrainer
from apportion.train.prepare import prepare
from apportion.train.settings import load_config
from continuations import Recorded, decoding
from tools import write

STEPS, ROUNDS = 6, 3
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "probepo": {"method.name": "probepo", "method.budget": 40, "method.samples": 8, "method.min_gap": 4},
}
METHODS["stream"] = {**METHODS["probepo"], "trainer.stream": True}


class Watched(Recorded):
    """Keeps of every stream which share of its probes had ended when its last rollout did."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.before: list[float] = []

    def read(self, stream: Stream) -> Generator[Continuation, None, None]:
        rollouts: list[bool] = []
        for c in super().read(stream):
            rollouts.append(isinstance(c, Rollout))
            yield c
        if True in rollouts and False in rollouts:
            last = len(rollouts) - rollouts[::-1].index(True)
            self.before.append(rollouts[:last].count(False) / rollouts.count(False))


def train(way: str, folder: Path) -> tuple[CreditTrainer, list[dict[str, Any]]]:
    config = load_config(
        None,
        {
            "method.name": "grpo", **METHODS[way], "run.folder": str(folder), "run.steps": STEPS,
            "run.evaluate_samples": 0, "run.record_every": 1000, "run.checkpoint_every": 1000, "run.threads": 1,
            "trainer.learning_rate": 0.0, "data.count": 1024,
        },
    )  # fmt: skip
    run = prepare(config)
    trainer = CreditTrainer(
        model=run.model, args=run.args, reward_funcs=run.data.reward, processing_class=run.tokenizer,
        train_dataset=Dataset.from_list(run.data.train),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    if trainer._measurer is not None and trainer._measurer.prober is not None:
        prober = trainer._measurer.prober
        prober.engine = Watched(prober.engine.model, prober.engine.pad_id, max_batch=prober.engine.max_batch)
        if trainer.stream is not None:
            trainer.stream.engine = prober.engine
    trainer.train()
    return trainer, RunFolder(folder).metrics()[1:]


def wall(row: dict[str, Any]) -> float:
    return sum(value for name, value in row.items() if name.startswith("seconds/"))


def phases(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = sorted({name for row in rows for name in row if name.startswith("seconds/")})
    return {name.removeprefix("seconds/"): round(median(row[name] for row in rows), 3) for name in names}


def steps(folder: Path) -> dict[str, Any]:
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in METHODS}
    decoded, before = list[float](), list[float]()
    for turn in range(ROUNDS):
        for name in METHODS:
            trainer, metrics = train(name, folder / f"{name}{turn}")
            rows[name] += metrics
            engine = None if trainer._measurer is None else trainer._measurer.sampler
            before += engine.before if name == "stream" else []
            if name == "probepo":
                start = time.perf_counter()
                decoding(engine, engine.steps, trainer._measurer.prober.sampling)
                decoded.append((time.perf_counter() - start) / STEPS)
    seconds = {name: median(map(wall, each)) for name, each in rows.items()} | {"decoding": median(decoded)}
    return {
        "over": round(seconds["probepo"] / (seconds["grpo"] + seconds["decoding"]), 3),
        "stream_over": round(seconds["stream"] / (seconds["grpo"] + seconds["decoding"]), 3),
        "probes_before_the_last_rollout": round(mean(before), 3),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "probe_tokens": {name: median(row["probe/tokens"] for row in rows[name]) for name in ("probepo", "stream")},
        # Prefills, the pass for entropies, and the prefix that is scored again for the log-probability gap.
        "other_forward_tokens": {
            name: median(row["measure/forward_tokens"] - row["probe/tokens"] for row in rows[name])
            for name in ("probepo", "stream")
        },
        "rollout_tokens": {name: median(row["tokens/actor"] for row in each) for name, each in rows.items()},
        "phases": {name: phases(each) for name, each in rows.items()},
    }


def overlap(folder: Path, seconds_a_response: float = 0.002) -> dict[str, Any]:
    """The same requests decoded and graded one after the other, and side by side."""
    trainer, _ = train("probepo", folder / "overlap")
    prober = trainer._measurer.prober
    batch, _ = trainer.last_credit
    jobs = trainer.credit_method.plan(batch.rollouts, batch.base)
    requests = requests_of(batch.rollouts, jobs, run="b", step=1, max_new_tokens=trainer.max_completion_length)
    walls: dict[str, list[float]] = {"decoding": [], "grading": [], "after": [], "beside": []}

    def graded(found: Sequence[Continuation]) -> None:
        time.sleep(seconds_a_response * len(found))

    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        found = list(prober.engine.continuations(requests, prober.sampling))
        middle = time.perf_counter()
        graded(found)
        end = time.perf_counter()
        for some in ahead((c for c in prober.engine.continuations(requests, prober.sampling)), 64):
            graded(some)
        last = time.perf_counter()
        for name, value in zip(walls, (middle - start, end - middle, end - start, last - end), strict=True):
            walls[name].append(value)
    return {"continuations": len(found), **{name: round(median(each[1:]), 3) for name, each in walls.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    torch.set_num_threads(1)
    try:
        write(__file__, {"step": steps(folder), "overlap": overlap(folder)}, options.output)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
