"""The configuration of a run: one TOML file, checked whole before anything starts.

Sections: [run], [model], [data], [method], [reward], [trainer]. The last is handed to TRL's `GRPOConfig` as
it is, so that every option of the trainer is reachable under its own name; the others are ours.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from apportion.credit.registry import make_method, method_class, method_names_of, setting_error
from apportion.errors import InputError, nearest

CONFIG_FILE = "config.toml"

# The generated tasks state an answer as "#37" in a paragraph of its own. A cut inside a step needs the paragraph
# break as well; steps end with it.
_ANSWER = r"#(\d+)"
_TASK_SETTINGS: dict[str, dict[str, Any]] = {
    "oar_p": {"answer_pattern": _ANSWER},
    "oar_g": {"answer_pattern": _ANSWER},
    "grpo_vps": {"answer_pattern": _ANSWER, "cue": "\n\n#"},
    "spae": {"answer_pattern": _ANSWER, "cue": "#"},
    "spo_tree": {"branching": [4, 4], "level_tokens": 32},
    "treepo": {"width": 8, "depth": 8, "segment_tokens": 16},
}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True)


class RunSection(_Section):
    """Where the run lives and how long it is."""

    folder: str = Field("runs/apportion", description="the run folder: records, metrics, checkpoints")
    steps: int = Field(100, ge=1, description="optimiser steps")
    tokens: int | None = Field(None, ge=1, description="stop at this many generated tokens, probes included")
    seed: int = Field(0, ge=0, description="of data order, sampling and probes")
    threads: int | None = Field(None, ge=1, description="CPU threads of torch; its own choice where left out")
    checkpoint_every: int = Field(25, ge=1, description="steps between checkpoints")
    record_every: int = Field(1, ge=1, description="steps between recorded batches")
    evaluate_every: int = Field(0, ge=0, description="steps between evaluations; 0: start and end only")
    evaluate_samples: int = Field(256, ge=0, description="held-out responses an evaluation samples; 0: none")
    predict: Literal["auto", "measure", "off"] = Field(
        "auto", description="predicted cost beside the run's own: auto, where this machine's figures are known"
    )


class ModelSection(_Section):
    """The policy: `embedded`, `smollm2`, or a local folder in Hugging Face's layout.

    float32 is the default because it is the faster one on a CPU, small steps do not round away in it, and probes
    then come from the policy that is trained: on SmolLM2 the log-probabilities of probing engine and trainer differed
    by 1e-5 nats, in bfloat16 by up to 0.06. With LoRA the adapter itself is float32 either way.
    """

    name: str = Field("embedded", description="embedded, smollm2, or a folder")
    lora: int = Field(0, ge=0, description="rank of a LoRA adapter on linear layers; 0 trains all weights")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the weights")


class DataSection(_Section):
    """The problems: a generated task, or a file of the user's."""

    task: str = Field("chain", description="embedded task, used where `path` is left out")
    path: str | None = Field(None, description="JSONL (.gz), JSON or Parquet file of problems")
    problem: str = Field("problem", description="column of the problem's text")
    answer: str = Field("answer", description="column of the gold answer")
    system: str | None = Field(None, description="system message; only for models with a chat template")
    count: int = Field(4096, ge=1, description="problems generated for the task")
    limit: int | None = Field(None, ge=1, description="use only the first problems of the file")
    operations: int = Field(8, ge=1, description="steps of each generated chain")
    modulus: int = Field(100, ge=10, le=1000, description="of the generated arithmetic")
    detour: float = Field(0.0, ge=0, le=1, description="share of worked solutions with a detour")
    seed: int = Field(0, ge=0, description="of the generated problems")


class RewardSection(_Section):
    """How a response is scored, and who judges its single steps, for methods that read such verdicts."""

    kind: Literal["auto", "task", "math", "exact", "choice", "lean"] = Field(
        "auto", description="auto: the task's own check for generated problems, math for a file"
    )
    settings: dict[str, Any] = Field(default_factory=dict, description="of the kind's verifier")
    steps: Literal["auto", "arithmetic", "lean"] = Field(
        "auto", description="auto: the task's own check for generated problems, nobody for a file"
    )
    step_settings: dict[str, Any] = Field(default_factory=dict, description="of the step verifier")


class RunConfig(_Section):
    """A whole run. `method`: `name` and that method's settings, or a list of names and a table for each of them;
    `trainer`: any option of TRL's GRPOConfig.
    """

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    reward: RewardSection = RewardSection()
    method: dict[str, Any] = Field(default_factory=lambda: {"name": "probepo"})
    trainer: dict[str, Any] = Field(default_factory=dict)


