"""Which runs are seeds of one configuration, and what the configurations are called beside each other."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apportion.report.escape import one_line

# Where a run is kept, how often it looks at itself and what it prints. How long it is (run.steps, run.tokens) is not
# here: schedules depend on it.
_BOOKKEEPING = {
    *(f"run.{key}" for key in ("folder", "threads", "checkpoint_every", "record_every", "evaluate_every",
                               "evaluate_samples", "predict")),
    *(f"trainer.{key}" for key in (
        "output_dir", "run_name", "project", "report_to", "disable_tqdm", "log_level", "log_completions",
        "log_unique_prompts", "num_completions_to_print", "logging_dir", "logging_steps", "logging_strategy",
        "save_steps", "save_strategy", "save_total_limit", "save_only_model", "dataloader_num_workers")),
}  # fmt: skip
_NAME, _VALUE, _SAID = 80, 40, 3  # characters of a label, of a value in it; keys that a label names


@dataclass(frozen=True)
class Kind:
    """Runs of one configuration. `runs`: their places in the list that was given."""

    label: str
    runs: tuple[int, ...]


def kinds(paths: Sequence[Path]) -> list[Kind]:
    """The run folders by configuration, in order of appearance.

    Two runs are of one kind where their config.toml say the same but for seeds (any key `seed` or `…_seed`), the
    folder and other bookkeeping. A folder without a config.toml that can be read is a kind of its own. A label is
    the method where that tells the kinds apart; the keys that differ otherwise; the folder's name where there is no
    configuration. No two labels are equal.
    """
    configs = [_config(path) for path in paths]
    members: dict[str, list[int]] = {}
    for i, config in enumerate(configs):
        key = f"folder {i}" if config is None else json.dumps(config, sort_keys=True, default=str)
        members.setdefault(key, []).append(i)
    found = list(members.values())
    labels = _labels([configs[runs[0]] for runs in found], [paths[runs[0]] for runs in found])
    return [Kind(label, tuple(runs)) for label, runs in zip(labels, found, strict=True)]


def seed(path: Path) -> int | None:
    """`run.seed` of a run folder; None where its configuration says none."""
    section = (_read(path) or {}).get("run")
    value = section.get("seed") if isinstance(section, dict) else None
    return value if isinstance(value, int) else None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _config(path: Path) -> dict[str, Any] | None:
    """What makes a run the kind that it is: dotted key → value."""
    found = _read(path)
    return None if found is None else {k: v for k, v in _flat(found).items() if not _is_bookkeeping(k)}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in table.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def _is_bookkeeping(key: str) -> bool:
    last = key.rpartition(".")[2]
    return key in _BOOKKEEPING or last == "seed" or last.endswith("_seed")


def _labels(configs: Sequence[dict[str, Any] | None], paths: Sequence[Path]) -> list[str]:
    methods = [None if config is None else _method(config) for config in configs]
    several = len({m for m in methods if m is not None}) > 1
    labels = []
    for config, method, path in zip(configs, methods, paths, strict=True):
        if config is None or method is None:
            labels.append(one_line(path.resolve().name or "run", _NAME))
            continue
        rivals = [c for c, m in zip(configs, methods, strict=True) if c is not None and m == method]
        differing = _differing(rivals)
        words = [f"{_short(key, differing)} {_value(config.get(key))}" for key in differing[:_SAID]]
        words += ["…"] if len(differing) > _SAID else []
        labels.append(one_line(", ".join(([method] if several or not words else []) + words), _NAME))
    counts, seen = Counter(labels), Counter[str]()
    for i, label in enumerate(labels):
        if counts[label] > 1:
            seen[label] += 1
            labels[i] = f"{label} ({seen[label]})"
    return labels


def _method(config: Mapping[str, Any]) -> str:
    name = config.get("method.name", config.get("method", "run"))
    return "+".join(map(str, name)) if isinstance(name, list) else str(name)


def _differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]


def _short(key: str, others: Sequence[str]) -> str:
    """The last part of a dotted key, where no other key here ends alike."""
    last = key.rpartition(".")[2]
    return key if sum(other.rpartition(".")[2] == last for other in others) > 1 else last


def _value(value: Any) -> str:
    return (
        "–" if value is None else one_line(value if isinstance(value, str) else json.dumps(value, default=str), _VALUE)
    )
