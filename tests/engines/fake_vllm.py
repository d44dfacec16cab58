"""The few calls of vLLM and of TRL's client that the engine makes, answered by a tiny model, habits and traps included.

Kept to the real ones by `test_vllm_engine.test_the_fake_is_like_vllm` where vLLM is installed and by
`test_trl_is_as_expected` everywhere: every output of a request is an entry of its own (CUMULATIVE), output i draws
from the request's seed + i, prefixes are cached in blocks and stay so when weights change, `reset_prefix_cache`
answers False while anything runs, the global random streams are drawn from, prompt log-probabilities are of
temperature 1 and recompute the prompt.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from apportion.engines.base import Sampling
from apportion.engines.sampling import draw, filtered

BLOCK = 4


class Hashed(nn.Module):
    """A model in the time of a look-up: its logits are a row of `table`, picked by everything before them."""

    def __init__(self, vocabulary: int, seed: int = 0, rows: int = 997) -> None:
        super().__init__()
        self.config = vocabulary
        self.table = nn.Parameter(2 * torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(seed)))

    def forward(self, ids_BN: torch.Tensor) -> Any:
        size = len(self.table)
        rows = [
            list(accumulate(row, lambda at, token: (at * 31 + token + 1) % size, initial=0)) for row in ids_BN.tolist()
        ]
        return SimpleNamespace(logits=self.table[torch.tensor(rows)[:, 1:]])


@dataclass
class SamplingParams:
    """vLLM's, as far as it is used; values that vLLM refuses or changes are errors here."""

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int = 16
    prompt_logprobs: int | None = None
    detokenize: bool = True

    def __post_init__(self) -> None:
        assert 0.01 <= self.temperature <= 2 and self.max_tokens >= 1 and self.n >= 1
        assert self.seed is None or 0 <= self.seed < 2**63 - self.n


@dataclass
class _Child:
    name: str
    index: int
    ids: list[int]
    params: SamplingParams
    generator: torch.Generator
    new: list[int] = field(default_factory=list)
    cached: int = 0
    model: Any = None


