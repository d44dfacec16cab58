"""What a vLLM is asked for, and one in this process that answers. Requests and answers are matched by name.

Shapes: none, these are lists of token ids.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from apportion.engines.base import Cost
from apportion.engines.rng import frozen_rng
from apportion.errors import InputError

# Name of the request, number of the output, token ids.
Output = tuple[str, int, tuple[int, ...]]


@dataclass(frozen=True)
class Ask:
    """`n` outputs after `ids`, of at most `max_tokens` tokens each; output i draws from the seed `seed` + i."""

    ids: tuple[int, ...]
    n: int
    max_tokens: int
    seed: int


class Host(Protocol):
    """A vLLM that continues and scores token ids.

    Attributes:
        longest: tokens that a prefix and its continuation may have together.
        cost: what was spent so far, but for generated tokens.
    """

    longest: int
    cost: Cost

    def generate(self, asks: Mapping[str, Ask], settings: Mapping[str, Any]) -> Iterator[Output]:
        """What comes back, in any order."""
        ...

    def score(self, rows: Mapping[str, Sequence[int]]) -> list[tuple[str, list[float | None]]]:
        """(name, log-probability of each token but the first) of each row; None where vLLM returned none."""
        ...

    def drop_cache(self) -> bool:
        """Whether vLLM forgot every prefix it has computed."""
        ...


class Colocated:
    """A `vllm.LLM` of this process: TRL's (`VLLMGeneration.llm`) or one of our own (`own_llm`).

    Raises:
        InputError: a vLLM that sleeps between calls, that several processes must call together, that returns logits
            in place of log-probabilities, or that runs on the CPU with chunked prefill, which fails on seeds.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.cost = Cost()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        config = llm.llm_engine.vllm_config
        self.longest: int = config.model_config.max_model_len
        check_config(
            config.model_config.logprobs_mode, config.scheduler_config.enable_chunked_prefill,
            config.device_config.device_type,
        )  # fmt: skip
        if config.model_config.enable_sleep_mode:
            raise InputError(
                "vllm_enable_sleep_mode", True, "False: vLLM would have dropped its weights before the probes",
                "leave it out; lower vllm_gpu_memory_utilization where memory is short",
            )  # fmt: skip
        size = config.parallel_config.tensor_parallel_size
        if size != 1:
            raise InputError(
                "vllm_tensor_parallel_size", size, "1: its ranks would have to make the same requests",
                "set it to 1, or use vllm_mode='server'",
            )  # fmt: skip

    def generate(self, asks: Mapping[str, Ask], settings: Mapping[str, Any]) -> Iterator[Output]:
        """See `Host.generate`. All of them are finished before the first is returned: vLLM draws from global random
        streams, which can be put back only while nobody else does.
        """
        finished = self._run(
            {
                name: (ask.ids, {"n": ask.n, "max_tokens": ask.max_tokens, "seed": ask.seed, **settings})
                for name, ask in asks.items()
            }
        )
        for name, output, completion in finished:
            tokens = tuple(completion.token_ids)
            # Each output of a request counts: the first fills the cache that the others hit.
            self.cost.forward_tokens += len(asks[name].ids) - (output.num_cached_tokens or 0) + max(len(tokens) - 1, 0)
            yield name, completion.index, tokens

    def score(self, rows: Mapping[str, Sequence[int]]) -> list[tuple[str, list[float | None]]]:
        """See `Host.score`. vLLM computes such a row anew, whatever it has cached, and caches it."""
        found = []
        for name, output, _ in self._run(
            {name: (ids, {"max_tokens": 1, "prompt_logprobs": 0}) for name, ids in rows.items()}
        ):
            self.cost.forward_tokens += len(rows[name]) - (output.num_cached_tokens or 0)
            # Entry t is of token t and holds others too where vLLM was asked for them; the first is None.
            read = zip((output.prompt_logprobs or [])[1:], rows[name][1:], strict=False)
            found.append((name, [at[token].logprob if at and token in at else None for at, token in read]))
        return found

    def drop_cache(self) -> bool:
        """See `Host.drop_cache`."""
        return bool(self.llm.reset_prefix_cache())

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Puts (name, value) of every parameter of the trained model into vLLM, under transformers' names.

        Raises:
            InputError: vLLM runs its workers in processes of their own.
        """
        if not hasattr(self.llm.llm_engine, "model_executor"):
            raise InputError(
                "vllm", "workers in processes of their own", "one in this process, which reads the weights in place",
                "set VLLM_ENABLE_V1_MULTIPROCESSING=0 before the LLM is made",
            )  # fmt: skip
        with frozen_rng():
            # Parameter by parameter (`load_weights`) fails where vLLM has packed them for the CPU.
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})

    def _run(self, asked: Mapping[str, tuple[Sequence[int], Mapping[str, Any]]]) -> list[tuple[str, Any, Any]]:
        """(name, vLLM's output, one finished completion of it), all finished: nothing is in flight afterwards."""
        engine = self.llm.llm_engine
        if engine.has_unfinished_requests():
            raise RuntimeError("vLLM has requests of another caller in flight, whose outputs would be lost")
        params = _vllm().SamplingParams
        found = []
        # Both belong to a thread, and this may be another one than that of the LLM: a new thread is on the first
        # device, and does not know PyTorch's number of threads, on which vLLM's kernels must agree, before it asks.
        torch.get_num_threads()
        device = nullcontext() if self._device is None else torch.cuda.device(self._device)
        with frozen_rng(), device:
            try:
                for name, (ids, settings) in asked.items():
                    engine.add_request(
                        name, {"type": "token", "prompt_token_ids": list(ids)}, params(detokenize=False, **settings)
                    )
                while engine.has_unfinished_requests():
                    self.cost.forwards += 1
                    for output in engine.step():
                        for completion in output.outputs:
                            if completion.finish_reason is not None:
                                check_ids(output.prompt_token_ids, asked[output.request_id][0])
                                found.append((output.request_id, output, completion))
            finally:
                if engine.has_unfinished_requests():
                    # Left in flight, they would come out of the host's next call, among its rollouts.
                    engine.abort_request(list(asked))
        return found


def own_llm(model: nn.Module, longest: int, **settings: Any) -> Any:
    """A `vllm.LLM` of the model's architecture for `Colocated`, where TRL holds none. It has no weights yet.

    Args:
        model: a transformers model, not wrapped.
        longest: tokens that a prefix and its continuation may have together.
        settings: further arguments of `vllm.LLM`, such as `gpu_memory_utilization` or `block_size`.

    Prefixes are never prefilled in parts: vLLM's seeded streams do not go on reliably after that. One is enough for
    a process: where a second one ends, vLLM takes down what both share.

    Raises:
        InputError: a PEFT model, or no vLLM.
    """
    if hasattr(model, "peft_config"):
        raise InputError(
            "model", "a PEFT model", "a plain one: TRL knows how to merge adapters for vLLM",
            "set use_vllm=True, so that TRL holds the vLLM",
        )  # fmt: skip
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}  # type: ignore[union-attr, operator]
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as folder, frozen_rng(), _one_process():
        type(model.config).from_dict(config).save_pretrained(folder)  # type: ignore[union-attr]
        return _vllm().LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, dtype=dtype, max_model_len=longest,
            enable_prefix_caching=True, enable_chunked_prefill=False, **settings,
        )  # fmt: skip


