"""Sampling a token from logits: transformers' filters, and keyed uniforms instead of a shared random state.

Shapes: _B rows, _V vocabulary, _K draws a row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from apportion.engines.base import Key, Sampling


def uniforms(key: Key, m: int, count: int) -> np.ndarray:
    """[count] uniforms in [0, 1), float64: continuation m draws its token t with the t-th [ours].

    They come from a counter-based generator (Philox) keyed by `Key.stream`, so no order, batch split, rank
    count or retry changes them, and a longer budget only appends to them.
    """
    return np.random.Generator(np.random.Philox(key=key.stream(m))).random(count)


def filtered(logits_BV: Tensor, sampling: Sampling, seen_BV: Tensor | None = None) -> Tensor:
    """(B, V) float32 scores to sample from, −inf where a filter removed a token; at least one is left a row.

    Same rules and order as transformers' logits processors: repetition penalty (on tokens where the bool
    `seen_BV` holds), temperature, top-k (ties with the k-th are kept), top-p, min-p.
    """
    scores_BV = logits_BV.float()
    if seen_BV is not None:
        penalty = sampling.repetition_penalty
        punished_BV = torch.where(scores_BV < 0, scores_BV * penalty, scores_BV / penalty)
        scores_BV = torch.where(seen_BV, punished_BV, scores_BV)
    if sampling.temperature != 1:
        scores_BV = scores_BV / sampling.temperature
    if sampling.top_k:
        k = min(sampling.top_k, scores_BV.shape[1])
        scores_BV = scores_BV.masked_fill(scores_BV < scores_BV.topk(k).values[:, -1:], -torch.inf)
    if sampling.top_p < 1:
        ascending_BV, order_BV = scores_BV.sort()
        # What remains is the smallest set, from the top, whose mass exceeds top_p.
        tail_BV = ascending_BV.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        tail_BV[:, -1] = False
        scores_BV = scores_BV.masked_fill(tail_BV.scatter(1, order_BV, tail_BV), -torch.inf)
    if sampling.min_p:
        # p < min_p · p_max, compared as probabilities so that the rounding is transformers' own.
        p_BV = scores_BV.softmax(-1)
        scores_BV = scores_BV.masked_fill(p_BV < sampling.min_p * p_BV.amax(-1, keepdim=True), -torch.inf)
    return scores_BV


def draw(scores_BV: Tensor, uniform_BK: Tensor) -> Tensor:
    """(B, K) int64 tokens: each row's inverse distribution function, summed in float64, at each uniform.

    Token j is drawn where P(< j) ≤ u < P(≤ j), so one of probability 0 never is.

    Raises:
        FloatingPointError: a row with NaN or +inf, or with nothing left to draw.
    """
    weight_BV = (scores_BV - scores_BV.amax(-1, keepdim=True)).exp_()
    cdf_BV = weight_BV.cumsum(-1, dtype=torch.float64)
    total_B1 = cdf_BV[:, -1:]
    if not torch.isfinite(total_B1).all():
        raise FloatingPointError("the model's logits hold NaN or +inf, or no finite value: nothing can be sampled")
    # A float64 uniform is at most 1 − 2⁻⁵³, and that times the total still rounds to less than the total.
    return torch.searchsorted(cdf_BV, uniform_BK * total_B1, right=True)
