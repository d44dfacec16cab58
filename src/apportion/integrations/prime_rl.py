"""prime-rl: credit from inside an algorithm's `score_group`.

The hook is that of prime-rl since its pull request 3297 (August 2026), read in the published source. A class derived
from `Algorithm(config, clients)` in `src/prime_rl/orchestrator/algo/base.py` has `async score_group(episodes)`. It gets
the policy's endpoint as `clients` (`clients.py`: `InferenceClient` with `train_client` and `model_name`) and hands
credit over with `assign_advantages(trace, values)` of `algo/routing.py`, one value a sampled token. Newer documentation
has these modules under `orchestrator/train/algo`, so nothing is imported from prime-rl here: the class hands its own
`assign_advantages` in. Episodes and traces are those of verifiers 0.4.0 (`verifiers.v1`). prime-rl is on no package
registry, and its configuration names no user code: the class goes into its `ALGORITHM_CLASSES`
(docs/other-trainers.md has it whole).

prime-rl's GRPO is r − μ in float32, without σ: that is the base where the traces carry no advantages yet, and scale 1.
Where its own `score_group` ran first, what it assigned is the base, penalties included.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

import torch

from apportion.credit.pipeline import stages_of
from apportion.engines.base import Continuation, Request, Sampling
from apportion.errors import InputError
from apportion.integrations.group import GroupCredit, Response, Sample


async def score_group(credit: GroupCredit, episodes: Sequence[Any], assign: Callable[[Any, list[float]], None]) -> None:
    """Gives every trainable trace of a group its credit.

    Traces with an error, of agents that are not trained, or without a sampled token are left out, as in prime-rl.
    Where nodes have no entropies, ProbePO ranks by minus the log-probability of each sampled token, one draw from what
    the entropy is the mean of [ours]; methods that weigh credit by entropy get none.

    Args:
        episodes: of one group, scored. assign: prime-rl's `assign_advantages`.

    Raises:
        InputError: a trace whose tokens have different advantages already; what `GroupCredit.advantages` refuses.
    """
    traces = [
        trace
        for episode in episodes
        for trace in episode.traces
        if not trace.has_error and trace.agent.trainable and any(map(_sampled, trace.nodes))
    ]
    if not traces:
        return
    ranks_only = all("continuations" in s.needs for s in stages_of(credit.method) if "entropy" in s.needs)
    rewards = torch.tensor([trace.reward for trace in traces], dtype=torch.float32)
    assigned = [_assigned(trace) for trace in traces]
    own = [value for value in assigned if value is not None]
    host = own if len(own) == len(traces) else (rewards - rewards.mean()).tolist()
    responses = [_response(trace, value, ranks_only) for trace, value in zip(traces, host, strict=True)]
    first = episodes[0]
    step = 0 if first.run is None else getattr(first.run.work, "step", 0)
    found = await credit.advantages(responses, name=first.id if first.group is None else first.group.id, step=step)
    for trace, response, values in zip(traces, responses, found, strict=True):
        assign(trace, [value for value, sampled in zip(values, response.mask, strict=True) if sampled])


def through(clients: Any, sampling: Sampling, *, threads: int = 64, timeout: float = 600.0) -> Sample:
    """Continuations from prime-rl's policy endpoint: vLLM's `/inference/v1/generate`, token ids in and out.

    Each continuation is a call of its own, with its budget and its seed. All calls of a response carry the same
    `X-Session-ID`, by which prime-rl's router keeps to one engine and its prefix cache. The endpoint does not say which
    weights it sampled with, and prime-rl updates them under way.

    Args:
        clients: prime-rl's `InferenceClient`. sampling: that of the rollouts. timeout: seconds of a call.
    """
    config = clients.train_client
    url = config.base_url.rstrip("/").removesuffix("/v1") + "/inference/v1/generate"
    key = os.environ.get(config.api_key_var) or "EMPTY"
    headers = {"Authorization": f"Bearer {key}", **(config.headers or {}), "Content-Type": "application/json"}
    fixed = {
        "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p, "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.stop_ids), "skip_special_tokens": False,
    }  # fmt: skip
    pool = ThreadPoolExecutor(threads)

    def ask(request: Request, m: int) -> Continuation:
        params = {**fixed, "max_tokens": request.budget, "seed": request.key.stream(m) % 2**31}
        body = {"model": clients.model_name, "token_ids": list(request.prefix_ids), "sampling_params": params}
        route = {"X-Session-ID": f"{request.key.run}-{request.key.step}-{request.key.prompt}-{request.key.sample}"}
        call = HttpRequest(url, json.dumps(body).encode(), {**headers, **route})
        with urlopen(call, timeout=timeout) as answer:
            choice = json.load(answer)["choices"][0]
        if choice["finish_reason"] not in ("stop", "length"):
            raise RuntimeError(f"finish_reason {choice['finish_reason']!r}")
        return Continuation(request.key, m, tuple(choice["token_ids"]), choice["finish_reason"])

    async def sample(request: Request, m: int) -> Continuation:
        return await asyncio.get_running_loop().run_in_executor(pool, ask, request, m)

    return sample


def _sampled(node: Any) -> bool:
    return any(node.mask)


def _nodes(trace: Any) -> tuple[list[Any], int]:
    """What is trained on, each node once and in the trace's order, as prime-rl counts tokens; and its branches."""
    branches = [branch for branch in trace.branches if branch.trainable]
    inside = {id(node) for branch in branches for node in branch.nodes}
    return [node for node in trace.nodes if id(node) in inside], len(branches)


def _assigned(trace: Any) -> float | None:
    """The one advantage that all sampled tokens have; None where some have none."""
    nodes = [node for node in _nodes(trace)[0] if _sampled(node)]
    if any(node.advantages is None for node in nodes):
        return None
    values = {value for node in nodes for value in node.advantages}
    if len(values) > 1:
        raise InputError(f"advantages of trace {trace.id}", f"{len(values)} different ones", "one a trace",
                         "let an algorithm score the group first that gives each trace one")  # fmt: skip
    return values.pop() if values else None


def _response(trace: Any, host: float, ranks_only: bool) -> Response:
    nodes, branches = _nodes(trace)
    ids = [token for node in nodes for token in node.token_ids]
    mask = [bool(sampled) for node in nodes for sampled in node.mask]
    start = mask.index(True) if True in mask else len(mask)
    logprob = _spread(nodes, "logprobs", start)
    entropy = _spread(nodes, "entropies", start)
    if entropy is None and logprob is not None and ranks_only:
        entropy = [None if value is None else max(-value, 0.0) for value in logprob]
    return Response(
        prompt_ids=ids[:start], token_ids=ids[start:], mask=mask[start:], reward=trace.reward, host=host,
        truncated=trace.is_truncated, old_logprob=logprob, entropy=entropy,
        ref_logprob=_spread(nodes, "reference_logprobs", start),
        single=branches == 1 and all(mask[start:]), origin=trace,
    )  # fmt: skip


def _spread(nodes: Iterable[Any], name: str, start: int) -> list[float | None] | None:
    """A value a token from each node's values of its sampled tokens; None where a node's are not complete."""
    out: list[float | None] = []
    for node in nodes:
        values = list(getattr(node, name) or [])
        if len(values) != sum(map(bool, node.mask)):
            return None
        rest = iter(values)
        out += [next(rest) if sampled else None for sampled in node.mask]
    return out[start:]
