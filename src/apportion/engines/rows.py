"""What runs in the slots of the transformers engine: continuations one by one, and all of them as tensors.

Shapes: _S slots, _B running rows (the first slots), _U tokens of the longest budget, _V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from apportion.engines.base import Continuation, Request, Sampling
from apportion.engines.sampling import uniforms
from apportion.engines.slots import SlotCache


@dataclass
class Run:
    """One continuation under way. `seen`: [V] bool, the tokens so far, under a repetition penalty."""

    request: Request
    m: int
    uniforms: np.ndarray
    seen: Tensor | None
    tokens: list[int] = field(default_factory=list)
    finish: Literal["stop", "length"] = "length"

    @property
    def cached(self) -> int:
        """Tokens whose keys are in the cache: all but the last, which the next forward feeds."""
        return len(self.request.prefix_ids) + len(self.tokens) - 1

    @property
    def next_uniform(self) -> float:
        # A finished row that is still fed draws past its budget; what it draws is dropped.
        return self.uniforms[min(len(self.tokens), len(self.uniforms) - 1)]

    @property
    def result(self) -> Continuation:
        return Continuation(self.request.key, self.m, tuple(self.tokens), self.finish)

    @property
    def over(self) -> bool:
        return self.finish == "stop" or len(self.tokens) == self.request.budget

    def take(self, token: int, stop_ids: Collection[int]) -> None:
        """Appends a token."""
        self.tokens.append(token)
        if self.seen is not None:
            self.seen[token] = True
        if token in stop_ids:
            self.finish = "stop"


def runs_of(request: Request, sampling: Sampling, vocabulary: int, device: torch.device) -> list[Run]:
    """The continuations that a request asks for, before their first token."""
    seen_V = None
    if sampling.repetition_penalty != 1:
        seen_V = torch.zeros(vocabulary, dtype=torch.bool)
        seen_V[list(request.prefix_ids)] = True
        seen_V = seen_V.to(device)
    return [
        Run(request, m, uniforms(request.key, m, request.budget), None if seen_V is None else seen_V.clone())
        for m in range(request.first, request.first + request.samples)
    ]


@dataclass
class Ready:
    """Continuations of a request that have a first token and wait for slots, and the row they start from."""

    cache: Cache
    row: int
    runs: list[Run]


class Rows:
    """The continuations in the slots as arrays, so that a step of decoding costs no Python a row.

    Arrays are on the host: every step the drawn tokens come there, and what the next forward needs goes back.

    Attributes:
        runs: the continuation in each slot, None where the slot is free.
        last_S: the token that the next forward feeds. cached_S: tokens whose keys are in the cache.
        seen_SV: the tokens so far, under a repetition penalty.
    """

    def __init__(self, slots: int, budget: int, stop_ids: Collection[int]) -> None:
        self.runs: list[Run | None] = [None] * slots
        self.last_S, self.cached_S, self._made_S, self._budget_S = np.zeros((4, slots), dtype=np.int64)
        self._tokens_SU, self._uniforms_SU = np.zeros((slots, budget), dtype=np.int64), np.zeros((slots, budget))
        self.seen_SV: Tensor | None = None
        self._stop = list(stop_ids)

    @property
    def free(self) -> list[int]:
        """Slots without a continuation, rising."""
        return [slot for slot, run in enumerate(self.runs) if run is None]

    @property
    def uniform_S(self) -> np.ndarray:
        """What each row's next token is drawn with."""
        rows = np.arange(len(self.runs))
        return self._uniforms_SU[rows, np.minimum(self._made_S, self._uniforms_SU.shape[1] - 1)]

    def start(self, slot: int, run: Run) -> None:
        """Lets a continuation that has its first token run in a free slot."""
        made = len(run.tokens)
        self.runs[slot] = run
        self._tokens_SU[slot, :made], self._uniforms_SU[slot, : len(run.uniforms)] = run.tokens, run.uniforms
        self._made_S[slot], self._budget_S[slot] = made, run.request.budget
        self.last_S[slot], self.cached_S[slot] = run.tokens[-1], run.cached
        if run.seen is not None:
            if self.seen_SV is None:
                self.seen_SV = run.seen.new_zeros((len(self.runs), len(run.seen)))
            self.seen_SV[slot] = run.seen

    def compact(self, cache: SlotCache) -> int:
        """Moves the last rows into free slots before them, keys and all; returns the number of rows that run."""
        count = sum(run is not None for run in self.runs)
        holes = [slot for slot in range(count) if self.runs[slot] is None]
        movable = [slot for slot in range(count, len(self.runs)) if self.runs[slot] is not None]
        for source, target in zip(movable, holes, strict=True):
            cache.move(source, target, int(self.cached_S[source]))
            arrays = (self.last_S, self.cached_S, self._made_S, self._budget_S, self._tokens_SU, self._uniforms_SU)
            for array in (*arrays, self.seen_SV):
                if array is not None:
                    array[target] = array[source]
            self.runs[target], self.runs[source] = self.runs[source], None
        return count

    def take(self, token_B: np.ndarray) -> list[Continuation]:
        """Appends a token to each of the first B rows; what that ends leaves its slot free."""
        count = len(token_B)
        made_B = self._made_S[:count]
        self._tokens_SU[np.arange(count), made_B] = self.last_S[:count] = token_B
        made_B += 1
        self.cached_S[:count] += 1
        if self.seen_SV is not None:
            self.seen_SV[torch.arange(count), torch.from_numpy(token_B)] = True
        stopped_B = np.isin(token_B, self._stop)
        ended = []
        for row in np.flatnonzero(stopped_B | (made_B == self._budget_S[:count])).tolist():
            run = self.runs[row]
            assert run is not None
            run.tokens = self._tokens_SU[row, : made_B[row]].tolist()
            run.finish = "stop" if stopped_B[row] else "length"
            ended.append(run.result)
            self.runs[row] = None
        return ended


def seen_of(runs: Sequence[Run]) -> Tensor | None:
    """(B, V) bool: the tokens each run has seen, or None without a repetition penalty."""
    seen = [run.seen for run in runs if run.seen is not None]
    return torch.stack(seen) if seen else None
