"""Where recorded responses come from: the run's data, tokenizer, reward and step verifier; and a model's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apportion.compare.recorded import Step
from apportion.errors import InputError
from apportion.measure.batch import answers_of
from apportion.train.data import Problems, load_data
from apportion.train.models import load_tokenizer, model_folder
from apportion.train.prepare import resolve
from apportion.train.run import last_checkpoint
from apportion.train.settings import RunConfig


@dataclass(frozen=True)
class Weights:
    """Where a model's files are. `name`: as a reader is told, without the machine's own paths for the run's models."""

    name: str
    folder: Path


def weights_of(run: Path, model: str | None) -> Weights:
    """The model that was asked for; else RUN/model where it is whole, else the newest whole checkpoint.

    Raises:
        InputError: there is none of them.
    """
    if model is not None:
        try:
            return Weights(model, model_folder(model))
        except InputError as error:
            raise InputError("--model", error.got, error.expected, error.fix) from None
    newest = last_checkpoint(run)
    for folder in filter(None, (run / "model", newest)):
        # Of LoRA only the adapter is saved, which is no model by itself.
        whole = (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file()
        if whole and any(folder.glob("*.safetensors")):
            return Weights(f"RUN/{folder.relative_to(run).as_posix()}", folder)
    raise InputError(
        "--model", "nothing, and the run folder holds no whole model or checkpoint", "a model to measure with",
        "give --model FOLDER (merge the adapter of a LoRA run into its model first)",
    )  # fmt: skip


@dataclass(frozen=True)
class Source:
    """Where the responses come from: the run's data and tokenizer, without any weights.

    Attributes:
        config: resolved. rows: of the run's data, one a response. problems: its reward and step verifier.
    """

    config: RunConfig
    tokenizer: Any = field(repr=False)
    rows: Sequence[dict[str, Any]] = field(repr=False)
    problems: Problems = field(repr=False)

    def ids(self, text: str) -> list[int]:
        """Of a text, without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def open_source(config: RunConfig, weights: Weights, step: Step) -> Source:
    """The run's data beside the responses that answer it.

    Raises:
        InputError: data that cannot be loaded, or prompts that are not among it (any more).
    """
    config = resolve(config)
    tokenizer: Any = load_tokenizer(weights.folder)
    problems = load_data(config, chat=bool(tokenizer.chat_template))
    rollouts = step.rollouts
    if rollouts.prompt_ids is None:
        raise InputError("RUN", "no prompt_ids in its rollouts", "the prompts' token ids: prefixes start with them")
    wanted: dict[tuple[int, ...], list[dict[str, Any]]] = {tuple(ids.tolist()): [] for ids in rollouts.prompt_ids}
    for row in problems.train:
        if (ids := tuple(_prompt_ids(config, tokenizer, row["prompt"]))) in wanted:
            wanted[ids].append(row)
    if lost := sum(not rows for rows in wanted.values()):
        raise InputError(
            "RUN/config.toml: data", f"no row for {lost} of the step's {len(wanted)} prompts",
            "the data that the run was trained on", "put the file back as it was",
        )  # fmt: skip
    found = []
    for group, gold in zip(rollouts.group.tolist(), step.recorded.golds, strict=True):
        rows = wanted[tuple(rollouts.prompt_ids[group].tolist())]
        found.append(next((row for row in rows if next(iter(answers_of(row)), "") == gold), rows[0]))
    return Source(config, tokenizer, found, problems)


def _prompt_ids(config: RunConfig, tokenizer: Any, prompt: Any) -> list[int]:
    """As the trainer tokenized it."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    more = config.trainer.get("chat_template_kwargs") or {}
    whole = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True, **more)
    return list(whole["input_ids"])
