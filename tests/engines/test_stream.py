"""Rollouts that are continued from their own cache while others are decoded, and continuations that end early.

The reference is the naive loop of `policies`, and a plain forward for what is read of tokens.
Planted faults seen caught: an answer that joins at once; a stream that does not wait where nothing runs; another
rollout's cache, or another row's; rollouts taken for probes in the cost; the first token of the prefix fed for its
last; what was read of a first token lost, or left behind when a row moves; rollouts asked whether they are decided; the
question put at other tokens, or at every one.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from policies import ids, llama, mistral, naive, qwen2

from apportion.engines.base import Continuation, Key, Request, Rollout, Sampling
from apportion.engines.stream import LAG
from apportion.engines.transformers import TransformersEngine
from apportion.errors import InputError
from apportion.measure.ahead import ahead

LIMIT = 40
STOP = Sampling((3,))
SETTINGS = [STOP, Sampling((3, 5), temperature=0.6, top_p=0.9), Sampling((3,), 1.4, top_k=4, repetition_penalty=1.5)]
PROMPTS = {"a": ids(5, 1), "b": ids(9, 2), "c": ids(5, 1)}


def rollout_requests(samples: int = 3) -> list[Request]:
    return [Request(Key("r", 0, name, 0, 0), prompt, samples, LIMIT) for name, prompt in PROMPTS.items()]


def probes_of(prompt: str, rollouts: Sequence[Rollout]) -> list[Request]:
    """Two states of each response: its opening and one before its end; and the prompt itself for the first."""
    out = []
    for rollout in rollouts:
        positions = {len(rollout.token_ids) // 2, len(rollout.token_ids) - 1} | ({0} if rollout.m == 0 else set())
        for position in sorted(positions):
            prefix = (*PROMPTS[prompt], *rollout.token_ids[:position])
            out.append(Request(Key("p", 0, prompt, rollout.m, position), prefix, 2, LIMIT - position))
    return out


def everything(
    engine: TransformersEngine, sampling: Sampling, wait: Callable[[], object] = lambda: None, samples: int = 3
) -> tuple[dict[str, list[Rollout]], list[Request], set[Continuation]]:
    """All rollouts, and then two states of each of them, asked for as soon as a prompt's rollouts are complete."""
    stream = engine.stream(sampling, max(map(len, PROMPTS.values())) + LIMIT, LIMIT)
    stream.add(rollout_requests(samples), rollouts=True)
    rollouts: dict[str, list[Rollout]] = {name: [] for name in PROMPTS}
    asked: list[Request] = []
    found: set[Continuation] = set()
    left: dict[str, int] = {}
    for (c,) in ahead(engine.read(stream), 1):
        prompt = c.key.prompt
        if isinstance(c, Rollout):
            rollouts[prompt].append(c)
            if len(rollouts[prompt]) == samples:
                wait()
                requests = probes_of(prompt, rollouts[prompt])
                asked += requests
                left[prompt] = sum(r.samples for r in requests)
                stream.answer(prompt, requests)
        else:
            assert c not in found
            found.add(c)
            left[prompt] -= 1
            if not left[prompt]:
                stream.answer(prompt, [])
    return rollouts, asked, found


def shapes(engine: TransformersEngine) -> list[tuple[int, int]]:
    """(rows, tokens a row) of every forward from now on."""
    seen: list[tuple[int, int]] = []
    engine.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("make", [llama, qwen2])
@pytest.mark.parametrize("slots", [4, 256])
def test_rollouts_and_probes_equal_the_naive_loop(make, sampling: Sampling, slots: int) -> None:
    model = make()
    rollouts, asked, found = everything(TransformersEngine(model, 0, max_batch=slots), sampling)
    same = {(c.key, c.m, c.token_ids, c.finish) for each in rollouts.values() for c in each}
    assert same == {(c.key, c.m, c.token_ids, c.finish) for c in naive(model, rollout_requests(), sampling)}
    assert len(asked) > 12
    assert found == naive(model, asked, sampling)


