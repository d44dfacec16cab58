"""Everything a run needs, loaded and checked before any long work starts."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from apportion.credit.pipeline import fresh_budget
from apportion.credit.registry import make_method
from apportion.engines.base import Sampling
from apportion.errors import InputError, nearest
from apportion.train.compatibility import check_data
from apportion.train.config import CreditConfig
from apportion.train.data import Problems, embedded_task, load_data
from apportion.train.models import load_model, load_tokenizer, model_folder
from apportion.train.settings import RunConfig
from apportion.train.trees import tree_method, tree_rule

# What suits the embedded policy and its task, measured on two cores; a real model gets the conservative column.
_EMBEDDED = {
    "learning_rate": 2e-4, "per_device_train_batch_size": 128, "gradient_accumulation_steps": 2,
    "gradient_checkpointing": False,
}  # fmt: skip
_REAL = {"learning_rate": 1e-5, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
_COMMON = {
    "num_generations": 8, "max_completion_length": 128, "temperature": 1.0, "beta": 0.0,
    "lr_scheduler_type": "constant", "bf16": False, "save_total_limit": 2, "report_to": "none", "disable_tqdm": True,
    "log_completions": False,
}  # fmt: skip
# Options that the run sets itself; naming them in [trainer] as well would leave two truths.
_OURS = {
    "output_dir": "run.folder, which sets it", "max_steps": "run.steps, which sets it",
    "num_train_epochs": "run.steps, which sets it", "seed": "run.seed, which sets it",
    "save_steps": "run.checkpoint_every, which sets it", "save_strategy": "run.checkpoint_every, which sets it",
    "run_folder": "run.folder, which sets it", "record_every": "run.record_every, which sets it",
    "method": "method.name, which sets it", "credit": "the section [method], which sets it",
    "logging_steps": "nothing: every step is logged", "logging_strategy": "nothing: every step is logged",
    "eval_strategy": "run.evaluate_every, which evaluates on the run's held-out problems",
    "resume_from_checkpoint": "apportion train --resume RUN",
    "push_to_hub": "nothing: a run stays on this machine",
}  # fmt: skip


@dataclass(frozen=True)
class Checked:
    """A run whose configuration, tokenizer and data have been checked."""

    config: RunConfig
    args: CreditConfig
    tokenizer: PreTrainedTokenizerBase
    data: Problems


@dataclass(frozen=True)
class Run:
    """A run that has been checked and is ready to train."""

    config: RunConfig
    args: CreditConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    data: Problems


def resolve(config: RunConfig) -> RunConfig:
    """The configuration with the trainer's defaults for its model filled in, as `--dry-run` prints it.

    Raises:
        InputError: an option that TRL's GRPOConfig does not have, that another section sets, of a wrong type, or
            that cannot be combined with the others or with the method.
    """
    _quieten()
    _check_options(config.trainer)
    defaults = _COMMON | (_EMBEDDED if config.model.name == "embedded" else _REAL)
    if config.data.path is None:
        defaults = defaults | {"max_completion_length": embedded_task(config.data).max_response}
    settings = dict(config.method)
    if (tree := tree_method(make_method(settings.pop("name"), settings))) is not None:
        try:
            defaults = defaults | {"num_generations": tree_rule(tree)[1]}
        except InputError as error:
            raise InputError(f"method.{error.field}", error.got, error.expected, error.fix) from None
    config = config.model_copy(update={"trainer": {**defaults, **config.trainer}})
    trainer_args(config)
    return config


def trainer_args(config: RunConfig) -> CreditConfig:
    """The trainer's configuration of a resolved run.

    Raises:
        InputError: options that cannot be combined with each other or with the method.
    """
    settings = dict(config.method)
    try:
        return CreditConfig(
            **{"use_cpu": not torch.cuda.is_available(), **config.trainer},
            output_dir=str(Path(config.run.folder) / "checkpoints"),
            max_steps=config.run.steps,
            seed=config.run.seed,
            save_steps=config.run.checkpoint_every,
            run_folder=config.run.folder,
            record_every=config.run.record_every,
            method=settings.pop("name"),
            credit=settings,
        )
    except InputError as error:
        section = "trainer" if error.field in _option_types() else "method"
        raise InputError(f"{section}.{error.field}", error.got, error.expected, error.fix) from None
    except (ValueError, TypeError, ImportError) as error:
        raise InputError("trainer", " ".join(str(error).split()), "options that TRL can combine") from error


def prepare(config: RunConfig) -> Run:
    """Loads and checks everything a run needs.

    Raises:
        InputError: anything that would have failed later; see `check`, and weights that cannot be loaded.
    """
    checked = check(config)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    model = load_model(model_folder(config.model.name), config.model.dtype)
    return Run(checked.config, checked.args, model, checked.tokenizer, checked.data)


def check(config: RunConfig) -> Checked:
    """Checks all that can be checked without the weights, the quickest first.

    Raises:
        InputError: the model's folder or tokenizer, the data, an option of the trainer, a prompt that leaves no
            room in the model's context.
    """
    config = resolve(config)
    args = trainer_args(config)
    folder = model_folder(config.model.name)
    tokenizer = load_tokenizer(folder)
    sampling_of(args, tokenizer)
    data = load_data(config, chat=bool(tokenizer.chat_template))
    _check_count(data.train, args)
    check_data(args.make_method(), data.train[0].keys(), data.train, data.steps is not None)
    shape = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    context, fresh = getattr(shape, "max_position_embeddings", None), fresh_budget(args.make_method())
    _check_prompts(data.train, tokenizer, context, args.max_completion_length, fresh)
    return Checked(config, args, tokenizer, data)


def sampling_of(args: CreditConfig, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """How the trainer samples its rollouts.

    Raises:
        InputError: a temperature, or another setting, outside its range.
    """
    try:
        return Sampling(
            (tokenizer.eos_token_id,), args.temperature, args.top_k or 0, args.top_p, args.min_p or 0.0,
            args.repetition_penalty,
        )  # fmt: skip
    except InputError as error:
        name = error.field.removeprefix("sampling.")
        raise InputError(f"trainer.{name}", error.got, error.expected, error.fix) from None


def _option_types() -> Mapping[str, Any]:
    # TRL declares `scale_rewards` as text and documents booleans as well.
    hints = get_type_hints(CreditConfig)
    return {f.name: hints[f.name] for f in fields(CreditConfig)} | {"scale_rewards": str | bool}


def _check_options(options: Mapping[str, Any]) -> None:
    types = _option_types()
    known = types.keys() - _OURS.keys()
    for key, value in options.items():
        if key in _OURS:
            raise InputError(f"trainer.{key}", repr(value), _OURS[key])
        if key not in known:
            raise InputError(f"trainer.{key}", "an unknown option", f"one of TRL's GRPOConfig{nearest(key, known)}")
        if value is None:
            raise InputError(f"trainer.{key}", "null", "a value, since TOML has no null", "leave the option out")
        try:
            TypeAdapter(types[key], config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError:
            expected = getattr(types[key], "__name__", str(types[key]))
            raise InputError(f"trainer.{key}", repr(value), f"{expected}, as CreditConfig declares it") from None


def _check_count(rows: Sequence[Any], args: CreditConfig) -> None:
    """TRL drops what does not fill a generation batch, and would end without a step where nothing fills one."""
    needed = args.generation_batch_size // args.num_generations
    if len(rows) < needed:
        raise InputError(
            "data", f"{len(rows)} problems", f"at least {needed}: as many prompts as a generation batch holds",
            "add problems, or lower trainer.gradient_accumulation_steps or trainer.per_device_train_batch_size",
        )  # fmt: skip


def _check_prompts(rows: Sequence[Any], tokenizer: Any, context: int | None, response: int, fresh: int) -> None:
    """Raises InputError at the first prompt that cannot be tokenized or leaves no room for a response."""
    beside = f" and method.fresh_budget={fresh}" if fresh else ""
    for number, row in enumerate(rows, 1):
        prompt = row["prompt"]
        try:
            ids = (
                tokenizer(prompt)["input_ids"]
                if isinstance(prompt, str)
                else tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
            )
        # Tokenizers and chat templates fail in ways of their own.
        except Exception as error:
            raise InputError(
                f"prompt of row {number}", f"{_shown(prompt)}, which the model's tokenizer refuses ({error})",
                "text in the tokenizer's alphabet, and messages that its chat template takes",
            ) from error  # fmt: skip
        if context is not None and len(ids) + response + fresh > context:
            raise InputError(
                f"prompt of row {number}", f"{len(ids)} tokens, with trainer.max_completion_length={response}{beside}",
                f"at most {context} together, the model's context", "drop the row or set a smaller limit",
            )  # fmt: skip


def _shown(prompt: Any) -> str:
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _quieten() -> None:
    """Warnings of the libraries beneath that say nothing about this run."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    logging.getLogger("trl").setLevel(logging.ERROR)
