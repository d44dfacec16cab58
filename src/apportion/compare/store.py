"""Results of a comparison on disk, and whether one that is there is still this one.

RUN/compare/shown.json                            the step and the methods that were asked for last
RUN/compare/METHOD/about.json                     for each step: settings, weights, gap, cost, and the digest
RUN/compare/METHOD/credit/step-000012.parquet     as RUN/credit
RUN/compare/METHOD/evidence/step-000012.parquet   as RUN/evidence: what the credit was made of
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apportion.records import RunFolder

FOLDER = "compare"
_SHOWN, _ABOUT = "shown.json", "about.json"
# A registered name, or those of a pipeline: nothing that leads out of the folder.
_NAME = re.compile(r"[a-z][a-z0-9_]*(\+[a-z][a-z0-9_]*)*")


def method_folder(run: Path, name: str) -> RunFolder:
    """Where a method's results lie; it reads and writes as the run's own folder does."""
    return RunFolder(run / FOLDER / name)


def record_digest(run: Path, step: int) -> str:
    """Of the files of a recorded step: a result holds for these responses, this evidence and this credit only."""
    state = hashlib.blake2b(digest_size=16)
    for kind in ("rollouts", "evidence", "credit"):
        path = run / kind / f"step-{step:06d}.parquet"
        state.update(_file_digest(path) if path.is_file() else b"none")
    return state.hexdigest()


def weights_digest(folder: Path) -> str:
    """Of a model's configuration and weights, whatever its folder is called."""
    state = hashlib.blake2b(digest_size=16)
    for path in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
        state.update(path.name.encode() + _file_digest(path))
    return state.hexdigest()


def digest(parts: Mapping[str, Any]) -> str:
    """Of anything that JSON can hold."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def about(run: Path, name: str, step: int) -> dict[str, Any] | None:
    """What is told of a method's result on a step; None where there is no whole result."""
    folder = method_folder(run, name)
    found = _read(folder.path / _ABOUT)
    entry = found.get("steps", {}).get(str(step)) if isinstance(found, dict) else None
    return entry if isinstance(entry, dict) and step in folder.steps() else None


def keep(
    run: Path, name: str, step: int, credit: Sequence[Mapping[str, Any]], evidence: Sequence[Mapping[str, Any]],
    told: Mapping[str, Any],
) -> None:  # fmt: skip
    """Writes a result. Its entry in about.json comes last, so that one which was cut short counts for nothing."""
    folder = method_folder(run, name)
    path = folder.path / _ABOUT
    old = _read(path)
    steps = dict(old.get("steps", {})) if isinstance(old, dict) else {}
    if steps.pop(str(step), None) is not None:
        _write(path, {"method": name, "steps": steps})
    folder.write("evidence", step, evidence)
    folder.write("credit", step, credit)
    _write(path, {"method": name, "steps": {**steps, str(step): dict(told)}})


def show(run: Path, step: int, names: Sequence[str]) -> None:
    """Notes what the page shows."""
    _write(run / FOLDER / _SHOWN, {"step": step, "methods": list(names)})


def shown(run: Path, step: int | None = None) -> tuple[int, list[str]] | None:
    """The step and the methods to show: those that were asked for last, or all that there are of `step`.

    None where nothing was compared.
    """
    found = _read(run / FOLDER / _SHOWN)
    if not isinstance(found, dict) or not isinstance(found.get("step"), int):
        return None
    if step is None or step == found["step"]:
        step, names = found["step"], found.get("methods", [])
    else:
        names = sorted(path.parent.name for path in (run / FOLDER).glob(f"*/{_ABOUT}"))
    return step, [name for name in names if isinstance(name, str) and _NAME.fullmatch(name)]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()
