"""The user's own problems, from JSONL, JSON or Parquet files."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from apportion.errors import InputError, nearest

Row = dict[str, Any]
Located = tuple[str, Row]  # where the row stands ("line 7", "row 7", counted from 1), and the row

_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
_FILL_OR_DROP = "give it a value or drop the row"


def load_problems(
    path: str | Path, problem_column: str = "problem", answer_column: str = "answer", limit: int | None = None
) -> list[Row]:
    """Rows with the keys ``problem`` and ``answer`` (both text, not empty), other columns as they stand.

    ``path``: .jsonl, .json (one array of objects), each also with .gz, or .parquet. Numbers as answers become
    text. Of an answer that holds ``####`` (GSM8K as published: the working, then ``#### 42``) the part after
    the last one is taken. A column called ``problem`` or ``answer`` gives way where another column was chosen
    for that name. ``limit``: read and check only the first so many rows.

    Raises InputError on a missing, empty or unreadable file, an unknown column, an invalid line, a null or
    empty problem or answer, or an ``id`` that stands twice.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise InputError("limit", limit, "1 or more, or none")
    try:
        located = list(islice(_read(path), limit))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(str(path), error, f"a {_suffix(path)} file that can be read") from error
    if not located:
        raise InputError(str(path), "an empty file", "at least one problem")
    columns = list(dict.fromkeys(name for _, row in located for name in row))
    _check_column(path, "problem", problem_column, columns)
    _check_column(path, "answer", answer_column, columns)
    _check_ids(path, located)
    renamed = {"problem", "answer", problem_column, answer_column}
    return [
        {
            "problem": _text(path, where, problem_column, row.get(problem_column)),
            "answer": _answer(path, where, answer_column, row.get(answer_column)),
            **{name: value for name, value in row.items() if name not in renamed},
        }
        for where, row in located
    ]


def _read(path: Path) -> Iterator[Located]:
    suffix = _suffix(path)
    if not path.is_file():
        raise InputError(str(path), "no such file", "a file of problems", "correct the path")
    if suffix == ".parquet":
        yield from _read_parquet(path)
        return
    opener = gzip.open if suffix.endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8-sig") as file:  # tolerates the mark that some editors write first
        yield from (_read_lines if suffix.startswith(".jsonl") else _read_array)(path, file)


def _suffix(path: Path) -> str:
    for suffix in _SUFFIXES:
        if path.name.lower().endswith(suffix):
            return suffix
    raise InputError(str(path), "an unknown kind of file", f"one of {', '.join(_SUFFIXES)}")


def _read_lines(path: Path, file: TextIO) -> Iterator[Located]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield _row(path, f"line {number}", _parse(path, f"line {number}", line))


def _read_array(path: Path, file: TextIO) -> Iterator[Located]:
    text = file.read()
    if not text.strip():
        return
    rows = _parse(path, "the file", text)
    if not isinstance(rows, list):
        raise InputError(str(path), f"a JSON {type(rows).__name__}", "one array of objects")
    for number, row in enumerate(rows, start=1):
        yield _row(path, f"row {number}", row)


def _read_parquet(path: Path) -> Iterator[Located]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))
    except pyarrow.ArrowException as error:
        raise InputError(str(path), error, "a Parquet file that can be read") from error


def _parse(path: Path, where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path}, {where}", error, "valid JSON") from error


def _row(path: Path, where: str, row: Any) -> Located:
    if not isinstance(row, dict):
        raise InputError(f"{path}, {where}", f"a JSON {type(row).__name__}", "an object")
    return where, row


def _check_column(path: Path, meaning: str, name: str, columns: list[str]) -> None:
    if name in columns:
        return
    raise InputError(
        str(path), f"no column {name!r}", f"one of its columns: {', '.join(columns) or 'none'}{nearest(name, columns)}",
        f"name the column of the {meaning} with data.{meaning}",
    )  # fmt: skip


def _check_ids(path: Path, located: list[Located]) -> None:
    first: dict[str, str] = {}
    for where, row in located:
        if row.get("id") is None:
            continue
        key = repr(row["id"])
        if key in first:
            raise InputError(f"{path}, {where}, column 'id'", f"{key}, as in {first[key]}", "each id once")
        first[key] = where


def _text(path: Path, where: str, column: str, value: Any) -> str:
    field = f"{path}, {where}, column {column!r}"
    if value is None or value != value:  # Parquet files made from data frames hold NaN for "nothing"
        raise InputError(field, "nothing", "text", _FILL_OR_DROP)
    if not isinstance(value, str):
        raise InputError(field, f"a {type(value).__name__}", "text")
    if not value.strip():
        raise InputError(field, "empty text", "text", _FILL_OR_DROP)
    return value


def _answer(path: Path, where: str, column: str, value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    text = _text(path, where, column, str(value) if number else value)
    return _text(path, where, column, text.rpartition("####")[2].strip())