@contextmanager
def _one_process() -> Iterator[None]:
    """A vLLM that is made inside runs in this process, where `load` reads the weights in place."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _vllm() -> Any:
    """vLLM, which is optional and takes seconds to import."""
    try:
        return importlib.import_module("vllm")
    except ImportError as error:
        raise InputError("vllm", f"no import ({error})", "vLLM", "pip install 'apportion[vllm]'") from None


def check_config(logprobs_mode: str, chunked: bool, device: str) -> None:
    """Raises InputError for a vLLM whose log-probabilities are none or whose seeds do not work."""
    if logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
        raise InputError(
            "logprobs_mode", repr(logprobs_mode), "'processed_logprobs', as TRL sets it", "restart vLLM with it"
        )
    if chunked and device == "cpu":
        raise InputError(
            "enable_chunked_prefill", True, "False: vLLM on the CPU fails on seeds where it prefills in parts",
            "make the LLM with enable_chunked_prefill=False, or start the server with --no-enable-chunked-prefill",
        )  # fmt: skip


def check_ids(got: Sequence[int], asked: Sequence[int]) -> None:
    """Raises RuntimeError where an answer is not about the token ids that were sent."""
    if list(got) != list(asked):
        raise RuntimeError(f"vLLM answered {len(got)} token ids that are not the {len(asked)} it was asked to continue")
