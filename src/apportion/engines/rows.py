"""What runs in the slots of the transformers engine: continuations one by one, and all of them as tensors.

Shapes: _S slots, _B running rows (the first slots), _U tokens of the longest budget, _K rows that are read or stop ids,
_V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from apportion.engines.base import Continuation, Finish, Request, Rollout, Sampling
from apportion.engines.sampling import uniforms
from apportion.engines.slots import Layers, SlotCache

# Whether the new tokens of a continuation decide its verdict, whatever would follow.
Decided = Callable[[Sequence[int]], bool]

# New tokens between two questions to it [ours]: decoding text costs about as much as a token of a small model.
ASK_EVERY = 8


@dataclass(eq=False)
class Run:
    """One continuation under way.

    Attributes:
        seen: [V] bool, the tokens so far, under a repetition penalty.
        read: log-probability and entropy of each token, of a rollout; None of other continuations.
    """

    request: Request
    m: int
    uniforms: np.ndarray
    seen: Tensor | None
    tokens: list[int] = field(default_factory=list)
    finish: Finish = "length"
    read: list[tuple[float, float]] | None = None

    @property
    def cached(self) -> int:
        """Tokens whose keys are in the cache: all but the last, which the next forward feeds."""
        return len(self.request.prefix_ids) + len(self.tokens) - 1

    @property
    def last(self) -> int:
        """The token that the next forward feeds."""
        return self.tokens[-1] if self.tokens else self.request.prefix_ids[-1]

    @property
    def next_uniform(self) -> float:
        # A finished row that is still fed draws past its budget; what it draws is dropped.
        return self.uniforms[min(len(self.tokens), len(self.uniforms) - 1)]

    @property
    def result(self) -> Continuation:
        ended = (self.request.key, self.m, tuple(self.tokens), self.finish)
        if self.read is None:
            return Continuation(*ended)
        logprobs, entropies = zip(*self.read, strict=True)
        return Rollout(*ended, logprobs=logprobs, entropies=entropies)

    @property
    def over(self) -> bool:
        return self.finish != "length" or len(self.tokens) == self.request.budget

    def take(self, token: int, stop_ids: Collection[int]) -> None:
        """Appends a token."""
        self.tokens.append(token)
        if self.seen is not None:
            self.seen[token] = True
        if token in stop_ids:
            self.finish = "stop"

    def ask(self, decided: Decided) -> None:
        """Ends the continuation where its verdict is decided; asked every few tokens, however it is batched."""
        if not self.over and len(self.tokens) % ASK_EVERY == 0 and decided(self.tokens):
            self.finish = "decided"


def runs_of(
    request: Request, sampling: Sampling, vocabulary: int, device: torch.device, reads: bool = False
) -> list[Run]:
    """The continuations that a request asks for, before their first token; rollouts where `reads`."""
    seen_V = None
    if sampling.repetition_penalty != 1:
        seen_V = torch.zeros(vocabulary, dtype=torch.bool)
        seen_V[list(request.prefix_ids)] = True
        seen_V = seen_V.to(device)
    return [
        Run(
            request, m, uniforms(request.key, m, request.budget), None if seen_V is None else seen_V.clone(),
            read=[] if reads else None,
        )
        for m in range(request.first, request.first + request.samples)
    ]  # fmt: skip


@dataclass
class Ready:
    """Continuations of one state that wait for slots, and the row of keys and values that they start from.

    They have a first token after a prefill. From the cache of a rollout they have none: the last token of their
    prefix is fed once more.
    """

    layers: Layers
    row: int
    runs: list[Run]

    @property
    def budget(self) -> int:
        return self.runs[0].request.budget


class Rows:
    """The continuations in the slots as arrays, so that a step of decoding costs no Python a row.

    Arrays are on the host: every step the drawn tokens come there, and what the next forward needs goes back.

    Attributes:
        runs: the continuation in each slot, None where the slot is free.
        last_S: the token that the next forward feeds. cached_S: tokens whose keys are in the cache.
        seen_SV: the tokens so far, under a repetition penalty.
        reads_S: whether it is a rollout, whose log-probabilities and entropies are kept.
    """

    def __init__(self, slots: int, budget: int, stop_ids: Collection[int]) -> None:
        self.runs: list[Run | None] = [None] * slots
        self.last_S, self.cached_S, self._made_S, self._budget_S = np.zeros((4, slots), dtype=np.int64)
        self._tokens_SU, self._uniforms_SU = np.zeros((slots, budget), dtype=np.int64), np.zeros((slots, budget))
        self.reads_S, self._read_SU2 = np.zeros(slots, dtype=bool), np.zeros((slots, budget, 2), dtype=np.float32)
        self.seen_SV: Tensor | None = None
        self._stop_K = np.array(list(stop_ids), dtype=np.int64)

    @property
    def free(self) -> list[int]:
        """Slots without a continuation, rising."""
        return [slot for slot, run in enumerate(self.runs) if run is None] if None in self.runs else []

    @property
    def uniform_S(self) -> np.ndarray:
        """What each row's next token is drawn with."""
        rows = np.arange(len(self.runs))
        return self._uniforms_SU[rows, np.minimum(self._made_S, self._uniforms_SU.shape[1] - 1)]

    def start(self, slot: int, run: Run) -> None:
        """Lets a continuation run in a free slot that holds its first `run.cached` keys and values."""
        made = len(run.tokens)
        self.runs[slot] = run
        self._tokens_SU[slot, :made], self._uniforms_SU[slot, : len(run.uniforms)] = run.tokens, run.uniforms
        self._made_S[slot], self._budget_S[slot] = made, run.request.budget
        self.last_S[slot], self.cached_S[slot] = run.last, run.cached
        self.reads_S[slot] = run.read is not None
        if run.read:
            self._read_SU2[slot, :made] = run.read
        if run.seen is not None:
            if self.seen_SV is None:
                self.seen_SV = run.seen.new_zeros((len(self.runs), len(run.seen)))
            self.seen_SV[slot] = run.seen

    def compact(self, cache: SlotCache) -> int:
        """Moves the last rows into free slots before them, keys and all; returns the number of rows that run."""
        count = len(self.runs) - self.runs.count(None)
        holes = [slot for slot in range(count) if self.runs[slot] is None]
        movable = [slot for slot in range(count, len(self.runs)) if self.runs[slot] is not None] if holes else []
        for source, target in zip(movable, holes, strict=True):
            cache.move(source, target, int(self.cached_S[source]))
            arrays = (self.last_S, self.cached_S, self._made_S, self._budget_S, self._tokens_SU, self._uniforms_SU)
            for array in (*arrays, self.reads_S, self._read_SU2, self.seen_SV):
                if array is not None:
                    array[target] = array[source]
            self.runs[target], self.runs[source] = self.runs[source], None
        return count

    def read(self, row_K: np.ndarray, logprob_K: Tensor, entropy_K: Tensor) -> None:
        """Keeps what was read of the tokens that `take` gets next, of these rows."""
        self._read_SU2[row_K, self._made_S[row_K]] = torch.stack([logprob_K, entropy_K], dim=1).cpu().numpy()

    def take(self, token_B: np.ndarray, decided: Decided | None = None) -> list[tuple[int, Run]]:
        """Appends a token to each of the first B rows; what that ends leaves its slot free, with its row."""
        count = len(token_B)
        made_B = self._made_S[:count]
        self._tokens_SU[np.arange(count), made_B] = self.last_S[:count] = token_B
        made_B += 1
        self.cached_S[:count] += 1
        if self.seen_SV is not None:
            self.seen_SV[torch.arange(count), torch.from_numpy(token_B)] = True
        stopped_B = (token_B[:, None] == self._stop_K).any(axis=1)
        over_B = stopped_B | (made_B == self._budget_S[:count])
        due_B = over_B if decided is None else over_B | ((made_B % ASK_EVERY == 0) & ~self.reads_S[:count])
        ended = []
        for row in np.flatnonzero(due_B).tolist():
            run = self.runs[row]
            assert run is not None
            run.tokens = self._tokens_SU[row, : made_B[row]].tolist()
            if stopped_B[row]:
                run.finish = "stop"
            elif not over_B[row] and decided is not None:
                run.ask(decided)
            if run.over:
                if self.reads_S[row]:
                    run.read = list(map(tuple, self._read_SU2[row, : made_B[row]].tolist()))
                ended.append((row, run))
                self.runs[row] = None
        return ended


def seen_of(runs: Sequence[Run]) -> Tensor | None:
    """(B, V) bool: the tokens each run has seen, or None without a repetition penalty."""
    seen = [run.seen for run in runs if run.seen is not None]
    return torch.stack(seen) if seen else None
