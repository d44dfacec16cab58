"""Which of TRL's options go together with per-token credit; the others are refused by name before any work.

Proven to work, each by a test: the loss types grpo, bnpo, dr_grpo, dapo, cispo, sapo and (at token level) luspo,
whose token terms are linear in the token's own advantage; LoRA, gradient accumulation, `num_iterations`,
`steps_per_generation`, `beta`, `mask_truncated_completions`, `top_entropy_quantile`, checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apportion.credit.baselines import GRPO
from apportion.credit.method import CreditMethod
from apportion.credit.pipeline import stages_of
from apportion.errors import InputError
from apportion.measure.batch import GOLD_COLUMNS
from apportion.train.trees import tree_method, tree_rule

if TYPE_CHECKING:
    from apportion.train.config import CreditConfig
    from apportion.train.trainer import CreditTrainer

Refusal = tuple[bool, str, object, str, str]

_LINEAR_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")


_MEASURED = frozenset({"continuations", "belief", "sensitivity", "confidence", "divergence", "step_labels", "tree"})


def measures(method: CreditMethod) -> bool:
    """Whether the method needs more than TRL's batch: our engines measure it with the trainer's own weights."""
    return bool(_MEASURED & method.needs)


def check_config(args: CreditConfig, method: CreditMethod) -> None:
    """Raises InputError for the first option that the method cannot be combined with."""
    if args.stream:
        _refuse(_streaming(args, method))
    if method.per_token:
        _refuse(_per_token(args, method.name))
    if measures(method):
        _refuse(_measuring(args, method.name, "confidence" in method.needs))
    if method.grouped and not isinstance(method, GRPO) and args.multi_objective_aggregation != "sum_then_normalize":
        raise InputError(
            "multi_objective_aggregation", repr(args.multi_objective_aggregation),
            f"'sum_then_normalize': {method.name} needs the μ and σ of one reward, and rewards that are normalised "
            "one by one have no common ones",
            "leave it at its default, or use method='grpo'",
        )  # fmt: skip
    if "tree" in method.needs:
        _refuse(_trees(args, method))
    if args.probe_stop is not None and "continuations" not in method.needs:
        raise InputError("probe_stop", repr(args.probe_stop), f"none with {method.name}, which makes no probes")
    if args.probe_stop is not None and args.probe_engine != "transformers":
        raise InputError(
            "probe_stop", repr(args.probe_stop), "none with probe_engine='vllm', which is not asked between tokens",
            "leave it out, or set probe_engine='transformers'",
        )  # fmt: skip


def check_trainer(trainer: CreditTrainer, method: CreditMethod) -> None:
    """The same for what only the trainer's arguments, its data and its launcher decide."""
    if not measures(method):
        return
    columns = set(getattr(trainer.train_dataset, "column_names", None) or [])
    needs = f"nothing: {method.name} reads responses as token ids alone, and "
    use = "use method='grpo', or leave it out"
    sharded = "one process, DDP, or ZeRO up to stage 2: measuring with a sharded model is not tested"
    _refuse(
        iter(
            [
                (bool(trainer.tools), "tools", "functions", needs + "a probe could not call them again", use),
                (trainer.rollout_func is not None, "rollout_func", "a function",
                 needs + "a probe cannot go through it", use),
                (trainer.environment_factories is not None, "environment_factory", "an environment",
                 needs + "its state at a pivot cannot be restored", use),
                (trainer._is_vlm or bool({"image", "images"} & columns), "processing_class", "images",
                 needs + "images would be lost", use),
                (trainer.is_fsdp_enabled, "fsdp", "sharded parameters", sharded, "launch with DDP"),
                (_launched_stage(trainer) > 2, "deepspeed", "sharded parameters", sharded, "set zero_stage to 2"),
            ]
        )
    )  # fmt: skip
    if trainer.args.probe_engine == "vllm" and not trainer.use_vllm and trainer.accelerator.num_processes > 1:
        raise InputError(
            "probe_engine", "'vllm' in several processes", "TRL's vLLM there: our own is for one process",
            "set use_vllm=True",
        )  # fmt: skip
    # An iterable data set may not know its columns before it is read; then the first batch tells.
    if columns:
        rows = trainer.train_dataset.select_columns([c for c in ("prompt", "span") if c in columns])
        check_data(method, columns, rows, trainer.step_verifier is not None)
    if ("tree" in method.needs or trainer.args.stream) and trainer.accelerator.num_processes > 1:
        why = "a stream runs in one process" if trainer.args.stream else f"{method.name}'s trees grow in one process"
        raise InputError("num_processes", trainer.accelerator.num_processes, f"1: {why}")


