"""What a recipe for verl will take, from its configuration and a machine's figures. Nothing of verl is imported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apportion.cost import Assumed, Hardware, ModelShape, Prediction, Workload, predict, read_shape
from apportion.cost.memory import Training
from apportion.cost.predict import Plan
from apportion.cost.serving import Serving
from apportion.cost.shape import shape_from
from apportion.credit.baselines import GRPO
from apportion.errors import InputError
from apportion.integrations.verl.settings import CreditSettings

_DTYPES = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
# Characters of a token where no tokenizer is asked [ours].
_CHARACTERS = 4


@dataclass(frozen=True)
class ClusterPrediction:
    """One step of verl, which generates once and updates `updates` times.

    Attributes:
        update: the prediction of one optimiser step. updates: optimiser steps of a step.
        steps: of the run, None where only the data tells. source: where the model's shape is from.
        notes: what the figures leave out, beside `update.notes`.
    """

    update: Prediction
    updates: int
    steps: int | None
    source: str
    notes: tuple[str, ...]

    @property
    def tokens(self) -> dict[str, float]:
        return {name: self.updates * value for name, value in self.update.tokens.items()}

    @property
    def parts(self) -> dict[str, float]:
        return {name: self.updates * value for name, value in self.update.parts.items()}

    @property
    def seconds(self) -> float:
        """Of the wall."""
        return self.updates * self.update.total


def predict_cluster(
    config: Mapping[str, Any], credit: CreditSettings | None, hardware: Hardware, assumed: Assumed | None = None
) -> ClusterPrediction:
    """One step of a recipe.

    Args:
        config: verl's whole configuration, resolved, as dictionaries; its table `recipe` holds the model's numbers and
            what is assumed of its responses.
        credit: what is asked of apportion; None is verl's own GRPO.
        hardware: of as many devices as the configuration has.
        assumed: over what the recipe assumes.

    Raises:
        InputError: a training engine that this does not know (FSDP is known), a model without folder and numbers,
            assumed lengths that do not fit the limits, a rollout engine whose memory does not hold the weights.
    """
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    model, data = config["actor_rollout_ref"]["model"], config["data"]
    if not str(actor["strategy"]).startswith("fsdp"):
        raise InputError("actor_rollout_ref.actor.strategy", actor["strategy"], "fsdp or fsdp2, which are predicted")
    shape, source = _shape(model["path"], config.get("recipe") or {})
    work = _work(config, assumed or Assumed(), hardware.devices)
    updates = max(1, math.ceil(data["train_batch_size"] / actor["ppo_mini_batch_size"])) * int(actor["ppo_epochs"])
    method = GRPO() if credit is None else credit.make_method()
    probes = "continuations" in method.needs
    serving = Serving(
        int(rollout["max_num_seqs"]), int(rollout["tensor_model_parallel_size"]),
        float(rollout["gpu_memory_utilization"]), _dtype(rollout["dtype"]),
        sleeps=not (probes and credit is not None and credit.probe.replicas == "awake"),
    )  # fmt: skip
    if hardware.devices % serving.tensor:
        raise InputError("actor_rollout_ref.rollout.tensor_model_parallel_size", serving.tensor,
                         f"a divisor of the {hardware.devices} GPUs")  # fmt: skip
    engine, packed, rank = actor["fsdp_config"], 0, int(model["lora_rank"])
    rows = work.rows * actor["ppo_epochs"] / updates
    if actor["use_dynamic_bsz"]:
        packed = int(actor["ppo_max_token_len_per_gpu"])
        steps = math.ceil(rows * (work.prompt + work.response) / packed)
        micro = rows / steps
    else:
        micro = min(rows, int(actor["ppo_micro_batch_size_per_gpu"]))
        steps = math.ceil(rows / micro)
    reference = bool(actor["use_kl_loss"] or config["algorithm"]["use_kl_in_reward"])
    training = Training(
        trained=shape.lora(rank) if rank else shape.parameters, adapter=bool(rank),
        dtype=_dtype(engine["model_dtype"]), compute=_dtype(engine["dtype"]),
        optimizer=str(actor["optim"]["optimizer"]).lower(), recompute=bool(model["enable_gradient_checkpointing"]),
        copies=0, shards=hardware.devices,
        micro=0.0, scored=0.0, cached=0.0, fused=bool(model["use_fused_kernels"]),
    )  # fmt: skip
    bypass = bool((config["algorithm"].get("rollout_correction") or {}).get("bypass_mode"))
    plan = Plan(
        method, training, micro, steps, 1 / updates, int(not bypass), int(reference), True, False, serving.slots, True,
        lambda text: -(-len(text) // _CHARACTERS), serving, packed,
    )  # fmt: skip
    found = predict(shape, plan, work, hardware)
    return ClusterPrediction(found, updates, config["trainer"]["total_training_steps"], source, _notes(config, found))


def _shape(path: str, recipe: Mapping[str, Any]) -> tuple[ModelShape, str]:
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return read_shape(folder), f"{folder}/config.json"
    numbers = recipe.get("model")
    if not numbers:
        raise InputError(
            "actor_rollout_ref.model.path", path, "a model's folder",
            "download the model, or write the numbers of its config.json into the recipe's table recipe.model",
        )  # fmt: skip
    return shape_from(numbers), "recipe.model"


def _work(config: Mapping[str, Any], given: Assumed, devices: int) -> Workload:
    data, n = config["data"], int(config["actor_rollout_ref"]["rollout"]["n"])
    limit, room = int(data["max_response_length"]), int(data["max_prompt_length"])
    told = (config.get("recipe") or {}).get("assumed") or {}

    def chosen(name: str, default: float) -> float:
        own = getattr(given, name)
        value: float = own if own is not None else told.get(name, default)
        return value

    # Half the limit, as `apportion cost` has it.
    response, prompt = chosen("response", limit / 2), chosen("prompt", room / 2)
    longest = int(max(chosen("longest", limit), math.ceil(response)))
    for name, value, most in (("response", response, limit), ("longest", longest, limit), ("prompt", prompt, room)):
        if value > most:
            key = "data.max_prompt_length" if name == "prompt" else "data.max_response_length"
            raise InputError(f"assumed {name}", value, f"at most {key}={most}")
    rows = math.ceil(int(data["train_batch_size"]) * n / devices)
    return Workload(
        rows, n, float(prompt), math.ceil(prompt), float(response), longest, limit, step=int(chosen("step", 40)),
        pass_rate=chosen("pass_rate", 0.5),
    )  # fmt: skip


def _dtype(name: Any) -> str:
    found = _DTYPES.get(str(name))
    if found is None:
        raise InputError("dtype", name, f"one of {', '.join(_DTYPES)}")
    return found


def _notes(config: Mapping[str, Any], found: Prediction) -> tuple[str, ...]:
    engine, notes = config["actor_rollout_ref"]["actor"]["fsdp_config"], []
    if engine["param_offload"] or engine["optimizer_offload"]:
        notes.append("Offloading is not modelled: memory is as it would be without.")
    if config["trainer"]["nnodes"] > 1:
        notes.append("The link between nodes is taken to be as fast as that within one.")
    if not found.fits:
        notes.append("Lower actor_rollout_ref.rollout.gpu_memory_utilization or actor.ppo_max_token_len_per_gpu.")
    notes.append(
        "Not counted: copying weights into the rollout engine, waiting of replicas for each other, validation, "
        "checkpoints, rescue's last tokens."
    )
    return tuple(notes)
