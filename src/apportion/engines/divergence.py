"""How a response's next-token distributions move when its prompt loses what is asked about, or has it disturbed.

Shapes: _B requests, _K columns whose logits are kept, _T tokens of a response, _V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from apportion.engines.base import DivergenceRequest, Reading
from apportion.engines.logprobs import check
from apportion.engines.scoring import Scorer
from apportion.errors import InputError

# The prompt as it is, without what is asked about, and with it disturbed.
_PROMPTS = 3
# Columns that a forward should reach the vocabulary with before requests are taken from it.
_COLUMNS = 128


def divergences(scorer: Scorer, requests: Sequence[DivergenceRequest]) -> Iterator[Reading]:
    """KL(p_t ‖ q_t)·exp(−KL(p_t ‖ d_t)) of every response token: grounded in the prompt, and stable.

    p, q and d are the distributions, at the scorer's temperature, that produce token t after the request's own
    prompt, after `blank_ids` and after `disturbed_ids`; the response is the same. PRPO (arXiv 2606.08708) with a
    span of the prompt in place of an image [ours: only the abstract could be read].

    The distributions are float64. No tensor of logits holds more than `max_logits` numbers, or than one
    column's of one request where that is more: a forward that would need more goes on from a cache.

    Yields:
        Readings of one value a response token, [T] float64, at least 0, in any order.

    Raises:
        InputError: a prompt without tokens, or another prompt of another length.
    """
    for request in requests:
        check(request)
        for name, ids in (("blank_ids", request.blank_ids), ("disturbed_ids", request.disturbed_ids)):
            if len(ids) != request.prompt:
                raise InputError(
                    f"{name} of {request.key}", f"{len(ids)} ids", f"{request.prompt}, as many as the prompt",
                    "replace tokens, so that the response keeps its positions",
                )  # fmt: skip
    asked = []
    for request in requests:
        if len(request.ids) > request.prompt:
            asked.append(request)
        else:
            yield Reading(request.key, torch.zeros(0, dtype=torch.float64))
    # The last token predicts nothing that is asked for.
    for indices in scorer.batches([len(request.ids) - 1 for request in asked], _PROMPTS):
        batch = [asked[i] for i in indices]
        columns = max(len(request.ids) for request in batch) - min(request.prompt for request in batch)
        size = max(1, scorer.rows_of_logits // (_PROMPTS * min(columns, _COLUMNS)))
        for at in range(0, len(batch), size):
            with scorer.measuring():
                readings = _read(scorer, batch[at : at + size])
            yield from readings


def kl(logp_V: Tensor, logq_V: Tensor) -> Tensor:
    """KL(p ‖ q) over the last dimension, in nats, from log-probabilities. Where p is 0 it adds 0.

    KL((.5, .5) ‖ (.9, .1)) = .5·ln(.5/.9) + .5·ln(.5/.1) = .5108.
    """
    return torch.where(logp_V > -torch.inf, logp_V.exp() * (logp_V - logq_V), 0.0).sum(-1)


def _read(scorer: Scorer, requests: Sequence[DivergenceRequest]) -> list[Reading]:
    """All requests in one batch, a number of columns at a time."""
    responses = [request.ids[request.prompt : -1] for request in requests]
    prompts = [
        *(request.ids[: request.prompt] for request in requests),
        *(request.blank_ids for request in requests),
        *(request.disturbed_ids for request in requests),
    ]
    rows = [[*prompt, *response] for prompt, response in zip(prompts, responses * _PROMPTS, strict=True)]
    first = min(request.prompt for request in requests) - 1
    parts = []
    for _, logits_BKV in scorer.columns(rows, first):
        logp = (logits_BKV.double() / scorer.temperature).log_softmax(-1)
        logp_BKV, blank_BKV, disturbed_BKV = logp.chunk(_PROMPTS)
        # Rounding may leave a divergence of equal distributions below 0.
        grounded_BK, unstable_BK = (kl(logp_BKV, other).clamp(min=0.0) for other in (blank_BKV, disturbed_BKV))
        parts.append((grounded_BK * (-unstable_BK).exp()).cpu())
    values_BK = torch.cat(parts, dim=1)
    spans = [slice(request.prompt - 1 - first, len(request.ids) - 1 - first) for request in requests]
    values = (values_BK[b, span] for b, span in enumerate(spans))
    return [Reading(request.key, each) for request, each in zip(requests, values, strict=True)]