def test_what_is_read_of_tokens_equals_a_plain_forward() -> None:
    model, sampling = llama(), Sampling((3,), temperature=0.7, top_k=4)
    rollouts, _, _ = everything(TransformersEngine(model, 0), sampling)
    for prompt, each in rollouts.items():
        for c in each:
            whole = torch.tensor([[*PROMPTS[prompt], *c.token_ids]])
            logp = (model.eval()(whole).logits[0, len(PROMPTS[prompt]) - 1 : -1] / 0.7).log_softmax(-1).detach()
            entropy = -(logp.exp() * logp).sum(-1)
            logprob = logp.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(c.logprobs), logprob, atol=1e-5, rtol=0)
            torch.testing.assert_close(torch.tensor(c.entropies), entropy, atol=1e-5, rtol=0)


def test_only_prompts_are_prefilled_and_equal_ones_once() -> None:
    engine = TransformersEngine(llama(), 0)
    seen = shapes(engine)
    everything(engine, STOP)
    assert [rows for rows, tokens in seen if tokens > 1] == [2], "a and c are the same prompt"


def test_cost_is_split_between_rollouts_and_probes() -> None:
    engine = TransformersEngine(llama(), 0)
    stream = engine.stream(STOP, 60, LIMIT)
    stream.add(rollout_requests(), rollouts=True)
    rollouts, ended = 0, Counter[str]()
    for (c,) in ahead(engine.read(stream), 1):
        if isinstance(c, Rollout):
            rollouts += len(c.token_ids) - 1
            ended[c.key.prompt] += 1
        if ended[c.key.prompt] == 3:
            stream.answer(c.key.prompt, [])
    assert engine.cost.generated == 0
    assert engine.cost == stream.cost
    # The padded prefill of two prompts of up to nine tokens, and every token but the first of each response.
    assert stream.cost.forward_tokens == 18 + rollouts


def test_a_slow_reader_changes_no_forward() -> None:
    """Answers join at their forward, however long they take; and what is decoded meanwhile goes on."""
    fast, slow = TransformersEngine(llama(), 0), TransformersEngine(llama(), 0)
    before = shapes(fast), shapes(slow)
    quick = everything(fast, STOP)
    late = everything(slow, STOP, lambda: time.sleep(0.05))
    assert before[0] == before[1]
    assert quick[2] == late[2]
    assert max(rows for rows, _ in before[0]) > 9, "probes ran beside rollouts"


def test_an_answer_joins_after_the_lag() -> None:
    """b's rollouts go on while a is answered: its probes join LAG forwards after a's last rollout."""
    engine = TransformersEngine(llama(), 0)
    budget = {"a": 2, "b": 2 + 2 * LAG}
    stream = engine.stream(Sampling(()), 60, 60)
    rollouts = [Request(Key("r", 0, name, 0, 0), PROMPTS[name], 1, budget[name]) for name in budget]
    stream.add(rollouts, rollouts=True)
    seen = shapes(engine)
    for (c,) in ahead(engine.read(stream), 1):
        state = (*PROMPTS["a"], c.token_ids[0])
        again = [Request(Key("p", 0, "a", 0, 1), state, 5, 3)] if isinstance(c, Rollout) and c.key.prompt == "a" else []
        if isinstance(c, Rollout) or c.m == 4:
            stream.answer(c.key.prompt, again)
    decoding = [rows for rows, tokens in seen if tokens == 1]
    # a's second token takes one forward; then b is alone until five probes of three tokens join.
    assert decoding == [2] + [1] * LAG + [6] * 3 + [1] * (LAG - 3)
    # The prefill and the forwards without probes are the rollouts' own.
    assert engine.cost.forwards - stream.cost.forwards == 3
    assert engine.cost.forward_tokens - stream.cost.forward_tokens == 5 * 3


def test_a_stream_that_is_given_up_ends() -> None:
    """Where it waits for an answer, and, after a forward or two, where it decodes."""
    engine = TransformersEngine(llama(), 0)
    stream = engine.stream(STOP, 60, LIMIT)
    stream.add(rollout_requests(), rollouts=True)
    results = ahead(engine.read(stream), 1, stream.stop)
    next(results)
    time.sleep(0.3)
    results.close()
    long = engine.stream(Sampling(()), 250, 240)
    long.add([Request(Key("r", 0, "a", 0, 0), PROMPTS["a"], 1, 240)], rollouts=True)
    long.add([Request(Key("q", 0, "q", 0, 0), PROMPTS["b"], 1, 1)])
    seen = shapes(engine)
    results = ahead(engine.read(long), 1, long.stop)
    next(results)
    results.close()
    assert len(seen) < 200
    assert not any(thread.name == "apportion-ahead" for thread in threading.enumerate())


