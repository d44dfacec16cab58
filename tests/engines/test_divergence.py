"""Grounding in the prompt equals three plain forwards a response; the model is left as it was.

Planted faults seen caught: KL(q ‖ p); the exponent's sign; blank and disturbed prompts swapped, or of another
request; columns or spans late by one; 0·ln 0; temperature left out; a chunk without its cache, or that runs the
opening again; either limit ignored, two of three rows not counted; lengths not checked; evaluation mode kept over a
yield; float32 readings.
"""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import VOCABULARY, ids, llama, mistral, qwen2
from torch import Tensor, nn
from transformers import MistralConfig

from apportion.engines.base import DivergenceRequest, Key
from apportion.engines.divergence import divergences, kl
from apportion.engines.scoring import Scorer
from apportion.errors import InputError
from apportion.tasks import load_policy


def changed(prompt: tuple[int, ...], *at: int) -> tuple[int, ...]:
    return tuple(0 if i in at else token for i, token in enumerate(prompt))


def asked() -> list[DivergenceRequest]:
    """Prompts and responses of several lengths, one of a single token and one of none."""
    out = []
    for p, length in ((6, 17), (3, 9), (6, 4), (1, 12), (9, 1), (5, 0)):
        sequence = ids(p + length, seed=p + length)
        prompt = sequence[:p]
        blank, disturbed = changed(prompt, 0, 1, 2), changed(prompt, p // 2)
        out.append(DivergenceRequest(Key("run", 2, f"{p}/{length}", 1, 0), sequence, p, blank, disturbed))
    return out


def read(scorer: Scorer, requests: list[DivergenceRequest]) -> dict[Key, Tensor]:
    out: dict[Key, Tensor] = {}
    for reading in divergences(scorer, requests):
        assert reading.key not in out
        assert reading.values.dtype == torch.float64 and not reading.values.requires_grad
        out[reading.key] = reading.values
    assert out.keys() == {request.key for request in requests}
    return out


def naive(model: nn.Module, request: DivergenceRequest, temperature: float = 1.0) -> list[float]:
    """The reference: three whole sequences, and the rule in plain loops over plain numbers."""

    def distributions(prompt: tuple[int, ...]) -> list[list[float]]:
        sequence = [*prompt, *request.ids[request.prompt :]]
        with torch.no_grad():
            logits = model(torch.tensor([sequence])).logits[0].double().tolist()
        out = []
        for row in logits:
            top = max(row)
            weights = [math.exp((z - top) / temperature) for z in row]
            out.append([w / math.fsum(weights) for w in weights])
        return out

    def divergence(p: list[float], q: list[float]) -> float:
        return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)

    was_training = model.training
    model.eval()
    prompts = (request.ids[: request.prompt], request.blank_ids, request.disturbed_ids)
    intact, blank, disturbed = map(distributions, prompts)
    model.train(was_training)
    out = []
    for i in range(request.prompt, len(request.ids)):
        p, q, d = intact[i - 1], blank[i - 1], disturbed[i - 1]
        out.append(divergence(p, q) * math.exp(-divergence(p, d)))
    return out


def test_kl_by_hand() -> None:
    """.5·ln(.5/.9) + .5·ln(.5/.1) = .5108; the other way .9·ln 1.8 + .1·ln .2 = .3681; ln 2 where p is sure."""
    even, skewed, sure = (torch.tensor(p).log() for p in ([0.5, 0.5], [0.9, 0.1], [1.0, 0.0]))
    assert float(kl(even, skewed)) == pytest.approx(0.5108, abs=5e-5)
    assert float(kl(skewed, even)) == pytest.approx(0.3681, abs=5e-5)
    assert float(kl(sure, even)) == pytest.approx(math.log(2))
    assert float(kl(sure, sure)) == 0
    assert kl(torch.stack([even, skewed]), torch.stack([skewed, even])).tolist() == pytest.approx(
        [0.5108, 0.3681], abs=5e-5
    )


