"""What it costs to form the credit itself, without any model: seconds, growth and memory of every method's `assign`.

    python benchmarks/credit_maths.py                     all of it, into benchmarks/credit_maths.json
    python benchmarks/credit_maths.py grpo probepo        only these methods

512 responses of 2,048 tokens in groups of 8, a step every 64 tokens, everything measured that a method asks for (random
numbers: the maths does not look at them). Times are medians; "pass" is the time of one read and write of the batch's
tokens in float64 in the same run, the least that any per-token rule can cost, and "looping" a plain loop over the
responses, as verl's estimator of GRPO forms its advantages; what stands beside it is our GRPO from rewards to token
advantages, `base` and `assign`. Growth is from 10^4 to 10^7 tokens. Memory is the largest resident size during the call
above that before it, over the size of the batch's own tensors; it needs Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apportion.credit.registry import make_method, method_names
from apportion.measure.evidence import Belief, Confidence, Continuations, Evidence, Importance, StepLabels
from apportion.rollouts import Rollouts

GROUP, TOKENS, STEP = 8, 2048, 64
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)


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


def padded(rollouts: Rollouts) -> tuple[Tensor, Tensor, np.ndarray]:
    """What verl's estimators are given: (R, W) rewards on the last token, (R, W) mask, and the name of each prompt."""
    reward = torch.zeros(len(rollouts), int(rollouts.length.max()))
    reward[torch.arange(len(rollouts)), rollouts.length - 1] = rollouts.reward.float()
    names = np.array([f"prompt {group}" for group in rollouts.group.tolist()], dtype=object)
    return reward, rollouts.to_padded(rollouts.mask.float()), names


@torch.no_grad()
def looping(reward: Tensor, mask: Tensor, names: np.ndarray) -> Tensor:
    """GRPO's advantages by a loop over responses and a dictionary of groups."""
    total = reward.sum(-1)
    members = defaultdict(list)
    for i in range(len(total)):
        members[names[i]].append(total[i])
    mean, deviation = {}, {}
    for name, rewards in members.items():
        stacked = torch.stack(rewards)
        mean[name], deviation[name] = stacked.mean(), stacked.std()
    for i in range(len(total)):
        total[i] = (total[i] - mean[names[i]]) / (deviation[names[i]] + 1e-6)
    return total[:, None] * mask


def seconds(call: Callable[[], object], least: int = 5) -> float:
    call()
    took: list[float] = []
    while len(took) < least or (sum(took) < 0.5 and len(took) < 50):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return median(took)


def fresh(rollouts: Rollouts) -> Rollouts:
    """The batch as a new object, so that what a batch keeps once it was computed counts too."""
    again = object.__new__(Rollouts)
    again.__dict__.update({field.name: getattr(rollouts, field.name) for field in fields(Rollouts)})
    return again


def assigning(name: str, rollouts: Rollouts, found: Evidence) -> Callable[[], object]:
    method = make_method(name)
    base = method.base(rollouts)
    return lambda: method.assign(fresh(rollouts), found, base)


def from_rewards(rollouts: Rollouts) -> object:
    """GRPO's token advantages with nothing given but the batch."""
    method, again = make_method("grpo"), fresh(rollouts)
    return method.assign(again, Evidence(), method.base(again))


def sized(tokens: int) -> Rollouts:
    return batch(max(GROUP, tokens // TOKENS // GROUP * GROUP), min(TOKENS, tokens // GROUP))


def peak(name: str, tokens: int) -> float:
    """Peak resident bytes of one `assign` over the bytes of the batch's tensors; run in a process of its own."""
    rollouts = sized(tokens)
    call = assigning(name, rollouts, evidence(rollouts))
    held = sum(v.nbytes for f in fields(Rollouts) if isinstance(v := getattr(rollouts, f.name), Tensor))
    # Forgets the peak so far, that of making the batch.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    call()
    return (resident("VmHWM") - before) / held


def resident(field: str) -> int:
    """Bytes of this process now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def measure(name: str, sizes: dict[int, tuple[Rollouts, Evidence]], least_s: float) -> dict[str, Any]:
    """`sizes` are the batches of each number of tokens and, under 0, the one that times are quoted for."""
    took = seconds(assigning(name, *sizes[0]))
    command = [sys.executable, __file__, "--peak", name]
    # With a fixed threshold, memory that is given back leaves the process at once and cannot hide what is taken.
    fixed = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "100000"}
    memory = float(subprocess.run(command, check=True, capture_output=True, text=True, env=fixed).stdout)
    growth = {}
    for tokens in SIZES:
        made = sizes[tokens][0]
        took_s = seconds(assigning(name, *sizes[tokens]), 1 if tokens == SIZES[-1] else 3)
        growth[str(tokens)] = round(1e9 * took_s / len(made.token_ids), 2)
    return {
        "ms": round(1e3 * took, 2),
        "over_pass": round(took / least_s, 1),
        "memory_over_batch": round(memory, 2),
        "ns_a_token": growth,
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
    sizes = {0: (rollouts, evidence(rollouts))}
    for tokens in SIZES:
        made = sized(tokens)
        sizes[tokens] = made, evidence(made)
    values = torch.rand(len(rollouts.row)).double()
    least_s = seconds(lambda: values * 2.0)
    given = padded(rollouts)
    looping_s, from_rewards_s = seconds(lambda: looping(*given)), seconds(lambda: from_rewards(rollouts))
    found: dict[str, Any] = {
        "command": "python benchmarks/credit_maths.py",
        "processors": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "pass_ms": round(1e3 * least_s, 2),
        "looping_ms": round(1e3 * looping_s, 2),
        "grpo_from_rewards_ms": round(1e3 * from_rewards_s, 2),
        "looping_over_grpo": round(looping_s / from_rewards_s, 1),
        "methods": {},
    }
    for name in options.methods or method_names():
        found["methods"][name] = measure(name, sizes, least_s)
        print(name, json.dumps(found["methods"][name]), flush=True)
    options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in found.items() if key != "methods"}))


if __name__ == "__main__":
    main()
