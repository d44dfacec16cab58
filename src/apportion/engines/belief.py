"""Belief in the gold answer at several positions of a response (GRPO-VPS).

Shapes: _K positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from apportion.engines.base import BeliefRequest, Reading
from apportion.engines.forced import Forced, ends_of, forced
from apportion.engines.scoring import Scorer
from apportion.errors import InputError


def beliefs(scorer: Scorer, requests: Sequence[BeliefRequest]) -> Iterator[Reading]:
    """ln π(y* | x, y_{≤k}, cue) of the best of the accepted answers (arXiv 2604.20659) [paper].

    Only the answer's tokens are scored, not the cue's; all positions of a response share one forward of it.

    Yields:
        A reading a request, in any order: [K] float64, nats, at the scorer's temperature.

    Raises:
        InputError: no answer or an empty one, a prompt without tokens, or a position outside the response.
    """
    asked = []
    for request in requests:
        if not request.answers or not all(request.answers):
            raise InputError(f"answers of {request.key}", request.answers, "at least one, each of at least one token")
        ends = ends_of(request)
        asked.append(Forced(request.ids, request.cue_ids, ends, (request.answers,) * len(ends)))
    for i, read in forced(scorer, asked):
        whole = not requests[i].per_token
        best_K = [max(sum(logprob) / (1 if whole else len(logprob)) for logprob, _ in answers) for answers in read]
        yield Reading(requests[i].key, torch.tensor(best_K, dtype=torch.float64))
