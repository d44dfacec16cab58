"""One of many workers that have probes sampled by verl's replicas and graded by verl's reward workers.

It is asked for numbered continuations of one state and answers by number. Shapes: none, these are records.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from apportion.integrations.verl.reward import Abstained
from apportion.measure.probe import Rescue

if TYPE_CHECKING:
    from apportion.integrations.verl.scheduler import Piece

# Engines whose requests take a seed; a key that the others do not know makes them refuse the request.
SEEDED = ("vllm", "apportion_transformers")
# Replicas that one request is asked of before it counts as failed, where each of them is found dead [ours].
REPLICAS = 3
# As verl writes greedy decoding, for all of its engines.
_GREEDY = {"temperature": 0, "top_p": 1.0, "top_k": -1}


@dataclass(frozen=True)
class Answer:
    """Continuation `m` of the state that was asked for.

    Attributes:
        token_ids: the new tokens, stop token included, and those of the rescue where there was one.
        finish: "length" where the budget ran out before a stop token.
        rescued: the answer cue was appended (see `measure.probe.Rescue`).
        text: the full response as verl's reward managers read it: decoded in one go, without special tokens.
        reward: None where the verifier abstained or failed. fault: why it failed, empty where it did not.
        version: the policy that sampled it, verl's number of the step; the last one where it changed on the way.
        oldest: the first one. None where the engine does not say.
        logprobs: what the engine gave each token, of the first continuation of a state only, without a rescue.
    """

    m: int
    token_ids: tuple[int, ...]
    finish: Literal["stop", "length"]
    rescued: bool
    text: str
    reward: float | None
    version: int | None
    oldest: int | None = None
    fault: str = ""
    logprobs: tuple[float, ...] | None = None


class NoAnswer(Exception):
    """What an engine returned is no continuation: broken off, empty or longer than its budget."""


@dataclass(frozen=True)
class _Sampled:
    token_ids: tuple[int, ...]
    finish: Literal["stop", "length"]
    fields: Mapping[str, Any]
    logprobs: tuple[float, ...] | None


class ProbeWorker:
    """Samples and grades pieces of work; an async Ray actor, wrapped where it is started.

    A continuation is one request to verl's client, with the piece's route as its session, so that one replica
    prefills the prefix once, and with a budget and, where the engine takes one (`SEEDED`), a seed of its own: it
    draws from its key and number alone. With other engines, SGLang among them, results differ between runs. Tokens
    go in and out as ids. vLLM and SGLang return the stop token, verl's rollouts have it, and so do answers.

    Args:
        config: verl's whole configuration; rollouts and probes are sampled with the same settings of it.
        llm_client: verl's client of the rollout replicas. reward_handles: verl's reward loop workers.
        stop_ids: token ids that end a response.
        timeout: seconds after which a piece is answered with what there is; None waits.
        balancer: verl's balancer of the replicas. Nobody tells it of one that died: that one fails at once, looks idle
            and draws every request. It is taken off here; None leaves it.
        tokenizer: the one that verl's reward workers load where None.
    """

    def __init__(
        self,
        config: Any,
        llm_client: Any,
        reward_handles: Sequence[Any],
        stop_ids: Collection[int],
        rescue: Rescue | None = None,
        timeout: float | None = None,
        balancer: Any = None,
        tokenizer: Any = None,
    ) -> None:
        rollout = config.actor_rollout_ref.rollout
        self._client, self._balancer = llm_client, balancer
        self._rescue, self._timeout = rescue, timeout
        self._asked: set[asyncio.Future[Any]] = set()
        self._reward_handles, self._turn = list(reward_handles), itertools.count()
        self._stop_ids = frozenset() if rollout.ignore_eos else frozenset(stop_ids)
        self._sampling = {
            "temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k,
            # What verl's agent loop samples rollouts with, whatever the configuration says.
            "repetition_penalty": 1.0, "logprobs": False,
        }  # fmt: skip
        self._seeded = rollout.name in SEEDED
        self._longest = rollout.get("max_model_len", None) or math.inf
        # vLLM is then given our names of requests, and refuses one that is in flight already.
        self._own_routes = bool(rollout.get("full_determinism", False))
        self._tokenizer = _tokenizer(config) if tokenizer is None else tokenizer

    async def ready(self) -> None:
        """Returns once the worker is up."""

    async def probe(self, piece: Piece, row: Mapping[str, Any]) -> tuple[list[Answer], str]:
        """Has the piece's continuations sampled and graded, all at once.

        Args:
            row: what the data set says of the prompt, as verl's reward workers get it with a rollout.

        Returns:
            The answers that came, in no particular order, and why the others did not, empty where all came: one that
            fails takes none of the others with it.
        """
        tasks = [asyncio.create_task(self._answer(piece, m, row)) for m in piece.numbers]
        try:
            await asyncio.wait(tasks, timeout=self._timeout)
        finally:
            for task in tasks:
                task.cancel()
        answers, reasons = [], Counter[str]()
        for task in tasks:
            if not task.done() or task.cancelled():
                reasons[f"no answer in {self._timeout:g} s"] += 1
            elif (error := task.exception()) is not None:
                reasons[why(error)] += 1
            else:
                answers.append(task.result())
        return answers, "; ".join(reasons)

    async def _answer(self, piece: Piece, m: int, row: Mapping[str, Any]) -> Answer:
        request, rescue = piece.request, self._rescue
        prefix = list(request.prefix_ids)
        start = len(prefix) - request.key.position
        prompt, kept = prefix[:start], prefix[start:]
        budget = int(min(request.budget, self._longest - len(prefix)))
        if budget < 1:
            raise NoAnswer(f"max_model_len = {self._longest} leaves no room after {len(prefix)} tokens")
        route = f"{piece.route}/{m}" if self._own_routes else piece.route
        # Of one continuation of a state, to compare with the trainer's.
        sampling = self._sampling | {"logprobs": m == request.first}
        if self._seeded:
            sampling["seed"] = request.key.stream(m) % 2**31
        reserved = rescue.tokens if rescue is not None and budget > rescue.tokens else 0
        sampled = await self._sample(route, prefix, budget - reserved, sampling)
        tokens, finish, fields = list(sampled.token_ids), sampled.finish, sampled.fields
        oldest, rescued = fields.get("min_global_steps"), False
        text = self._decode([*kept, *tokens])
        if rescue is not None and reserved and finish == "length" and not rescue.has_answer(text):
            tokens += rescue.cue_ids
            left = rescue.tokens - len(rescue.cue_ids)
            last = await self._sample(route, [*prefix, *tokens], left, self._sampling | _GREEDY)
            tokens += last.token_ids
            finish, fields, rescued = last.finish, last.fields, True
            text = self._decode([*kept, *tokens])
        reward, fault = await self._grade(graded_as(prompt, [*kept, *tokens], row, fields))
        version = fields.get("max_global_steps")
        logprobs = None if rescued else sampled.logprobs
        return Answer(m, tuple(tokens), finish, rescued, text, reward, version, oldest, fault, logprobs)

    async def _sample(self, route: str, prefix: list[int], budget: int, sampling: Mapping[str, Any]) -> _Sampled:
        """Raises NoAnswer where the engine broke off, returned nothing or more than the budget."""
        output = await self._ask(route, prefix, {**sampling, "max_tokens": budget})
        tokens = tuple(output.token_ids)
        # verl's client of asynchronous training resumes what was broken off by itself.
        if output.stop_reason in ("aborted", "abort"):
            raise NoAnswer("broken off by the engine")
        if not tokens:
            raise NoAnswer("an empty answer")
        if len(tokens) > budget:
            raise NoAnswer(f"{len(tokens)} tokens for a budget of {budget}")
        # "completed" says nothing, and a stop token that is the budget's last is reported as "length" by some.
        spent = len(tokens) == budget or output.stop_reason == "length"
        finish: Literal["stop", "length"] = "length" if spent and tokens[-1] not in self._stop_ids else "stop"
        given = output.log_probs if sampling["logprobs"] else None
        logprobs = tuple(given) if given and len(given) == len(tokens) else None
        return _Sampled(tokens, finish, output.extra_fields, logprobs)

    async def _ask(self, route: str, prefix: list[int], sampling: dict[str, Any]) -> Any:
        for _ in range(REPLICAS - 1):
            try:
                return await self._ask_once(route, prefix, sampling)
            except Exception as error:
                if not (_gone(error) and await self._leads_elsewhere(route)):
                    raise
        return await self._ask_once(route, prefix, sampling)

    async def _ask_once(self, route: str, prefix: list[int], sampling: dict[str, Any]) -> Any:
        asked = asyncio.ensure_future(
            self._client.generate(request_id=route, prompt_ids=prefix, sampling_params=dict(sampling))
        )
        self._asked.add(asked)
        asked.add_done_callback(self._asked.discard)
        # One that is given up runs on in its replica, which verl's balancer is to know: it would look idle.
        return await asyncio.shield(asked)

    async def _leads_elsewhere(self, route: str) -> bool:
        """Takes a route's replica off the balancer if it is gone; where that is not known yet, waits until it is."""
        if self._balancer is None:
            return False
        try:
            name, server = await self._balancer.acquire_server.remote(request_id=route)
        except Exception:
            # No replica is left, or it is a balancer that wants to know more than a name.
            return False
        self._balancer.release_server.remote(server_id=name)
        while True:
            try:
                await server.__ray_ready__.remote()
                return True
            except Exception as error:
                if not _unreachable(error):
                    if _gone(error):
                        await self._balancer.remove_servers.remote([name])
                    return _gone(error)
            await asyncio.sleep(1)

    async def _grade(self, data: Any) -> tuple[float | None, str]:
        """The reward and why there is none: a verifier that raises abstains."""
        fault = ""
        # A reward worker that is gone is no fault of the response's; one that took two with it is not asked a third.
        first = next(self._turn)
        for turn in range(min(2, len(self._reward_handles))):
            # The next one in the row: the turn itself is shared, and others may have moved it to the same again.
            handle = self._reward_handles[(first + turn) % len(self._reward_handles)]
            try:
                found = (await handle.compute_score.remote(data))["reward_score"]
                reward = math.nan if found is None else float(found)
            except Exception as error:
                if isinstance(getattr(error, "cause", error), Abstained):
                    return None, ""
                fault = why(error)
                if not _gone(error):
                    break
            else:
                return (None if math.isnan(reward) else reward), ""
        return None, fault

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def graded_as(prompt: list[int], response: list[int], row: Mapping[str, Any], fields: Mapping[str, Any]) -> Any:
    """One response in the layout that verl's agent loop hands rollouts to a reward worker in (a DataProto of 1).

    Args:
        row: the data set's columns; its `__num_turns__`, where it has one, else the two turns of a single question.
        fields: what the engine said of the answer beside its tokens.
    """
    from tensordict import TensorDict
    from verl.protocol import DataProto

    ids = torch.tensor([prompt + response], dtype=torch.int64)
    batch = {
        "prompts": ids[:, : len(prompt)], "responses": ids[:, len(prompt) :], "input_ids": ids,
        "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(ids.shape[1])[None],
    }  # fmt: skip
    about = {
        "__num_turns__": 2, **row, "prompt_len": len(prompt), "response_len": len(response),
        "tool_extra_fields": {**fields, "turn_scores": [], "tool_rewards": []},
    }  # fmt: skip
    return DataProto(
        batch=TensorDict(batch, batch_size=1), non_tensor_batch={name: np.array([v]) for name, v in about.items()}
    )


def why(error: BaseException) -> str:
    """One line of what happened; where Ray passes an exception on, the original's."""
    if isinstance(cause := getattr(error, "cause", None), BaseException):
        return why(cause)
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])[:200]


def _gone(error: Exception) -> bool:
    """Whether the actor that was asked is no more or out of reach, rather than one that it asked."""
    from ray.exceptions import RayActorError, RayTaskError

    return isinstance(error, RayActorError) and not isinstance(error, RayTaskError)


def _unreachable(error: Exception) -> bool:
    """Whether it may come back."""
    from ray.exceptions import ActorUnavailableError

    return isinstance(error, ActorUnavailableError)


def _tokenizer(config: Any) -> Any:
    from verl.utils import hf_tokenizer
    from verl.utils.fs import copy_to_local

    model = config.actor_rollout_ref.model
    return hf_tokenizer(copy_to_local(model.tokenizer_path or model.path), trust_remote_code=True)