class FirstAndLast(nn.Module):
    """logits_i is the row of the first token plus that of token i."""

    def __init__(self, *rows: tuple[float, float]) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(torch.tensor(rows, dtype=torch.float32))
        self.config = MistralConfig(vocab_size=2, sliding_window=1)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def forward(self, input_ids, logits_to_keep=0, use_cache=False, past_key_values=None) -> SimpleNamespace:
        logits = self.embed(input_ids)[:, :1] + self.embed(input_ids)
        return SimpleNamespace(logits=logits[:, -logits_to_keep:], past_key_values=None)


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        # Gap 0: KL((.5, .5) ‖ (.9, .1)) = −ln .6 and KL((.5, .5) ‖ (.2, .8)) = −ln .8, so .5108·.8.
        # Gap −ln 9: KL((.1, .9) ‖ (.5, .5)) = .3681 and KL((.1, .9) ‖ (1/37, 36/37)) = .0607.
        (1.0, [0.4087, 0.3464, 0.4087]),
        # Half the gaps: .1438·√(8/9); KL((.25, .75) ‖ (.5, .5)) = .1308, KL((.25, .75) ‖ (1/7, 6/7)) = .0398.
        (2.0, [0.1356, 0.1257, 0.1356]),
    ],
)
def test_by_hand(temperature: float, expected: list[float]) -> None:
    """The first token adds a gap between the two logits: 0 in the prompt, ln 9 in the blank one, −ln 4 disturbed.

    The tokens that predict the response add 0 (the prompt's last), −ln 9 and 0 (the response's first two).
    """
    model = FirstAndLast((0, 0), (0, math.log(9)), (0, 0), (math.log(9), 0), (0, math.log(4)))
    request = DivergenceRequest(Key("r", 0, "p", 0, 0), (2, 2, 1, 0, 1), 2, (3, 2), (4, 2))
    got = read(Scorer(model, 0, temperature=temperature), [request])[request.key]
    assert got.tolist() == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("max_logits", [1, 7 * VOCABULARY, 40 * VOCABULARY, 2**26])
@pytest.mark.parametrize("make", [llama, qwen2, lambda: mistral(8)], ids=["llama", "qwen2", "window"])
def test_equals_three_forwards_a_response(make, max_logits: int, temperature: float) -> None:
    model, requests = make(), asked()
    got = read(Scorer(model, 0, temperature=temperature, max_logits=max_logits), requests)
    for request in requests:
        expected = naive(model, request, temperature)
        assert got[request.key].tolist() == pytest.approx(expected, abs=1e-5, rel=1e-5)
    assert max(float(values.max()) for values in got.values() if len(values)) > 0.1


def test_the_embedded_policy() -> None:
    """Blanked operands matter to the steps that use them; a copy of the prompt is no loss at all."""
    model, tokenizer = load_policy()
    prompt, response = (tuple(tokenizer(text)["input_ids"]) for text in ("47+8*7=?\n", "47+8=55\n\n55*7=85\n\n#85"))
    blank, disturbed = changed(prompt, 0, 1), changed(prompt, 5)
    key = Key("r", 0, "p", 0, 0)
    for request in (
        DivergenceRequest(key, prompt + response, len(prompt), blank, prompt),
        DivergenceRequest(key, prompt + response, len(prompt), blank, disturbed),
    ):
        got = read(Scorer(model, 0), [request])[key].tolist()
        assert got == pytest.approx(naive(model, request), abs=1e-5, rel=1e-5)
    assert max(got[:2]) > 1, "the first step copies what is blanked"
    same = DivergenceRequest(key, prompt + response, len(prompt), prompt, disturbed)
    assert read(Scorer(model, 0), [same])[key].abs().max() < 1e-9


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 99),
    max_tokens=st.sampled_from([1, 100, 16_384]),
    max_logits=st.sampled_from([1, 50 * VOCABULARY, 2**26]),
    pad=st.integers(0, VOCABULARY - 1),
    parts=st.integers(1, 3),
)
def test_order_batches_and_padding_change_nothing(
    seed: int, max_tokens: int, max_logits: int, pad: int, parts: int
) -> None:
    requests = asked()
    random.Random(seed).shuffle(requests)
    scorer = Scorer(MODEL, pad, max_tokens=max_tokens, max_logits=max_logits)
    got = {key: values for part in range(parts) for key, values in read(scorer, requests[part::parts]).items()}
    assert got.keys() == EXPECTED.keys()
    for key, values in EXPECTED.items():
        torch.testing.assert_close(got[key], values, atol=1e-6, rtol=1e-5)


