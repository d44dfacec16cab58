"""The actor of a replica of `apportion_transformers`: verl's calls, answered by `serving.Serving`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from apportion.errors import InputError
from apportion.integrations.verl.asks import Limits, ask_of
from apportion.integrations.verl.serving import PARTS, Part, Serving


class Server:
    """The actor of a replica: verl's calls, answered by `serving.Serving`."""

    def __init__(self, config: Any, model_config: Any, mode: RolloutMode, rank: int) -> None:
        self.config, self.mode = omega_conf_to_dataclass(config), mode
        described = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        kinds = {"dtype": getattr(torch, self.config.dtype), "trust_remote_code": described.trust_remote_code}
        ready = self.config.load_format != "dummy"
        if ready:
            model = AutoModelForCausalLM.from_pretrained(described.local_path, config=described.hf_config, **kinds)
        else:
            model = AutoModelForCausalLM.from_config(described.hf_config, **kinds)
        positions = model.config.get_text_config().max_position_embeddings
        length = self.config.max_model_len or positions
        if length > positions:
            raise InputError("rollout.max_model_len", length, f"at most the model's {positions} positions")
        self.limits = Limits(self.config.prompt_length, self.config.response_length, length, self.config.seed)
        tokenizer = described.tokenizer
        ends = getattr(described.generation_config, "eos_token_id", None) or []
        self.stop_ids = tuple({tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])})
        self.serving = Serving(
            f"replica {rank}", model.eval().requires_grad_(False), tokenizer.pad_token_id or 0,
            max_batch=self.config.max_num_seqs, length=length, ready=ready,
        )  # fmt: skip

    async def generate(
        self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **media: Any
    ) -> TokenOutput:
        """One continuation of the prompt's token ids.

        Raises:
            InputError: see `asks.ask_of`; images, videos or audio.
        """
        for name, value in media.items():
            if value is not None and len(value):
                raise InputError(
                    name,
                    f"{len(value)} of them",
                    "text alone",
                    "use another rollout engine: this one reads token ids only",
                )
        params = {"repetition_penalty": 1.0, "ignore_eos": self.config.ignore_eos, **sampling_params}
        served = await self.serving.generate(ask_of(request_id, prompt_ids, params, self.stop_ids, self.limits))
        return TokenOutput(
            token_ids=list(served.token_ids),
            log_probs=None if served.log_probs is None else list(served.log_probs),
            stop_reason=served.stop,
            extra_fields={"global_steps": served.version},
        )

    async def sleep(self) -> None:
        """Ends what runs and sleeps; trainers that share the machine then send weights before it wakes up."""
        if self.config.free_cache_engine and self.mode != RolloutMode.STANDALONE:
            await self.serving.release(PARTS, forget=self.mode == RolloutMode.HYBRID)

    async def wake_up(self, tags: list[Part] | None = None) -> None:
        self.serving.wake(PARTS if tags is None else tags)

    async def release_kv_cache(self) -> None:
        if self.config.free_cache_engine and self.mode != RolloutMode.COLOCATED:
            await self.serving.release(["kv_cache"])

    async def resume_kv_cache(self) -> None:
        self.serving.wake(["kv_cache"])

    async def clear_kv_cache(self) -> None:
        """Nothing to do: keys and values do not outlive a micro-batch."""

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, int]:
        return {"aborted_count": await self.serving.abort(reject_request)}

    async def resume_generation(self) -> None:
        self.serving.resume()

    async def wait_for_requests_to_drain(self) -> None:
        await self.serving.drained()

    async def start_profile(self, **_: Any) -> None:
        """Nothing to do: this engine has no profiler."""

    async def stop_profile(self) -> None:
        """Nothing to do: this engine has no profiler."""

    async def update_weights(
        self, named: dict[str, torch.Tensor], version: int | None, first: bool, last: bool
    ) -> None:
        """See `Serving.update`."""
        await self.serving.update(named, version, first=first, last=last)
