"""Answers forced on a response after a cue, at several of its positions, over one forward of the response.

A row holds the response as a trunk, and behind it a branch a position: the cue, and behind that every answer. A branch
attends to the trunk up to its position, to its cue and to its own answer, and its position ids go on from there, so it
reads what a sequence of its own would. Where the limits do not let a row have all its branches, the trunk's keys and
values are kept, and the branches follow in forwards of their own.

The branches start with a slot each for the cues, which end together, and then come the answers: only the columns that
predict an answer's token reach the vocabulary.
Shapes: _B rows, _W columns of trunks, _Q columns of branches, _K kept columns, _P predicted tokens, _V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from apportion.engines.base import BeliefRequest, ConfidenceRequest
from apportion.engines.logprobs import check, scored
from apportion.engines.scoring import PackedMask, Scorer
from apportion.errors import InputError
from apportion.measure.tokens import token_logprobs_and_entropies

Answer = tuple[int, ...]
Read = list[list[tuple[list[float], list[float]]]]
"""By branch and answer: the log-probability of each token, and the entropy that it was predicted with."""


@dataclass(frozen=True)
class Forced:
    """Branch k forces each of `answers[k]`, after `cue`, on the first `ends[k]` of `ids`."""

    ids: tuple[int, ...] = field(repr=False)
    cue: tuple[int, ...]
    ends: tuple[int, ...]
    answers: tuple[tuple[Answer, ...], ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that this stands for, or a few more."""
        return max(self.ends) + len(self.cue) + max(len(answer) for answers in set(self.answers) for answer in answers)

    @property
    def trunk(self) -> int:
        """Tokens that all branches go on from."""
        return max(self.ends)

    @property
    def fed(self) -> int:
        """Tokens that all branches feed behind their cues."""
        return sum(len(answer) - 1 for answers in self.answers for answer in answers)

    @property
    def columns(self) -> int:
        """Tokens of the trunk and of its branches."""
        return self.trunk + len(self.ends) * max(1, len(self.cue)) + self.fed

    @property
    def widest(self) -> int:
        """Tokens that the widest branch feeds behind its cue."""
        return max(sum(map(len, answers)) - len(answers) for answers in set(self.answers))

    def opening(self, k: int) -> tuple[int, Answer]:
        """Where branch k leaves the trunk, and the tokens that it starts with; without a cue the last one before."""
        end = self.ends[k]
        return (end, self.cue) if self.cue else (end - 1, self.ids[end - 1 : end])


def ends_of(request: BeliefRequest | ConfidenceRequest) -> tuple[int, ...]:
    """The request's positions counted from the prompt's start.

    Raises:
        InputError: a prompt without tokens, or a position outside the response; its end is inside.
    """
    check(request)
    length = len(request.ids) - request.prompt
    for position in request.positions:
        if not 0 <= position <= length:
            raise InputError(f"position of {request.key}", position, f"0 to the response's {length} tokens")
    return tuple(request.prompt + position for position in request.positions)


def forced(scorer: Scorer, asked: Sequence[Forced]) -> Iterator[tuple[int, Read]]:
    """Reads every answer of every branch, each of at least one token.

    No forward holds more than `max_tokens`, nor logits more than `max_logits`, unless one trunk or one branch
    does. A model that takes no such mask reads each answer in a sequence of its own.

    Yields:
        The index of what was asked, and what was read at the scorer's temperature, in nats.
    """
    branching = [i for i, each in enumerate(asked) if each.ends]
    yield from ((i, []) for i, each in enumerate(asked) if not each.ends)
    if not scorer.packs(max((asked[i].longest for i in branching), default=0)):
        for i in branching:
            yield i, _alone(scorer, asked[i])
        return
    for batch in scorer.batches([asked[i].columns for i in branching]):
        items = [asked[branching[b]] for b in batch]
        with scorer.measuring():
            found = _packed(scorer, items)
        yield from ((branching[b], read) for b, read in zip(batch, found, strict=True))


def _alone(scorer: Scorer, item: Forced) -> Read:
    sequences = [
        ((*item.ids[:end], *item.cue, *answer), end + len(item.cue))
        for end, answers in zip(item.ends, item.answers, strict=True)
        for answer in answers
    ]
    found = {i: (logprob.tolist(), entropy.tolist()) for i, logprob, entropy in scored(scorer, sequences)}
    values = iter(found[i] for i in range(len(sequences)))
    return [[next(values) for _ in answers] for answers in item.answers]


