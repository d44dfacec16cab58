"""Log-probabilities and entropies from logits, a few rows at a time.

Shapes: _N tokens, _C tokens of a chunk, _V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apportion.errors import InputError


@torch.no_grad()
def token_logprobs_and_entropies(
    logits_NV: Tensor, ids_N: Tensor, temperature: float, chunk: int = 128
) -> tuple[Tensor, Tensor]:
    """[N] log-probability of each id and [N] entropy of its distribution, nats, float32, at `temperature`.

    Logits are upcast before they are divided: bfloat16 would tie entropies of 2.001 and 2.006. Besides the
    logits only a few (chunk, V) float32 tensors are alive. A logit of −inf means probability 0 and adds 0.

    Numbers: logits [2, 0] at temperature .5 give ln p₀ = −ln(1 + e⁻⁴) = −.01815; 1,000 equal ones ln 1000.

    Raises:
        InputError: shapes that do not match (an engine returned fewer rows than tokens), a temperature that
            is not positive, or a chunk below 1.
    """
    if logits_NV.ndim != 2 or ids_N.shape != logits_NV.shape[:1]:
        got = f"{tuple(logits_NV.shape)} with ids {tuple(ids_N.shape)}"
        raise InputError("logits", got, "(N, V) with ids (N,): one row a token")
    if not temperature > 0:
        raise InputError("temperature", temperature, "above 0, as the tokens were sampled")
    if chunk < 1:
        raise InputError("chunk", chunk, "at least 1")
    dtype = torch.promote_types(logits_NV.dtype, torch.float32)
    logprob_N = logits_NV.new_empty(len(ids_N), dtype=torch.float32)
    entropy_N = torch.empty_like(logprob_N)
    for start in range(0, len(ids_N), chunk):
        rows = slice(start, start + chunk)
        scaled_CV = logits_NV[rows].to(dtype) / temperature
        logp_CV = scaled_CV.sub_(scaled_CV.logsumexp(-1, keepdim=True))
        logprob_N[rows] = logp_CV.gather(1, ids_N[rows, None])[:, 0]
        # 0·ln 0 is 0: a finite floor makes the product so instead of NaN.
        floored_CV = logp_CV.clamp(min=torch.finfo(dtype).min)
        entropy_N[rows] = -floored_CV.mul_(logp_CV.exp()).sum(-1)
    return logprob_N, entropy_N
