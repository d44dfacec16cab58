"""Predicted beside measured: seconds by phase of training steps, and of single passes of SmolLM2.

    python benchmarks/cost_model.py            writes benchmarks/cost_model.json
    python benchmarks/cost_model.py --rounds 1 grpo probepo

Every method trains a few steps of the embedded policy with one thread; the first, which warms up, does not count. What
`apportion cost` predicts from the configuration alone, and from it with the run's own mean and longest response, is set
against the seconds that the run logged. The machine's figures are micro-benchmarks (`apportion.cost.calibrate`), taken
right before and right after each run, on random tensors and random models; nothing is fitted to a run. Both are the
processor's own seconds (`time.process_time`): on a machine that is not shared they are what a clock shows, on one that
is they are steadier. Of several rounds each figure is the median.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import torch

from apportion.cost import Assumed, Hardware, Prediction, predict_run, read_shape
from apportion.cost.calibrate import calibrate
from apportion.cost.roofline import decode, padded, seconds
from apportion.errors import InputError
from apportion.records import RunFolder
from apportion.train import clock
from apportion.train.clock import PHASES
from apportion.train.models import load_model, model_folder
from apportion.train.prepare import prepare
from apportion.train.run import train
from apportion.train.settings import load_config

METHODS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "probepo": {"method.budget": 16, "method.samples": 4, "method.min_gap": 4, "method.n0": 2.0},
    "vineppo": {"method.samples": 2},
    "oar_p": {},
    "grpo_vps": {},
}
COMMON = {
    "run.threads": 1, "run.evaluate_samples": 0, "run.checkpoint_every": 1000, "data.count": 1024,
    "run.predict": "off", "trainer.gradient_accumulation_steps": 1,
}  # fmt: skip
TOKENS = ("tokens/actor", "probe/tokens", "probe/continuations", "measure/forwards", "measure/forward_tokens")


def measured(method: str, steps: int) -> dict[str, float]:
    """Means over the steps of one run but the first, as it logged them."""
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(None, settings(method) | {"run.folder": folder, "run.steps": steps + 1})
        train(prepare(config))
        rows = RunFolder(Path(folder)).metrics()[1:]
    names = [*TOKENS, *(f"seconds/{phase}" for phase in PHASES), "completions/mean_length", "completions/max_length"]
    return {name: mean(row.get(name, 0.0) for row in rows) for name in names}


def settings(method: str) -> dict[str, Any]:
    return COMMON | {"method.name": method} | METHODS[method]


def predicted(method: str, machines: Sequence[Hardware], lengths: Assumed) -> dict[str, float]:
    """Means over the machine as it was before and after."""
    config = load_config(None, settings(method))
    found: list[Prediction] = [predict_run(config, machine, lengths) for machine in machines]
    rows = [
        {
            **{name: each.tokens[name] for name in TOKENS},
            **{f"seconds/{phase}": each.seconds[phase] for phase in PHASES},
        }
        for each in found
    ]
    return {name: mean(row[name] for row in rows) for name in rows[0]}


def compared(method: str, machines: Sequence[Hardware], run: dict[str, float]) -> dict[str, dict[str, float]]:
    own = Assumed(response=run["completions/mean_length"], longest=round(run["completions/max_length"]))
    out = {"measured": run}
    for name, lengths in (("configuration alone", Assumed()), ("with the run's lengths", own)):
        row = predicted(method, machines, lengths)
        out[name] = row
    for row in out.values():
        row["seconds/all"] = sum(row[f"seconds/{phase}"] for phase in PHASES)
    return out


def medians(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """The median of every figure, and predicted over measured."""
    found: dict[str, Any] = {
        kind: {name: round(median(each[kind][name] for each in rounds), 4) for name in rounds[0][kind]}
        for kind in rounds[0]
    }
    for kind in list(rounds[0])[1:]:
        ratios: dict[str, float] = {}
        for name in found[kind]:
            pairs = [(each[kind][name], each["measured"][name]) for each in rounds]
            if all(b > 0 for _, b in pairs):
                ratios[name] = round(median(a / b for a, b in pairs), 3)
        found[f"{kind}, over measured"] = ratios
    return found


def smollm(repeats: int = 3) -> dict[str, Any] | None:
    """Single passes of SmolLM2-135M in float32: prefill, generation and training, against the roofline."""
    try:
        folder = model_folder("smollm2")
    except InputError:
        return None
    shape, model = read_shape(folder), load_model(folder, "float32")
    rows: dict[str, list[tuple[float, float]]] = {}

    def timed(work: Callable[[], object]) -> float:
        work()
        start = time.process_time()
        work()
        return time.process_time() - start

    for _ in range(repeats):
        machine = calibrate(shape, clock=time.process_time)

        def note(name: str, work: Callable[[], object], *calls: Any, machine: Hardware = machine) -> None:
            took = sum(seconds(call, shape, machine, "float32") for call in calls)
            rows.setdefault(name, []).append((took, timed(work)))

        for count, length in ((1, 256), (4, 128), (4, 384)):
            ids = torch.full((count, length), 100)
            with torch.no_grad():
                note(
                    f"prefill of {count} x {length}", lambda ids=ids: model(input_ids=ids, logits_to_keep=1),
                    padded(count, length, masked=False, logits=float(count)),
                )  # fmt: skip
        for count in (1, 8, 32):
            ids = torch.full((count, 64), 100)
            note(
                f"generation of 17 tokens, {count} rows",
                lambda ids=ids: model.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=17,
                    min_new_tokens=17,
                ),
                padded(count, 64, logits=float(count)), decode(16, count, 73, "generate"),
            )  # fmt: skip
        ids = torch.full((2, 128), 100)
        note(
            "forward and backward of 2 x 128", lambda ids=ids: model(input_ids=ids).logits.sum().backward(),
            padded(2, 128, masked=False, logits=256.0, backward=2.0),
        )  # fmt: skip
    return {
        name: {
            "predicted": round(median(a for a, _ in pairs), 4), "measured": round(median(b for _, b in pairs), 4),
            "ratio": round(median(a / b for a, b in pairs), 3),
        }
        for name, pairs in rows.items()
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--no-smollm2", action="store_true")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    # The run's clock, in the processor's seconds.
    clock.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[assignment]
    shape = read_shape(model_folder("embedded"))
    rounds: dict[str, list[Any]] = {method: [] for method in options.methods}
    machines = [calibrate(shape, clock=time.process_time)]
    for number in range(options.rounds):
        for method in options.methods:
            run = measured(method, options.steps)
            machines.append(calibrate(shape, clock=time.process_time))
            rounds[method].append(compared(method, machines[-2:], run))
            shown = {name: round(row["seconds/all"], 2) for name, row in rounds[method][-1].items()}
            print(f"round {number}: {method} {shown}", flush=True)
    last = {name: value for name, value in vars(machines[-1]).items() if value not in (math.inf, None)}
    found: dict[str, Any] = {
        "command": "python benchmarks/cost_model.py",
        "rounds": options.rounds, "steps of a run, beside the first": options.steps,
        "the machine when last measured": last | {"overheads": vars(machines[-1].overheads)},
        "methods": {method: medians(each) for method, each in rounds.items()},
    }  # fmt: skip
    options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not options.no_smollm2:
        found["smollm2"] = smollm()
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for method, each in found["methods"].items():
        ratios = {name: row["seconds/all"] for name, row in each.items() if name.endswith("measured") and "," in name}
        print(method, ratios)


if __name__ == "__main__":
    main()