def load_config(path: Path | None, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Reads a TOML file (or the defaults) and applies overrides: `section.key` → value.

    Raises:
        InputError: a missing or broken file, an unknown section or key (with the nearest one), a value that
            its key does not take, or a method whose settings do not fit together.
    """
    data = {} if path is None else _read(path)
    for section, values in data.items():
        _check_keys(section, values)
    overrides = overrides or {}
    if "method.name" in overrides and overrides["method.name"] != data.get("method", {}).get("name"):
        # What the file sets are another method's settings.
        data["method"] = {}
    for key, value in overrides.items():
        section, dot, name = key.partition(".")
        if not dot:
            raise InputError("--set", repr(key), "section.key=value, for example method.budget=24 or run.steps=50")
        # A table inside of a section: `method.STAGE.SETTING` of a pipeline, `reward.settings.NAME`.
        stage, _, last = name.rpartition(".")
        _check_keys(section, {stage or last: value})
        table = data.setdefault(section, {})
        if stage and not isinstance(table.setdefault(stage, {}), dict):
            raise InputError("--set", repr(key), f"a key of {section}; {section}.{stage} is no table")
        (table[stage] if stage else table)[last] = value
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise setting_error("", error) from None
    settings = dict(config.method)
    name = settings.pop("name", "probepo")
    if not (isinstance(name, str) or (isinstance(name, list) and all(isinstance(each, str) for each in name))):
        raise InputError("method.name", repr(name), "a method's name, or a list of names, which is a pipeline")
    names = method_names_of(name)
    own = {*names, *(key for each in names for key in method_class(each).model_fields)}
    if wrong := next((key for key in settings if key not in own and nearest(key, ["name"])), None):
        raise InputError(f"method.{wrong}", "an unknown key", "name, or a setting of the method, did you mean 'name'?")
    # The resolved file names every setting, so that a later change of a default cannot change a recorded run.
    # In JSON's types, which are TOML's: a tuple would come back as a list.
    given = _with_task_settings(names, settings) if config.data.path is None else settings
    resolved = json.loads(json.dumps(dict(make_method(name, given).settings)))
    return config.model_copy(update={"method": {"name": name, **resolved}})


def _with_task_settings(names: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings over those that fit the generated tasks: how they state an answer, and their short responses."""
    if len(names) == 1:
        return {**_TASK_SETTINGS.get(names[0], {}), **settings}
    found = dict(settings)
    for name in names:
        own = settings.get(name, {})
        if name in _TASK_SETTINGS and isinstance(own, Mapping):
            found[name] = {**_TASK_SETTINGS[name], **own}
    return found


def resume_config(folder: Path) -> RunConfig:
    """The configuration that a run folder was made with.

    Raises:
        InputError: no config.toml in the folder.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise InputError("--resume", str(folder), f"the folder of a run, with {CONFIG_FILE} in it")
    return load_config(folder / CONFIG_FILE, {"run.folder": str(folder)})


def save_config(config: RunConfig) -> None:
    """Writes the configuration into the run folder, which is all that `resume_config` needs."""
    folder = Path(config.run.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(to_toml(config), encoding="utf-8")
    except OSError as error:
        raise InputError("run.folder", f"{folder}: {error.strerror}", "a folder that can be written to") from None


def to_toml(config: RunConfig) -> str:
    """The configuration as TOML that loads as the same one; keys without a value are left out: TOML has no null."""
    lines = []
    for section, values in config.model_dump().items():
        lines.append(f"[{section}]")
        lines += [f"{_key(key)} = {_value(value)}" for key, value in values.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError("config", str(path), "a TOML file that exists")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"config {path}", error, "valid TOML") from None


def _check_keys(section: str, values: Any) -> None:
    if section not in RunConfig.model_fields:
        raise InputError(f"[{section}]", "an unknown section", _one_of(section, RunConfig.model_fields))
    if not isinstance(values, Mapping):
        raise InputError(section, repr(values), f"a table: [{section}] and its keys below")
    cls = RunConfig.model_fields[section].annotation
    known = cls.model_fields if isinstance(cls, type) and issubclass(cls, BaseModel) else values
    for key in values:
        if key not in known:
            raise InputError(f"{section}.{key}", "an unknown key", _one_of(key, known))


def _one_of(word: str, known: Iterable[str]) -> str:
    return f"one of {', '.join(known)}{nearest(word, known)}"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        items = {key: item for key, item in value.items() if item is not None}
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in items.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    # JSON's strings, integers and booleans are TOML's too, but for the one control character that JSON lets stand.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
