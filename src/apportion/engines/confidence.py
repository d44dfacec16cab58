"""Short answers forced after the steps of a response: how sure the model is, and how right (SPAE).

Shapes: _K positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from apportion.engines.base import ConfidenceRequest, ContinuationEngine, Key, Reading, Request, Sampling
from apportion.engines.forced import Answer, Forced, ends_of, forced
from apportion.engines.scoring import Scorer
from apportion.errors import InputError


def confidences(
    engine: ContinuationEngine, scorer: Scorer, requests: Sequence[ConfidenceRequest], sampling: Sampling
) -> Iterator[Reading]:
    """Conf and acc at each position (SPAE, arXiv 2601.03823) [note].

    conf = mean over the sampled answers of exp(−mean entropy of the distributions that produced its tokens, the
    stop token's included); acc = mean over the gold answer's tokens of their probabilities, teacher forced. Both
    are read before any top-k, top-p or min-p [ours]. Answers are drawn from random streams of their own, keyed by
    the request's key and the position. What the engine generates is in the engine's cost.

    Yields:
        A reading a request, in any order: (K, 2) float64, conf and acc.

    Raises:
        InputError: no gold answer, fewer than one sample or token, a prompt without tokens, a position outside the
            response, temperatures that differ, two requests of one key, or a position without a single answer.
    """
    if sampling.temperature != scorer.temperature:
        raise InputError("sampling.temperature", sampling.temperature, f"the scorer's, {scorer.temperature}")
    ends = []
    prefixes: dict[Key, Request] = {}
    for request in requests:
        if not request.gold_ids or request.samples < 1 or request.tokens < 1:
            got = f"{len(request.gold_ids)} gold tokens, {request.samples} samples of {request.tokens} tokens"
            raise InputError(f"confidence of {request.key}", got, "at least one of each")
        ends.append(ends_of(request))
        for position, end in zip(request.positions, ends[-1], strict=True):
            prefix = Request(
                _key(request, position), (*request.ids[:end], *request.cue_ids), request.samples, request.tokens
            )
            if prefixes.setdefault(prefix.key, prefix) != prefix:
                raise InputError("confidence", f"{request.key} twice", "a key of its own for each request")
    sampled: dict[Key, list[Answer]] = {key: [] for key in prefixes}
    for continuation in engine.continuations(list(prefixes.values()), sampling):
        sampled[continuation.key].append(continuation.token_ids)
    asked = []
    for request, ends_K in zip(requests, ends, strict=True):
        answers_K = []
        for position in request.positions:
            answers = sampled[_key(request, position)]
            if not answers:
                raise InputError(f"answers of {request.key}", f"none at position {position}", "at least one")
            # Answers that are alike are read once.
            answers_K.append((request.gold_ids, *sorted(set(answers))))
        asked.append(Forced(request.ids, request.cue_ids, ends_K, tuple(answers_K)))
    for i, read in forced(scorer, asked):
        rows = []
        for k, (position, ((logprob, _), *others)) in enumerate(zip(requests[i].positions, read, strict=True)):
            drawn = sampled[_key(requests[i], position)]
            sure = [math.exp(-math.fsum(entropy) / len(entropy)) for _, entropy in others]
            shares = [drawn.count(answer) / len(drawn) for answer in asked[i].answers[k][1:]]
            conf = math.fsum(share * value for share, value in zip(shares, sure, strict=True))
            rows.append((conf, math.fsum(map(math.exp, logprob)) / len(logprob)))
        yield Reading(requests[i].key, torch.tensor(rows, dtype=torch.float64).reshape(-1, 2))


def _key(request: ConfidenceRequest, position: int) -> Key:
    """Of a state whose answers are drawn: no stream of a rollout or a probe has this run."""
    return replace(request.key, run=f"{request.key.run}/confidence", position=position)
