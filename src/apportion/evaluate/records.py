"""An evaluation on disk: samples as they were drawn, a line a problem, and the numbers.

    OUT/samples/SET/00003-1f9b….parquet   one row a sample: the cache that a run goes on from
    OUT/items/SET.parquet                 one row a problem, of the last command
    OUT/evaluation.json, OUT/table.md     settings and numbers of the last command
    OUT/disagreements.jsonl               with a second grader: the samples on which the two differ

A file appears whole or not at all, and carries checksums. Samples of other settings, seeds or weights may lie in one
folder: each row's key says what it was drawn from, and nothing is read by its place.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from apportion.errors import InputError
from apportion.evaluate.grading import Grade

_GRADE = pa.struct({"grader": pa.string(), "verdict": pa.string(), "reason": pa.string(), "answer": pa.string()})

SAMPLES = pa.schema(
    {
        "set": pa.string(), "id": pa.string(), "m": pa.int32(), "key": pa.string(), "setting": pa.string(),
        "prompt": pa.string(), "gold": pa.list_(pa.string()), "text": pa.string(), "token_ids": pa.list_(pa.int32()),
        "tokens": pa.int32(), "finish": pa.string(), "grades": pa.list_(_GRADE),
    }
)  # fmt: skip

# `average` is None where no sample has a verdict.
ITEMS = pa.schema(
    {
        "id": pa.string(), "row": pa.int32(), "problem": pa.string(), "gold": pa.list_(pa.string()),
        "samples": pa.int32(), "graded": pa.int32(), "correct": pa.int32(), "average": pa.float64(),
        "no_answer": pa.int32(), "cut_off": pa.int32(), "tokens": pa.int64(),
    }
)  # fmt: skip

EVALUATION = "evaluation.json"
DISAGREEMENTS = "disagreements.jsonl"


@dataclass(frozen=True)
class Stored:
    """What is kept in memory of a sample on disk."""

    path: Path
    gold: tuple[str, ...]
    tokens: int
    finish: str
    grades: Mapping[str, Grade]

    def judged(self, graders: Iterable[str], gold: tuple[str, ...]) -> bool:
        """Whether all of these graders have judged it against this gold. An abstention is tried again."""
        settled = {name for name, grade in self.grades.items() if grade.verdict != "abstain"}
        return self.gold == gold and settled >= set(graders)


def sample_key(**parts: Any) -> str:
    """The key of a problem's samples: a hash of all that decides them. Sample m is the m-th of its stream."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


class Store:
    """Reads and writes the files of one evaluation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other evaluations out of the folder, and clears away what a killed one was writing.

        Raises:
            InputError: a folder that cannot be written to, or that another evaluation is writing to.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
            opened = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise _unwritable(self.folder, error) from None
        try:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError("--output", str(self.folder), "a folder that no other evaluation is writing to",
                                 "wait for it, or choose another --output") from None  # fmt: skip
            # Some network file systems have no locks.
            except OSError:
                pass
            for partial in self.folder.rglob(".*.part"):
                partial.unlink(missing_ok=True)
            yield
        finally:
            os.close(opened)

    def read(self, name: str, keys: Iterable[str]) -> dict[tuple[str, int], Stored]:
        """The samples of a set that lie here under one of these keys, by key and m.

        Raises:
            InputError: a file that is no such record.
        """
        wanted, found = set(keys), {}
        columns = ["key", "m", "gold", "tokens", "finish", "grades"]
        for path in sorted((self.folder / "samples" / name).glob("*.parquet")):
            for row in _rows(path, columns, SAMPLES):
                if row["key"] in wanted:
                    grades = {each["grader"]: Grade(**each) for each in row["grades"]}
                    stored = Stored(path, tuple(row["gold"]), row["tokens"], row["finish"], grades)
                    found[row["key"], row["m"]] = stored
        return found

    def rows(self, path: Path) -> list[dict[str, Any]]:
        """A file's rows with all their columns."""
        return _rows(path, SAMPLES.names, SAMPLES)

    def write(self, name: str, chunk: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes a chunk of samples; its name says its place in the set and what it holds."""
        digest = hashlib.blake2b("".join(f"{row['key']}{row['m']}," for row in rows).encode(), digest_size=6)
        self.rewrite(self.folder / "samples" / name / f"{chunk:05d}-{digest.hexdigest()}.parquet", rows)

    def rewrite(self, path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replaces a file's rows, after samples were graded once more."""
        _write_table(path, rows, SAMPLES)

    def write_items(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes the set's line a problem."""
        _write_table(self.folder / "items" / f"{name}.parquet", rows, ITEMS)

    def items(self, name: str) -> list[dict[str, Any]]:
        """A set's line a problem."""
        return _rows(self.folder / "items" / f"{name}.parquet", ITEMS.names, ITEMS)

    def write_text(self, file: str, text: str) -> None:
        """Writes one of the other files."""
        with _writing(self.folder / file) as partial:
            partial.write_text(text, encoding="utf-8")

    def remove(self, file: str) -> None:
        """Removes one of the other files, which an earlier command left."""
        (self.folder / file).unlink(missing_ok=True)

    def evaluation(self) -> dict[str, Any]:
        """Settings and numbers of the last command.

        Raises:
            InputError: no finished evaluation in the folder.
        """
        try:
            found = json.loads((self.folder / EVALUATION).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict) or not found.keys() >= {"model", "settings", "sets", "avg6"}:
            raise InputError("OUT", str(self.folder), f"the folder of a finished evaluation, with {EVALUATION} in it",
                             "run its `apportion evaluate` to the end")  # fmt: skip
        return cast(dict[str, Any], found)


def _write_table(target: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> None:
    with _writing(target) as partial:
        pq.write_table(
            pa.Table.from_pylist(list(rows), schema=schema), partial, compression="zstd", write_page_checksum=True
        )


@contextmanager
def _writing(target: Path) -> Iterator[Path]:
    """A path to write to that takes the target's place when the block ends."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        os.replace(partial, target)
    except OSError as error:
        raise _unwritable(target, error) from None
    finally:
        with suppress(OSError):
            partial.unlink()


def _unwritable(target: Path, error: OSError) -> InputError:
    return InputError("--output", f"{target}: {error.strerror}", "a folder that can be written to")


def _rows(path: Path, columns: Sequence[str], schema: pa.Schema) -> list[dict[str, Any]]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            if not file.schema_arrow.equals(schema):
                raise pa.ArrowInvalid(f"columns {', '.join(file.schema_arrow.names)[:80]}")
            return cast(list[dict[str, Any]], file.read(columns=list(columns)).to_pylist())
    # Damaged text is a ValueError.
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InputError(str(path), str(error).splitlines()[0][:160], "a file that `apportion evaluate` wrote",
                         "delete it; what it held is done again") from None  # fmt: skip