def _packed(scorer: Scorer, items: Sequence[Forced]) -> list[Read]:
    """All trunks and all branches in one forward, where the limits allow that for a row; else in several."""
    slots, cue = max(len(item.ends) for item in items), max(1, *(len(item.cue) for item in items))
    answers = max(item.fed for item in items)
    columns = max(item.trunk for item in items) + slots * cue + answers
    rows = min(scorer.max_tokens // columns, scorer.rows_of_logits // (slots + answers))
    if not rows:
        return _over_cache(scorer, items)
    return [read for at in range(0, len(items), rows) for read in _branch(scorer, items[at : at + rows], range(slots))]


def _over_cache(scorer: Scorer, items: Sequence[Forced]) -> list[Read]:
    """One forward for all trunks, and several for the branches."""
    trunks = [item.ids[: item.trunk] for item in items]
    nothing = torch.zeros(0, dtype=torch.long, device=scorer.device)
    cache = Cache(layer_class_to_replicate=_TrunkLayer)
    scorer.forward(trunks, nothing, use_cache=True, **{scorer.cache_name: cache})
    widest = max(item.widest for item in items)
    tokens = max(1, *(len(item.cue) for item in items)) + widest
    # Branches of one forward, over all rows.
    limit = max(1, min(scorer.max_tokens // tokens, scorer.rows_of_logits // (1 + widest)))
    rows = min(len(items), limit)
    branches = limit // rows
    reads: list[Read] = [[] for _ in items]
    for row in range(0, len(items), rows):
        part = slice(row, row + rows)
        trunk = Cache(layers=[layer.rows(part) for layer in cache.layers])
        for first in range(0, max(len(item.ends) for item in items[part]), branches):
            numbered = range(first, first + branches)
            for read, more in zip(reads[part], _branch(scorer, items[part], numbered, trunk), strict=True):
                read += more
    return reads


class _TrunkLayer(DynamicLayer):
    """Keys and values of prefilled trunks, which branches see before their own and never join."""

    def update(self, keys_BHQD: Tensor, values_BHQD: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self._fill(keys_BHQD, values_BHQD)
            return keys_BHQD, values_BHQD
        return torch.cat([self.keys, keys_BHQD], dim=-2), torch.cat([self.values, values_BHQD], dim=-2)

    def rows(self, part: slice) -> _TrunkLayer:
        """The same of some rows."""
        layer = _TrunkLayer()
        layer._fill(self.keys[part], self.values[part])
        return layer

    def _fill(self, keys_BHWD: Tensor, values_BHWD: Tensor) -> None:
        self.keys, self.values = keys_BHWD, values_BHWD
        self.device, self.dtype, self.is_initialized = keys_BHWD.device, keys_BHWD.dtype, True


def _branch(scorer: Scorer, items: Sequence[Forced], numbered: range, cache: Cache | None = None) -> list[Read]:
    """Reads these branches of every item, those that it has, in one forward over the trunks or with them."""
    table_5BQ, kept_K, wanted_P3 = (part.to(scorer.device) for part in _layout(items, numbered))
    ids_BQ, place_BQ, end_BQ, slot_BQ, answer_BQ = table_5BQ
    trunk = cache.get_seq_length() if cache else max(item.trunk for item in items)
    sees_BQQ = (slot_BQ[:, :, None] == slot_BQ[:, None]) & (place_BQ[:, :, None] >= place_BQ[:, None])
    sees_BQQ &= (answer_BQ[:, None] == 0) | (answer_BQ[:, :, None] == answer_BQ[:, None])
    trunk_W = torch.arange(trunk, device=scorer.device)
    blocked_B1QW = ~torch.cat([trunk_W < end_BQ[:, :, None], sees_BQQ], dim=-1)[:, None]
    # Eager attention adds the mask, so it holds numbers of the model's own type.
    mask_B1QW = scorer.model.get_input_embeddings().weight.new_zeros(blocked_B1QW.shape)
    mask_B1QW.masked_fill_(blocked_B1QW, torch.finfo(mask_B1QW.dtype).min)
    rows = ids_BQ.tolist()
    if cache:
        out = scorer.forward(
            rows, kept_K, use_cache=True,
            attention_mask=mask_B1QW, position_ids=place_BQ, **{scorer.cache_name: cache},
        )  # fmt: skip
    else:
        rows = [
            [*item.ids[: item.trunk], *[scorer.pad_id] * (trunk - item.trunk), *row]
            for item, row in zip(items, rows, strict=True)
        ]
        place_BW = torch.cat([trunk_W.expand(len(rows), -1), place_BQ], dim=1)
        out = scorer.forward(rows, trunk + kept_K, attention_mask=PackedMask.of(mask_B1QW), position_ids=place_BW)
    logprob, entropy = _predicted(scorer, out.logits, wanted_P3)
    reads: list[Read] = []
    at = 0
    for item in items:
        reads.append([])
        for answers in item.answers[numbered.start : numbered.stop]:
            cuts = list(accumulate(map(len, answers), initial=at))
            reads[-1].append([(logprob[a:b], entropy[a:b]) for a, b in pairwise(cuts)])
            at = cuts[-1]
    return reads


def _layout(items: Sequence[Forced], numbered: range) -> tuple[Tensor, Tensor, Tensor]:
    """Where the tokens of these branches lie.

    Returns:
        (5, B, Q) int64: of each column the token, its position, how much of the trunk it sees, its slot from 1, or 0
        where the column is empty, and its answer from 1, or 0 for the cue; [K] the columns that predict; (P, 3): of
        each predicted token its row, the number of its kept column, and the token, in the order of the answers.
    """
    slots = min(len(numbered), max(len(item.ends) for item in items) - numbered.start)
    cue = max(1, *(len(item.cue) for item in items))
    tokens: list[int] = []
    # Of each run of tokens: its length, row, first column, first position, and the rest as above.
    runs: list[tuple[int, ...]] = []
    wanted: list[tuple[int, int, int]] = []
    for b, item in enumerate(items):
        column = slots * cue
        for slot, k in enumerate(range(numbered.start, min(numbered.stop, len(item.ends)))):
            end, opening = item.opening(k)
            runs.append((len(opening), b, slot * cue + cue - len(opening), end, end, slot + 1, 0))
            tokens += opening
            for a, answer in enumerate(item.answers[k], 1):
                runs.append((len(answer) - 1, b, column, end + len(opening), end, slot + 1, a))
                tokens += answer[:-1]
                wanted.append((b, slot, answer[0]))
                wanted += [(b, kept, token) for kept, token in enumerate(answer[1:], column - slots * cue + slots)]
                column += len(answer) - 1
    length_R, *rest_R = torch.tensor(runs).unbind(1)
    run_N = torch.repeat_interleave(length_R)
    step_N = torch.arange(len(tokens)) - (length_R.cumsum(0) - length_R)[run_N]
    row_N, column_N, place_N, end_N, slot_N, answer_N = (value_R[run_N] for value_R in rest_R)
    column_N += step_N
    table_5BQ = torch.zeros((5, len(items), int(column_N.max()) + 1), dtype=torch.long)
    table_5BQ[:, row_N, column_N] = torch.stack([torch.tensor(tokens), place_N + step_N, end_N, slot_N, answer_N])
    kept = [*range(cue - 1, slots * cue, cue), *range(slots * cue, table_5BQ.shape[2])]
    return table_5BQ, torch.tensor(kept), torch.tensor(wanted)


def _predicted(scorer: Scorer, logits_BKV: Tensor, wanted_P3: Tensor) -> tuple[list[float], list[float]]:
    """Log-probability and entropy of P tokens, each with the row and the kept column that predict it."""
    parts = []
    # Several answers share the column that predicts their first tokens: a copy may be larger than the logits.
    for row_P, column_P, token_P in (part.unbind(1) for part in wanted_P3.split(scorer.rows_of_logits)):
        parts.append(token_logprobs_and_entropies(logits_BKV[row_P, column_P], token_P, scorer.temperature))
    logprob_P, entropy_P = (torch.cat(values).tolist() for values in zip(*parts, strict=True))
    return logprob_P, entropy_P
