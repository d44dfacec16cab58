"""Log-probabilities of whole responses equal a forward of each sequence, whatever the limits.

Hand numbers come from a bigram model: after 3 comes 1 with 1/2, after 1 comes 2 with 2/3, after 2 comes 0 with 5/8.

Planted faults seen caught: a token scored where it stands; a shift by a token; T not applied; columns of the longest
prompt only; `max_logits` ignored by rows or by columns; Mamba that goes on from a cache, or forgets the opening;
prompts without tokens let in.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from bigram import bigram, gap, separate, sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import VOCABULARY, ids, llama, mistral, qwen2
from transformers import MambaConfig, MambaForCausalLM, PreTrainedModel

from apportion.engines.base import Key, Scoring
from apportion.engines.logprobs import logprobs
from apportion.engines.scoring import Scorer
from apportion.errors import InputError
from apportion.tasks import load_policy
from apportion.tasks.arithmetic import ArithmeticTask, generate


def scorings() -> list[Scoring]:
    """Prompts and responses of several lengths, one response empty, one of a token behind a long prompt."""
    sizes = {"a": (40, 6), "b": (27, 20), "c": (9, 1), "d": (12, 12), "e": (31, 30), "f": (27, 3)}
    return [Scoring(Key("r", 0, name, 0, 0), ids(n, n), prompt) for name, (n, prompt) in sizes.items()]


def slowly(model: PreTrainedModel, temperature: float = 1.0) -> dict[Key, list[float]]:
    return {r.key: [p for p, _ in separate(model, r.ids, r.prompt, temperature)] for r in scorings()}


def test_hand_numbers() -> None:
    def answer(prompt: int, temperature: float = 1.0) -> list[float]:
        request = Scoring(Key("r", 0, "p", 0, 0), (0, 3, 1, 2, 0), prompt)
        (reading,) = logprobs(Scorer(bigram(), 0, temperature=temperature), [request])
        return reading.values.exp().tolist()

    assert answer(2) == pytest.approx([1 / 2, 2 / 3, 5 / 8])
    assert answer(1) == pytest.approx([1 / 4, 1 / 2, 2 / 3, 5 / 8])
    assert answer(5) == []
    assert answer(2, temperature=0.5) == pytest.approx([9 / 12, 64 / 70, 25 / 28])  # weights squared


@pytest.mark.parametrize("make", [llama, qwen2, lambda: mistral(8), lambda: llama(attn_implementation="eager")])
@pytest.mark.parametrize("rows", [1, 7, 1_000])
def test_equals_a_forward_of_each_sequence(make, rows: int) -> None:
    model = make()
    expected = slowly(model, 0.7)
    scorer = Scorer(model, 0, temperature=0.7, max_logits=rows * VOCABULARY)
    with sizes(model) as seen:
        assert gap(list(logprobs(scorer, scorings())), expected) < 1e-5
    assert max(logits for _, _, logits in seen) <= scorer.max_logits


@settings(max_examples=8)
@given(
    seed=st.integers(0, 999),
    tokens=st.sampled_from([1, 50, 90, 16_384]),
    numbers=st.sampled_from([1, VOCABULARY, 3 * VOCABULARY + 1, 33 * VOCABULARY, 10_000]),
    pad=st.integers(0, VOCABULARY - 1),
    parts=st.integers(1, 3),
)
def test_order_batch_and_split_change_nothing(seed: int, tokens: int, numbers: int, pad: int, parts: int) -> None:
    asked = scorings()
    random.Random(seed).shuffle(asked)
    scorer = Scorer(MODEL, pad, max_tokens=tokens, max_logits=numbers)
    with sizes(MODEL) as seen:
        found = [reading for part in range(parts) for reading in logprobs(scorer, asked[part::parts])]
    assert gap(found, EXPECTED) < 1e-5
    for rows, columns, logits in seen:
        assert rows * columns <= tokens or rows == 1
        assert logits <= max(numbers, VOCABULARY)
    assert sum(rows * columns for rows, columns, _ in seen) == scorer.cost.forward_tokens


def test_no_token_is_computed_twice() -> None:
    asked = scorings()[:1]
    with sizes(MODEL) as seen:
        list(logprobs(Scorer(MODEL, 0, max_logits=10 * VOCABULARY), asked))
    # 34 tokens after a prompt of 6: columns 5 to 38 predict them, 10 at a time.
    assert seen == [(1, n, m * VOCABULARY) for n, m in ((15, 10), (10, 10), (10, 10), (4, 4))]
    with sizes(MODEL) as seen:
        list(logprobs(Scorer(MODEL, 0), asked))
    assert seen == [(1, 39, 34 * VOCABULARY)]


def test_linear_attention_reads_the_opening_again() -> None:
    torch.manual_seed(0)
    model = MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=8, num_hidden_layers=1, initializer_range=0.4)
    )
    scorer = Scorer(model, 0, max_logits=10 * VOCABULARY)
    assert not scorer.continues and not scorer.packs(1)
    expected = slowly(model)
    assert gap(list(logprobs(scorer, scorings())), expected) < 1e-5


def test_embedded_policy() -> None:
    model, tokenizer = load_policy()
    asked = []
    for i, problem in enumerate(generate(ArithmeticTask(), "test", 8)):
        prompt, response = (
            tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (problem.prompt, problem.solution)
        )
        asked.append(Scoring(Key("r", 0, str(i), 0, 0), prompt + response, len(prompt)))
    for reading in logprobs(Scorer(model, tokenizer.pad_token_id, max_logits=2_000), asked):
        request = asked[int(reading.key.prompt)]
        want = [logprob for logprob, _ in separate(model, request.ids, request.prompt)]
        assert gap([reading], {reading.key: want}) < 1e-5
        # The first operand of the first step is copied from the prompt: it is sure of it.
        assert reading.values[0] > math.log(0.9)


def test_bfloat16_is_upcast_before_the_softmax() -> None:
    model = bigram([[2.0, 0.0, 0.0, 0.0]] * 4).to(torch.bfloat16)
    (reading,) = logprobs(Scorer(model, 0), [Scoring(Key("r", 0, "p", 0, 0), (1, 0, 2), 1)])
    low = math.log(math.exp(2) + 3)
    assert reading.values.tolist() == pytest.approx([2 - low, -low], abs=1e-6)


def test_leaves_no_trace() -> None:
    model = llama(attention_dropout=0.5).train()
    model.model.layers[1].eval()
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    found = []
    for reading in logprobs(Scorer(model, 0, max_tokens=40, max_logits=100), scorings()):
        found.append(reading)
        assert [m.training for m in model.modules()] == modes and torch.is_grad_enabled()
    assert gap(found, EXPECTED) < 1e-5
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_prompts_that_predict_nothing() -> None:
    for prompt in (0, 5):
        with pytest.raises(InputError, match="prompt"):
            list(logprobs(Scorer(MODEL, 0), [*scorings(), Scoring(Key("r", 0, "p", 0, 0), ids(4), prompt)]))


MODEL = llama()
EXPECTED = slowly(MODEL)
