"""What an engine is asked and what it answers. Everything is keyed, nothing is positional."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from apportion.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """How the rollouts were sampled; probes are sampled the same way.

    Attributes:
        temperature: > 0. Logits are upcast to float32 before they are divided by it.
        top_k: 0 keeps all. top_p: 1 keeps all. min_p: 0 keeps all.
        repetition_penalty: 1 for none; counts prompt and response, as transformers does.
        stop_ids: token ids that end a response; the stop token is part of it.

    Raises:
        InputError: a setting outside its range.
    """

    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, ok, expected in (
            ("temperature", self.temperature > 0, "above 0 (for greedy decoding set top_k=1)"),
            ("top_k", self.top_k >= 0, "at least 0, which keeps all"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and up to 1, which keeps all"),
            ("min_p", 0 <= self.min_p <= 1, "0, which keeps all, to 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0; 1 for none"),
        ):
            if not ok:
                raise InputError(f"sampling.{name}", getattr(self, name), expected)


@dataclass(frozen=True)
class Key:
    """Names one state to continue: results are matched by it and random streams are drawn from it.

    Attributes:
        run: the run's seed or name; step: optimiser step; prompt: the prompt's occurrence in that step;
        sample: the response's number in its group; position: tokens of the response that are kept.
    """

    run: str
    step: int
    prompt: str
    sample: int
    position: int

    def stream(self, m: int) -> int:
        """The 64-bit seed of continuation m: a hash of the key, so no order, split or retry changes it."""
        text = "\x1f".join(map(str, (self.run, self.step, self.prompt, self.sample, self.position, m)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Request:
    """Continue `prefix_ids` (prompt and response so far, never text) `samples` times, numbered from `first`.

    Each continuation may use `budget` new tokens.
    """

    key: Key
    prefix_ids: tuple[int, ...] = field(repr=False)
    samples: int
    budget: int
    first: int = 0


def asked_of(requests: Sequence[Request]) -> list[Request]:
    """The requests that ask for any continuation.

    Raises:
        InputError: one of them has an empty prefix, or a budget below 1.
    """
    asked = [request for request in requests if request.samples]
    for request in asked:
        if not request.prefix_ids or request.budget < 1:
            raise InputError(
                f"request {request.key}",
                f"{len(request.prefix_ids)} prefix tokens and a budget of {request.budget}",
                "at least one of each",
            )  # fmt: skip
    return asked


# Why a continuation ends: a stop token, its budget, or text that decides its verdict (see `Decided`).
Finish = Literal["stop", "length", "decided"]


@dataclass(frozen=True)
class Continuation:
    """Continuation `m` of a key. `finish` is "length" where the budget ran out before a stop token."""

    key: Key
    m: int
    token_ids: tuple[int, ...]
    finish: Finish
    rescued: bool = False


@dataclass(frozen=True)
class Rollout(Continuation):
    """A response that is sampled by our own engine, with what was read of each token as it was drawn.

    Attributes:
        logprobs, entropies: a number a token, nats, at the sampling temperature, before any filter.
    """

    logprobs: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()


class ContinuationEngine(Protocol):
    """Answers continuation requests, in any order."""

    def continuations(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Continuation]:
        """Yields every continuation of every request, as each finishes."""
        ...


@dataclass(frozen=True)
class Scoring:
    """A response as an engine scores it: the prompt's ids and then its own, never text.

    Attributes:
        ids: prompt and response. prompt: how many of them are the prompt's. Positions count in the response.
    """

    key: Key
    ids: tuple[int, ...] = field(repr=False)
    prompt: int


@dataclass(frozen=True)
class BeliefRequest(Scoring):
    """Log-probability of the best of `answers` after `cue_ids`, at every one of `positions`; the cue does not count.

    Where `per_token`, each answer's is divided by its number of tokens before they are compared.
    """

    positions: tuple[int, ...]
    cue_ids: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    per_token: bool = False


@dataclass(frozen=True)
class SensitivityRequest(Scoring):
    """The influence of the first `reasoning` tokens of the response on its own `answer` (see `SensitivityJob`)."""

    reasoning: int
    answer: tuple[int, int]
    estimator: Literal["perturb", "gradient"]
    representation: Literal["last", "answer_mean", "answer_joint"]
    noise: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class ConfidenceRequest(Scoring):
    """`samples` answers of at most `tokens` tokens after `cue_ids`, and the gold answer's forced probability."""

    positions: tuple[int, ...]
    cue_ids: tuple[int, ...]
    gold_ids: tuple[int, ...]
    samples: int
    tokens: int


@dataclass(frozen=True)
class DivergenceRequest(Scoring):
    """Two other prompts of the same length for the same response: without what is asked about, and disturbed."""

    blank_ids: tuple[int, ...]
    disturbed_ids: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """What was read for a key: one value a position (belief), token (sensitivity, divergence, log-probabilities).

    Attributes:
        values: [K] float64 on the CPU; (K, 2) for confidence: conf and acc.
    """

    key: Key
    values: Tensor


@dataclass
class Cost:
    """What an engine has spent since it was made. Padding counts: it is computed."""

    generated: int = 0
    forwards: int = 0
    forward_tokens: int = 0
    backwards: int = 0
    backward_tokens: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __sub__(self, other: Cost) -> Cost:
        return Cost(**{name: value - getattr(other, name) for name, value in vars(self).items()})
