"""TRL's completions: the Parquet files that `GRPOTrainer` writes with `log_completions=True`.

Read as TRL 1.16 writes them: `completions/completions_00012.parquet` under the output folder, with the columns `step`,
`prompt`, `completion` (texts or lists of messages), one of floats for each reward function, whatever the user logged
beside, and `advantage`. The advantages are TRL's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from apportion.errors import InputError
from apportion.report.foreign.files import Entry, File, number_in, unreadable
from apportion.report.foreign.records import Records
from apportion.report.foreign.responses import Response, Responses, Step
from apportion.report.foreign.text import conversation, messages, parts

NAME = "trl"
PATTERN = "completions_*.parquet"
_FIXED = ("prompt", "completion", "advantage")
_STATE = "trainer_state.json"


def completions(folder: Path) -> list[File]:
    """The files of a folder by step. The last is left out as long as it has no end: TRL is writing it."""
    found = sorted((step, path) for path in folder.glob(PATTERN) if (step := number_in(path.stem)) is not None)
    if found and not _has_end(found[-1][1]):
        found.pop()
    return [File(step, (path,)) for step, path in found]


def _has_end(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(-4, 2)
            return file.read() == b"PAR1"
    except OSError:
        return False


def _output(folder: Path) -> Path:
    """The trainer's output folder around its completions."""
    return folder.parent if folder.name == "completions" else folder


def folder_source(path: Path, folder: Path) -> Records:
    """The completions in `folder`, with what the trainer logged in the output folder around it."""
    return Records(path, lambda: completions(folder), load, lambda: logged(_output(folder)))


def file_source(path: Path) -> Records:
    """One file. Its step is that of its column `step`, or the number in its name."""
    return Records(path, lambda: [File(None, (path,))], load)


def load(file: File) -> Mapping[int, Step]:
    """The responses of a file.

    Raises:
        InputError: no Parquet, a column that is missing or of another type, a value that is none of its column's.
    """
    (path,) = file.paths
    table, rewards = _table(path)
    try:
        columns = {name: table.column(name).to_pylist() for name in table.column_names}
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise unreadable(path, _first_line(error)) from None
    by_step: dict[int, list[Response]] = {}
    for k in range(table.num_rows):
        entry = Entry(f"row {k} of {path.name}", {name: values[k] for name, values in columns.items()})
        step = file.step if file.step is not None else _step(entry, path)
        by_step.setdefault(step, []).append(_response(entry, rewards))
    settings = {
        "record": "completions that TRL logged",
        "reward": rewards[0] if len(rewards) == 1 else
        f"the plain sum of {', '.join(rewards)}; their weights are not recorded" if rewards else "none is recorded",
        "groups": "responses to the same prompt in a step",
    }  # fmt: skip
    return {step: Responses(NAME, found, settings) for step, found in by_step.items()}


def _table(path: Path) -> tuple[pa.Table, list[str]]:
    """The columns that are shown, and the names of those that are rewards."""
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            _check(schema, path)
            rewards = _rewards(schema, _logged_rewards(_output(path.parent)))
            step = ["step"] if schema.names.count("step") == 1 else []
            return file.read([*step, *_FIXED, *rewards]), rewards
    except (OSError, pa.ArrowException) as error:
        fix = "if it is being written, wait for the trainer to finish the step"
        raise unreadable(path, _first_line(error), fix) from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _check(schema: pa.Schema, path: Path) -> None:
    for column in _FIXED:
        if schema.names.count(column) != 1:
            got = f"the columns {', '.join(schema.names[:20])}"
            raise InputError(f"{column} of {path.name}", got, "a column of this name, as TRL's log_completions writes")
    for column in ("prompt", "completion"):
        if not _is_spoken(kind := schema.field(column).type):
            raise InputError(
                f"{column} of {path.name}", f"values of type {str(kind)[:60]}", "texts or lists of messages"
            )


def _is_spoken(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
        return bool(pa.types.is_struct(kind) or pa.types.is_null(kind))
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind))


def _rewards(schema: pa.Schema, known: set[str]) -> list[str]:
    """The columns of rewards: those whose means the trainer logged, or else all other columns of floats."""
    floats = [
        column.name for column in schema
        if column.name not in ("step", *_FIXED) and pa.types.is_floating(column.type)
        and schema.names.count(column.name) == 1
    ]  # fmt: skip
    return [name for name in floats if name in known] or floats


def _step(entry: Entry, path: Path) -> int:
    step = entry.fields.get("step", number_in(path.stem))
    if type(step) is not int or not 0 <= step < 10**9:
        raise entry.wrong("step", "a whole number from 0")
    return step


def _response(entry: Entry, rewards: Sequence[str]) -> Response:
    scores = [score for name in rewards if (score := entry.number(name)) is not None]
    return Response(
        prompt=conversation(messages(entry, "prompt")),
        parts=parts(messages(entry, "completion")),
        # A response that no function could score counts in no mean, as in TRL.
        reward=Entry(entry.where, {"reward": sum(scores)}).number("reward") if scores else None,
        advantage=entry.number("advantage"),
    )


def logged(output: Path) -> Mapping[int, Mapping[str, Any]]:
    """The numbers of `log_history` in the output folder's state, or in that of its last checkpoint, by step.

    A state that is not whole is none: the trainer is writing it.
    """
    checkpoints = sorted(output.glob(f"checkpoint-*/{_STATE}"), key=lambda path: number_in(path.parent.name) or 0)
    found: dict[int, dict[str, Any]] = {}
    for path in (*checkpoints[-1:], output / _STATE):
        try:
            state = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        history = state.get("log_history") if isinstance(state, dict) else None
        for row in history if isinstance(history, list) else ():
            if isinstance(row, dict) and type(step := row.get("step")) is int and 0 <= step < 10**9:
                numbers = {str(name): value for name, value in row.items() if type(value) in (int, float)}
                found[step] = {**found.get(step, {}), **numbers}
    return found


def _logged_rewards(output: Path) -> set[str]:
    names = {name for row in logged(output).values() for name in row}
    return {name.removeprefix("rewards/").removesuffix("/mean") for name in names if name.startswith("rewards/")}
