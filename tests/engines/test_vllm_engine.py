"""One contract, held by a fake of vLLM, by TRL's client of one, and, where vLLM is installed, by the real ones.

Planted faults seen caught: `first` ignored in the number or the seed; one seed for all keys; one budget for all; finish
by length; the model's own end token; stop ids, temperature, top-k or the penalty dropped; a setting that vLLM changes
let through; lengths unchecked or off by one; log-probabilities shifted, cut short, not finite, or of the most likely
token; outputs numbered by their order; cached tokens counted, or those that only the first output saves; the last
token fed. With the real one: chunked prefill left on.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_vllm import FakeClient, FakeLLM
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import VOCABULARY, ids, requests
from vllm_worlds import (
    LONGEST,
    MODEL,
    STOP,
    ask,
    chi_square,
    engine_of,
    logprobs_of,
    many,
    models,
    next_logits,
    run,
    weights,
)

from apportion.engines.base import Key, Request, Sampling, Scoring
from apportion.engines.sampling import filtered
from apportion.engines.vllm_hosts import Colocated, Host
from apportion.engines.vllm_server import Server
from apportion.errors import InputError
from apportion.measure.gap import gap_of, prefixes_of
from apportion.measure.plan import Job
from apportion.measure.probe import evidence_of, probe
from apportion.measure.wave import requests_of
from apportion.rollouts import Rollouts

# The contract of every engine.


def test_everything_asked_comes_back_by_its_key(host: Host) -> None:
    asked = requests()
    done = run(engine_of(host), asked)
    budget = {(r.key, m): r.budget for r in asked for m in range(r.first, r.first + r.samples)}
    assert {(c.key, c.m) for c in done} == set(budget)
    for c in done:
        assert (c.token_ids[-1] == 3) == (c.finish == "stop")
        assert 3 not in c.token_ids[:-1]
        assert len(c.token_ids) == budget[c.key, c.m] or c.finish == "stop"


def test_the_tokens_are_of_their_own_prefix(host: Host) -> None:
    """Where only one token can be drawn, it is the most likely one after the request's own prefix."""
    asked = [Request(Key("r", 0, str(n), 0, 0), ids(20, n), 2, 1) for n in range(12)]
    wanted = {str(n): int(next_logits(host, ids(20, n)).argmax()) for n in range(12)}
    assert len(set(wanted.values())) > 3
    done = run(engine_of(host), asked, Sampling((3,), top_k=1))
    assert len(done) == 24
    for c in done:
        assert c.token_ids == (wanted[c.key.prompt],)


def test_order_and_split_change_nothing(host: Host) -> None:
    asked = requests()
    whole = run(engine_of(host), asked)
    for seed in range(3):
        random.Random(seed).shuffle(asked)
        engine = engine_of(host)
        assert set().union(*(run(engine, asked[part::3]) for part in range(3))) == whole


def test_a_request_can_be_split_over_its_samples(host: Host) -> None:
    whole = ask()
    halves = [ask(3), ask(5, first=3)]
    assert run(engine_of(host), halves) == run(engine_of(host), [whole])


def test_more_prefixes_than_vllm_prefills_at_a_time(host: Host) -> None:
    asked = [Request(Key("r", 0, str(i), 0, at), ids(150, i)[: 60 + at], 2, 4) for i in range(6) for at in (0, 40, 90)]
    together = run(engine_of(host), asked, Sampling(()))
    engine = engine_of(host)
    assert set().union(*(run(engine, [each], Sampling(())) for each in asked)) == together


def test_each_continuation_has_a_stream_of_its_own(host: Host) -> None:
    a, b = ask(30, 8, prompt="p"), Request(Key("run", 0, "other", 0, 0), ids(70, 1), 30, 8)
    assert a.prefix_ids == b.prefix_ids
    done = run(engine_of(host), [a, b], Sampling(()))
    assert len({c.token_ids for c in done}) > 55, "M and keys draw apart"


@pytest.mark.parametrize("sampling", [Sampling(()), Sampling((), temperature=0.6)])
def test_distribution_of_two_tokens(host: Host, sampling: Sampling) -> None:
    n, prefix = many(host, 4_000), ids(7)
    with torch.no_grad():
        p = (next_logits(host, prefix).double() / sampling.temperature).softmax(0)
        rows = torch.tensor([[*prefix, x] for x in range(VOCABULARY)])
        after = (models(host)[0](rows).logits[:, -1].double() / sampling.temperature).softmax(1)
    done = run(engine_of(host), [Request(Key("r", 0, "p", 0, 0), prefix, n, 2)], sampling)
    seen = torch.zeros((VOCABULARY, VOCABULARY), dtype=torch.float64)
    for c in done:
        seen[c.token_ids] += 1
    chi2, limit = chi_square(seen.flatten(), (n * p[:, None] * after).flatten())
    assert chi2 < limit


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling((), top_k=4),
        Sampling((), top_p=0.8, temperature=1.3),
        Sampling((), min_p=0.2),
        Sampling((), min_p=0.1, top_k=5),
        Sampling((), repetition_penalty=1.8),
        Sampling((), temperature=2.0, top_k=6, top_p=0.9, repetition_penalty=0.7),
    ],
)
def test_filters_keep_what_transformers_keeps(host: Host, sampling: Sampling) -> None:
    n, prefix = many(host, 1_500), ids(9)
    seen_1V = torch.zeros((1, VOCABULARY), dtype=torch.bool)
    seen_1V[0, list(prefix)] = True
    p = filtered(next_logits(host, prefix)[None], sampling, seen_1V)[0].double().softmax(0)
    done = run(engine_of(host), [Request(Key("r", 0, "p", 0, 0), prefix, n, 1)], sampling)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in done]), minlength=VOCABULARY).double()
    assert not counts[p == 0].any()
    chi2, limit = chi_square(counts, n * p)
    assert chi2 < limit


