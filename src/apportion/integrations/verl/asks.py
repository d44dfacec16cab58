"""Requests to a replica of the `apportion_transformers` engine, read as verl states them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apportion.engines.base import Key, Sampling
from apportion.errors import InputError, nearest

_KNOWN = {
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "max_new_tokens", "seed", "logprobs",
    "stop_token_ids", "ignore_eos", "n",
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What a replica allows.

    Attributes:
        prompt, response: tokens of the configured prompt and response; a request without a budget gets what is left
            of both together, at most `response`.
        length: tokens of the longest sequence.
        seed: of requests without one.
    """

    prompt: int
    response: int
    length: int
    seed: int = 0


@dataclass(frozen=True)
class Ask:
    """One request: continue `prefix_ids` once, by at most `budget` tokens.

    Attributes:
        key: what its random stream is drawn from: the seed and the prefix, so the same request always gets the same
            tokens. Without a seed it is the name of the request instead.
        logprobs: whether the log-probabilities of its tokens are asked for.
    """

    key: Key
    prefix_ids: tuple[int, ...]
    sampling: Sampling
    budget: int
    logprobs: bool


def ask_of(
    request_id: str, prefix_ids: Sequence[int], params: Mapping[str, Any], stop_ids: tuple[int, ...], limits: Limits
) -> Ask:
    """Reads a request as verl states it.

    A temperature of 0 and a `top_k` of 1 are both greedy; `top_k` −1 and 0 keep all. A budget beyond the longest
    sequence is cut to it, as vLLM does.

    Raises:
        InputError: an unknown or unusable setting, an empty prefix, or one that leaves no room for a token.
    """
    for name in params:
        if name not in _KNOWN:
            raise InputError(
                f"sampling_params.{name}", params[name], f"one of {', '.join(sorted(_KNOWN))}{nearest(name, _KNOWN)}"
            )
    if params.get("n", 1) != 1:
        raise InputError("sampling_params.n", params["n"], "1", "send a request for each continuation")
    prefix = tuple(map(int, prefix_ids))
    if not 1 <= len(prefix) < limits.length:
        raise InputError("prompt_ids", f"{len(prefix)} tokens", f"1 to {limits.length - 1}", "raise max_model_len")
    rest = max(1, min(limits.response, limits.prompt + limits.response - len(prefix)))
    named = (params.get(name) for name in ("max_tokens", "max_new_tokens"))
    budget = next((int(value) for value in named if value is not None), rest)
    if budget < 1:
        raise InputError("sampling_params.max_tokens", budget, "at least 1")
    greedy = params.get("temperature", 1.0) == 0
    sampling = Sampling(
        stop_ids=(*(() if params.get("ignore_eos") else stop_ids), *(params.get("stop_token_ids") or ())),
        temperature=1.0 if greedy else params.get("temperature", 1.0),
        top_k=1 if greedy else max(0, params.get("top_k", 0)),
        top_p=params.get("top_p", 1.0),
        min_p=params.get("min_p", 0.0),
        repetition_penalty=params.get("repetition_penalty", 1.0),
    )
    seed = params.get("seed")
    run = f"request {limits.seed} {request_id}" if seed is None else f"seed {seed}"
    key = Key(run=run, step=0, prompt=" ".join(map(str, prefix)), sample=0, position=len(prefix))
    return Ask(key, prefix, sampling, min(budget, limits.length - len(prefix)), bool(params.get("logprobs")))
