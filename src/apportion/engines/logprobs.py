"""Log-probabilities of whole responses, and what stands behind them: sequences scored each in a row of its own.

Shapes: _T tokens of a response, _B rows, _K kept columns, _V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from apportion.engines.base import Reading, Scoring
from apportion.engines.scoring import Scorer
from apportion.errors import InputError
from apportion.measure.tokens import token_logprobs_and_entropies

# Columns that a forward should reach the vocabulary with before rows are taken from it.
_COLUMNS = 128


def logprobs(scorer: Scorer, requests: Sequence[Scoring]) -> Iterator[Reading]:
    """The log-probability of every token of each response, as a reference model answers it.

    Yields:
        A reading a request, in any order: [T] float64, nats, at the scorer's temperature.

    Raises:
        InputError: a prompt without tokens, or longer than the ids.
    """
    for request in requests:
        check(request)
    for i, logprob_T, _ in scored(scorer, [(request.ids, request.prompt) for request in requests]):
        yield Reading(requests[i].key, logprob_T.double())


def check(request: Scoring) -> None:
    """Raises InputError unless a token stands before the response, to predict its first one."""
    if not 1 <= request.prompt <= len(request.ids):
        raise InputError(f"prompt of {request.key}", request.prompt, f"1 to the {len(request.ids)} ids")


def scored(scorer: Scorer, sequences: Sequence[tuple[Sequence[int], int]]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Log-probabilities and entropies of `ids[start:]` of each (ids, start), start at least 1.

    No tensor of logits holds more than `max_logits` numbers, or one row of logits where that is more (see
    `Scorer.columns`).

    Yields:
        The index of the sequence and two [T] float32 tensors on the CPU, longest sequences first.
    """
    none = torch.zeros(0)
    for i, (ids, start) in enumerate(sequences):
        if start == len(ids):
            yield i, none, none
    asked = [i for i, (ids, start) in enumerate(sequences) if start < len(ids)]
    # The last token predicts nothing that is asked for.
    for batch in scorer.batches([len(sequences[i][0]) - 1 for i in asked]):
        rows = [sequences[asked[b]] for b in batch]
        columns = max(len(ids) for ids, _ in rows) - min(start for _, start in rows)
        size = max(1, scorer.rows_of_logits // min(columns, _COLUMNS))
        for at in range(0, len(rows), size):
            with scorer.measuring():
                found = _score(scorer, rows[at : at + size])
            yield from ((asked[b], *values) for b, values in zip(batch[at : at + size], found, strict=True))


def _score(scorer: Scorer, rows: Sequence[tuple[Sequence[int], int]]) -> list[tuple[Tensor, Tensor]]:
    """What `scored` yields of each row, all in one batch, a number of columns at a time."""
    first = min(start for _, start in rows) - 1
    parts = []
    for kept, logits_BKV in scorer.columns([ids[:-1] for ids, _ in rows], first):
        stop = kept + logits_BKV.shape[1]
        targets = [ids[kept + 1 : stop + 1] for ids, _ in rows]
        filled = [[*ids, *[0] * (stop - kept - len(ids))] for ids in targets]
        targets_BK = torch.tensor(filled, device=logits_BKV.device)
        values = token_logprobs_and_entropies(logits_BKV.flatten(0, 1), targets_BK.reshape(-1), scorer.temperature)
        parts.append([value.reshape(targets_BK.shape).cpu() for value in values])
    logprob_BK, entropy_BK = (torch.cat(values, dim=1) for values in zip(*parts, strict=True))
    spans = [slice(start - 1 - first, len(ids) - 1 - first) for ids, start in rows]
    return [(logprob_BK[b, span], entropy_BK[b, span]) for b, span in enumerate(spans)]
