"""What it costs to form the credit itself, without any model: seconds, growth and memory of every method's `assign`.

    python benchmarks/credit_maths.py                     all of it, into benchmarks/credit_maths.json
    python benchmarks/credit_maths.py grpo probepo        only these methods

512 responses of 2,048 tokens in groups of 8, a step every 64 tokens, everything measured that a method asks for (random
numbers: the maths does not look at them). Times are medians; "pass" is the time of one read and write of the batch's
tokens in float64 in the same run, the least that any per-token rule can cost, and "looping" a plain loop over the
responses, as verl's estimator of GRPO forms its advantages. Growth is from 10^4 to 10^6 tokens; memory is the largest
resident size above that before the call, over the size of the batch's own tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from apportion.credit.registry import make_method, method_names
from apportion.measure.evidence import Belief, Confidence, Continuations, Evidence, Importance, StepLabels
from apportion.rollouts import Rollouts

GROUP, TOKENS, STEP = 8, 2048, 64
SIZES = (10_000, 1_000_000)


def batch(responses: int, length: int) -> Rollouts:
    """Random responses of one length with every field but text, which `plan` reads and `assign` does not."""
    torch.manual_seed(0)
    n = responses * length
    position = torch.arange(length).repeat(responses)
    edges = [tuple(f"{i}.{d}" for d in range(-(-length // STEP))) for i in range(responses)]
    return Rollouts(
        token_ids=torch.randint(0, 50_000, (n,)), offsets=torch.arange(responses + 1) * length,
        group=torch.arange(responses) // GROUP, reward=(torch.rand(responses) < 0.5).double(),
        mask=torch.ones(n, dtype=torch.bool), truncated=torch.zeros(responses, dtype=torch.bool),
        old_logprob=-3 * torch.rand(n), ref_logprob=-3 * torch.rand(n), entropy=3 * torch.rand(n),
        boundary=(position % STEP == 0) & (position > 0), path=tuple(edges),
    )  # fmt: skip


def evidence(rollouts: Rollouts) -> Evidence:
    """Every kind of measurement, at the start of every step."""
    at = (rollouts.position % STEP == 0).nonzero()[:, 0]
    row, position = rollouts.row[at], rollouts.position[at]
    value, given = torch.rand(len(at)).double(), torch.ones(len(rollouts), dtype=torch.bool)
    nine = torch.full_like(row, 9)
    return Evidence(
        Continuations(row, position, value, value * 0.1, nine), Belief(row, position, -value, given),
        Confidence(row, position, value, 1 - value, given), StepLabels(row, position, value < 0.7, given),
        Importance(torch.rand(len(rollouts.row)).double(), given), rollouts.length - 9,
    )  # fmt: skip


def looping(rollouts: Rollouts) -> Tensor:
    """GRPO's advantages by a loop over (R, W) responses and a dictionary of groups."""
    score = rollouts.to_padded(torch.zeros(len(rollouts.row)))
    score[:, -1] = rollouts.reward.float()
    mask = torch.ones_like(score)
    total = score.sum(-1)
    members = defaultdict(list)
    for i, group in enumerate(rollouts.group.tolist()):
        members[group].append(total[i])
    mean = {group: torch.stack(rewards).mean() for group, rewards in members.items()}
    deviation = {group: torch.stack(rewards).std() for group, rewards in members.items()}
    for i, group in enumerate(rollouts.group.tolist()):
        total[i] = (total[i] - mean[group]) / (deviation[group] + 1e-6)
    return total[:, None] * mask


def seconds(call: Callable[[], object], least: int = 5) -> float:
    call()
    took = []
    while len(took) < least or (sum(took) < 0.5 and len(took) < 50):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return median(took)


def assigning(name: str, rollouts: Rollouts) -> Callable[[], object]:
    """`assign` of a fresh batch object, so that what a batch keeps once it was computed counts too."""
    method = make_method(name)
    found = evidence(rollouts)
    base = method.base(rollouts)
    kept = {field.name: getattr(rollouts, field.name) for field in fields(Rollouts)}

    def call() -> object:
        fresh = object.__new__(Rollouts)
        fresh.__dict__.update(kept)
        return method.assign(fresh, found, base)

    return call


def peak(name: str, tokens: int) -> float:
    """Peak resident bytes of one `assign` over the bytes of the batch's tensors; run in a process of its own."""
    rollouts = batch(max(GROUP, tokens // TOKENS), min(TOKENS, tokens // GROUP))
    call = assigning(name, rollouts)
    held = sum(v.nbytes for f in fields(Rollouts) if isinstance(v := getattr(rollouts, f.name), Tensor))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / held


def growth(name: str) -> dict[str, float]:
    """Nanoseconds a token at each size."""
    found = {}
    for tokens in SIZES:
        rollouts = batch(max(GROUP, tokens // TOKENS // GROUP * GROUP), min(TOKENS, tokens // GROUP))
        found[str(tokens)] = round(1e9 * seconds(assigning(name, rollouts), 3) / len(rollouts.row), 2)
    return found


def measure(name: str, rollouts: Rollouts, least_s: float) -> dict[str, Any]:
    took = seconds(assigning(name, rollouts))
    command = [sys.executable, __file__, "--peak", name]
    memory = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {
        "ms": round(1e3 * took, 2),
        "over_pass": round(took / least_s, 1),
        "memory_over_batch": round(memory, 2),
        "ns_a_token": growth(name),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    if options.peak:
        print(peak(options.peak, 4_000_000))
        return
    rollouts = batch(512, TOKENS)
    values = torch.rand(len(rollouts.row)).double()
    least_s = seconds(lambda: values * 2.0)
    found: dict[str, Any] = {
        "command": "python benchmarks/credit_maths.py",
        "processors": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "pass_ms": round(1e3 * least_s, 2),
        "looping_ms": round(1e3 * seconds(lambda: looping(rollouts)), 1),
        "grpo_and_base_ms": round(1e3 * seconds(lambda: make_method("grpo").base(rollouts)), 2),
        "methods": {},
    }
    for name in options.methods or method_names():
        found["methods"][name] = measure(name, rollouts, least_s)
        print(name, json.dumps(found["methods"][name]), flush=True)
    options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in found.items() if key != "methods"}))


if __name__ == "__main__":
    main()
