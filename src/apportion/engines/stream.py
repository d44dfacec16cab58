"""Continuous batching in slots: continuations, and rollouts that are probed while others are still decoded.

Shapes: _T trunks (distinct prefixes of one prefill), _E ends of requests in them, _Q these requests,
_M continuations of a request, _B running continuations, _K those of them that are rollouts, _W columns of the cache,
_V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache

from apportion.engines.base import Continuation, Cost, Request, Sampling, asked_of
from apportion.engines.rows import Ready, Rows, Run, runs_of, seen_of
from apportion.engines.sampling import draw, filtered
from apportion.engines.slots import Layers, SlotCache, Trunk, piece_of, trunks_of
from apportion.errors import InputError
from apportion.measure.tokens import token_logprobs_and_entropies

if TYPE_CHECKING:
    from apportion.engines.transformers import TransformersEngine

# Forwards between the end of what is answered and the answer's first forward [ours]: time to grade a group.
LAG = 16


@dataclass(frozen=True)
class Kept:
    """What is left of a rollout that ended: prompt and response, and the keys and values of all but the last token."""

    ids: tuple[int, ...]
    layers: Layers


class Stream:
    """Continuations in one batch of slots, the longest budgets first; a slot that gets free is handed to the next one.
    What goes on from rollouts comes before all that waits for a prefill: it frees what is kept for it.

    Rollouts keep their keys and values. When the last result of a prompt that has rollouts was read, the reader owes
    an `answer`: requests that continue openings of these rollouts, which need no prefill, or none, which frees what
    was kept. An answer joins the batch `LAG` forwards after what it answers, sooner only where nothing else runs; the
    stream waits for it there. So what shares a forward does not depend on how fast the reader is.

    Args:
        engine: whose model decodes.
        slots: continuations decoded at once. width: tokens of the longest sequence. budget: the most new tokens.

    Attributes:
        cost: what the rollouts were of the engine's cost, which does not count them as generated; a forward counts
            where it held nothing else.
    """

    def __init__(self, engine: TransformersEngine, sampling: Sampling, slots: int, width: int, budget: int) -> None:
        self.engine, self.sampling, self.width, self.budget = engine, sampling, width, budget
        self.cost = Cost()
        self._cache, self._rows = SlotCache(slots, width), Rows(slots, budget, sampling.stop_ids)
        self._waiting: list[Trunk | Ready] = []
        self._ready = deque[Ready]()
        self._kept: dict[str, dict[int, Kept]] = {}
        # Of a prompt with rollouts: results that are still to come, and then the forward at which its answer joins.
        self._open: dict[str, int] = {}
        self._owed: dict[str, int] = {}
        self._answers = SimpleQueue[tuple[str, list[Request]] | None]()
        self._early: dict[str, list[Request]] = {}
        self._forwards = 0
        self._stopped = Event()

    def add(self, requests: Sequence[Request], *, rollouts: bool = False) -> None:
        """Lets requests wait for slots; before the stream is read.

        Raises:
            InputError: an empty prefix, a budget below 1, or a request that does not fit the slots.
        """
        requests = self._checked(requests)
        trunks = trunks_of(requests)
        if rollouts:
            for trunk in trunks:
                trunk.rollouts = True
            for request in requests:
                self._kept[request.key.prompt] = {}
                self._open[request.key.prompt] = self._open.get(request.key.prompt, 0) + request.samples
        self._wait(trunks)

    def answer(self, prompt: str, requests: Sequence[Request]) -> None:
        """What follows on the results of a prompt, from whatever thread reads them; none: nothing more.

        Raises:
            InputError: see `add`; a request that continues no opening of one of the prompt's rollouts.
        """
        for request in self._checked(requests):
            kept = self._kept[prompt].get(request.key.sample)
            if kept is None or kept.ids[: len(request.prefix_ids)] != request.prefix_ids:
                raise InputError(f"request {request.key}", "another prefix", f"an opening of a rollout of {prompt!r}")
        self._answers.put((prompt, asked_of(requests)))

    def stop(self) -> None:
        """Ends the stream before its next forward, also where it waits for an answer, from whatever thread."""
        self._stopped.set()
        self._answers.put(None)

    def run(self) -> Iterator[list[Continuation]]:
        """What each prefill and each forward ends."""
        rows = self._rows
        while self._join() and not self._stopped.is_set():
            while (free := rows.free) and (self._ready or self._waiting):
                if self._ready:
                    self._start(free)
                elif isinstance(first := self._waiting.pop(0), Ready):
                    self._ready.append(first)
                else:
                    yield self._prefill(first)
            if count := rows.compact(self._cache):
                yield self._forward(count)
            elif not self._owed:
                return

    def _checked(self, requests: Sequence[Request]) -> list[Request]:
        asked = asked_of(requests)
        longest = max((len(r.prefix_ids) + r.budget for r in asked), default=0)
        if longest > self.width or any(r.budget > self.budget for r in asked):
            raise InputError("requests", f"one of {longest} tokens", f"at most {self.width}, {self.budget} of them new")
        return asked

    def _wait(self, more: Iterable[Trunk | Ready]) -> None:
        self._waiting = sorted([*self._waiting, *more], key=lambda each: (isinstance(each, Trunk), -each.budget))

    def _join(self) -> bool:
        """Takes in the answers that are due, all that can be waited for where nothing runs; False once stopped."""
        idle = not (self._ready or self._waiting or any(self._rows.runs))
        due = min(self._owed.values(), default=0) if idle else self._forwards
        for prompt in [prompt for prompt, at in self._owed.items() if at <= due]:
            while prompt not in self._early:
                if (answer := self._answers.get()) is None:
                    return False
                self._early[answer[0]] = answer[1]
            del self._owed[prompt]
            self._open[prompt] = sum(request.samples for request in self._early[prompt])
            self._wait(self._from_rollouts(prompt, self._early.pop(prompt)))
        return True

    def _from_rollouts(self, prompt: str, requests: Sequence[Request]) -> Iterator[Ready]:
        for request in requests:
            yield Ready(self._kept[prompt][request.key.sample].layers, 0, self._runs(request))
        if not requests:
            del self._kept[prompt]

    def _runs(self, request: Request, rollouts: bool = False) -> list[Run]:
        scorer = self.engine.scorer
        return runs_of(request, self.sampling, scorer.vocabulary, scorer.device, rollouts)

    def _start(self, free: Sequence[int]) -> None:
        """Gives free slots to the continuations of the first state that is ready."""
        group = self._ready[0]
        taken = free[: len(group.runs)]
        self._cache.place(taken, group.layers, group.row, group.runs[0].cached)
        for slot in taken:
            self._rows.start(slot, group.runs.pop())
        if not group.runs:
            self._ready.popleft()

    def _forward(self, count: int) -> list[Continuation]:
        """Feeds the last token of every running row and draws the next one."""
        rows, sampling = self._rows, self.sampling
        logits_BV = self.engine.step(self._cache, rows.last_S[:count], rows.cached_S[:count])
        seen_BV = None if rows.seen_SV is None else rows.seen_SV[:count]
        uniform_B1 = torch.from_numpy(rows.uniform_S[:count, None]).to(logits_BV.device)
        token_B1 = draw(filtered(logits_BV, sampling, seen_BV), uniform_B1)
        row_K = np.flatnonzero(rows.reads_S[:count])
        if len(row_K):
            at_K = torch.from_numpy(row_K).to(logits_BV.device)
            read = token_logprobs_and_entropies(logits_BV[at_K], token_B1[at_K, 0], sampling.temperature)
            rows.read(row_K, *read)
        self.cost.forwards += len(row_K) == count
        self.cost.forward_tokens += len(row_K)
        self._forwards += 1
        ended = rows.take(token_B1[:, 0].cpu().numpy(), self.engine.decided)
        return [self._settled(run, self._cache, row) for row, run in ended]

    def _prefill(self, first: Trunk) -> list[Continuation]:
        """Prefills a trunk and those behind it in one forward and draws the first token of all their continuations.

        Returns what that token already ended; the rest gets ready, grouped by request.
        """
        engine, trunks, width = self.engine, [first], len(first.ids)
        for trunk in self._waiting:
            if isinstance(trunk, Ready) or (len(trunks) + 1) * max(width, len(trunk.ids)) > engine.prefill_tokens:
                break
            trunks.append(trunk)
            width = max(width, len(trunk.ids))
        del self._waiting[: len(trunks) - 1]
        ids_TW = torch.tensor([[*t.ids, *[engine.pad_id] * (width - len(t.ids))] for t in trunks])
        requests = [request for trunk in trunks for request in trunk.requests]
        row_Q = [row for row, trunk in enumerate(trunks) for _ in trunk.requests]
        # No mask: padding is on the right, where causal attention does not look.
        ends = sorted({len(request.prefix_ids) - 1 for request in requests})
        keep = torch.tensor(ends, device=engine.scorer.device)
        logits_TEV, cache = engine.forward(ids_TW, DynamicCache(), logits_to_keep=keep)
        logits_QV = logits_TEV[row_Q, [ends.index(len(request.prefix_ids) - 1) for request in requests]]
        runs_Q = [self._runs(request, trunks[row].rollouts) for row, request in zip(row_Q, requests, strict=True)]
        uniform_QM = np.zeros((len(requests), max(map(len, runs_Q))))
        for uniform_M, runs in zip(uniform_QM, runs_Q, strict=True):
            uniform_M[: len(runs)] = [run.next_uniform for run in runs]
        scores_QV = filtered(logits_QV, self.sampling, seen_of([runs[0] for runs in runs_Q]))
        tokens_QM = draw(scores_QV, torch.from_numpy(uniform_QM).to(logits_QV.device))
        ended = []
        for row, runs, logits_V, token_M in zip(row_Q, runs_Q, logits_QV, tokens_QM, strict=True):
            token_M = token_M[: len(runs)]
            if trunks[row].rollouts:
                logits_MV = logits_V.expand(len(runs), -1)
                read = token_logprobs_and_entropies(logits_MV, token_M, self.sampling.temperature)
                for run, logprob, entropy in zip(runs, *(values.tolist() for values in read), strict=True):
                    run.read = [(logprob, entropy)]
            for run, token in zip(runs, token_M.tolist(), strict=True):
                run.take(token, self.sampling.stop_ids)
            ended += [self._settled(run, cache, row) for run in runs if run.over]
            if going := [run for run in runs if not run.over]:
                self._ready.append(Ready(cache.layers, row, going))
        of_rollouts = sum(trunk.rollouts for trunk in trunks)
        self.cost.forwards += of_rollouts == len(trunks)
        self.cost.forward_tokens += of_rollouts * width
        return ended

    def _settled(self, run: Run, cache: Cache, row: int) -> Continuation:
        """The result of a run that ended in this row of a cache; of a rollout the row is kept."""
        prompt = run.request.key.prompt
        if run.read is not None:
            layers = piece_of(cache, row, 0, run.cached)
            self._kept[prompt][run.m] = Kept((*run.request.prefix_ids, *run.tokens), layers)
        if prompt in self._kept:
            self._open[prompt] -= 1
            if not self._open[prompt]:
                self._owed[prompt] = self._forwards + LAG
        return run.result
