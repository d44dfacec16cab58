"""Measurements that read the model without sampling, against the plain forwards that they stand for.

    python benchmarks/scoring.py                    all parts, into benchmarks/scoring.json
    python benchmarks/scoring.py belief memory      only these

  belief       log-probability of a gold answer at all boundaries of responses, over one plain forward of the same
               responses (hidden states of every token, no logits), and over a forward a boundary;
  perturbed    OAR-P over R full forwards of the response, batched to the same number of tokens, and one by one;
  gradient     OAR-G over one forward and one backward with the parameters' gradients, and how much memory each adds;
  memory       log-probabilities and entropies with a vocabulary of 150,000: peak above the model by length.

The model of `perturbed` and `gradient` has random weights: what they cost does not hang on them. Ratios are medians of
rounds in which the ways take turns; differences from scoring one by one are the largest, in nats.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from apportion.engines.base import BeliefRequest, Key, Scoring, SensitivityRequest
from apportion.engines.belief import beliefs
from apportion.engines.logprobs import logprobs, scored
from apportion.engines.scoring import Scorer
from apportion.engines.sensitivity import sensitivities
from apportion.train.models import load_model, model_folder
from tools import peak_mib, random_llama, ratio, walls, write

_VOCABULARY = 150_000


def ids_of(count: int, length: int, vocabulary: int, seed: int = 0) -> list[tuple[int, ...]]:
    fill = random.Random(seed)
    return [tuple(fill.randrange(3, vocabulary) for _ in range(length)) for _ in range(count)]


def belief(model: Any, responses: int, prompt: int, length: int, boundaries: int, rounds: int) -> dict[str, Any]:
    """A cue of 5 tokens and an answer of 4 at `boundaries` places of each response."""
    scorer = Scorer(model, 0)
    rows = ids_of(responses, prompt + length, scorer.vocabulary)
    cue, answer = ids_of(2, 5, scorer.vocabulary, seed=1)
    at = (*(length * k // boundaries for k in range(boundaries)), length)
    requests = [
        BeliefRequest(Key("b", 0, str(i), 0, 0), ids, prompt, at, cue, (answer[:4],)) for i, ids in enumerate(rows)
    ]
    apart = [((*ids[: prompt + p], *cue, *answer[:4]), prompt + p + 5) for ids in rows for p in at]

    def plain() -> None:
        for batch in scorer.batches([len(ids) for ids in rows]):
            with scorer.measuring():
                scorer.forward([rows[i] for i in batch], torch.zeros(0, dtype=torch.long))

    found = walls(
        {
            "packed": lambda: list(beliefs(scorer, requests)),
            "plain": plain,
            "apart": lambda: list(scored(scorer, apart)),
        },
        rounds,
    )
    packed = {reading.key.prompt: reading.values for reading in beliefs(scorer, requests)}
    single = {i: float(logprob.double().sum()) for i, logprob, _ in scored(scorer, apart)}
    together = torch.cat([packed[str(i)] for i in range(responses)])
    gap = (together - torch.tensor([single[i] for i in range(len(apart))], dtype=torch.float64)).abs().max()
    return {
        "responses": responses, "prompt": prompt, "length": length, "states_a_response": len(at),
        "packed_over_plain": ratio(found, "packed", "plain"), "apart_over_packed": ratio(found, "apart", "packed"),
        "largest_difference": float(gap),
    }  # fmt: skip


def perturbed(model: Any, prompt: int, length: int, rounds: int) -> dict[str, Any]:
    """A response whose last 4 tokens are the answer."""
    scorer = Scorer(model, 0)
    (ids,) = ids_of(1, prompt + length, scorer.vocabulary)
    request = SensitivityRequest(
        Key("s", 0, "0", 0, 0), ids, prompt, length - 4, (length - 4, length), "perturb", "last"
    )
    keep = torch.tensor([prompt + length - 5])
    replaced = [[*ids[:t], 0, *ids[t + 1 : -4]] for t in range(prompt, prompt + length - 4)]

    def full(rows_at_once: int) -> None:
        with scorer.measuring():
            for at in range(0, len(replaced), rows_at_once):
                scorer.forward(replaced[at : at + rows_at_once], keep)

    calls = {
        "ours": lambda: list(sensitivities(scorer, [request])),
        "batched": partial(full, max(1, scorer.max_tokens // len(ids))),
        "one_by_one": partial(full, 1),
    }
    found = walls(calls, rounds)
    return {
        "prompt": prompt, "length": length, "forwards_that_it_stands_for": len(replaced),
        "batched_over_ours": ratio(found, "batched", "ours"),
        "one_by_one_over_ours": ratio(found, "one_by_one", "ours"),
    }  # fmt: skip


def gradient_memory(kind: str, hidden: int, layers: int) -> float:
    """Peak MiB above the model with its activations of one forward; run in a process of its own."""
    model = random_llama(hidden, layers, 1000)
    (ids,) = ids_of(1, 256, 1000)
    before = peak_mib()
    if kind == "ours":
        request = SensitivityRequest(Key("g", 0, "0", 0, 0), ids, 64, 180, (180, 192), "gradient", "answer_mean", 1e-3)
        list(sensitivities(Scorer(model, 0), [request]))
    else:
        model(input_ids=torch.tensor([ids]), logits_to_keep=12).logits.sum().backward()
    return peak_mib() - before


def gradient(rounds: int) -> dict[str, Any]:
    model = random_llama(512, 8, 1000)
    scorer = Scorer(model, 0)
    rows = ids_of(4, 256, 1000)
    requests = [
        SensitivityRequest(Key("g", 0, str(i), 0, 0), ids, 64, 180, (180, 192), "gradient", "answer_mean", 1e-3)
        for i, ids in enumerate(rows)
    ]

    def trained() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=torch.tensor(rows), logits_to_keep=12, use_cache=False).logits.sum().backward()

    found = walls({"ours": lambda: list(sensitivities(scorer, requests)), "trained": trained}, rounds)
    memory = {}
    for layers in (4, 8, 16):
        memory[f"512x{layers}"] = {
            kind: round(_child("gradient", kind, 512, layers), 1) for kind in ("ours", "parameters")
        }
        model_mib = sum(p.numel() for p in random_llama(512, layers, 1000).parameters()) * 4 / 2**20
        memory[f"512x{layers}"]["model"] = round(model_mib, 1)
    return {"ours_over_forward_and_backward": ratio(found, "ours", "trained"), "peak_mib_above_the_model": memory}


def logprob_memory(kind: str, length: int) -> float:
    """Peak MiB above the model for one response of `length` tokens; run in a process of its own."""
    model = random_llama(64, 1, _VOCABULARY)
    (ids,) = ids_of(1, 16 + length, 1000)
    before = peak_mib()
    if kind == "ours":
        list(logprobs(Scorer(model, 0), [Scoring(Key("l", 0, "0", 0, 0), ids, 16)]))
    else:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits
            logits.float().log_softmax(-1).gather(2, torch.tensor([ids])[..., None])
    return peak_mib() - before


def memory() -> dict[str, Any]:
    """By length: ours, and one pass with its logits and their logarithms alive."""
    ours = {length: round(_child("memory", "ours", length), 1) for length in (512, 1024, 2048, 4096, 8192)}
    whole = {length: round(_child("memory", "whole", length), 1) for length in (512, 1024, 2048)}
    return {"vocabulary": _VOCABULARY, "ours_mib": ours, "whole_logits_mib": whole}


def _child(part: str, *arguments: object) -> float:
    command = [sys.executable, __file__, "--child", part, *map(str, arguments)]
    return median(
        float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        for _ in range(3)
    )


def measure(part: str, rounds: int) -> Any:
    if part == "memory":
        return memory()
    if part == "gradient":
        return gradient(rounds)
    if part == "perturbed":
        model = random_llama(256, 4, 1000)
        return [perturbed(model, 64, length, rounds) for length in (64, 256, 512)]
    embedded, larger = load_model(model_folder("embedded"), "float32"), random_llama(256, 6, 8000)
    return {
        "embedded": belief(embedded.eval(), 256, 20, 80, 8, rounds),
        "random_6M": belief(larger, 8, 128, 512, 8, rounds),
    }


def main() -> None:
    parts: dict[str, Callable[..., float]] = {"gradient": gradient_memory, "memory": logprob_memory}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["belief", "perturbed", "gradient", "memory"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.child:
        part, kind, *numbers = options.parts
        print(parts[part](kind, *map(int, numbers)))
        return
    write(__file__, {part: measure(part, options.rounds) for part in options.parts}, options.output)


if __name__ == "__main__":
    main()
