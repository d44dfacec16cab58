"""Problems out of a file, or out of a data set of the datasets library, checked row by row."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from apportion.errors import InputError
from apportion.tasks import load_problems
from apportion.tasks.problems import Row

_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
_HUB = re.compile(r"(?P<path>[^/@\s]+/[^/@\s]+)(?:/(?P<config>[^@\s]+))?(?:@(?P<split>\S+))?")
_LOCAL = re.compile(r"(?P<path>.+?)(?:@(?P<split>[^@/\s]+))?")


@dataclass(frozen=True)
class Columns:
    """Names of a file's columns. A file without the `id` column is numbered from 1."""

    problem: str = "problem"
    answer: str = "answer"
    id: str = "id"


@dataclass(frozen=True)
class Problem:
    """One problem. `gold`: the accepted answers, any of which will do. `row`: from 1, blank lines not counted."""

    id: str
    text: str
    gold: tuple[str, ...]
    row: int


def plain_name(name: str) -> str:
    """A name as names are compared: MATH-500 is math500."""
    return re.sub(r"[-_ ]", "", name.casefold())


def find(folder: Path, names: Sequence[str]) -> list[Path]:
    """The files of the folder that have one of these names, as `plain_name` compares them."""
    wanted = {plain_name(name) for name in names}
    found = []
    for path in sorted(folder.iterdir()):
        stems = [path.name[: -len(suffix)] for suffix in _SUFFIXES if path.name.lower().endswith(suffix)]
        if path.is_file() and wanted & set(map(plain_name, stems)):
            found.append(path)
    return found


def read(name: str, source: str, columns: Columns, limit: int | None) -> tuple[Problem, ...]:
    """The first `limit` problems of a file, or of hf:ORG/NAME[/CONFIG][@SPLIT].

    Raises:
        InputError: as `benches.load_sets`, naming set, source and row.
    """
    if source.startswith("hf:"):
        rows = _from_hub(name, source, columns, limit)
    else:
        rows = _rows(name, Path(source), source, columns, limit)
    return _problems(name, source, rows, columns)


def _rows(name: str, path: Path, shown: str, columns: Columns, limit: int | None) -> list[Row]:
    if not path.exists():
        raise InputError(f"{name}: {shown}", "no such file or folder", "a folder of sets, or a file", "correct --data")
    try:
        return load_problems(path, columns.problem, columns.answer, limit)
    except InputError as error:
        # The loader's own advice names the trainer's settings.
        fix = f"--problem-column {name}=… and --answer-column {name}=…" if "data." in error.fix else error.fix
        if error.got == "a list":
            fix = "one answer in its column, and a list of all that will do in the column answers"
        field = error.field.replace(str(path), shown)
        raise InputError(f"{name}: {field}", error.got, error.expected, fix) from error


def _from_hub(name: str, source: str, columns: Columns, limit: int | None) -> list[Row]:
    asked = source.removeprefix("hf:")
    # A folder is no ORG/NAME/CONFIG, however many parts its path has.
    local = _LOCAL.fullmatch(asked)
    spec = local if local is not None and Path(local["path"]).is_dir() else _HUB.fullmatch(asked)
    if spec is None:
        raise InputError("--data", repr(source), "hf:ORG/NAME, hf:ORG/NAME/CONFIG, hf:ORG/NAME/CONFIG@SPLIT, or "
                         "hf:FOLDER@SPLIT with a folder that is there")  # fmt: skip
    import datasets

    parts = spec.groupdict()
    try:
        with _quiet():
            data: Any = datasets.load_dataset(parts["path"], parts.get("config"), split=parts["split"] or "test")
            data = data.select(range(min(limit or len(data), len(data))))
            lists = data[:][columns.answer] if columns.answer in data.column_names else []
            if any(isinstance(each, list) for each in lists):
                data, columns = _first_of(data, lists), replace(columns, answer="answer")
    # Network, names, splits and formats fail in as many ways as there are layers below.
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise InputError(
            "--data", f"{source} ({reason})", "a data set that the datasets library can fetch from here",
            f"check name, config, split and network, or fetch it elsewhere and pass its file: {name}=FILE.parquet",
        ) from error  # fmt: skip
    # By way of a file, so that one reader checks every source.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        with _quiet():
            data.to_parquet(path)
        return _rows(name, path, source, columns, limit)


def _first_of(data: Any, lists: Sequence[list[Any] | None]) -> Any:
    """The data with lists of answers as the column `answers`, and the first of each as `answer`."""
    every = [[each if each is None else str(each) for each in answers or ()] for answers in lists]
    data = data.remove_columns([name for name in ("answer", "answers") if name in data.column_names])
    return data.add_column("answers", every).add_column("answer", [(answers or [None])[0] for answers in every])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's bars, and without a line for each try to reach the hub: the error says it once."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets")]
    levels, hidden = [logger.level for logger in loggers], are_progress_bars_disabled()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    disable_progress_bars()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if not hidden:
            enable_progress_bars()


def _problems(name: str, shown: str, rows: Sequence[Row], columns: Columns) -> tuple[Problem, ...]:
    numbered = all(row.get(columns.id) is None for row in rows)
    if numbered and columns.id != Columns.id:
        raise InputError(f"{name}: {shown}", f"no column {columns.id!r}", "the column that --id-column names")
    out: dict[str, Problem] = {}
    for number, row in enumerate(rows, 1):
        where = f"{name}: {shown}, row {number}"
        key = str(number) if numbered else _id(f"{where}, column {columns.id!r}", row.get(columns.id))
        if key in out:
            raise InputError(f"{where}, column {columns.id!r}", f"{key!r}, as in row {out[key].row}", "each id once")
        gold = _gold(where, row)
        texts = [(columns.id, key), (columns.problem, row["problem"]), *((columns.answer, each) for each in gold)]
        for column, text in texts:
            try:
                text.encode()
            # JSON can spell half of a surrogate pair, which no file of records can hold.
            except UnicodeEncodeError as error:
                raise InputError(f"{where}, column {column!r}", repr(text[error.start]), "text that UTF-8 can hold",
                                 "write the character itself") from None  # fmt: skip
        out[key] = Problem(key, row["problem"], gold, number)
    return tuple(out.values())


def _id(where: str, given: object) -> str:
    if isinstance(given, bool) or not isinstance(given, str | int | float | None):
        raise InputError(where, f"{given!r:.60}", "a text or a number")
    if given is None or given != given or not str(given).strip():
        raise InputError(where, "nothing", "an id in every row, or in none")
    return str(given).strip()


def _gold(where: str, row: Row) -> tuple[str, ...]:
    """The answer, and what a list `answers` accepts beside it."""
    more = row.get("answers")
    if more is None:
        return (row["answer"],)
    if not isinstance(more, list) or not all(isinstance(each, str) and each.strip() for each in more):
        raise InputError(f"{where}, column 'answers'", repr(more)[:80], "a list of answers, each a text")
    return tuple(dict.fromkeys([row["answer"], *more]))