def _launched_stage(trainer: CreditTrainer) -> int:
    """The ZeRO stage that the trainer runs under, whoever configured it; 0 without DeepSpeed."""
    plugin = trainer.accelerator.state.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    return 0 if plugin is None else int(plugin.zero_stage)


def check_data(method: CreditMethod, columns: Collection[str], rows: Iterable[Any], step_verifier: bool) -> None:
    """Raises InputError where the data lacks what the method measures.

    Args:
        columns: of the data set. rows: its rows, of which `prompt` and `span` are read for methods that blank a span.
        step_verifier: whether there is one.
    """
    _refuse(_data(method, {*columns}))
    if "step_labels" in method.needs and not step_verifier:
        raise InputError(
            "step_verifier", "none", f"a verifier of single steps, whose verdicts {method.name} reads",
            "reward.steps = \"arithmetic\" or \"lean\", a generated task, which has its own, or from Python "
            "CreditTrainer(..., step_verifier=my_verifier)",
        )  # fmt: skip
    if "divergence" in method.needs:
        for number, row in enumerate(rows, 1):
            span, prompt = row["span"], row["prompt"]
            texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
            if not isinstance(span, str) or not span or not any(span in text for text in texts if text):
                got = repr(span if not isinstance(span, str) or len(span) <= 60 else span[:57] + "...")
                raise InputError(f"span of row {number}", got, "a part of the row's prompt, as it stands in its text")


def _streaming(args: Any, method: CreditMethod) -> Iterator[Refusal]:
    probing = "continuations" in method.needs and not (_MEASURED - {"continuations"}) & method.needs
    yield (
        len(stages_of(method)) > 1 or not probing, "stream", f"True with {method.name}",
        "False, or exactly one method whose only measurement is continuations",
        "leave it out, or use probepo, vineppo or spo_chain",
    )  # fmt: skip
    yield (
        method.batch_wide or "ref_logprob" in method.needs, "stream", f"True with {method.name}",
        "False: it plans for a whole batch, and a stream for one group after the other", "leave it out",
    )  # fmt: skip
    yield (
        args.use_vllm or args.probe_engine != "transformers", "stream", "True with vLLM",
        "False: it is a loop of our own engine over the trained model", "leave it out",
    )  # fmt: skip
    yield (
        args.rescue_cue is not None, "stream", "True with rescue_cue", "one of the two: what is rescued is asked twice",
        "leave one of them out",
    )  # fmt: skip


def _trees(args: Any, method: CreditMethod) -> Iterator[Refusal]:
    own = tree_method(method)
    assert own is not None
    try:
        rule, leaves = tree_rule(own)
        rule.bounds(args.max_completion_length)
    except InputError as error:
        # The rule knows no trainer: its field is the method's setting, its limit the trainer's.
        words = [str(each).replace("max_new_tokens", "max_completion_length") for each in (error.expected, error.fix)]
        field = error.field if method is not own else error.field.removeprefix(f"{own.name}.")
        raise InputError(field, error.got, *words) from None
    yield (
        args.use_vllm, "use_vllm", True, f"False: {own.name}'s trees grow from the trained model", "leave it out",
    )  # fmt: skip
    yield (
        args.num_generations != leaves, "num_generations", args.num_generations,
        f"{leaves}, the leaves of a tree of {own.name}", f"set num_generations={leaves}",
    )  # fmt: skip
    yield (
        own.name == "spo_tree" and args.mask_truncated_completions, "mask_truncated_completions", True,
        "False: an edge that a truncated response shares with others is trained once, masked or not", "leave it out",
    )  # fmt: skip
    yield (
        own.name == "spo_tree" and method is not own, "method", method.name,
        "spo_tree by itself: its edges train with one advantage each, by its own rule", "drop the other methods",
    )  # fmt: skip


