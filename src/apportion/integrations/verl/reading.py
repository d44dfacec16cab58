"""Forward passes with the weights that verl trains: beliefs, sensitivities, confidences and divergences.

verl's workers compute the log-probability of a response and nothing else, and their shards cannot be called by one
rank alone. So each rank gathers the whole weights, as verl does to hand them to its rollout engine, puts them into a
plain model of transformers and reads its share of the requests by itself.
Shapes: none, these are records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import nn
from transformers.utils import logging as transformers_logging
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.utils import Role
from verl.utils.device import get_device_id
from verl.utils.memory_utils import aggressive_empty_cache
from verl.utils.model import get_hf_auto_model_class

from apportion.credit.method import CreditMethod
from apportion.engines.base import Cost, Reading, Sampling, Scoring
from apportion.engines.rng import frozen_rng
from apportion.engines.scoring import Scorer
from apportion.engines.transformers import TransformersEngine
from apportion.errors import InputError
from apportion.measure.batch import READ
from apportion.measure.readings import At, merged, read, share

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What a copy of the weights may be held and computed in."""


@dataclass(frozen=True)
class How:
    """How requests are read.

    Attributes:
        sampling: of the rollouts; all distributions are read at its temperature. pad_id: of the tokenizer.
        dtype: one of `DTYPES`; None: what the actor's parameters are, which is float32 where verl is not told
            otherwise. In bfloat16 gradients of small differences are far off (see `engines.sensitivity`).
    """

    sampling: Sampling
    pad_id: int
    dtype: str | None = None


class ReadingWorker:
    """Mixed in before verl's worker class: one more method that the driver can call on all ranks."""

    rank: int
    world_size: int
    actor: Any

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def apportion_read(self, asked: Mapping[At, Scoring], how: How) -> tuple[dict[At, Reading], Cost]:
        """This rank's share of the requests, read with the weights that the actor has now.

        Between verl's `compute_log_prob` and its update these are the weights that `old_log_probs` are of.

        Every rank takes part in gathering the weights, and in nothing after that. A rank with requests holds the whole
        model once, beside its shard: parameters × 4 bytes in float32, 28 GB for 7 billion (experts twice, while verl's
        one by one are put together), and while it reads what `Scorer` and `TransformersEngine` take (see their
        limits). It is given back before the call returns. A rank without requests holds one parameter at a time.
        Global random streams are left where they were.
        """
        mine = share(asked, self.rank, self.world_size)
        with frozen_rng():
            model = whole_model(self.actor.engine, how.dtype, wanted=bool(mine))
            if model is None:
                return {}, Cost()
            scorer = Scorer(model, how.pad_id, temperature=how.sampling.temperature)
            engine = TransformersEngine(model, how.pad_id)
            found = read(mine, scorer, engine, how.sampling)
        cost = scorer.cost + engine.cost
        del model, scorer, engine
        aggressive_empty_cache()
        return found, cost


def reading_worker(base: type) -> type:
    """verl's worker class (`ActorRolloutRefWorker`, `DetachActorWorker`), with `ReadingWorker.apportion_read`."""
    return type(f"Reading{base.__name__}", (ReadingWorker, base), {"__module__": __name__})


def whole_model(engine: Any, dtype: str | None, wanted: bool) -> nn.Module | None:
    """A model of transformers with the weights of one of verl's training engines; None where it is not `wanted`.

    All ranks of the engine call this together. It goes through `get_per_tensor_param`, which every engine of verl has;
    tested with FSDP2 (verl's FSDP1 starts on GPUs only; Megatron was not run). Attention is transformers' own choice,
    as in our trainer, whatever the actor's is. Merged LoRA weights come from verl rounded to bfloat16.

    Raises:
        InputError: LoRA adapters that verl does not merge.
        RuntimeError: weights without a place in the model, or places without weights.
    """
    weights, adapter = engine.get_per_tensor_param()
    if adapter is not None:
        raise InputError(
            "actor_rollout_ref.model.lora", "adapters beside their base", "merged ones: readings are of whole weights",
            "set actor_rollout_ref.model.lora.merge=True",
        )  # fmt: skip
    state = {}
    for name, weight in weights:
        if wanted:
            own = weight.detach()
            state[name] = own.to(DTYPES[dtype]) if dtype is not None and own.is_floating_point() else own
    if engine.is_param_offload_enabled:
        engine.to("cpu", model=True, optimizer=False, grad=False)
    if not wanted:
        return None
    config, trusted = engine.model_config.hf_config, engine.model_config.trust_remote_code
    with torch.device("meta"):
        cls: Any = type(get_hf_auto_model_class(config).from_config(config, trust_remote_code=trusted))
    precision = next(weight.dtype for weight in state.values() if weight.is_floating_point())
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model, report = cls.from_pretrained(
            None, config=config, state_dict=state, dtype=precision, attn_implementation=None,
            device_map={"": get_device_id()}, output_loading_info=True,
        )  # fmt: skip
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
    if wrong := {what: sorted(map(str, names)) for what, names in report.items() if names}:
        raise RuntimeError(f"the actor's weights do not fill a {cls.__name__}: {wrong}")
    found: nn.Module = model
    return found


def needs_readings(method: CreditMethod) -> bool:
    """Whether the method reads the trained model's own forward passes."""
    return bool(READ & method.needs)


def readers_in(worker_classes: dict[Any, Any], method: CreditMethod) -> None:
    """Puts the class that can read in the place of the actor's, where the method needs it.

    Args:
        worker_classes: verl's `role_worker_mapping`, whose values are classes behind `ray.remote`.

    Raises:
        RuntimeError: there is no actor in it.
    """
    if not needs_readings(method):
        return
    roles = [role for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef) if role in worker_classes]
    if not roles:
        raise RuntimeError(f"{method.name} reads the actor, and verl's roles have none: {list(worker_classes)}")
    for role in roles:
        worker_classes[role] = ray.remote(reading_worker(worker_classes[role].__ray_actor_class__))


class Readers:
    """On the driver: what the actor's ranks read.

    Args:
        worker_group: verl's, of a class that `readers_in` has put there.
        sampling, pad_id, dtype: see `How`.

    Raises:
        InputError: a dtype that is none of `DTYPES`.
    """

    def __init__(self, worker_group: Any, sampling: Sampling, pad_id: int, *, dtype: str | None = None) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise InputError("dtype", repr(dtype), f"one of {', '.join(DTYPES)}, or none: the actor's own")
        self.worker_group, self.how = worker_group, How(sampling, pad_id, dtype)

    def read(self, asked: Mapping[At, Scoring]) -> tuple[dict[At, Reading], Cost]:
        """(kind, row) → what was read, and what all ranks spent. Which rank reads what does not change a result.

        Raises:
            RuntimeError: an answer that came twice, or for nothing that was asked, or did not come.
        """
        if not asked:
            return {}, Cost()
        # Once a node, not once a rank.
        shares = self.worker_group.apportion_read(ray.put(dict(asked)), self.how)
        return merged(asked, [readings for readings, _ in shares]), sum((cost for _, cost in shares), Cost())
