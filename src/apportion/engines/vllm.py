"""Continuations and log-probabilities from vLLM, keyed, from the weights that are trained and no others.

Shapes: _T tokens of a response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from apportion.engines.base import Continuation, Key, Reading, Request, Sampling, Scoring, asked_of
from apportion.engines.logprobs import check
from apportion.engines.vllm_hosts import Ask, Colocated, Host
from apportion.engines.vllm_server import Server
from apportion.errors import InputError

# vLLM raises lower temperatures to the first and refuses those above the second.
_TEMPERATURES = (0.01, 2.0)
# The version of weights that nobody has put into vLLM.
_NO_WEIGHTS = object()


class StaleWeights(RuntimeError):
    """vLLM holds other weights than those that are trained: what it would measure is of another policy."""


class VLLMEngine:
    """Continues token-id prefixes with vLLM: one request of n outputs a prefix, whose prefill is cached.

    Every request has its own budget and seed. Continuation m of a key draws from the seed `seed_of(key, m)`, so
    results depend on the key alone, up to rounding of logits in batches of another shape; they are not those that
    `TransformersEngine` draws from the same key. vLLM's filters are transformers' but for their order, so
    `min_p` together with `top_p` is refused.

    Weights have a version. Measuring with another one in vLLM than the trained one raises `StaleWeights`, and so
    does a change in the course of a call. The first call after a change drops vLLM's prefix cache and makes sure
    that it did. Global random streams are left where they were.

    Args:
        host: `Colocated` or `Server`.
        trained: the version of the weights that are trained, such as the number of optimiser steps.
        held: the version in vLLM, where somebody else updates it, as TRL does; None where `update` does.

    Attributes:
        cost: what was spent so far. Of a prefix the tokens that vLLM had to compute count, and of a continuation
            its tokens, once it is returned.
        lost: continuations that vLLM broke off before a stop token and before their budget; they are missing
            in the results.
    """

    def __init__(self, host: Host, trained: Callable[[], Hashable], held: Callable[[], Hashable] | None = None) -> None:
        self.host, self.cost, self.lost = host, host.cost, 0
        self._trained, self._host_holds = trained, held
        self._updated: Hashable = _NO_WEIGHTS
        self._cached: Hashable = _NO_WEIGHTS

    def update(self, model: nn.Module) -> None:
        """Puts the weights that are trained now into our own vLLM.

        Args:
            model: a transformers model, not wrapped.

        Raises:
            InputError: a vLLM that somebody else updates.
        """
        if self._host_holds is not None or not isinstance(self.host, Colocated):
            raise InputError("vllm", "one that TRL updates", "our own (`own_llm`)", "leave the update to TRL")
        # Until it is through, vLLM may hold some of both.
        self._updated = self._cached = _NO_WEIGHTS
        version = self._trained()
        # A head that is tied to the embeddings is named too: vLLM on the CPU keeps a packed copy of it.
        self.host.load((name, value.detach()) for name, value in model.named_parameters(remove_duplicate=False))
        self._updated = version

    def continuations(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Continuation]:
        """Yields every continuation of every request: a server's as its requests finish, a colocated vLLM's at the end.

        Raises:
            InputError: an empty prefix, a budget below 1, a request longer than vLLM takes, or sampling settings that
                vLLM cannot keep to.
            StaleWeights: see the class.
        """
        settings = settings_of(sampling)
        requests = asked_of(requests)
        self._check_length(max((len(r.prefix_ids) + r.budget for r in requests), default=0))
        asks = {str(i): Ask(r.prefix_ids, r.samples, r.budget, seed_of(r.key, r.first)) for i, r in enumerate(requests)}
        if not asks:
            return
        with self._weights():
            for name, number, tokens in self.host.generate(asks, settings):
                request = requests[int(name)]
                stopped = bool(tokens) and tokens[-1] in sampling.stop_ids
                if not stopped and len(tokens) < request.budget:
                    self.lost += 1
                    continue
                self.cost.generated += len(tokens)
                yield Continuation(request.key, request.first + number, tokens, "stop" if stopped else "length")

    def logprobs(self, requests: Sequence[Scoring]) -> Iterator[Reading]:
        """The log-probability of every token of each response, before temperature: vLLM scores prompts without it.

        Compared with the trainer's they show whether probes come from the policy that is trained (`measure.gap`).
        Scored before they are continued, prefixes are prefilled once: vLLM computes what it scores anew and caches it.

        Yields:
            A reading a request, in any order: [T] float64, nats, at temperature 1.

        Raises:
            InputError: a prompt without tokens or longer than the ids, or a row longer than vLLM takes.
            StaleWeights: see the class.
            RuntimeError: vLLM returned less than a finite log-probability a token.
        """
        for request in requests:
            check(request)
        # vLLM generates a token, which is dropped, to score a row.
        self._check_length(max((len(request.ids) + 1 for request in requests), default=0))
        rows = {str(i): r.ids for i, r in enumerate(requests) if len(r.ids) > r.prompt}
        scored: dict[str, list[float | None]] = {}
        if rows:
            with self._weights():
                scored = dict(self.host.score(rows))
        for i, request in enumerate(requests):
            wanted = len(request.ids) - request.prompt
            # The row's first token has no log-probability.
            values = scored.get(str(i), [])[request.prompt - 1 :] if wanted else []
            if len(values) != wanted or not all(value is not None and math.isfinite(value) for value in values):
                raise RuntimeError(f"vLLM returned no log-probability for some of the {wanted} tokens of {request.key}")
            yield Reading(request.key, torch.tensor(values, dtype=torch.float64))

    def _check_length(self, longest: int) -> None:
        if longest > self.host.longest:
            raise InputError(
                "max_model_len", self.host.longest, f"at least {longest}, the longest sequence that is measured",
                "raise vllm_max_model_length",
            )  # fmt: skip

    @contextmanager
    def _weights(self) -> Iterator[None]:
        """What is done inside is done with the weights that are trained, before and after it."""
        version = self._version()
        if version != self._cached:
            if not self.host.drop_cache():
                raise StaleWeights(
                    "vLLM did not drop its prefix cache, which is of other weights: requests of another caller are in "
                    "flight"
                )
            self._cached = version
        yield
        if self._version() != version:
            raise StaleWeights(f"the weights changed from {version} to {self._trained()} while vLLM was measuring")

    def _version(self) -> Hashable:
        trained = self._trained()
        held = self._updated if self._host_holds is None else self._host_holds()
        if held != trained:
            what = "none: call `update`" if held is _NO_WEIGHTS else f"version {held}"
            raise StaleWeights(f"the weights that are trained are version {trained}, and vLLM holds {what}")
        return trained


def through_trl(
    generation: Any, trained: Callable[[], Hashable], held: Callable[[], Hashable], concurrency: int = 64
) -> VLLMEngine:
    """The engine over the vLLM that TRL samples its rollouts with.

    Args:
        generation: `GRPOTrainer.vllm_generation`. In server mode hand it in on the main process, which asks for all
            ranks: the others have no client.
        trained: `lambda: trainer.state.global_step`. held: `lambda: trainer._last_loaded_step`.
        concurrency: calls under way at a time, in server mode.
    """
    if generation.mode == "server":
        return VLLMEngine(Server(generation.vllm_client, concurrency), trained, held)
    return VLLMEngine(Colocated(generation.llm), trained, held)


def seed_of(key: Key, m: int) -> int:
    """The seed of continuation m, below 2^63: those of a key follow one another, as vLLM seeds its n outputs [ours]."""
    return (key.stream(0) >> 2) + m


def settings_of(sampling: Sampling) -> dict[str, Any]:
    """vLLM's names for them. Only `stop_ids` end a continuation, whatever the model's own end tokens are.

    Raises:
        InputError: a setting that vLLM would change, refuse or apply in another order.
    """
    lowest, highest = _TEMPERATURES
    if not lowest <= sampling.temperature <= highest:
        raise InputError(
            "sampling.temperature", sampling.temperature, f"{lowest} to {highest}, which vLLM takes as it is"
        )
    if sampling.min_p and sampling.top_p < 1:
        raise InputError(
            "sampling.min_p", f"{sampling.min_p} with top_p={sampling.top_p}",
            "one of the two: vLLM filters by min_p first and transformers by top_p, which keeps other tokens",
        )  # fmt: skip
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,
    }
