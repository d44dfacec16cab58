"""The verl that the plugin is written for: its versions, and the parts of it that are used.

`check_verl` costs next to nothing and runs wherever verl loads the plugin. `check_signatures` imports what verl's v1
trainer imports and runs where a trainer starts: a release in the range may still have moved something.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from apportion.errors import InputError

SUPPORTED = ">=0.9.1,<0.10"
# The release that everything here was run with.
TESTED = "0.9.1"
# verl asks for it in an extra only, so that pip may have left it out. Ray and tensordict are bounded by verl itself.
TRANSFER_QUEUE = ">=0.1.10,<0.2"
TRL = "<1"

_V1 = "verl.trainer.ppo.v1"
_BASE = f"{_V1}.trainer_base"
_TRAINER = f"{_BASE}.PPOTrainer"
_SYNC = f"{_V1}.trainer_sync.PPOTrainerSync"
_COLOCATE = f"{_V1}.trainer_colocate_async.PPOTrainerColocateAsync"
_SEPARATE = f"{_V1}.trainer_separate_async.PPOTrainerSeparateAsync"
_ALGOS = "verl.trainer.ppo.core_algos"
_ROLLOUT = "verl.workers.rollout"
_REPLICAS = "verl.checkpoint_engine.base.CheckpointEngineManager"
_ACTOR = "verl.workers.engine_workers.ActorRolloutRefWorker"

# Methods that the trainers override: verl calls ours with what it would have given its own, so all of it has to fit.
OVERRIDDEN: Mapping[str, tuple[str, ...]] = {
    f"{_TRAINER}.__init__": ("config",),
    f"{_TRAINER}.fit": ("agent_loop_manager",),
    f"{_TRAINER}._init_resource_pool_mgr": (),
    f"{_TRAINER}._compute_old_log_prob": ("batch", "metrics"),
    f"{_SEPARATE}._compute_old_log_prob": ("batch", "metrics"),
    f"{_TRAINER}._compute_advantage": ("batch", "metrics"),
    f"{_TRAINER}._compute_metrics": ("batch", "metrics", "timing_raw", "global_steps", "epoch"),
    f"{_TRAINER}._save_checkpoint": (),
    f"{_TRAINER}._load_checkpoint": (),
    f"{_SYNC}.on_sample_end": (),
    f"{_COLOCATE}.on_sample_end": (),
    f"{_SEPARATE}.on_sample_end": (),
    f"{_SYNC}.on_step_end": (),
    f"{_COLOCATE}.on_step_end": (),
    f"{_SEPARATE}.on_step_end": (),
    f"{_ACTOR}.compute_log_prob": ("data",),
}

# What is called, made or filled in: these parameters, in this order. Others may come if they have defaults.
CALLED: Mapping[str, tuple[str, ...]] = {
    f"{_TRAINER}.step": ("metrics", "timing_raw"),
    f"{_TRAINER}._step_once": ("metrics", "timing_raw", "sample_batch_size"),
    f"{_TRAINER}.get_llm_client": (),
    f"{_COLOCATE}.get_llm_client": (),
    f"{_SEPARATE}.get_llm_client": (),
    f"{_TRAINER}.get_reward_handles": (),
    f"{_BASE}.register_trainer": ("name",),
    f"{_BASE}.get_trainer_cls": ("name",),
    f"{_V1}.utils.compute_advantage_for_multi_trajectories": (
        "data", "batch_keys", "adv_estimator", "norm_adv_by_std_in_grpo", "config",
    ),
    "verl.trainer.ppo.ray_trainer.compute_advantage": (
        "data", "adv_estimator", "norm_adv_by_std_in_grpo", "config",
    ),
    f"{_ALGOS}.register_adv_est": ("name_or_enum",),
    f"{_ALGOS}.compute_grpo_outcome_advantage": (
        "token_level_rewards", "response_mask", "index", "epsilon", "norm_adv_by_std_in_grpo",
    ),
    f"{_ALGOS}.compute_policy_loss_vanilla": (
        "old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config", "rollout_is_weights",
    ),
    "verl.trainer.ppo.padding_utils.upsample_batch_to_divisible_size": ("batch", "batch_multiple", "eos_token_id"),
    "verl.workers.utils.padding.response_to_nested": ("tensor", "response_mask"),
    "verl.workers.utils.padding.response_from_nested": ("tensor", "response_mask"),
    f"{_ROLLOUT}.llm_server.LLMServerClient": ("config", "load_balancer_handle"),
    f"{_ROLLOUT}.llm_server.LLMServerClient.generate": ("request_id", "prompt_ids", "sampling_params"),
    f"{_ROLLOUT}.llm_server.FullyAsyncLLMServerClient": ("config", "load_balancer_handle"),
    f"{_ROLLOUT}.llm_server.FullyAsyncLLMServerClient.generate": ("request_id", "prompt_ids", "sampling_params"),
    f"{_ROLLOUT}.llm_server.LLMServerManager.get_client": ("client_cls",),
    f"{_ROLLOUT}.replica.TokenOutput": ("token_ids", "log_probs", "stop_reason", "num_preempted", "extra_fields"),
    f"{_ROLLOUT}.replica.RolloutReplicaRegistry.register": ("name", "loader"),
    f"{_ROLLOUT}.replica.RolloutReplica": (
        "replica_rank", "config", "model_config", "gpus_per_node", "is_reward_model", "is_teacher_model", "name_suffix",
    ),
    f"{_REPLICAS}.update_weights": ("global_steps",),
    f"{_REPLICAS}.sleep_replicas": (),
    f"{_REPLICAS}.abort_replicas": ("reject_request",),
    f"{_REPLICAS}.resume_generation_replicas": (),
    f"{_ACTOR}.update_weights": ("global_steps", "mode"),
    "verl.workers.engine.base.BaseEngine.get_per_tensor_param": (),
    "verl.experimental.reward_loop.reward_loop.RewardLoopWorker.compute_score": ("data",),
    "verl.protocol.DataProto": ("batch", "non_tensor_batch", "meta_info"),
    "transfer_queue.kv_batch_get": ("keys", "partition_id", "select_fields"),
    "transfer_queue.kv_batch_put": ("keys", "partition_id", "fields", "tags"),
    "transfer_queue.kv_clear": ("keys", "partition_id"),
    "transfer_queue.KVBatchMeta": ("keys", "tags", "partition_id", "fields", "extra_info"),
}  # fmt: skip

SIGNATURES: Mapping[str, tuple[str, ...]] = {**OVERRIDDEN, **CALLED}

# Values that a call leaves to verl and that `base.verl_base` counts on.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    f"{_ALGOS}.compute_grpo_outcome_advantage": {"epsilon": 1e-6, "norm_adv_by_std_in_grpo": True},
}

# What a subclass has to have; one more would keep ours from being made.
ABSTRACT: Mapping[str, tuple[str, ...]] = {
    _TRAINER: ("on_sample_end", "on_step_end"),
    f"{_ROLLOUT}.replica.RolloutReplica": ("launch_servers",),
}


def check_verl() -> None:
    """Whether the installed verl, what it reads rows from and what stands beside it are of versions that go together.

    Raises:
        InputError: one is missing or outside the supported range, or TRL is one that verl fails with; says what was
            found and how to mend it.
    """
    for package, module, supported in (
        ("verl", "verl", SUPPORTED),
        ("TransferQueue", "transfer_queue", TRANSFER_QUEUE),
    ):
        found = found_version(package, module)
        try:
            good = found is not None and SpecifierSet(supported).contains(found, prereleases=True)
        except InvalidVersion:
            good = False
        if not good:
            raise InputError(package, found or "none installed", supported, f"pip install '{package}{supported}'")
    trl = found_version("trl")
    if trl is not None and not SpecifierSet(TRL).contains(trl, prereleases=True):
        raise InputError(
            "trl", f"{trl} beside verl", f"none, or {TRL}: verl 0.9 imports a value head from it that TRL 1 has not",
            "pip uninstall trl, or an environment of its own for verl",
        )  # fmt: skip


def check_signatures() -> None:
    """Whether everything that is used of verl is as it was.

    Raises:
        InputError: something moved; names it, what was found and what was expected, and whatever else moved.
    """
    found = [*moved()]
    if found:
        also = f"; moved as well: {', '.join(error.field for error in found[1:])}" if found[1:] else ""
        raise InputError(found[0].field, found[0].got, found[0].expected + also, found[0].fix)


def moved() -> Iterator[InputError]:
    """Everything that is not as it was, each as an error that names it."""
    for path, names in SIGNATURES.items():
        yield from _moved(path, names)
    for path, abstract in ABSTRACT.items():
        try:
            got = tuple(sorted(getattr(_resolve(path), "__abstractmethods__", ())))
        except InputError as error:
            yield error
            continue
        if got != abstract:
            yield _error(path, f"abstract methods {_list(got)}", f"abstract methods {_list(abstract)}")


def found_version(package: str, module: str | None = None) -> str | None:
    """The version of a package: that of the imported module, else the installed one; None where there is none."""
    loaded = getattr(sys.modules.get(module or package), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _moved(path: str, names: tuple[str, ...]) -> Iterator[InputError]:
    try:
        found = _parameters(_resolve(path))
    except InputError as error:
        yield error
        return
    except (TypeError, ValueError):
        yield _error(path, "something that is not called", f"({', '.join(names)})")
        return
    got, wanted = f"({', '.join(map(_written, found))})", f"({', '.join(names)})"
    if path in OVERRIDDEN:
        fits = tuple(parameter.name for parameter in found) == names
    else:
        order = [parameter.name for parameter in found if parameter.name in names]
        fits = order == list(names) and all(p.name in names or not _required(p) for p in found)
        wanted += " and nothing more without a default"
    if not fits:
        yield _error(path, got, wanted)
        return
    defaults = {parameter.name: parameter.default for parameter in found}
    for name, value in DEFAULTS.get(path, {}).items():
        if defaults[name] != value:
            yield _error(path, f"{name}={defaults[name]!r}", f"{name}={value!r}")


def _resolve(path: str) -> Any:
    """What a dotted path leads to.

    Raises:
        InputError: it leads nowhere, or a module on the way cannot be imported.
    """
    parts = path.split(".")
    found: Any = None
    for i, part in enumerate(parts):
        name = ".".join(parts[: i + 1])
        if found is None or (inspect.ismodule(found) and not hasattr(found, part)):
            try:
                found = import_module(name)
            except ImportError as error:
                if not isinstance(error, ModuleNotFoundError) or not name.startswith(error.name or name):
                    raise InputError(
                        name, f"a failing import: {error}", "verl's own requirements installed",
                        f"pip install {error.name}" if error.name else "repair the installation of verl",
                    ) from error  # fmt: skip
                raise _error(path, f"no {name}", "it to be there") from error
        elif hasattr(found, part):
            found = getattr(found, part)
        else:
            raise _error(path, f"no {name}", "it to be there")
    return found


def _parameters(found: Any) -> list[inspect.Parameter]:
    """The parameters of a function, a method without its `self`, or a class as it is made."""
    parameters = list(inspect.signature(found).parameters.values())
    return parameters[1:] if parameters and parameters[0].name == "self" else parameters


def _required(parameter: inspect.Parameter) -> bool:
    gathers = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in gathers


def _written(parameter: inspect.Parameter) -> str:
    return str(parameter.replace(annotation=inspect.Parameter.empty)).replace(" ", "")


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"


def _error(path: str, got: str, expected: str) -> InputError:
    package, module = ("TransferQueue", "transfer_queue") if path.startswith("transfer_queue") else ("verl", "verl")
    where = f"{package} {found_version(package, module)} has "
    fix = f"pip install verl=={TESTED}" if package == "verl" else f"pip install '{package}{TRANSFER_QUEUE}'"
    return InputError(path, where + got, expected, fix)