def test_requests_that_continue_nothing_are_refused() -> None:
    engine = TransformersEngine(llama(), 0)
    stream = engine.stream(STOP, 60, LIMIT)
    stream.add(rollout_requests(), rollouts=True)
    with pytest.raises(InputError, match="opening of a rollout"):
        stream.answer("a", [Request(Key("p", 0, "a", 7, 1), (*PROMPTS["a"], 1), 1, 4)])
    with pytest.raises(InputError, match="at most 60"):
        stream.add([Request(Key("p", 0, "a", 0, 1), ids(30), 1, LIMIT)])
    with pytest.raises(InputError, match="max_cache_tokens"):
        TransformersEngine(llama(), 0, max_cache_tokens=50).stream(STOP, 60, LIMIT)


def test_continuations_end_where_their_verdict_is_decided() -> None:
    """After the first multiple of eight tokens that hold token 7 twice, in batches of any size; rollouts go on."""

    def decided(tokens: Sequence[int]) -> bool:
        return list(tokens).count(7) >= 2

    asked = [Request(Key("r", 0, "p", 0, n), ids(4 + n, n), 8, 50) for n in range(4)]
    free = Sampling(())
    whole = {(c.key, c.m): c.token_ids for c in TransformersEngine(llama(), 0).continuations(asked, free)}
    for slots in (3, 256):
        found = list(TransformersEngine(llama(), 0, max_batch=slots, decided=decided).continuations(asked, free))
        for c in found:
            tokens = whole[c.key, c.m]
            cuts = [n for n in range(8, 50, 8) if tokens[:n].count(7) >= 2]
            expected = (tokens[: cuts[0]], "decided") if cuts else (tokens, "length")
            assert (c.token_ids, c.finish) == expected
        assert {c.finish for c in found} == {"decided", "length"}
    narrow = TransformersEngine(mistral(8), 0, decided=lambda tokens: True)
    assert {len(c.token_ids) for c in narrow.continuations(asked, free)} == {8}, "and with a cache of the model's own"
    engine = TransformersEngine(llama(), 0, decided=lambda tokens: True)
    rollouts, _, found = everything(engine, STOP)
    assert {c.finish for each in rollouts.values() for c in each} <= {"stop", "length"}
    assert max(len(c.token_ids) for c in found) == 8


def test_the_longest_budgets_get_the_slots_first_and_answers_before_all() -> None:
    """One slot: an answer's short budget goes before a long one that has waited since the start."""
    engine = TransformersEngine(llama(), 0, max_batch=1, prefill_tokens=1)
    asked = [Request(Key("r", 0, str(n), 0, 0), ids(4, n), 1, n) for n in (3, 9, 6)]
    assert [len(c.token_ids) for c in engine.continuations(asked, Sampling(()))] == [9, 6, 3]
    stream = engine.stream(Sampling(()), 60, 60)
    stream.add([Request(Key("r", 0, "a", 0, 0), PROMPTS["a"], 1, 30)], rollouts=True)
    stream.add([Request(Key("q", 0, str(n), 0, 0), ids(4, n), 1, 32 - n) for n in range(4)])
    order = []
    for (c,) in ahead(engine.read(stream), 1):
        order.append((c.key.prompt, len(c.token_ids)))
        if c.key.prompt == "a":
            again = Request(Key("p", 0, "a", 0, 1), (*PROMPTS["a"], c.token_ids[0]), 1, 20)
            stream.answer("a", [again] if isinstance(c, Rollout) else [])
    # Budgets fall, ties in the order of arrival; the answer comes while "2" has the slot, and goes before "3".
    assert order == [("0", 32), ("1", 31), ("a", 30), ("2", 30), ("a", 20), ("3", 29)]
