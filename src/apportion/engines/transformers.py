"""Continuations from a transformers model in memory: one prefill a prefix, continuations decoded together.

Shapes: _M continuations of a request, _B running continuations, _W columns of the cache, _N tokens, _V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from apportion.engines.base import Continuation, Request, Rollout, Sampling, asked_of
from apportion.engines.rows import Decided, Run, runs_of, seen_of
from apportion.engines.sampling import draw, filtered
from apportion.engines.scoring import Scorer
from apportion.engines.slots import SlotCache
from apportion.engines.stream import Stream
from apportion.errors import InputError
from apportion.measure.tokens import token_logprobs_and_entropies


class TransformersEngine:
    """Continues token-id prefixes with a causal language model of transformers, plain or PEFT-wrapped.

    Requests whose prefixes open one another (the pivots of a response) share one prefill. Their continuations
    start from slices of its cache and are decoded in one batch of slots; a slot whose continuation ends is
    handed to the next one, longest budgets first, and the batch shrinks when none is left. Tokens are drawn
    from `uniforms`, so results depend on the key alone, up to rounding of logits in batches of another shape.

    Layers that cannot be sliced by position (a sliding window shorter than the longest sequence, linear
    attention) make it prefill each request by itself, with the model's own cache.

    The weights are read when a forward runs and nothing outlives a call, so a weight update needs no flush.
    The model's modes, gradients and torch's random state are left alone; it is in evaluation mode only while
    this engine computes, not between two results.

    Args:
        model: hand in the unwrapped model (`accelerator.unwrap_model`), not DDP: ranks make different numbers
            of forwards.
        pad_id: any valid token id; its keys and values are never attended to.
        max_batch: continuations decoded at once.
        max_cache_tokens: slots times the longest sequence; caps the batch on long sequences.
        prefill_tokens: padded tokens of one prefill; a longer prefix is prefilled alone.
        decided: asked with the new tokens of a continuation, every 8 of them, whether they decide its verdict, which
            ends it; None: continuations go on to a stop token or the end of their budget. Rollouts always do.

    Attributes:
        scorer: the model as it is measured with.
        cost: what was spent so far; tokens of a continuation count when it is returned.

    Raises:
        InputError: a setting below 1, PEFT prompt learning (its virtual tokens are no prefix of ids), or a
            model without `logits_to_keep`.
    """

    def __init__(
        self,
        model: nn.Module,
        pad_id: int,
        *,
        max_batch: int = 256,
        max_cache_tokens: int = 131_072,
        prefill_tokens: int = 2_048,
        decided: Decided | None = None,
    ) -> None:
        limits = {
            "max_batch": max_batch,
            "max_cache_tokens": max_cache_tokens,
            "prefill_tokens": prefill_tokens,
        }
        for name, value in limits.items():
            if value < 1:
                raise InputError(name, value, "at least 1")
        self.scorer = Scorer(model, pad_id)
        self.model: Any = self.scorer.model
        self.cost = self.scorer.cost
        self.pad_id, self.max_batch, self.decided = pad_id, max_batch, decided
        self.max_cache_tokens, self.prefill_tokens = max_cache_tokens, prefill_tokens

    def continuations(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Continuation]:
        """Yields every continuation of every request, as each finishes.

        Raises:
            InputError: an empty prefix, a budget below 1, or a request that does not fit `max_cache_tokens`.
        """
        requests = asked_of(requests)
        longest = max((len(r.prefix_ids) + r.budget for r in requests), default=0)
        if not self.scorer.sliceable(longest):
            self._fits(longest)
            yield from self._measured(self._decode_alone(requests, sampling))
        elif requests:
            samples, budget = sum(r.samples for r in requests), max(r.budget for r in requests)
            stream = self.stream(sampling, longest, budget, samples)
            stream.add(requests)
            yield from self.read(stream)

    def stream(self, sampling: Sampling, longest: int, budget: int, samples: int | None = None) -> Stream:
        """An empty `Stream` for sequences of up to `longest` tokens, `budget` of them new.

        Args:
            samples: the most continuations there will be, where that is known.

        Raises:
            InputError: sequences that do not fit `max_cache_tokens`, or a model that does not keep every key of them.
        """
        if not self.streams(longest):
            self._fits(longest)
            raise InputError("model", type(self.model).__name__, f"full attention over {longest} tokens in every layer")
        slots = min(self.max_batch, self.max_cache_tokens // longest, samples or self.max_batch)
        return Stream(self, sampling, slots, longest, budget)

    def streams(self, longest: int) -> bool:
        """Whether there can be a `stream` of sequences of up to `longest` tokens."""
        return longest <= self.max_cache_tokens and self.scorer.sliceable(longest)

    def read(self, stream: Stream) -> Generator[Continuation, None, None]:
        """Yields what the stream ends, as it does; rollouts are not counted as generated."""
        yield from self._measured(stream.run())

    def _fits(self, longest: int) -> None:
        if longest > self.max_cache_tokens:
            raise InputError("max_cache_tokens", self.max_cache_tokens, f"at least the longest sequence, {longest}")

    def _measured(self, work: Iterator[list[Continuation]]) -> Iterator[Continuation]:
        while True:
            with self.scorer.measuring():
                done = next((done for done in work if done), None)
            if done is None:
                return
            self.cost.generated += sum(len(c.token_ids) for c in done if not isinstance(c, Rollout))
            yield from done

    def score(
        self, prefix_ids: Sequence[int], from_position: int, temperature: float, chunk: int = 256
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of `prefix_ids[from_position:]` over a prefilled cache of the rest.

        Compared with the trainer's own numbers they show whether probes come from the policy that is trained.

        Returns:
            Two [N] float32 tensors on the CPU, in nats, at `temperature`, before any top-k, top-p or min-p.
        """
        if not 1 <= from_position < len(prefix_ids):
            raise InputError("from_position", from_position, f"1 to {len(prefix_ids) - 1}")
        ids_1N = torch.tensor([prefix_ids])
        # The last token predicts nothing that is asked for.
        starts = [0, *range(from_position, len(prefix_ids) - 1, chunk), len(prefix_ids) - 1]
        cache, parts = None, []
        with self.scorer.measuring():
            for start, stop in pairwise(starts):
                keep = 1 if start == 0 else stop - start
                logits_1NV, cache = self.forward(ids_1N[:, start:stop], cache, logits_to_keep=keep)
                targets_N = ids_1N[0, stop + 1 - keep : stop + 1].to(logits_1NV.device)
                parts.append(token_logprobs_and_entropies(logits_1NV[0], targets_N, temperature, chunk))
        logprob, entropy = (torch.cat(values).cpu() for values in zip(*parts, strict=True))
        return logprob, entropy

    def step(self, cache: SlotCache, last_B: np.ndarray, cached_B: np.ndarray) -> Tensor:
        """(B, V) logits after the last token of each running row, of which the cache holds `cached_B` before it."""
        device, width = self.scorer.device, int(cached_B.max()) + 1
        length_B = torch.from_numpy(cached_B).to(device)
        cache.aim(length_B, width)
        logits_B1V, _ = self.forward(
            torch.from_numpy(last_B)[:, None], cache, logits_to_keep=1,
            attention_mask=torch.arange(width, device=device) <= length_B[:, None],
            position_ids=length_B[:, None],
        )  # fmt: skip
        return logits_B1V[:, -1]

    def _decode_alone(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[list[Continuation]]:
        """Each request in a batch of its own, rows of one length, with the model's own kind of cache."""
        for request in sorted(requests, key=lambda r: -r.budget):
            at_once = min(self.max_batch, self.max_cache_tokens // (len(request.prefix_ids) + request.budget))
            runs_M = runs_of(request, sampling, self.model.config.get_text_config().vocab_size, self.scorer.device)
            for runs in (runs_M[i : i + at_once] for i in range(0, len(runs_M), at_once)):
                ids_BN, cache = torch.tensor([request.prefix_ids] * len(runs)), None
                going = list(runs)
                while going:
                    logits_B1V, cache = self.forward(ids_BN, cache, logits_to_keep=1)
                    # Rows that ended stay in the batch, ignored: not every cache can drop a row.
                    self._extend(runs, logits_B1V[:, -1], sampling)
                    ids_BN = torch.tensor([[run.tokens[-1]] for run in runs])
                    yield [run.result for run in going if run.over]
                    going = [run for run in going if not run.over]

    def _extend(self, runs: Sequence[Run], logits_BV: Tensor, sampling: Sampling) -> None:
        """Draws a token for each continuation that is not over."""
        u_B1 = torch.tensor([[run.next_uniform] for run in runs], dtype=torch.float64, device=self.scorer.device)
        tokens_B1 = draw(filtered(logits_BV, sampling, seen_of(runs)), u_B1)
        for run, token in zip(runs, tokens_B1[:, 0].tolist(), strict=True):
            if not run.over:
                run.take(token, sampling.stop_ids)
                if self.decided is not None:
                    run.ask(self.decided)

    def forward(self, ids_BN: Tensor, cache: Cache | None, **rest: Any) -> tuple[Tensor, Cache]:
        name = self.scorer.cache_name
        self.scorer.count(ids_BN.numel())
        out = self.model(input_ids=ids_BN.to(self.scorer.device), use_cache=True, **{name: cache}, **rest)
        return out.logits, getattr(out, name)