def test_a_vocabulary_that_is_masked_adds_nothing() -> None:
    model = llama()
    model.lm_head.register_forward_hook(lambda _, args, out: out.index_fill(-1, torch.tensor([0, 1, 2]), -torch.inf))
    got = read(Scorer(model, 0), asked())
    for request in asked():
        assert got[request.key].tolist() == pytest.approx(naive(model, request), abs=1e-5, rel=1e-5)


@pytest.mark.parametrize(("rows_of_logits", "most_rows"), [(12, 3), (80, 6)])
def test_limits_of_a_forward_and_its_count(rows_of_logits: int, most_rows: int) -> None:
    model = llama()
    shapes, logits = [], []
    model.register_forward_pre_hook(lambda _, args, kw: shapes.append(kw["input_ids"].shape), with_kwargs=True)
    model.lm_head.register_forward_hook(lambda _, args, out: logits.append(out.numel()))
    scorer = Scorer(model, 0, max_tokens=100, max_logits=rows_of_logits * VOCABULARY)
    read(scorer, asked())
    assert max(rows * width for rows, width in shapes) <= 100
    assert max(logits) <= rows_of_logits * VOCABULARY
    assert max(rows for rows, _ in shapes) == most_rows, "three a request"
    cost = scorer.cost
    assert (cost.forwards, cost.forward_tokens) == (len(shapes), sum(rows * width for rows, width in shapes))
    # On from a cache: no token is computed twice but for padding.
    tokens = 3 * sum(len(request.ids) - 1 for request in asked() if len(request.ids) > request.prompt)
    assert tokens <= cost.forward_tokens < 1.5 * tokens
    assert (cost.backwards, cost.generated) == (0, 0)


def test_only_the_response_reaches_the_vocabulary() -> None:
    model, logits = llama(), []
    model.lm_head.register_forward_hook(lambda _, args, out: logits.append(out.shape[:2]))
    read(Scorer(model, 0), asked()[:1])
    assert logits == [(3, 17)]


def test_leaves_no_trace() -> None:
    model = llama(attention_dropout=0.5).train()
    model.model.layers[1].eval()
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    inside, got = set(), {}
    model.lm_head.register_forward_pre_hook(lambda *_: inside.add((torch.is_grad_enabled(), model.training)))
    for reading in divergences(Scorer(model, 0, max_tokens=1), asked()):
        got[reading.key] = reading.values
        assert [m.training for m in model.modules()] == modes, "between readings the model is the host's"
        assert torch.is_grad_enabled()
    assert inside == {(False, False)}
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    for request in asked():
        assert got[request.key].tolist() == pytest.approx(naive(llama(), request), abs=1e-5, rel=1e-5)


def test_nothing_asked_nothing_run() -> None:
    scorer = Scorer(MODEL, 0)
    assert read(scorer, []) == {}
    assert [values.tolist() for values in read(scorer, asked()[-1:]).values()] == [[]]
    assert scorer.cost.forwards == 0


@pytest.mark.parametrize(
    ("prompt", "blank", "disturbed", "field"),
    [(3, 2, 3, "blank_ids"), (3, 3, 4, "disturbed_ids"), (0, 0, 0, "prompt"), (9, 9, 9, "prompt")],
)
def test_requests_that_cannot_be_served(prompt: int, blank: int, disturbed: int, field: str) -> None:
    scorer = Scorer(MODEL, 0)
    bad = DivergenceRequest(Key("r", 0, "p", 0, 0), ids(8), prompt, ids(blank), ids(disturbed))
    with pytest.raises(InputError, match=field):
        list(divergences(scorer, [*asked(), bad]))
    assert scorer.cost.forwards == 0


MODEL = llama()
EXPECTED = read(Scorer(MODEL, 0), asked())
