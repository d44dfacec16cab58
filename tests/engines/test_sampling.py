"""Filters equal transformers' own, and a draw inverts the distribution function.

Planted faults seen caught: top-p cut at `<` instead of `<=`; top-k dropping ties; penalty dividing negative
logits; draw with right=False; cumulative sum in float32; a stream without m or without the sample's number.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policies import processors

from apportion.engines.base import Key, Sampling
from apportion.engines.sampling import draw, filtered, uniforms
from apportion.errors import InputError

KEY = Key("run", 3, "p", 1, 20)


def logits(rows: int, vocabulary: int, seed: int, coarse: bool) -> torch.Tensor:
    out = 3 * torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(seed))
    # Halves tie, also at the edge of top-k.
    return (out * 2).round() / 2 if coarse else out


@given(
    seed=st.integers(0, 2**16),
    coarse=st.booleans(),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    top_p=st.sampled_from([1e-6, 0.3, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    penalty=st.sampled_from([1.0, 1.3, 0.5]),
)
def test_filters_equal_transformers(
    seed: int, coarse: bool, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    sampling = Sampling((0,), temperature, top_k, top_p, min_p, penalty)
    raw = logits(4, 17, seed, coarse)
    before = torch.randint(17, (4, 6), generator=torch.Generator().manual_seed(seed))
    seen = torch.zeros((4, 17), dtype=torch.bool).scatter_(1, before, True)
    kept = raw.clone()
    got = filtered(raw, sampling, seen if penalty != 1 else None)
    assert torch.equal(got, processors(sampling)(before, raw.clone()))
    assert torch.isfinite(got).any(1).all()
    assert torch.equal(raw, kept)


def test_filters_by_hand() -> None:
    # p = .5, .25, .125, .125: the smallest set with mass > .6 is the first two; min-p .3 cuts below .15.
    raw = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    assert torch.isfinite(filtered(raw, Sampling((), top_p=0.6))).tolist() == [[True, True, False, False]]
    assert torch.isfinite(filtered(raw, Sampling((), min_p=0.3))).tolist() == [[True, True, False, False]]
    # A tail of exactly 1 − top_p goes.
    assert torch.isfinite(filtered(torch.zeros((1, 2)), Sampling((), top_p=0.5))).sum() == 1
    # The third ties with the fourth, so top-3 keeps both.
    assert torch.isfinite(filtered(raw, Sampling((), top_k=3))).all()


def test_upcast_before_the_temperature() -> None:
    raw = torch.tensor([[1.0, 1.0078125]], dtype=torch.bfloat16)
    got = filtered(raw, Sampling((), temperature=0.7))
    assert got.dtype == torch.float32
    assert got[0, 1] - got[0, 0] == pytest.approx(0.0078125 / 0.7, rel=1e-4)


@given(seed=st.integers(0, 2**16), temperature=st.sampled_from([0.05, 1.0]))
def test_draw_equals_a_slow_loop(seed: int, temperature: float) -> None:
    raw = logits(3, 11, seed, coarse=False) / temperature
    raw[:, 4] = -torch.inf
    uniform = np.random.default_rng(seed).random((3, 5))
    got = draw(raw, torch.from_numpy(uniform))
    for b in range(3):
        p = raw[b].double().softmax(0).tolist()
        for k in range(5):
            token, below = 0, p[0]
            while uniform[b, k] >= below:
                token += 1
                below += p[token]
            assert got[b, k] == token


def test_draw_never_takes_probability_zero_even_at_the_ends() -> None:
    raw = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]])
    ends = torch.tensor([[0.0, 1 - 2**-53]], dtype=torch.float64)
    assert draw(raw, ends).tolist() == [[1, 3]]
    # Totals of all sizes: u·total must not round up to the total, which lies past the last token.
    for width in range(1, 200):
        row = torch.cat([torch.linspace(-1, 0, width), torch.tensor([-torch.inf])])[None]
        assert draw(row, ends)[0, 1] == width - 1


def test_draw_counts_a_grid_of_uniforms_exactly() -> None:
    # n uniforms at (i + ½)/n fall into each token's interval n·p ± 1 times. A float32 sum would drift here.
    raw = torch.randn((1, 50_000), generator=torch.Generator().manual_seed(1))
    n = 1_000_000
    got = draw(raw, ((torch.arange(n, dtype=torch.float64) + 0.5) / n)[None])[0]
    share = raw[0].double().softmax(0) * n
    assert (torch.bincount(got, minlength=50_000) - share).abs().max() <= 1.01


@pytest.mark.parametrize("bad", [[torch.nan, 0.0], [torch.inf, 0.0], [-torch.inf, -torch.inf]])
def test_draw_refuses_broken_logits(bad: list[float]) -> None:
    with pytest.raises(FloatingPointError, match="logits"):
        draw(torch.tensor([[0.0, 0.0], bad]), torch.full((2, 1), 0.5, dtype=torch.float64))


def test_uniforms_are_a_function_of_the_key() -> None:
    long = uniforms(KEY, 2, 100)
    assert np.array_equal(uniforms(KEY, 2, 10), long[:10])
    others = [uniforms(KEY, 3, 10), *(uniforms(k, 2, 10) for k in (
        Key("run2", 3, "p", 1, 20), Key("run", 4, "p", 1, 20), Key("run", 3, "q", 1, 20),
        Key("run", 3, "p", 2, 20), Key("run", 3, "p", 1, 21),
    ))]  # fmt: skip
    assert all(not np.isclose(other, long[:10]).any() for other in others)
    assert long.min() >= 0 and long.max() < 1
    # Frozen: a change of stream would change every recorded run.
    assert uniforms(Key("run", 0, "p", 0, 0), 0, 2).tolist() == [0.8127361245483082, 0.23583445909435152]


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 0.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
    ],
)
def test_sampling_names_the_setting(setting: dict[str, float]) -> None:
    with pytest.raises(InputError, match=f"sampling.{next(iter(setting))}"):
        Sampling((0,), **setting)  # type: ignore[arg-type]
