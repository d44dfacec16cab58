"""What a credit page is made from: a run folder of ours, or the records of another trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from apportion.errors import InputError
from apportion.records import RunFolder
from apportion.report.foreign.detect import KNOWN, file_records, folder_records


class Source(Protocol):
    """A run that can be read, as `RunFolder` can."""

    path: Path

    def steps(self) -> list[int]:
        """The steps with recorded credit, rising."""

    def recorded_steps(self) -> list[int]:
        """The same; raises InputError where there are none."""

    def read(self, kind: str, step: int) -> list[dict[str, Any]]:
        """The rows of a step: kind `rollouts`, `evidence` or `credit`, columns of `records`' schema of that name."""

    def metrics(self) -> list[dict[str, Any]]:
        """A row of numbers for each step, with the key `step`, rising."""


def open_source(path: str | Path) -> Source:
    """Opens a run folder, or the records of TRL, verl or prime-rl, or an interchange file (see `foreign`).

    Nothing in them is run, and nothing is unpickled.

    Raises:
        InputError: there is nothing at `path`, nothing that is known, several runs, or a file that is not opened.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return _folder(path)
    except OSError as error:
        raise InputError("RUN", f"{path}: {error.strerror}", "a folder that can be read") from None
    if not path.is_file():
        raise InputError("RUN", f"{path}, which {'is no file' if path.exists() else 'does not exist'}", KNOWN)
    return file_records(path)


def _folder(path: Path) -> Source:
    if _has_credit(path):
        return RunFolder(path)
    if runs := sorted(each.name for each in path.iterdir() if each.is_dir() and _has_credit(each)):
        named = ", ".join(runs[:3]) + (f" and {len(runs) - 3} more" if len(runs) > 3 else "")
        raise InputError("RUN", f"{path}, which holds {len(runs)} runs ({named})", "one run", f"open {path / runs[0]}")
    if (records := folder_records(path)) is not None:
        return records
    # A run that has not recorded its first step yet.
    if any((path / name).exists() for name in ("config.toml", "metrics.jsonl", "credit")):
        return RunFolder(path)
    raise InputError("RUN", str(path), KNOWN, "train with `apportion train`, which records every step")


def _has_credit(path: Path) -> bool:
    return any((path / "credit").glob("step-*.parquet"))
