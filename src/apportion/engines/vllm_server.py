"""A vLLM behind TRL's client. Requests and answers are matched by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

from apportion.engines.base import Cost
from apportion.engines.vllm_hosts import Ask, Output, check_config, check_ids

T = TypeVar("T")


class Server:
    """TRL's client of a vLLM server (`VLLMGeneration.vllm_client`), which only the main process has.

    A call a request: a server takes one seed and one budget a call, and TRL's own way through all ranks hands
    continuations to the wrong rank where ranks send unequal numbers.

    The client does not pass on what the server found in its cache, so `cost` counts each prefix as computed once,
    and a forward a call.

    Args:
        client: `trl.generation.vllm_client.VLLMClient`.
        concurrency: calls under way at a time.

    Raises:
        InputError: a server that returns logits in place of log-probabilities, or that runs on the CPU with chunked
            prefill, which fails on seeds.
    """

    def __init__(self, client: Any, concurrency: int = 64) -> None:
        self.client, self.concurrency = client, concurrency
        self.cost = Cost()
        config = client.get_server_info()
        self.longest: int = config["model_config"]["max_model_len"]
        check_config(
            config["model_config"]["logprobs_mode"], config["scheduler_config"]["enable_chunked_prefill"],
            config["device_config"]["device"],
        )  # fmt: skip

    def generate(self, asks: Mapping[str, Ask], settings: Mapping[str, Any]) -> Iterator[Output]:
        """See `Host.generate`."""
        named = dict(settings)
        # The client has no arguments for these; it passes them on as they are.
        extra = {name: named.pop(name) for name in ("stop_token_ids", "ignore_eos")}

        def send(ask: Ask) -> dict[str, Any]:
            answer: dict[str, Any] = self.client.generate(
                [list(ask.ids)], n=ask.n, max_tokens=ask.max_tokens, logprobs=None,
                generation_kwargs={"seed": ask.seed, **extra}, **named,
            )  # fmt: skip
            return answer

        for name, answer in self._each(send, asks):
            check_ids(answer["prompt_ids"][0], asks[name].ids)
            outputs = answer["completion_ids"]
            if len(outputs) != asks[name].n:
                raise RuntimeError(f"the vLLM server returned {len(outputs)} outputs where {asks[name].n} were asked")
            self.cost.forward_tokens += len(asks[name].ids) + sum(max(len(tokens) - 1, 0) for tokens in outputs)
            yield from ((name, number, tuple(tokens)) for number, tokens in enumerate(outputs))

    def score(self, rows: Mapping[str, Sequence[int]]) -> list[tuple[str, list[float | None]]]:
        """See `Host.score`."""

        def send(ids: Sequence[int]) -> dict[str, Any]:
            answer: dict[str, Any] = self.client.get_sequence_logprobs([list(ids)], [1], top_logprobs=1)
            return answer

        found: list[tuple[str, list[float | None]]] = []
        for name, answer in self._each(send, rows):
            check_ids([token for (token,) in answer["actual_token_ids"][0]], rows[name][1:])
            self.cost.forward_tokens += len(rows[name])
            found.append((name, [value for (value,) in answer["actual_logprobs"][0]]))
        return found

    def drop_cache(self) -> bool:
        """See `Host.drop_cache`."""
        # The client's own method drops the server's answer, which says whether it worked (vLLM 0.26 and later).
        response = self.client.session.post(f"{self.client.base_url}/reset_prefix_cache")
        return response.status_code == 200 and (not response.content or bool(response.json()["success"]))

    def _each(self, send: Callable[[Any], T], asked: Mapping[str, Any]) -> Iterator[tuple[str, T]]:
        """(name, answer), each call in a thread, as they finish."""
        with ThreadPoolExecutor(min(self.concurrency, len(asked) or 1)) as pool:
            names = {pool.submit(send, each): name for name, each in asked.items()}
            try:
                for future in as_completed(names):
                    self.cost.forwards += 1
                    yield names[future], future.result()
            finally:
                for future in names:
                    future.cancel()
