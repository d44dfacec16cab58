"""Measurements that read the model without sampling, against the plain forwards that they stand for.

    python benchmarks/scoring.py                    all parts, into benchmarks/scoring.json
    python benchmarks/scoring.py belief memory      only these

  belief       log-probability of a gold answer at all boundaries of responses, over one plain forward of the same
               responses, up to their hidden states and up to the response's logits; and a forward a boundary over it;
  perturbed    OAR-P against R full forwards, one by one and batched;
  gradient     OAR-G against one forward and one backward with the parameters' gradients: time and memory;
  memory       log-probabilities and entropies with a vocabulary of 150,000: memory by length.

Times are CPU seconds of one thread. Ratios are medians of rounds in which the ways take turns. Where a way would take
too long, equal parts of it are measured and multiplied: the fields say how many. Memory is what a process of its own
reached above what it held with the model loaded. All but the embedded policy have random weights: what they cost does
not hang on them. Differences from scoring one by one are the largest, in nats.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from apportion.engines.base import BeliefRequest, Key, Scoring, SensitivityRequest
from apportion.engines.belief import beliefs
from apportion.engines.logprobs import logprobs, scored
from apportion.engines.scoring import Scorer
from apportion.engines.sensitivity import sensitivities
from apportion.train.models import load_model, model_folder
from tools import peak_mib, random_llama, ratio, write

_VOCABULARY = 150_000
# Full forwards that stand for all R of them: one by one, and in a batch.
_SAMPLE, _BATCH = 4, 32


def ids_of(count: int, length: int, vocabulary: int, seed: int = 0) -> list[tuple[int, ...]]:
    fill = random.Random(seed)
    return [tuple(fill.randrange(3, vocabulary) for _ in range(length)) for _ in range(count)]


def turns(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each call by round; one more round warms up."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if turn:
                found[name].append(time.process_time() - start)
    return found


def scaled(found: Mapping[str, list[float]], name: str, times: float) -> dict[str, list[float]]:
    return {**found, name: [seconds * times for seconds in found[name]]}


def belief(
    model: Any, responses: int, prompt: int, length: int, boundaries: int, cue: int, answer: int, rounds: int
) -> dict[str, Any]:
    """At equal distances, the last at the response's end.

    Forwards a boundary are timed at two boundaries of the first response, as far on the whole as all are on average.
    """
    scorer = Scorer(model, 0)
    rows = ids_of(responses, prompt + length, scorer.vocabulary)
    (cue_ids,), (answer_ids,) = ids_of(1, cue, scorer.vocabulary, 1), ids_of(1, answer, scorer.vocabulary, 2)
    at = tuple(length * k // boundaries for k in range(1, boundaries + 1))
    requests = [
        BeliefRequest(Key("b", 0, str(i), 0, 0), ids, prompt, at, cue_ids, (answer_ids,)) for i, ids in enumerate(rows)
    ]
    apart = [((*rows[0][: prompt + p], *cue_ids, *answer_ids), prompt + p + cue) for p in at]
    two = [apart[boundaries // 4], apart[-1 - boundaries // 4]]

    def plain(keep: torch.Tensor | int) -> None:
        for batch in scorer.batches([len(ids) for ids in rows]):
            with scorer.measuring():
                scorer.forward([rows[i] for i in batch], keep)

    def one_by_one(sequences: list[tuple[tuple[int, ...], int]]) -> list[float]:
        return [float(logprob.double().sum()) for each in sequences for _, logprob, _ in scored(scorer, [each])]

    packed: dict[str, list[float]] = {}

    def ours() -> None:
        packed.update({reading.key.prompt: reading.values.tolist() for reading in beliefs(scorer, requests)})

    found = turns(
        {
            "packed": ours,
            "states": partial(plain, torch.zeros(0, dtype=torch.long)),
            "logits": partial(plain, length),
            "apart": partial(one_by_one, two),
        },
        rounds,
    )
    scorer.cost.forward_tokens = 0
    ours()
    tokens = scorer.cost.forward_tokens / (responses * (prompt + length))
    over = ratio(found, "packed", "states")
    return {
        "parameters": sum(p.numel() for p in model.parameters()), "vocabulary": scorer.vocabulary,
        "responses": responses, "prompt": prompt, "length": length, "boundaries": boundaries, "cue": cue,
        "answer": answer, "packed_over_plain": over, "packed_over_plain_with_logits": ratio(found, "packed", "logits"),
        "tokens_over_plain": round(tokens, 3), "packed_over_plain_a_token": round(over["median"] / tokens, 3),
        "apart_over_packed_a_boundary": ratio(scaled(found, "apart", responses * boundaries / 2), "apart", "packed"),
        "boundaries_timed_apart": len(two),
        "largest_difference": max(abs(a - b) for a, b in zip(packed["0"], one_by_one(apart), strict=True)),
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
    batch = replaced[:_BATCH]

    def full(rows: list[list[list[int]]]) -> None:
        with scorer.measuring():
            for each in rows:
                scorer.forward(each, keep)

    calls = {
        "ours": lambda: list(sensitivities(scorer, [request])),
        "batched": partial(full, [batch]),
        "one_by_one": partial(full, [[row] for row in replaced[:: len(replaced) // _SAMPLE][:_SAMPLE]]),
    }
    found = turns(calls, rounds)
    found = scaled(found, "batched", len(replaced) / len(batch))
    found = scaled(found, "one_by_one", len(replaced) / _SAMPLE)
    return {
        "prompt": prompt, "length": length, "forwards_that_it_stands_for": len(replaced),
        "measured_batched": len(batch), "measured_one_by_one": _SAMPLE,
        "batched_over_ours": ratio(found, "batched", "ours"),
        "one_by_one_over_ours": ratio(found, "one_by_one", "ours"),
    }  # fmt: skip


def _by_gradient(rows: list[tuple[int, ...]]) -> list[SensitivityRequest]:
    """Of 256 tokens: a prompt of 64, 180 of reasoning, and an answer of 12."""
    return [
        SensitivityRequest(Key("g", 0, str(i), 0, 0), ids, 64, 180, (180, 192), "gradient", "answer_mean", 1e-3)
        for i, ids in enumerate(rows)
    ]


def _trained(model: Any, rows: list[tuple[int, ...]]) -> None:
    model.zero_grad(set_to_none=True)
    model(input_ids=torch.tensor(rows), logits_to_keep=12, use_cache=False).logits.sum().backward()


def gradient_memory(kind: str, layers: int, vocabulary: int) -> float:
    model = random_llama(512, layers, vocabulary)
    assert all(parameter.requires_grad for parameter in model.parameters())
    rows = ids_of(1, 256, 1000)
    start = _resident()
    if kind == "ours":
        list(sensitivities(Scorer(model, 0), _by_gradient(rows)))
    else:
        _trained(model, rows)
    return peak_mib() - start


def gradient(rounds: int) -> dict[str, Any]:
    """Time of 4 rows; memory of one by layers and by vocabulary, beside what the parameters' gradients take."""
    model = random_llama(512, 8, 1000)
    scorer, rows = Scorer(model, 0), ids_of(4, 256, 1000)
    calls = {
        "ours": lambda: list(sensitivities(scorer, _by_gradient(rows))),
        "trained": partial(_trained, model, rows),
    }
    found = turns(calls, rounds)
    memory = {}
    for layers, vocabulary in ((4, 1000), (16, 1000), (4, 100_000)):
        with torch.device("meta"):
            numbers = sum(p.numel() for p in random_llama(512, layers, vocabulary).parameters())
        memory[f"512x{layers}" + (f"_{vocabulary}" if vocabulary > 1000 else "")] = {
            "gradients": round(numbers * 4 / 2**20, 1),
            "ours": _alone(gradient_memory, "ours", layers, vocabulary),
            "trained": _alone(gradient_memory, "trained", layers, vocabulary),
        }
    return {"ours_over_forward_and_backward": ratio(found, "ours", "trained"), "peak_mib_above_the_model": memory}


