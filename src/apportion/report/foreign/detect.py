"""Which trainer wrote a file or a folder."""

from __future__ import annotations

from pathlib import Path

from apportion.errors import InputError
from apportion.report.foreign import interchange, prime_rl, trl, verl
from apportion.report.foreign.files import entries
from apportion.report.foreign.records import Records

KNOWN = (
    "the folder of a run, with credit/step-*.parquet in it; or TRL's completions_*.parquet, verl's STEP.jsonl, "
    "prime-rl's rollouts/step_N/ or an interchange file"
)
_PACKED = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".joblib"})
_PACKED_FIX = {
    ".bin": "open the .jsonl that prime-rl writes in the same folder",
    "": "have the trainer write JSON lines or Parquet: TRL log_completions, verl trainer.rollout_data_dir",
}


def folder_records(path: Path) -> Records | None:
    """The records in a folder; None where there are none of another trainer.

    Raises:
        InputError: only records in a format that is not opened.
    """
    for folder in (path, path / "completions"):
        if any(folder.glob(trl.PATTERN)):
            return trl.folder_source(path, folder)
    if (found := prime_rl.folder_source(path)) is not None:
        return found
    lines = sorted(path.glob("*.jsonl"))
    if dumps := verl.dumps(path):
        lines = list(dumps[0].paths)
    for first in lines:
        keys = _first_keys(first)
        if keys >= verl.FIELDS:
            return verl.folder_source(path)
        if keys >= interchange.FIELDS:
            return interchange.folder_source(path)
    if packed := prime_rl.batches(path):
        raise _refused(packed[0])
    return None


def file_records(path: Path) -> Records:
    """The records in a file.

    Raises:
        InputError: it is in no known format, or in one that is not opened.
    """
    if path.suffix in _PACKED:
        raise _refused(path)
    if path.suffix == ".parquet":
        return trl.file_source(path)
    keys = _first_keys(path)
    if keys >= interchange.FIELDS:
        return interchange.file_source(path)
    if keys >= verl.FIELDS:
        return verl.file_source(path)
    if prime_rl.is_one(dict.fromkeys(keys)):
        return prime_rl.file_source(path)
    named = ", ".join(sorted(keys)[:12])
    got = f"objects with {named[:120]}" if keys else "no whole line"
    raise InputError(str(path), got.encode("ascii", "backslashreplace").decode(), KNOWN)


def _first_keys(path: Path) -> frozenset[str]:
    """The fields of a file's first object; none where it has no whole line."""
    first = next(entries([path]), None)
    return frozenset(first.fields) if first is not None else frozenset()


def _refused(path: Path) -> InputError:
    return InputError(
        str(path), "a packed file: reading it can run code, or needs the trainer's own classes",
        "JSON lines or Parquet", _PACKED_FIX.get(path.suffix, _PACKED_FIX[""]),
    )  # fmt: skip
