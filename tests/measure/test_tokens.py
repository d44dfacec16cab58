"""Log-probabilities and entropies at the sampling temperature (field faults 16 to 20).

Planted faults seen caught: temperature left out; log-probability divided by T; division before the upcast;
plain p·ln p (NaN); the whole tensor upcast at once.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from apportion.errors import InputError
from apportion.measure.tokens import token_logprobs_and_entropies as measure


def one(logits: list[float], token: int, temperature: float) -> tuple[float, float]:
    logprob, entropy = measure(torch.tensor([logits]), torch.tensor([token]), temperature)
    return float(logprob), float(entropy)


def test_temperature_scales_logits_and_not_log_probabilities() -> None:
    # ln p0 = −ln(1 + e^(−2/.5)) = −.01815; at T = 1 −.12693, which divided by T would be −.2539.
    logprob, entropy = one([2.0, 0.0], 0, 0.5)
    assert logprob == pytest.approx(-0.0181499, abs=1e-6)
    p = math.exp(-0.0181499)
    assert entropy == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-6)
    assert one([2.0, 0.0], 0, 1.0)[0] == pytest.approx(-0.126928, abs=1e-6)


def test_a_thousand_equal_tokens() -> None:
    logprob, entropy = measure(torch.full((1, 1000), 3.0, dtype=torch.bfloat16), torch.tensor([7]), 1.0)
    assert float(entropy) == pytest.approx(math.log(1000), abs=1e-5)
    assert float(logprob) == pytest.approx(-math.log(1000), abs=1e-5)


def test_probability_zero_adds_nothing() -> None:
    inf = math.inf
    assert one([0.0, -inf, -inf], 0, 0.7) == (0.0, 0.0)
    assert one([0.0, -inf, 0.0], 2, 1.0) == pytest.approx((-math.log(2), math.log(2)), abs=1e-6)
    assert one([0.0, -inf, 0.0], 1, 1.0)[0] == -inf


def test_bfloat16_logits_keep_their_order() -> None:
    # Seven equal tokens and a rarer one, whose logit raises H. Rounded to bfloat16 both entropies are one number.
    rows = torch.zeros((2, 8), dtype=torch.bfloat16)
    rows[0, 0], rows[1, 0] = -1.2890625, -1.2578125
    for temperature in (1.0, 0.7):
        entropy = measure(rows, torch.zeros(2, dtype=torch.int64), temperature)[1]
        p = (rows.double() / temperature).softmax(1)
        slow = -(p * p.log()).sum(1)
        assert slow[0] < slow[1] and slow.bfloat16().unique().numel() == 1
        assert entropy.dtype == torch.float32 and entropy[0] < entropy[1]
        assert entropy.tolist() == pytest.approx(slow.tolist(), abs=1e-6)


@given(
    seed=st.integers(0, 999),
    n=st.integers(0, 9),
    chunk=st.integers(1, 12),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_equals_a_slow_loop_in_any_chunks(seed: int, n: int, chunk: int, temperature: float) -> None:
    fill = torch.Generator().manual_seed(seed)
    logits, ids = 4 * torch.randn((n, 13), generator=fill), torch.randint(13, (n,), generator=fill)
    kept = logits.clone()
    logprob, entropy = measure(logits, ids, temperature, chunk)
    assert torch.equal(logits, kept)
    assert logprob.shape == entropy.shape == (n,)
    for row, token, lp, h in zip(logits.tolist(), ids.tolist(), logprob, entropy, strict=True):
        weight = [math.exp(x / temperature) for x in row]
        p = [w / sum(weight) for w in weight]
        assert float(lp) == pytest.approx(math.log(p[token]), abs=2e-5)
        assert float(h) == pytest.approx(-sum(x * math.log(x) for x in p), abs=2e-5)


def test_entropy_is_never_negative() -> None:
    logits = 30 * torch.randn((500, 50), generator=torch.Generator().manual_seed(2))
    assert measure(logits, torch.zeros(500, dtype=torch.int64), 0.1)[1].min() >= 0


def test_nothing_wider_than_a_chunk_is_made() -> None:
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
                self.numel = max(self.numel, out.numel())
            return out

    logits = torch.randn((64, 300)).bfloat16().requires_grad_()
    with Largest() as seen:
        out = measure(logits, torch.zeros(64, dtype=torch.int64), 1.0, chunk=8)
    assert seen.numel == 8 * 300
    assert not any(t.requires_grad for t in out)


@pytest.mark.parametrize(
    ("logits", "ids", "temperature", "chunk", "field"),
    [
        (torch.zeros(3, 5), torch.zeros(4, dtype=torch.int64), 1.0, 1, "logits"),
        (torch.zeros(1, 3, 5), torch.zeros(3, dtype=torch.int64), 1.0, 1, "logits"),
        (torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64), 0.0, 1, "temperature"),
        (torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64), 1.0, 0, "chunk"),
    ],
)
def test_bad_input_is_named(logits, ids, temperature: float, chunk: int, field: str) -> None:
    with pytest.raises(InputError, match=field):
        measure(logits, ids, temperature, chunk)
