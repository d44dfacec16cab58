"""Probing with the transformers engine against decoding alone, and against the procedure of VinePPO's released code.

    python benchmarks/continuations.py                  both models, into benchmarks/continuations.json
    python benchmarks/continuations.py embedded         only one

Responses are sampled from the model itself; every one is continued `samples` times from each of a few of its positions.
Three ways, one after the other and repeated in turn, medians of the walls:

  probing    `TransformersEngine.continuations`, prefills, refills and the bookkeeping included;
  decoding   the same forwards of one token with the same rows and columns as probing made, the same logits filtered and
             drawn from, and nothing else: no prefill, no keys moved, no continuation to keep;
  text       every continuation's prefix decoded to text, tokenised again, and given to transformers' `generate` in
             batches of the same number of rows: a prefill each, and a batch lasts until its longest has ended.

`probing/decoding` is what measuring costs above its new tokens. Counts of prefilled tokens say where it goes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apportion.engines.base import Continuation, Key, Request, Sampling
from apportion.engines.sampling import draw, filtered
from apportion.engines.slots import SlotCache
from apportion.engines.transformers import TransformersEngine
from apportion.tasks.arithmetic import ArithmeticTask, generate
from apportion.train.models import load_model, load_tokenizer, model_folder

SETTINGS: dict[str, dict[str, Any]] = {
    "embedded": {"dtype": "float32", "responses": 64, "limit": 80, "pivots": 4, "samples": 8, "rows": 256, "rounds": 9},
    "smollm2": {"dtype": "bfloat16", "responses": 2, "limit": 96, "pivots": 4, "samples": 8, "rows": 32, "rounds": 2},
}
QUESTION = "Explain step by step how to find the sum of all whole numbers from 1 to {}, and give the sum."


class Recorded(TransformersEngine):
    """Keeps the rows and columns of every forward of one token."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[np.ndarray] = []
        self.slots: SlotCache | None = None

    def step(self, cache: SlotCache, last_B: np.ndarray, cached_B: np.ndarray) -> Tensor:
        self.steps.append(cached_B.copy())
        self.slots = cache
        return super().step(cache, last_B, cached_B)


def prompts_of(name: str, tokenizer: Any, count: int) -> list[list[int]]:
    if name == "embedded":
        return [tokenizer(p.prompt)["input_ids"] for p in generate(ArithmeticTask(), "train", count)]
    chats = [[{"role": "user", "content": QUESTION.format(20 + i)}] for i in range(count)]
    return [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]


def requests_of(engine: TransformersEngine, prompts: list[list[int]], sampling: Sampling, how: dict[str, Any]) -> Any:
    """Requests at random positions of sampled responses, each with what its prefix left of the limit."""
    first = [Request(Key("rollout", 0, str(i), 0, 0), tuple(ids), 1, how["limit"]) for i, ids in enumerate(prompts)]
    place = random.Random(0)
    requests = []
    for c in engine.continuations(first, sampling):
        at = sorted(place.sample(range(1, len(c.token_ids)), min(how["pivots"], len(c.token_ids) - 1)))
        for p in at:
            prefix = (*prompts[int(c.key.prompt)], *c.token_ids[:p])
            key = Key("probe", 0, c.key.prompt, 0, p)
            requests.append(Request(key, prefix, how["samples"], how["limit"] - p))
    return requests


def decoding(engine: Recorded, steps: list[np.ndarray], sampling: Sampling) -> None:
    """The forwards of one token again, with the same shapes."""
    cache, uniforms = engine.slots, torch.rand((len(steps[0]), 1), dtype=torch.float64)
    assert cache is not None
    with engine.scorer.measuring():
        for cached_B in steps:
            last_B = np.full(len(cached_B), engine.pad_id)
            logits_BV = TransformersEngine.step(engine, cache, last_B, cached_B)
            draw(filtered(logits_BV, sampling), uniforms[: len(cached_B)]).tolist()


def by_text(model: Any, tokenizer: Any, requests: list[Request], sampling: Sampling, rows: int) -> int:
    """The same number of continuations from text; returns the new tokens."""
    texts = [tokenizer.decode(r.prefix_ids) for r in requests for _ in range(r.samples)]
    budget = [r.budget for r in requests for _ in range(r.samples)]
    made = 0
    for at in range(0, len(texts), rows):
        batch = tokenizer(texts[at : at + rows], return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad():
            out = model.generate(
                **batch, max_new_tokens=max(budget[at : at + rows]), do_sample=True, temperature=1.0, top_k=0,
                top_p=1.0, eos_token_id=list(sampling.stop_ids), pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
        made += int((out[:, batch["input_ids"].shape[1] :] != tokenizer.pad_token_id).sum())
    return made


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    found = call()
    return time.perf_counter() - start, found


def measure(name: str) -> dict[str, Any]:
    how = SETTINGS[name]
    folder = model_folder(name)
    tokenizer: Any = load_tokenizer(folder)
    model: Any = load_model(folder, how["dtype"]).eval()
    sampling = Sampling(stop_ids=(tokenizer.eos_token_id,))
    engine = Recorded(model, tokenizer.pad_token_id, max_batch=how["rows"])
    requests = requests_of(engine, prompts_of(name, tokenizer, how["responses"]), sampling, how)
    walls: dict[str, list[float]] = {"probing": [], "decoding": [], "text": []}
    for turn in range(how["rounds"] + 1):
        engine.steps, before = [], engine.cost + type(engine.cost)()
        probing_s, found = timed(lambda: list[Continuation](engine.continuations(requests, sampling)))
        spent, steps = engine.cost - before, list(engine.steps)
        decoding_s, _ = timed(lambda steps=steps: decoding(engine, steps, sampling))
        if not turn:  # the first round warms up
            continue
        text_s, text_tokens = timed(lambda: by_text(model, tokenizer, requests, sampling, how["rows"]))
        for kind, wall in (("probing", probing_s), ("decoding", decoding_s), ("text", text_s)):
            walls[kind].append(wall)
    new = sum(len(c.token_ids) for c in found)
    stepped = sum(map(len, steps))
    seconds = {kind: median(each) for kind, each in walls.items()}
    ratios = [a / b for a, b in zip(walls["probing"], walls["decoding"], strict=True)]
    return {
        **how,
        "requests": len(requests), "new_tokens": new, "text_new_tokens": text_tokens,
        "decoding_forwards": len(steps), "mean_rows": round(stepped / len(steps), 1),
        "prefilled_tokens": spent.forward_tokens - stepped,
        "prefix_tokens": sum(len(r.prefix_ids) for r in requests),
        "prefix_tokens_times_samples": sum(len(r.prefix_ids) * r.samples for r in requests),
        "seconds": {kind: round(value, 3) for kind, value in seconds.items()},
        "probing_over_decoding": round(median(ratios), 3),
        "probing_over_decoding_by_round": [round(r, 3) for r in ratios],
        "text_over_probing_per_token": round(seconds["text"] / text_tokens / (seconds["probing"] / new), 2),
        "text_over_probing": round(seconds["text"] / seconds["probing"], 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(SETTINGS))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    found: dict[str, Any] = {"command": "python benchmarks/continuations.py", "threads": options.threads}
    for name in options.models:
        found[name] = measure(name)
        print(name, json.dumps(found[name], indent=2), flush=True)
    options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