def _data(method: CreditMethod, columns: set[str]) -> Iterator[Refusal]:
    got = ", ".join(sorted(columns))
    yield (
        bool({"belief", "confidence"} & method.needs) and not columns & {*GOLD_COLUMNS}, "train_dataset",
        f"the columns {got}", f"a gold answer, whose probability {method.name} reads: one of {', '.join(GOLD_COLUMNS)}",
        "add such a column",
    )  # fmt: skip
    yield (
        "divergence" in method.needs and "span" not in columns, "train_dataset", f"the columns {got}",
        f"`span`, the part of each prompt that {method.name} blanks (or images, which need a model that sees)",
        "add that column with text as it stands in the prompt",
    )  # fmt: skip


def _refuse(rules: Iterator[Refusal]) -> None:
    for wrong, field, got, expected, fix in rules:
        if wrong:
            raise InputError(field, got, expected, fix)


def _per_token(args: Any, name: str) -> Iterator[Refusal]:
    yield (
        args.importance_sampling_level != "token", "importance_sampling_level", repr(args.importance_sampling_level),
        f"'token': a sequence-level ratio sees each response's mean advantage only, so {name}'s credit would vanish",
        "set importance_sampling_level='token', or use method='grpo'",
    )  # fmt: skip
    yield (
        args.loss_type not in (*_LINEAR_LOSSES, "vespo"), "loss_type", repr(args.loss_type),
        f"one of {', '.join(_LINEAR_LOSSES)}: those are proven to work with per-token credit", "set loss_type='dapo'",
    )  # fmt: skip
    yield (
        args.loss_type == "vespo", "loss_type", "'vespo'",
        f"one of {', '.join(_LINEAR_LOSSES)}: VESPO picks the weight of a whole response by the sign of "
        "its advantage, and tokens of both signs would get two weights",
        "set loss_type='dapo'",
    )  # fmt: skip
    yield (
        args.off_policy_mask_threshold is not None, "off_policy_mask_threshold", args.off_policy_mask_threshold,
        "None: TRL drops whole responses by the sign of their advantage, and would drop single tokens here",
        "leave it out",
    )  # fmt: skip
    yield (
        args.use_liger_kernel, "use_liger_kernel", True,
        "False: releases of TRL whose Liger loss takes one advantage a response are still about",
        "leave it out; model_init_kwargs={'use_kernels': True} has the layer kernels",
    )  # fmt: skip


def _measuring(args: Any, name: str, needs_answers: bool) -> Iterator[Refusal]:
    yield (
        args.use_vllm and args.probe_engine != "vllm", "use_vllm", True,
        f"False, or probe_engine='vllm': {name}'s probes are sampled as the rollouts are", "set probe_engine='vllm'",
    )  # fmt: skip
    yield (
        args.use_vllm and args.vllm_mode == "server" and needs_answers, "vllm_mode", "'server'",
        f"'colocate': {name}'s forced answers are drawn by every rank, and only the main one may ask a server",
        "set vllm_mode='colocate'",
    )  # fmt: skip
    yield (
        args.use_transformers_continuous_batching, "use_transformers_continuous_batching", True,
        f"False: it switches the model to paged attention, under which {name}'s probes are not tested",
        "leave it out",
    )  # fmt: skip
    yield (
        bool(args.generation_kwargs), "generation_kwargs", args.generation_kwargs,
        "none: probes are sampled as the rollouts are, and know temperature, top_k, top_p, min_p and "
        "repetition_penalty only",
        "use those options",
    )  # fmt: skip
    yield (
        bool(args.fsdp), "fsdp", args.fsdp, "nothing: probing a sharded model is not tested", "launch with DDP",
    )  # fmt: skip
    yield (
        _zero_stage(args.deepspeed) > 2, "deepspeed", f"ZeRO stage {_zero_stage(args.deepspeed)}",
        "at most stage 2, which shards no parameters: measuring with a sharded model is not tested",
        "set zero_optimization.stage to 2",
    )  # fmt: skip


def _zero_stage(deepspeed: Any) -> int:
    """Of a DeepSpeed configuration, which TRL takes as a table or as the path of a JSON file; 0 for none."""
    if not deepspeed:
        return 0
    table = deepspeed if isinstance(deepspeed, Mapping) else json.loads(Path(deepspeed).read_text())
    return int(table.get("zero_optimization", {}).get("stage", 0))