def logprob_memory(kind: str, length: int) -> float:
    model = random_llama(64, 1, _VOCABULARY)
    (ids,) = ids_of(1, 16 + length, 1000)
    start = _resident()
    if kind == "ours":
        list(logprobs(Scorer(model, 0), [Scoring(Key("l", 0, "0", 0, 0), ids, 16)]))
    else:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), logits_to_keep=length + 1, use_cache=False).logits
            logits.log_softmax(-1).gather(2, torch.tensor([ids])[:, 15:, None])
    return peak_mib() - start


def memory() -> dict[str, Any]:
    """By length: ours, one pass with its logits and their logarithms alive, and one float32 [T, V] tensor."""
    lengths = (1024, 2048, 4096, 8192)
    return {
        "vocabulary": _VOCABULARY,
        "ours_mib": {length: _alone(logprob_memory, "ours", length) for length in lengths},
        "whole_logits_mib": {length: _alone(logprob_memory, "whole", length) for length in lengths[:2]},
        "one_tensor_mib": {length: round(length * _VOCABULARY * 4 / 2**20, 1) for length in lengths},
    }


def _resident() -> float:
    """MiB that the process holds. Building the model may have taken more: `peak_mib` would start from that."""
    Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def _alone(measured: Callable[..., float], *arguments: object) -> float:
    """In a process of its own, forked off one that has only imported what is needed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["apportion.engines.sensitivity", "apportion.train.models"])
    one = partial(torch.set_num_threads, 1)
    with ProcessPoolExecutor(1, context, one) as pool:
        return round(pool.submit(measured, *arguments).result(), 1)


def measure(part: str, rounds: int) -> Any:
    if part == "memory":
        return memory()
    if part == "gradient":
        return gradient(rounds)
    if part == "perturbed":
        model = random_llama(256, 4, 1000)
        return [perturbed(model, 64, length, rounds) for length in (64, 128, 256)]
    # The embedded policy's own shape, and a response of 512 tokens with 8 boundaries, cue and answer of 8 together.
    long = (128, 512, 8, 4, 4)
    return {
        "embedded": belief(load_model(model_folder("embedded"), "float32").eval(), 64, 20, 80, 8, 1, 2, rounds),
        "random_6M": belief(random_llama(256, 6, 8000), 8, *long, rounds),
        "random_6M_alone": belief(random_llama(256, 6, 8000), 1, *long, rounds),
        "random_32M": belief(random_llama(512, 8, 8000), 2, *long, rounds),
        "random_96M": belief(random_llama(768, 12, 8000), 1, *long, rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["belief", "perturbed", "gradient", "memory"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    write(__file__, {part: measure(part, options.rounds) for part in options.parts}, options.output)


if __name__ == "__main__":
    main()