def test_the_budget_is_each_requests_own_and_a_stop_token_may_use_it_up(host: Host) -> None:
    asked = [ask(40, budget, 40, position=budget, first=budget) for budget in (1, 2, 6)]
    done = run(engine_of(host), asked, Sampling((3, 7)))
    assert {(c.key.position, c.m) for c in done} == {(b, b + m) for b in (1, 2, 6) for m in range(40)}
    assert {c.finish for c in done} == {"stop", "length"}
    assert any(len(c.token_ids) == c.key.position and c.finish == "stop" for c in done)


def test_only_the_stop_ids_end_a_continuation(host: Host) -> None:
    """5 is the model's own end token."""
    done = run(engine_of(host), [ask(60, 12, 40)], Sampling((3,)))
    assert any(5 in c.token_ids[:-1] for c in done)


def test_nothing_asked_nothing_run(host: Host) -> None:
    engine = engine_of(host, lambda: pytest.fail("the weights are no matter"))
    assert run(engine, []) == run(engine, [ask(0)]) == set()
    assert list(engine.logprobs([])) == []


@pytest.mark.parametrize(
    ("asked", "sampling", "field"),
    [
        (ask(length=0), STOP, "request"),
        (ask(budget=0), STOP, "request"),
        (ask(budget=LONGEST - 69), STOP, "max_model_len"),
        (ask(), Sampling((3,), temperature=0.009), "temperature"),
        (ask(), Sampling((3,), temperature=2.1), "temperature"),
        (ask(), Sampling((3,), min_p=0.1, top_p=0.9), "min_p"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_before_any_work(host: Host, asked, sampling, field: str) -> None:
    engine = engine_of(host)
    with pytest.raises(InputError, match=field):
        run(engine, [ask(), asked], sampling)
    assert vars(engine.cost) == dict.fromkeys(vars(engine.cost), 0) or engine.cost.forwards == 0


def test_the_longest_request_that_fits(host: Host) -> None:
    done = run(engine_of(host), [ask(2, LONGEST - 70)], Sampling(()))
    assert {len(c.token_ids) for c in done} == {LONGEST - 70}


# Log-probabilities.


def test_logprobs_are_the_models(host: Host) -> None:
    engine = engine_of(host)
    asked = [
        Scoring(Key("r", 0, "p", n, 0), ids(50 + n, n), prompt) for n, prompt in ((0, 1), (1, 17), (40, 90), (3, 52))
    ]
    run(engine, [ask(), Request(asked[0].key, asked[0].ids, 2, 3)])  # and caches part of it
    before: dict[Key, torch.Tensor] = {}
    for _ in range(2):
        read = {reading.key: reading.values for reading in engine.logprobs(asked)}
        for request in asked:
            wanted = logprobs_of(models(host)[0], request.ids, request.prompt)
            assert read[request.key].dtype == torch.float64
            torch.testing.assert_close(read[request.key], wanted, atol=2e-5, rtol=0)
        assert all(torch.equal(read[key], values) for key, values in before.items())
        before = read


def test_a_response_without_tokens_has_no_logprobs(host: Host) -> None:
    (read,) = engine_of(host).logprobs([Scoring(Key("r", 0, "p", 0, 0), ids(9), 9)])
    assert read.values.shape == (0,)


@pytest.mark.parametrize(
    ("length", "prompt", "field"), [(9, 0, "prompt"), (9, 10, "prompt"), (LONGEST, 5, "max_model_len")]
)
def test_rows_that_cannot_be_scored(host: Host, length: int, prompt: int, field: str) -> None:
    with pytest.raises(InputError, match=field):
        list(engine_of(host).logprobs([Scoring(Key("r", 0, "p", 0, 0), ids(length), prompt)]))


@pytest.mark.parametrize("cut", ["short", "hole", "nan"])
def test_fewer_logprobs_than_tokens_is_an_error(monkeypatch, cut: str) -> None:
    llm = FakeLLM(MODEL, LONGEST)
    whole = llm._score

    def score(row: list[int]) -> list[Any]:
        out = whole(row)
        if cut == "short":
            return out[:-1]
        out[6] = {row[6]: SimpleNamespace(logprob=float("nan"))} if cut == "nan" else None
        return out

    monkeypatch.setattr(llm, "_score", score)
    with pytest.raises(RuntimeError, match="no log-probability"):
        list(engine_of(Colocated(llm)).logprobs([Scoring(Key("r", 0, "p", 0, 0), ids(12), 4)]))


# Cost.


def test_prefill_that_the_cache_saves_is_not_counted(colocated: Colocated) -> None:
    """70 tokens: 64 in whole blocks of 32, or 68 in blocks of 4, which all but the first of 8 find."""
    block = 32 if not isinstance(colocated.llm, FakeLLM) else 4
    left = 70 % block
    engine = engine_of(colocated)
    done = run(engine, [ask(8, 5)], Sampling(()))
    assert engine.cost.generated == sum(len(c.token_ids) for c in done) == 40
    # Of each continuation the last token is never fed.
    assert engine.cost.forward_tokens == 70 + 7 * left + 8 * 4
    assert engine.cost.forwards == 5
    before = engine.cost + type(engine.cost)()
    run(engine, [ask(8, 5)], Sampling(()))
    assert (engine.cost - before).forward_tokens == 8 * left + 8 * 4


def test_scored_first_a_prefix_is_prefilled_once(colocated: Colocated) -> None:
    block = 32 if not isinstance(colocated.llm, FakeLLM) else 4
    engine = engine_of(colocated)
    scoring = Scoring(ask().key, ask().prefix_ids, 30)
    list(engine.logprobs([scoring]))
    assert engine.cost.forward_tokens == 70 and engine.cost.generated == 0
    run(engine, [ask(8, 1)], Sampling(()))
    assert engine.cost.forward_tokens == 70 + 8 * (70 % block)
    list(engine.logprobs([scoring]))
    assert engine.cost.forward_tokens == 70 + 8 * (70 % block) + 70, "scoring computes all of it again"


def test_a_server_does_not_say_what_it_cached(fake_server) -> None:
    engine = engine_of(fake_server)
    run(engine, [ask(8, 5), ask(2, 3, 40, "qq")], Sampling(()))
    assert vars(engine.cost) == {
        "generated": 46, "forwards": 2, "forward_tokens": 70 + 32 + 40 + 4, "backwards": 0, "backward_tokens": 0
    }  # fmt: skip


def batch(host: Host) -> Rollouts:
    prompt, responses = ids(12, 9), [[*ids(30, 4)], [*ids(40, 5), 3]]
    old = [logprobs_of(models(host)[0], [*prompt, *response], 12).tolist() for response in responses]
    return Rollouts.from_lists(responses, ["p", "p"], [0.0, 1.0], prompt_ids=(torch.tensor(prompt),), old_logprob=old)


def test_probing_and_the_gap_on_every_prefix(host: Host) -> None:
    rollouts = batch(host)
    jobs = [Job(row, at, 4, ((row, at),)) for row, at in ((0, 0), (0, 9), (0, 25), (1, 17))]
    where = {"run": "run", "step": 3, "max_new_tokens": 60}
    engine = engine_of(host)
    scorings = prefixes_of(requests_of(rollouts, jobs, **where))
    assert [(s.key.sample, s.key.position, s.prompt, len(s.ids)) for s in scorings] == [
        (0, 25, 12, 37),
        (1, 17, 12, 29),
    ]
    gap = gap_of(rollouts, engine.logprobs(scorings))
    assert gap.tokens == 42 and 0 < gap.mean <= gap.largest < 2e-5
    probes = probe(
        rollouts, jobs, engine, STOP, lambda rows, responses, texts: [float(len(r) % 2) for r in responses],
        lambda tokens: " ".join(map(str, tokens)), **where,
    )  # fmt: skip
    assert [(p.row, p.position, p.m) for p in probes] == [(j.row, j.position, m) for j in jobs for m in range(4)]
    assert evidence_of(rollouts, jobs, probes).count.tolist() == [4] * 4


def test_the_gap_shows_other_weights(colocated: Colocated) -> None:
    rollouts = batch(colocated)
    where = {"run": "run", "step": 3, "max_new_tokens": 60}
    scorings = prefixes_of(requests_of(rollouts, [Job(0, 25, 4, ((0, 25),))], **where))
    colocated.load(weights(models(colocated)[1]))
    assert gap_of(rollouts, engine_of(colocated).logprobs(scorings)).mean > 0.1


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=6), st.randoms()
)
def test_any_mix_of_requests_is_answered_by_key(shapes: list[tuple[int, int, int]], shuffle: random.Random) -> None:
    asked = [
        Request(Key("r", 1, str(i), 0, 0), ids(3 + i, i), samples, budget, first)
        for i, (samples, budget, first) in enumerate(shapes)
    ]
    whole = run(engine_of(Colocated(FakeLLM(MODEL))), asked)
    assert len(whole) == sum(r.samples for r in asked)
    shuffle.shuffle(asked)
    assert run(engine_of(Server(FakeClient(FakeLLM(MODEL)))), asked) == whole
