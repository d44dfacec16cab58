"""OAR's sensitivities equal one full forward a token, and finite differences; the model is left as it was.

Planted faults seen caught: the representation a position late or early, at the answer's end or one short; targets a
token off; the replaced token off by one, or dropped; a cache one too long, sliced in a sliding window, never shared;
too many rows a suffix; KL(q ‖ p);
abs missing or inside the sum, the clamp missing or an abs in its place; noise on the prompt, on the answer,
shifted, of variance for deviation, without seed or key, from the global stream; the clean row read with noise or with a
graph; gradients of parameters computed or stored, all parameters thawed, frozen or in evaluation mode over a yield;
temperature left out; probabilities averaged for logits, a sum for φ's mean; columns or spans of another row; either
limit ignored, the rows of a suffix unbounded; the backward not counted; −inf − −inf; requests not checked.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from influence import (
    JOINT,
    LAST,
    MEAN,
    REPRESENTATIONS,
    Averages,
    ask,
    asked,
    exact,
    key_less,
    naive_gradient,
    naive_perturbed,
    one,
    read,
)
from policies import VOCABULARY, ids, llama, mistral, qwen2
from torch import Tensor, nn

from apportion.engines.scoring import Scorer
from apportion.engines.sensitivity import sensitivities
from apportion.errors import InputError
from apportion.tasks import load_policy

PAD, LN9 = 2, math.log(9)


@pytest.mark.parametrize(
    ("representation", "answer", "pad_logit", "temperature", "expected"),
    [
        # Before: all logits 0. Prompt and two reasoning tokens average to (ln 9, 0): KL((.5, .5) ‖ (.9, .1)).
        (LAST, (0,), 3 * LN9, 1.0, 0.5108),
        # ln 9 / 2 = ln 3: KL((.5, .5) ‖ (.75, .25)) = .5·ln(.5/.75) + .5·ln 2.
        (LAST, (0, 1), 3 * LN9, 2.0, 0.1438),
        # Columns 2 and 3 hold x/3 and x/4, 7x/24 on average: again ln 9. Averaged probabilities would say .4954.
        (MEAN, (0, 1), 24 / 7 * LN9, 1.0, 0.5108),
        # ln .5 − (ln .9 + ln(1/(1 + 9^.75)))/2.
        (JOINT, (0, 1), 3 * LN9, 1.0, 0.2715),
        # ln .5 − ln .9 = −.5878: the answer became likelier.
        (JOINT, (0,), 3 * LN9, 1.0, 0.0),
    ],
)
def test_perturbation_by_hand(
    representation: str, answer: tuple[int, ...], pad_logit: float, temperature: float, expected: float
) -> None:
    model = Averages((0, 0), (0, 0), (pad_logit, 0))
    request = ask((1, 1, 1, *answer), 1, 2, (2, 2 + len(answer)), "perturb", representation)
    assert one(model, request, PAD, temperature=temperature) == pytest.approx([expected] * 2, abs=5e-5)


def test_gradient_by_hand() -> None:
    """Rows with gaps of 2, 1 and −3 behind a zero row: p = (.5, .5), and each embedding has a weight of 1/4.

    φ = ln p₀, so |∂φ/∂e · e| = (1 − p₀)·|gap|/4 = .25, .125, .375. KL: ∂J/∂z = q − p = (δ, −δ), so I ∝ |gap|.
    """
    model = Averages((0, 0), (1, -1), (1, 0), (-1, 2))
    joint = ask((0, 1, 2, 3, 0), 1, 3, (3, 4), "gradient", JOINT)
    assert one(model, joint) == pytest.approx([0.25, 0.125, 0.375], rel=2e-3)
    for representation in (LAST, MEAN):
        values = one(model, ask((0, 1, 2, 3, 0), 1, 3, (3, 4), "gradient", representation))
        assert values[0] > 0
        assert values == pytest.approx([values[1] * gap for gap in (2, 1, 3)], rel=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    "make", [llama, qwen2, lambda: mistral(8), lambda: mistral(64)], ids=["llama", "qwen2", "window", "wide window"]
)
def test_perturbation_equals_a_forward_a_token(make, temperature: float) -> None:
    model, requests = make(), asked("perturb")
    got = read(Scorer(model, 2, temperature=temperature), requests)
    for request in requests:
        expected = naive_perturbed(model, request, 2, temperature)
        assert got[request.key].tolist() == pytest.approx(expected, abs=1e-5, rel=1e-5)
    assert max(float(values.max()) for values in got.values() if len(values)) > 0.1


@settings(max_examples=20, deadline=None)
@given(
    prompt=st.integers(1, 6),
    reasoning=st.integers(0, 40),
    cue=st.integers(0, 3),
    answer=st.integers(1, 4),
    rest=st.integers(0, 3),
    representation=st.sampled_from(REPRESENTATIONS),
    pad=st.integers(0, VOCABULARY - 1),
    limit=st.sampled_from([1, 100, 16_384]),
)
def test_perturbation_equals_a_forward_a_token_anywhere(
    prompt: int, reasoning: int, cue: int, answer: int, rest: int, representation: str, pad: int, limit: int
) -> None:
    start = reasoning + cue
    sequence = ids(prompt + start + answer + rest, seed=reasoning)
    request = ask(sequence, prompt, reasoning, (start, start + answer), "perturb", representation)
    expected = naive_perturbed(MODEL, request, pad)
    assert one(MODEL, request, pad, max_tokens=limit) == pytest.approx(expected, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradient_equals_finite_differences(temperature: float) -> None:
    model, requests = exact(llama()), asked("gradient")
    got = read(Scorer(model, 0, temperature=temperature), requests)
    for request in requests:
        expected = naive_gradient(model, request, temperature)
        assert got[request.key].tolist() == pytest.approx(expected, abs=1e-5 * max(expected, default=0), rel=1e-4)


@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_the_embedded_policy(representation: str) -> None:
    model, tokenizer = load_policy()
    parts = [
        tokenizer(text)["input_ids"] for text in ("47+8*7-9+5=?\n", "47+8=55\n\n55*7=85\n\n85-9=76\n\n", "#", "76")
    ]
    sequence, (p, r, cue, answer) = tuple(token for part in parts for token in part), map(len, parts)
    where = (sequence, p, r, (r + cue, r + cue + answer))
    perturb = ask(*where, "perturb", representation)
    assert one(model, perturb) == pytest.approx(naive_perturbed(model, perturb), abs=1e-5, rel=1e-5)
    gradient = ask(*where, "gradient", representation)
    expected = naive_gradient(exact(model), gradient)
    assert one(exact(model), gradient) == pytest.approx(expected, abs=1e-5 * max(expected))
    assert one(model, gradient) == pytest.approx(expected, abs=1e-3 * max(expected)), "float32 at noise 1e-3"


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 99),
    max_tokens=st.sampled_from([1, 60, 150, 16_384]),
    max_logits=st.sampled_from([1, 10 * VOCABULARY, 2**26]),
    parts=st.integers(1, 3),
)
def test_order_and_batches_change_nothing(seed: int, max_tokens: int, max_logits: int, parts: int) -> None:
    requests = asked("gradient") + asked("perturb", (MEAN,))
    requests = [ask(*key_less(r), name=f"{r.estimator}{r.key.prompt}") for r in requests]
    expected = read(Scorer(DOUBLE, 0), requests)
    random.Random(seed).shuffle(requests)
    scorer = Scorer(DOUBLE, 0, max_tokens=max_tokens, max_logits=max_logits)
    got = {key: values for part in range(parts) for key, values in read(scorer, requests[part::parts]).items()}
    assert got.keys() == expected.keys()
    for key, values in expected.items():
        torch.testing.assert_close(got[key], values, atol=1e-12, rtol=1e-6)


def test_padding_is_not_read_by_the_gradient() -> None:
    requests = asked("gradient")
    first, second = (read(Scorer(DOUBLE, pad), requests) for pad in (0, 9))
    for key in first:
        torch.testing.assert_close(first[key], second[key], atol=0, rtol=1e-9)


def test_noise_is_on_the_reasoning_tokens_and_drawn_from_seed_and_key() -> None:
    model, seen = llama(), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["inputs_embeds"].detach()) if "inputs_embeds" in kwargs else None,
        with_kwargs=True,
    )
    sequence = ids(90, seed=4)
    where = (sequence, 6, 70, (72, 74), "gradient", MEAN)
    values = [one(model, ask(*where, **change)) for change in ({}, {}, {"seed": 1}, {"name": "q"}, {"noise": 1e-2})]
    assert values[0] == values[1]
    assert values[2] != values[0] != values[3]
    for inputs, scale in zip(seen, (1e-3,) * 4 + (1e-2,), strict=True):
        noise = inputs[0] - model.get_input_embeddings().weight.detach()[list(sequence[: inputs.shape[1]])]
        assert noise[:6].abs().max() == 0 == noise[76:].abs().max()
        # 2,240 draws: a standard deviation is off by 1.5 % of itself, a mean by 2 %.
        assert noise[6:76].std() == pytest.approx(scale, rel=0.08)
        assert abs(float(noise[6:76].mean())) < 0.1 * scale
    state = torch.get_rng_state()
    one(model, ask(*where))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("estimator", ["perturb", "gradient"])
def test_a_vocabulary_that_is_masked_adds_nothing(estimator: str) -> None:
    model = exact(llama())
    model.lm_head.register_forward_hook(lambda _, args, out: out.index_fill(-1, torch.tensor([0, 1, 2]), -torch.inf))
    requests = asked(estimator)
    got = read(Scorer(model, 0), requests)
    for request in requests:
        assert torch.isfinite(got[request.key]).all()
        expected = naive_perturbed(model, request) if estimator == "perturb" else naive_gradient(model, request)
        assert got[request.key].tolist() == pytest.approx(expected, abs=1e-5 * max(expected, default=0), rel=1e-4)
    ruled_out = (*ids(12), 1)
    values = one(model, ask(ruled_out, 4, 6, (8, 9), estimator, JOINT))
    assert all(math.isfinite(value) for value in values)


def trained(model: nn.Module, measure: bool) -> list[Tensor]:
    """Two optimiser steps, with measurements before and after a backward pass and in the middle of one."""
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-2)
    scorer, requests = Scorer(model, 0), asked("gradient") + asked("perturb")
    batch = torch.tensor([ids(30, seed=1)])

    def measured() -> None:
        if measure:
            grads = [p.grad for p in model.parameters()]
            values = [None if g is None else g.clone() for g in grads]
            for _ in sensitivities(scorer, requests):
                assert model.training and torch.is_grad_enabled()
            for p, g, v in zip(model.parameters(), grads, values, strict=True):
                assert p.grad is g and (g is None or torch.equal(g, v))

    for _ in range(2):
        measured()
        loss = model(batch, labels=batch).loss
        measured()
        loss.backward()
        measured()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [p.detach() for p in model.parameters()]


def tuned() -> nn.Module:
    model = llama().train()
    model.lm_head.weight.requires_grad_(False)
    return model


def lora() -> nn.Module:
    peft = pytest.importorskip("peft", reason="needs apportion[peft]")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "embed_tokens"], r=4, init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(llama(), config).train()
    model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("make", [tuned, lora])
def test_training_goes_on_as_if_nothing_was_measured(make) -> None:
    plain, measured = make(), make()
    wanted = [p.requires_grad for p in measured.parameters()]
    for a, b in zip(trained(plain, False), trained(measured, True), strict=True):
        assert torch.equal(a, b)
    assert [p.requires_grad for p in measured.parameters()] == wanted


def test_no_gradient_of_a_parameter_is_computed() -> None:
    model = llama()
    inside = set()

    def look(*_: object) -> None:
        inside.add((torch.is_grad_enabled(), any(p.requires_grad for p in model.parameters())))

    def never(grad: Tensor) -> None:
        raise AssertionError("a parameter's gradient was computed")

    model.lm_head.register_forward_pre_hook(look)
    for parameter in model.parameters():
        parameter.register_hook(never)
    read(Scorer(model, 0), asked("gradient", (MEAN,)))
    # The clean forward keeps no graph; the noisy one keeps none for the parameters.
    assert inside == {(False, False), (True, False)}
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_lora_is_measured_with_its_adapter() -> None:
    model, requests = exact(lora()), asked("gradient", (JOINT,)) + asked("perturb", (LAST,))
    requests = [ask(*key_less(r), name=r.estimator + r.key.prompt) for r in requests]
    got = read(Scorer(model, 0), requests)
    with model.disable_adapter():
        base = read(Scorer(model, 0), requests)
    model.eval()
    for request in requests:
        if request.reasoning:
            assert not torch.allclose(got[request.key], base[request.key], rtol=1e-2, atol=0)
        if request.estimator == "perturb":
            assert got[request.key].tolist() == pytest.approx(naive_perturbed(model, request), rel=1e-9, abs=1e-9)


def test_leaves_no_trace() -> None:
    model = llama(attention_dropout=0.5).train()
    model.model.layers[1].eval()
    model.gradient_checkpointing_enable()
    modes = [m.training for m in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    requests = asked("perturb", (LAST,)) + asked("gradient", (MEAN,))
    got = {}
    for reading in sensitivities(Scorer(model, 0), requests):
        got[reading.key] = reading.values
        assert [m.training for m in model.modules()] == modes, "between readings the model is the host's"
        assert torch.is_grad_enabled() and all(p.requires_grad for p in model.parameters())
    next(sensitivities(Scorer(model, 0), requests[-4:]))  # and a caller that stops early
    assert [m.training for m in model.modules()] == modes
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    plain = read(Scorer(llama(), 0), requests)
    assert all(torch.equal(got[key], values) for key, values in plain.items()), "no dropout while measuring"
    with torch.no_grad():
        again = read(Scorer(model, 0), requests)
    assert all(torch.equal(got[key], values) for key, values in again.items())


def test_everything_is_put_back_after_an_error() -> None:
    model = llama().train()

    def fail(*_: object) -> None:
        raise FloatingPointError

    model.lm_head.register_forward_hook(fail)
    for estimator in ("perturb", "gradient"):
        with pytest.raises(FloatingPointError):
            read(Scorer(model, 0), asked(estimator))
        assert model.training and torch.is_grad_enabled() and all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("estimator", ["perturb", "gradient"])
def test_limits_of_a_forward_and_its_count(estimator: str) -> None:
    model = llama()
    shapes, logits = [], []

    def look(_: nn.Module, args: object, given: dict[str, Tensor]) -> None:
        ids_BW, embeds_BWH = given.get("input_ids"), given.get("inputs_embeds")
        shapes.append(tuple(ids_BW.shape if embeds_BWH is None else embeds_BWH.shape[:2]))

    model.model.register_forward_pre_hook(look, with_kwargs=True)
    model.lm_head.register_forward_hook(lambda _, args, out: logits.append(out.numel()))
    requests = asked(estimator)
    scorer = Scorer(model, 0, max_tokens=70, max_logits=9 * VOCABULARY)
    read(scorer, requests)
    assert max(rows * width for rows, width in shapes) <= 70
    assert max(logits) <= 9 * VOCABULARY
    assert max(rows for rows, _ in shapes) > 1, "batched"
    cost = scorer.cost
    assert (cost.forwards, cost.forward_tokens) == (len(shapes), sum(rows * width for rows, width in shapes))
    if estimator == "perturb":
        assert (cost.backwards, cost.backward_tokens) == (0, 0)
    else:
        assert cost.backwards > 0 and cost.backward_tokens < cost.forward_tokens


def test_a_gradient_costs_two_forwards_and_a_backward_a_batch() -> None:
    for representation, forwards in ((LAST, 2), (MEAN, 2), (JOINT, 1)):
        scorer = Scorer(llama(), 0)
        requests = asked("gradient", (representation,))[:3]
        read(scorer, requests)
        # The longest: 8 prompt tokens and 23 before the answer; what follows is fed where it predicts more of it.
        tokens = 3 * 31
        assert vars(scorer.cost) == {
            "generated": 0, "forwards": forwards, "forward_tokens": forwards * tokens,
            "backwards": 1, "backward_tokens": tokens,
        }  # fmt: skip


def test_perturbation_runs_only_what_a_replacement_changes() -> None:
    scorer, reasoning = Scorer(llama(), 0), 120
    request = ask(ids(150), 20, reasoning, (124, 126), "perturb", LAST)
    read(scorer, [request])
    whole = 20 + 124
    at_least = whole + sum(whole - 20 - t for t in range(reasoning))
    assert at_least <= scorer.cost.forward_tokens < 1.15 * at_least < 0.7 * reasoning * whole
    # The whole, and 16 suffixes at a time.
    assert scorer.cost.forwards == 1 + math.ceil(reasoning / 16)


def test_rows_of_a_long_suffix_grow_with_it() -> None:
    scorer = Scorer(llama(), 0)
    read(scorer, [ask(ids(246), 2, 238, (240, 242), "perturb", LAST)])
    starts, left = [], 242 - 2
    # An eighth of what is left, at least 16 and no more than the reasoning has: 30, 26, 23, 20, 17, then 16 at a time.
    while left > 2:
        rows = min(max(left // 8, 16), left - 2)
        starts, left = [*starts, rows * left], left - rows
    assert scorer.cost.forward_tokens == 242 + sum(starts) and scorer.cost.forwards == 1 + len(starts)


def test_nothing_asked_nothing_run() -> None:
    scorer = Scorer(llama(), 0)
    assert read(scorer, []) == {}
    for estimator in ("perturb", "gradient"):
        assert one(scorer.model, ask(ids(9), 4, 0, (3, 5), estimator, MEAN)) == []
        read(scorer, [ask(ids(9), 4, 0, (3, 5), estimator, MEAN)])
    assert scorer.cost.forwards == 0


def test_bfloat16_runs() -> None:
    model = llama().to(torch.bfloat16)
    requests = asked("perturb", (LAST,)) + asked("gradient", (MEAN,))
    assert all(torch.isfinite(values).all() for values in read(Scorer(model, 0), requests).values())


@pytest.mark.parametrize(
    ("prompt", "reasoning", "answer", "noise", "field"),
    [
        (0, 2, (3, 4), 1e-3, "request"),
        (2, 4, (3, 4), 1e-3, "request"),
        (2, 2, (3, 3), 1e-3, "request"),
        (2, 2, (3, 9), 1e-3, "request"),
        (2, -1, (3, 4), 1e-3, "request"),
        (2, 2, (3, 4), 0.0, "noise"),
    ],
)
def test_requests_that_cannot_be_served(prompt: int, reasoning: int, answer, noise: float, field: str) -> None:
    scorer = Scorer(MODEL, 0)
    bad = ask(ids(10), prompt, reasoning, answer, "gradient", LAST, noise)
    with pytest.raises(InputError, match=field):
        list(sensitivities(scorer, [*asked("perturb"), bad]))
    assert scorer.cost.forwards == 0


MODEL = llama().eval()
DOUBLE = exact(llama())
