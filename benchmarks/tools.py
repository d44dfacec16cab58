"""What the benchmarks share: timing in turns, models of any size with random weights, and where results go."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def walls(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, taken in turns so that a busy neighbour meets all of them. One more round warms up."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                found[name].append(time.perf_counter() - start)
    return found


def ratio(found: Mapping[str, list[float]], over: str, under: str) -> dict[str, Any]:
    """The median of the rounds' ratios, and all of them: what is compared ran side by side."""
    each = [a / b for a, b in zip(found[over], found[under], strict=True)]
    return {"median": round(median(each), 3), "rounds": [round(r, 3) for r in each]}


def random_llama(hidden: int, layers: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A Llama with random weights: what a forward costs does not hang on them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=int(2.75 * hidden), num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, vocab_size=vocabulary,
        max_position_embeddings=1 << 16,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def peak_mib() -> float:
    """The largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def write(script: str, found: Mapping[str, Any], output: Path | None) -> None:
    """The JSON beside the script, or in `output`, with the command and the machine's processors; printed too."""
    path = Path(script)
    head = {"command": f"python benchmarks/{path.name}", "processors": len(os.sched_getaffinity(0))}
    text = json.dumps({**head, "threads": torch.get_num_threads(), **found}, indent=2)
    (output or path.with_suffix(".json")).write_text(text + "\n", encoding="utf-8")
    print(text)
