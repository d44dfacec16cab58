"""The engine equals a loop that runs the whole sequence again for each token, and leaves no trace.

Planted faults seen caught: mask off by one or the same for all rows; position off by one; a shrinking batch that
moves a row without its cache or with other uniforms; modes not put back, dropout left on, gradients left on; long
sequences in a sliding window's slots; scores shifted by a token; a budget overrun by one; tokens not added to the
penalty's set, or to that of all continuations; trunks not shared; shortest first; `first` ignored.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import VOCABULARY, ids, llama, mistral, naive, qwen2, requests
from torch import nn

from apportion.engines.base import Key, Request, Sampling
from apportion.engines.slots import trunks_of
from apportion.engines.transformers import TransformersEngine
from apportion.errors import InputError

STOP = Sampling((3,))
SETTINGS = [
    STOP,
    Sampling((3, 5), temperature=0.6, top_p=0.9),
    Sampling((3,), temperature=1.4, top_k=4, repetition_penalty=1.5),
    Sampling((), temperature=1.2, min_p=0.1),
]


def run(engine: TransformersEngine, asked: list[Request], sampling: Sampling = STOP) -> set:
    out = list(engine.continuations(asked, sampling))
    assert len(set(out)) == len(out)
    return set(out)


@contextmanager
def forwards(model: nn.Module) -> Iterator[list[tuple[int, int]]]:
    """(rows, tokens a row) of every forward."""
    seen: list[tuple[int, int]] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        yield seen
    finally:
        hook.remove()


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("make", [llama, qwen2])
def test_equals_the_naive_loop(make, sampling: Sampling) -> None:
    model = make()
    assert run(TransformersEngine(model, 0), requests(), sampling) == naive(model, requests(), sampling)


def test_equals_the_naive_loop_with_eager_attention() -> None:
    model = llama(attn_implementation="eager")
    assert run(TransformersEngine(model, 0), requests()) == naive(model, requests(), STOP)


@settings(max_examples=10)
@given(
    seed=st.integers(0, 999),
    max_batch=st.sampled_from([1, 2, 5, 13, 256]),
    cache=st.sampled_from([30, 64, 200, 10_000]),
    prefill=st.sampled_from([1, 40, 2_048]),
    pad=st.integers(0, VOCABULARY - 1),
    parts=st.integers(1, 3),
)
def test_order_batch_and_split_change_nothing(
    seed: int, max_batch: int, cache: int, prefill: int, pad: int, parts: int
) -> None:
    asked = requests()
    random.Random(seed).shuffle(asked)
    engine = TransformersEngine(MODEL, pad, max_batch=max_batch, max_cache_tokens=cache, prefill_tokens=prefill)
    got = set()
    for part in range(parts):
        got |= run(engine, asked[part::parts])
    assert got == EXPECTED


def test_a_request_can_be_split_over_its_samples() -> None:
    engine = TransformersEngine(MODEL, 0)
    whole = requests()[1]
    key, prefix, budget = whole.key, whole.prefix_ids, whole.budget
    halves = [Request(key, prefix, 1, budget), Request(key, prefix, 2, budget, first=1)]
    assert run(engine, halves) == run(engine, [whole])


def test_each_prefix_is_prefilled_once_and_no_row_outlives_its_continuation() -> None:
    engine = TransformersEngine(MODEL, 0, prefill_tokens=1)
    with forwards(MODEL) as calls:
        done = run(engine, requests())
    prefills = sorted(n for rows, n in calls if n > 1)
    # Prompt a: pivots 0, 4, 9 and 15 of one response lie in 21 tokens, the fork's 8 in its 17. Prompt b: 14.
    assert prefills == [14, 17, 21]
    # Each decode row makes one token; the first of each continuation comes from the prefill.
    assert sum(rows for rows, n in calls if n == 1) == sum(len(c.token_ids) - 1 for c in done)


def test_slots_are_refilled_while_anything_waits() -> None:
    with forwards(MODEL) as calls:
        done = run(TransformersEngine(MODEL, 0, max_batch=4), requests(samples=6))
    steps = [rows for rows, n in calls if n == 1]
    assert max(steps) == 4
    assert steps == sorted(steps, reverse=True), "the batch shrinks only when nothing waits"
    assert sum(steps) == sum(len(c.token_ids) - 1 for c in done)


def test_only_the_last_positions_reach_the_vocabulary() -> None:
    seen = []
    hook = MODEL.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:2]))
    asked = [r for r in requests() if r.key.prompt == "a" and r.key.sample == 0]
    run(TransformersEngine(MODEL, 0), asked)
    hook.remove()
    assert seen[0] == (1, len(asked))
    assert all(shape[1] == 1 for shape in seen[1:])


def test_stop_token_budget_and_numbers() -> None:
    asked = [Request(Key("r", 0, "p", 0, n), ids(5), 40, n, first=n) for n in (1, 2, 6)]
    done = run(TransformersEngine(MODEL, 0), asked)
    assert {(c.key.position, c.m) for c in done} == {(n, n + m) for n in (1, 2, 6) for m in range(40)}
    assert {c.finish for c in done} == {"stop", "length"}
    for c in done:
        assert (c.token_ids[-1] == 3) == (c.finish == "stop")
        assert 3 not in c.token_ids[:-1]
        assert len(c.token_ids) == c.key.position if c.finish == "length" else len(c.token_ids) <= c.key.position


def test_nothing_asked_nothing_run() -> None:
    engine = TransformersEngine(MODEL, 0)
    with forwards(MODEL) as calls:
        assert run(engine, []) == set()
        assert run(engine, [Request(Key("r", 0, "p", 0, 0), ids(3), 0, 4)]) == set()
    assert not calls


def test_results_come_as_they_finish() -> None:
    asked = [Request(Key("r", 0, "p", 0, n), ids(5), 1, n) for n in (20, 2)]
    done = [c.key.position for c in TransformersEngine(MODEL, 0).continuations(asked, Sampling(()))]
    assert done == [2, 20]


def test_longest_budgets_go_first() -> None:
    a, b = ids(10, 1), ids(10, 2)
    asked = [
        Request(Key("r", 0, p, 0, at), prefix[: 5 + at], 1, budget)
        for p, prefix, at, budget in (("b", b, 4, 3), ("a", a, 4, 6), ("b", b, 0, 5), ("a", a, 1, 9))
    ]
    trunks = trunks_of(asked)
    assert [t.ids for t in trunks] == [a[:9], b[:9]]
    assert [[r.budget for r in t.requests] for t in trunks] == [[9, 6], [5, 3]]


def test_distribution_of_two_tokens() -> None:
    """χ² of 20,000 pairs against p(x)·p(y|x), at the 99.9 % quantile; the second comes from the slots."""
    n, prefix = 20_000, ids(7)
    p = MODEL_EVAL(torch.tensor([prefix])).logits[0, -1].double().softmax(0)
    after = MODEL_EVAL(torch.tensor([[*prefix, x] for x in range(VOCABULARY)])).logits[:, -1].double().softmax(1)
    engine = TransformersEngine(MODEL, 0, max_batch=1_000)
    done = run(engine, [Request(Key("r", 0, "p", 0, 0), prefix, n, 2)], Sampling(()))
    seen = torch.zeros((VOCABULARY, VOCABULARY), dtype=torch.float64)
    for c in done:
        seen[c.token_ids] += 1
    expected = n * p[:, None] * after
    big = expected >= 5
    observed = torch.cat([seen[big], seen[~big].sum()[None]])
    wanted = torch.cat([expected[big], expected[~big].sum()[None]])
    df = len(wanted) - 1
    chi2 = float(((observed - wanted) ** 2 / wanted).sum())
    # Wilson–Hilferty: the 99.9 % quantile is df·(1 − 2/9df + 3.09·√(2/9df))³.
    limit = df * (1 - 2 / (9 * df) + 3.09 * (2 / (9 * df)) ** 0.5) ** 3
    assert chi2 < limit, (chi2, limit, df)


def test_leaves_no_trace() -> None:
    model = llama(attention_dropout=0.5)
    model.train()
    model.model.layers[1].eval()
    model.gradient_checkpointing_enable()
    model.lm_head.weight.requires_grad_(False)
    modes = [m.training for m in model.modules()]
    wanted = [p.requires_grad for p in model.parameters()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    inside = set()
    model.register_forward_pre_hook(lambda *_: inside.add((torch.is_grad_enabled(), model.training)))
    engine = TransformersEngine(model, 0, max_batch=3)
    done = set()
    for c in engine.continuations(requests(), STOP):
        done.add(c)
        assert [m.training for m in model.modules()] == modes, "between results the model is the host's"
        assert torch.is_grad_enabled()
    next(engine.continuations(requests(), STOP))  # and a caller that stops early
    engine.score(ids(12), 4, 1.0)
    assert inside == {(False, False)}
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert done == naive(llama(), requests(), STOP), "no dropout while probing"


def test_modes_are_put_back_after_an_error() -> None:
    model = llama().train()
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError):
        run(TransformersEngine(model, 0), requests())
    assert model.training and torch.is_grad_enabled()


def test_new_weights_are_used_at_once() -> None:
    model = llama()
    engine = TransformersEngine(model, 0)
    first = run(engine, requests())
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    assert run(engine, requests()) == naive(model, requests(), STOP) != first


def test_lora() -> None:
    peft = pytest.importorskip("peft", reason="needs apportion[peft]")
    base = llama()
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False, lora_dropout=0.5)
    model = peft.get_peft_model(base, config).train()
    got = run(TransformersEngine(model, 0), requests())
    assert got == naive(model, requests(), STOP)
    with model.disable_adapter():
        assert got != naive(model, requests(), STOP)


def test_prompt_learning_is_refused() -> None:
    peft = pytest.importorskip("peft", reason="needs apportion[peft]")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(InputError, match="prompt learning"):
        TransformersEngine(peft.get_peft_model(llama(), config), 0)


@pytest.mark.parametrize(("window", "sliced"), [(8, False), (64, True)])
def test_sliding_windows(window: int, sliced: bool) -> None:
    model = mistral(window)
    engine = TransformersEngine(model, 0, max_batch=2)
    for sampling in (STOP, SETTINGS[2]):
        with forwards(model) as calls:
            got = run(engine, requests(), sampling)
        assert got == naive(model, requests(), sampling)
        prefills = sum(rows for rows, n in calls if n > 1)
        # One of 3 trunks each, or one for each of 22 continuations.
        assert prefills == (3 if sliced else 22)


def test_score_equals_a_plain_forward() -> None:
    sequence = ids(40)
    for model in (MODEL, mistral(8)):
        full = model.eval()(torch.tensor([sequence])).logits[0, :-1].detach() / 0.7
        logp = full.log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        logp = logp.gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
        engine = TransformersEngine(model, 0)
        for start, chunk in ((1, 256), (17, 5), (39, 256)):
            got = engine.score(sequence, start, 0.7, chunk)
            assert [len(g) for g in got] == [40 - start] * 2
            torch.testing.assert_close(got[0], logp[start - 1 :], atol=1e-5, rtol=0)
            torch.testing.assert_close(got[1], entropy[start - 1 :], atol=1e-5, rtol=0)
            again = engine.score(sequence, start, 0.7, chunk)
            assert torch.equal(got[0], again[0]) and torch.equal(got[1], again[1])


def test_bfloat16_runs() -> None:
    done = run(TransformersEngine(llama().to(torch.bfloat16), 0, max_batch=4), requests())
    assert len(done) == sum(r.samples for r in requests())


@pytest.mark.parametrize(
    ("prefix", "budget", "cache", "field"),
    [((), 3, 100, "request"), ((1, 2), 0, 100, "request"), (ids(9), 3, 11, "max_cache_tokens")],
)
def test_requests_that_cannot_be_served(prefix, budget: int, cache: int, field: str) -> None:
    engine = TransformersEngine(MODEL, 0, max_cache_tokens=cache)
    with pytest.raises(InputError, match=field):
        run(engine, [Request(Key("r", 0, "p", 0, 0), prefix, 1, budget)])


def test_settings_that_cannot_be_used() -> None:
    with pytest.raises(InputError, match="max_batch"):
        TransformersEngine(MODEL, 0, max_batch=0)
    with pytest.raises(InputError, match="logits_to_keep"):
        TransformersEngine(nn.Linear(2, 2), 0)
    with pytest.raises(InputError, match="from_position"):
        TransformersEngine(MODEL, 0).score(ids(3), 3, 1.0)


MODEL = llama()
EXPECTED = naive(MODEL, requests(), STOP)


def MODEL_EVAL(tokens: torch.Tensor):
    with torch.no_grad():
        return MODEL.eval()(tokens)