class FakeLLM:
    """`vllm.LLM` and its `llm_engine`, which are one object here."""

    def __init__(self, model: nn.Module, longest: int = 256, eos: int = 5, **settings: Any) -> None:
        self.policy, self.eos = model.eval(), eos
        self.model_config = SimpleNamespace(
            max_model_len=longest,
            logprobs_mode=settings.pop("logprobs_mode", "processed_logprobs"),
            enable_sleep_mode=settings.pop("enable_sleep_mode", False),
        )
        self.vllm_config = SimpleNamespace(
            model_config=self.model_config,
            parallel_config=SimpleNamespace(tensor_parallel_size=settings.pop("tensor_parallel_size", 1)),
            scheduler_config=SimpleNamespace(enable_chunked_prefill=settings.pop("enable_chunked_prefill", False)),
            device_config=SimpleNamespace(device_type=settings.pop("device", "cpu")),
        )
        assert not settings
        self.model_executor = object()
        self.running: list[_Child] = []
        # Prefix of whole blocks → the model whose keys and values it holds.
        self.blocks: dict[tuple[int, ...], Any] = {}
        self.resets, self.added, self.break_at, self.abort_at = 0, list[tuple[str, SamplingParams]](), -1, -1
        self.steps, self.known = 0, dict[Any, torch.Tensor]()
        # Another process, that of a server, does not draw from this one's streams.
        self.elsewhere = False
        self._draw_globally()

    @property
    def llm_engine(self) -> FakeLLM:
        return self

    def _draw_globally(self) -> None:
        if not self.elsewhere:
            torch.rand(1), np.random.random(), random.random()

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams) -> str:
        assert prompt["type"] == "token"
        ids = prompt["prompt_token_ids"]
        assert ids and len(ids) < self.model_config.max_model_len
        self.added.append((request_id, params))
        for index in range(params.n):
            seed = random.getrandbits(60) if params.seed is None else params.seed + index
            self.running.append(_Child(request_id, index, list(ids), params, torch.Generator().manual_seed(seed)))
        return request_id + "-internal"

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def abort_request(self, request_ids: list[str]) -> None:
        self.running = [child for child in self.running if child.name not in request_ids]

    def step(self) -> list[Any]:
        """A token for every output that is under way."""
        self.steps += 1
        if self.steps == self.break_at:
            raise KeyboardInterrupt
        self._draw_globally()
        done = []
        for child in list(self.running):
            p = child.params
            prompt_logprobs = None
            if not child.new:
                self._prefill(child)
                if p.prompt_logprobs is not None:
                    prompt_logprobs = self._score(child.ids)
            ids = torch.tensor([[*child.ids, *child.new]])
            logits = self._logits(child.model, ids)
            seen = torch.zeros_like(logits, dtype=torch.bool)
            seen[0, ids[0]] = True
            settings = Sampling((), p.temperature, p.top_k, p.top_p, p.min_p, p.repetition_penalty)
            scores = filtered(logits, settings, seen if p.repetition_penalty != 1 else None)
            u = torch.rand((1, 1), generator=child.generator, dtype=torch.float64)
            child.new.append(int(draw(scores, u)))
            reason = None
            if child.new[-1] in p.stop_token_ids or (child.new[-1] == self.eos and not p.ignore_eos):
                reason = "stop"
            elif len(child.new) == p.max_tokens or ids.shape[1] + 1 >= self.model_config.max_model_len:
                reason = "length"
            if self.steps == self.abort_at and child.index == 0:
                reason = "abort"
            if reason:
                self.running.remove(child)
            completion = SimpleNamespace(index=child.index, token_ids=list(child.new), finish_reason=reason)
            done.append(
                SimpleNamespace(
                    request_id=child.name, prompt_token_ids=child.ids, outputs=[completion],
                    finished=not any(other.name == child.name for other in self.running),
                    num_cached_tokens=child.cached, prompt_logprobs=prompt_logprobs,
                )
            )  # fmt: skip
        return done

    def _logits(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        """(1, V) after `ids`, each computed once."""
        key = (model, tuple(ids[0].tolist()))
        if key not in self.known:
            with torch.no_grad():
                self.known[key] = model(ids).logits[:, -1]
        return self.known[key]

    def _prefill(self, child: _Child) -> None:
        """At least one token is computed. A hit gives what was computed then, with the weights of then."""
        child.model = self.policy
        whole = [tuple(child.ids[:end]) for end in range(BLOCK, len(child.ids) + 1, BLOCK)]
        if child.params.prompt_logprobs is None:
            for block in whole:
                if len(block) == len(child.ids) or block not in self.blocks:
                    break
                child.cached, child.model = len(block), self.blocks[block]
        for block in whole:
            self.blocks.setdefault(block, child.model)

    def _score(self, ids: list[int]) -> list[Any]:
        with torch.no_grad():
            logp = self.policy(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        # The most likely token stands beside the one that is there.
        return [None] + [
            {t: SimpleNamespace(logprob=float(row[t])) for t in (int(row.argmax()), token)}
            for row, token in zip(logp[:-1], ids[1:], strict=True)
        ]

    def reset_prefix_cache(self) -> bool:
        if self.running:
            return False
        self.blocks.clear()
        self.resets += 1
        return True

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[None]:
        """New weights; the prefix cache stays."""
        assert method == "reload_weights"
        self._draw_globally()
        old = self.policy
        self.policy = type(old)(old.config).eval()
        self.policy.load_state_dict(dict(kwargs["weights_iterator"]), strict=False)
        return [None]


class FakeClient:
    """TRL's `VLLMClient` and the server behind it: one seed and one budget a call, for all of its prompts."""

    def __init__(self, llm: FakeLLM) -> None:
        self.llm, self.lock = llm, threading.Lock()
        llm.elsewhere = True
        self.base_url, self.calls = "http://server", list[dict[str, Any]]()
        self.session = SimpleNamespace(post=self._post)

    def get_server_info(self) -> dict[str, Any]:
        whole = {name: dict(vars(config)) for name, config in vars(self.llm.vllm_config).items()}
        # The server's JSON names it otherwise.
        whole["device_config"] = {"device": whole["device_config"]["device_type"]}
        return whole

    def generate(
        self, prompts, features=None, n=1, repetition_penalty=1.0, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0,
        max_tokens=16, logprobs=0, structured_outputs_regex=None, generation_kwargs=None,
    ) -> dict[str, Any]:  # fmt: skip
        assert logprobs is None and structured_outputs_regex is None
        settings = dict(
            n=n, repetition_penalty=repetition_penalty, temperature=temperature, top_p=top_p, top_k=top_k,
            min_p=min_p, max_tokens=max_tokens, **(generation_kwargs or {}),
        )  # fmt: skip
        with self.lock:
            self.calls.append({"prompts": prompts, **settings})
            found = self._run({str(i): ids for i, ids in enumerate(prompts)}, settings)
        return {
            "prompt_ids": prompts,
            "completion_ids": [found[str(i), m].token_ids for i in range(len(prompts)) for m in range(n)],
            "logprobs": None,
            "logprob_token_ids": None,
        }

    def get_sequence_logprobs(
        self, sequences, prompt_lengths, top_logprobs=100, temperature=1.0, chunk_size=0, max_concurrent_requests=4
    ) -> dict[str, Any]:
        assert prompt_lengths == [1] * len(sequences) and temperature == 1
        with self.lock:
            scored = [self.llm._score(ids)[1:] for ids in sequences]
        rows = [[(ids[t + 1], at[t]) for t in range(len(ids) - 1)] for ids, at in zip(sequences, scored, strict=True)]
        return {
            "actual_logprobs": [[[at[token].logprob] for token, at in row] for row in rows],
            "actual_token_ids": [[[token] for token, _ in row] for row in rows],
        }

    def _run(self, prompts: dict[str, list[int]], settings: dict[str, Any]) -> dict[tuple[str, int], Any]:
        for name, ids in prompts.items():
            self.llm.add_request(name, {"type": "token", "prompt_token_ids": ids}, SamplingParams(**settings))
        found = {}
        while self.llm.running:
            for output in self.llm.step():
                found |= {(output.request_id, c.index): c for c in output.outputs}
        return found

    def _post(self, url: str) -> Any:
        assert url == "http://server/reset_prefix_cache"
        success = self.llm.reset_prefix_cache()
        return SimpleNamespace(status_code=200, content=b"...", json=lambda: {"success": success})
