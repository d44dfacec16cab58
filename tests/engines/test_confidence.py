"""Short forced answers: sampled with keyed streams after the cue, and read like the gold answer.

Hand numbers come from a bigram model: after the cue 3 comes 1 with 3 of 6, after 1 comes 2 with 8 of 12, after 2
comes 0 with 5 of 8, and 0 stops.

Planted faults seen caught: a sum of entropies, or one without the stop token's; distinct answers that weigh alike;
one sampled answer read; a geometric mean of the gold's tokens; conf and acc swapped; the probes' random streams, or
one for all positions; sampling without the cue; temperatures that differ; generated tokens of the last result only,
continuations counted for tokens, forwards of the engine not counted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from bigram import bigram, separate, sizes
from policies import ids, llama, mistral, naive
from transformers import PreTrainedModel

from apportion.engines.base import ConfidenceRequest, Continuation, Key, Reading, Request, Sampling
from apportion.engines.confidence import confidences
from apportion.engines.scoring import Scorer
from apportion.engines.transformers import TransformersEngine
from apportion.errors import InputError

SAMPLING = Sampling((3,), temperature=0.8)


def requests() -> list[ConfidenceRequest]:
    return [
        ConfidenceRequest(Key("run", 7, "a", 0, 0), ids(24, 1), 6, (0, 7, 18), (7, 9), (8, 5, 3), 5, 6),
        ConfidenceRequest(Key("run", 7, "a", 1, 0), ids(15, 1), 6, (4, 9), (7,), (5,), 3, 1),
        ConfidenceRequest(Key("run", 7, "b", 0, 0), ids(9, 2), 3, (), (7, 9), (5,), 5, 4),
    ]


def slowly(model: PreTrainedModel, sampling: Sampling = SAMPLING) -> dict[Key, list[tuple[float, float]]]:
    """The reference: the naive sampler, and a forward for each answer."""
    out = {}
    for r in requests():
        out[r.key] = []
        for position in r.positions:
            opening = (*r.ids[: r.prompt + position], *r.cue_ids)
            key = Key("run/confidence", 7, r.key.prompt, r.key.sample, position)
            answers = [c.token_ids for c in naive(model, [Request(key, opening, r.samples, r.tokens)], sampling)]
            assert len(answers) == r.samples
            sure = []
            for answer in answers:
                entropies = [h for _, h in separate(model, (*opening, *answer), len(opening), sampling.temperature)]
                sure.append(math.exp(-sum(entropies) / len(answer)))
            gold = separate(model, (*opening, *r.gold_ids), len(opening), sampling.temperature)
            acc = sum(math.exp(logprob) for logprob, _ in gold) / len(gold)
            out[r.key].append((sum(sure) / len(sure), acc))
    return out


def measure(model: PreTrainedModel, asked: Sequence[ConfidenceRequest], sampling: Sampling = SAMPLING, **limits: int):
    engine, scorer = TransformersEngine(model, 0), Scorer(model, 0, temperature=sampling.temperature, **limits)
    return list(confidences(engine, scorer, asked, sampling))


def check(found: list[Reading], expected: dict[Key, list[tuple[float, float]]]) -> None:
    assert sorted(map(repr, (r.key for r in found))) == sorted(map(repr, expected))
    for reading in found:
        want = torch.tensor(expected[reading.key], dtype=torch.float64).reshape(-1, 2)
        torch.testing.assert_close(reading.values, want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("make", [llama, lambda: mistral(8)])
@pytest.mark.parametrize("sampling", [SAMPLING, Sampling((3, 5), temperature=1.3, top_p=0.8)])
def test_equals_the_slow_way(make, sampling: Sampling) -> None:
    model = make()
    check(measure(model, requests(), sampling), slowly(model, sampling))


@pytest.mark.parametrize("seed", range(4))
def test_order_batch_and_split_change_nothing(seed: int) -> None:
    asked = requests()
    random.Random(seed).shuffle(asked)
    limits = dict(max_tokens=(16_384, 40)[seed % 2], max_logits=(2**26, 100)[seed // 2])
    check([*measure(MODEL, asked[:1], **limits), *measure(MODEL, asked[1:], **limits)], EXPECTED)


def entropy(*shares: float) -> float:
    return -sum(p * math.log(p) for p in shares)


@pytest.mark.parametrize("tokens", [2, 10])
def test_hand_numbers(tokens: int) -> None:
    # Greedy: 1, 2, 0 and stop, or cut after 1, 2. Gold (1, 0): (1/2 + 1/12) / 2.
    request = ConfidenceRequest(Key("r", 0, "p", 0, 0), (0, 2, 1), 1, (0, 2), (3,), (1, 0), 4, tokens)
    (reading,) = measure(bigram(), [request], Sampling((0,), top_k=1))
    each = [entropy(1 / 6, 1 / 2, 1 / 6, 1 / 6), entropy(1 / 12, 1 / 12, 2 / 3, 1 / 6), entropy(5 / 8, *[1 / 8] * 3)]
    conf = math.exp(-sum(each[:tokens]) / len(each[:tokens]))
    torch.testing.assert_close(
        reading.values, torch.tensor([[conf, 7 / 24]] * 2, dtype=torch.float64), atol=1e-6, rtol=0
    )


def test_temperature_is_that_of_sampling() -> None:
    # At temperature 1/2 the weights are squared: (1, 9, 1, 1) after the cue, and gold 1 has 9/12.
    request = ConfidenceRequest(Key("r", 0, "p", 0, 0), (0, 2), 1, (1,), (3,), (1,), 1, 1)
    (reading,) = measure(bigram(), [request], Sampling((0,), temperature=0.5, top_k=1))
    want = [math.exp(-entropy(9 / 12, *[1 / 12] * 3)), 9 / 12]
    assert reading.values[0].tolist() == pytest.approx(want, abs=1e-6)
    with pytest.raises(InputError, match=r"sampling\.temperature"):
        list(confidences(TransformersEngine(MODEL, 0), Scorer(MODEL, 0), requests(), SAMPLING))


def test_every_answer_has_its_share() -> None:
    """Of 4,000 one-token answers after the cue, all have the same conf; two-token ones differ by their first."""
    request = ConfidenceRequest(Key("r", 0, "p", 0, 0), (0, 2), 1, (1,), (3,), (1,), 4_000, 2)
    (reading,) = measure(bigram(), [request], Sampling(()))
    p = (1 / 6, 1 / 2, 1 / 6, 1 / 6)
    after = (entropy(*[1 / 4] * 4), entropy(1 / 12, 1 / 12, 2 / 3, 1 / 6), entropy(5 / 8, *[1 / 8] * 3), entropy(*p))
    values = [math.exp(-(entropy(*p) + h) / 2) for h in after]
    mean = sum(share * v for share, v in zip(p, values, strict=True))
    spread = math.sqrt(sum(share * (v - mean) ** 2 for share, v in zip(p, values, strict=True)) / 4_000)
    assert abs(float(reading.values[0, 0]) - mean) < 4 * spread


class Spy:
    """Hands requests on and keeps them; may lose answers."""

    def __init__(self, engine: TransformersEngine, lost: set[int] = frozenset()) -> None:
        self.engine, self.lost, self.asked = engine, lost, []

    def continuations(self, asked: Sequence[Request], sampling: Sampling) -> Iterator[Continuation]:
        self.asked += asked
        return (c for c in self.engine.continuations(asked, sampling) if c.m not in self.lost)


def test_streams_are_those_of_no_rollout_and_no_probe() -> None:
    spy = Spy(TransformersEngine(MODEL, 0))
    list(confidences(spy, Scorer(MODEL, 0, temperature=0.8), requests(), SAMPLING))
    assert len({r.key.stream(0) for r in spy.asked}) == len(spy.asked) == 5
    probes = {replace(r.key, position=p).stream(m) for r in requests() for p in r.positions for m in range(5)}
    assert not probes & {r.key.stream(m) for r in spy.asked for m in range(r.samples)}


def test_answers_that_were_lost_leave_the_mean() -> None:
    scorer = Scorer(MODEL, 0, temperature=0.8)
    some = requests()[0]
    fewer = list(confidences(Spy(TransformersEngine(MODEL, 0), {3, 4}), scorer, [some], SAMPLING))
    check(fewer, {some.key: [tuple(v) for v in measure(MODEL, [replace(some, samples=3)])[0].values.tolist()]})
    with pytest.raises(InputError, match="none at position 0"):
        list(confidences(Spy(TransformersEngine(MODEL, 0), set(range(5))), scorer, [some], SAMPLING))


def test_a_position_asked_twice_is_sampled_once() -> None:
    twice = replace(requests()[0], positions=(7, 0, 7))
    spy = Spy(TransformersEngine(MODEL, 0))
    (reading,) = confidences(spy, Scorer(MODEL, 0, temperature=0.8), [twice], SAMPLING)
    assert len(spy.asked) == 2
    check([reading], {twice.key: [EXPECTED[twice.key][k] for k in (1, 0, 1)]})


def test_cost_counts_what_was_generated_and_every_forward() -> None:
    spy, scorer = Spy(TransformersEngine(MODEL, 0)), Scorer(MODEL, 0, temperature=0.8)
    with sizes(MODEL) as seen:
        list(confidences(spy, scorer, requests(), SAMPLING))
    costs = (spy.engine.cost, scorer.cost)
    assert sum(cost.forwards for cost in costs) == len(seen)
    assert sum(cost.forward_tokens for cost in costs) == sum(rows * columns for rows, columns, _ in seen)
    assert scorer.cost.forwards == 1, "the trunks and their branches"
    assert spy.engine.cost.generated == sum(len(c.token_ids) for c in naive(MODEL, spy.asked, SAMPLING))
    assert scorer.cost.generated == 0


def test_leaves_no_trace() -> None:
    model = llama(attention_dropout=0.5).train()
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    engine, scorer = TransformersEngine(model, 0), Scorer(model, 0, temperature=0.8, max_tokens=40)
    found = []
    for reading in confidences(engine, scorer, requests(), SAMPLING):
        found.append(reading)
        assert [m.training for m in model.modules()] == modes and torch.is_grad_enabled()
    check(found, EXPECTED)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("change", "field"),
    [({"gold_ids": ()}, "gold"), ({"samples": 0}, "samples"), ({"tokens": 0}, "tokens"),
     ({"positions": (19,)}, "position"), ({"ids": ids(24, 5)}, "twice")],
)  # fmt: skip
def test_requests_that_cannot_be_answered(change: dict, field: str) -> None:
    with sizes(MODEL) as seen, pytest.raises(InputError, match=field):
        measure(MODEL, [*requests(), replace(requests()[0], **change)])
    assert not seen


MODEL = llama()
EXPECTED = slowly(MODEL)
