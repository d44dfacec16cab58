"""Records as they come from a file: whole lines, and fields that are checked when they are taken.

Nothing here is trusted: text may be hostile, numbers absent, a file half written.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from apportion.errors import InputError
from apportion.report.escape import one_line

LIMIT = 3.4e38
"""Credit is float32: a number beyond this has no place in a record of it."""
NUMBER = "a number that float32 can hold, or null"


@dataclass(frozen=True)
class File:
    """What holds one step, or several where `step` is None: its lines are then read one file after the other."""

    step: int | None
    paths: tuple[Path, ...]

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Changes when a file does.

        Raises:
            InputError: a file that is gone.
        """
        try:
            return tuple((found.st_mtime_ns, found.st_size) for found in (path.stat() for path in self.paths))
        except OSError as error:
            raise unreadable(Path(error.filename or self.paths[0]), error.strerror) from None


def unreadable(path: Path, why: object, fix: str = "") -> InputError:
    return InputError(str(path), why, "a record that can be read", fix)


def number_in(name: str) -> int | None:
    """The number that a file's or a folder's name ends in: 12 of `12`, `step_12` and `completions_00012`."""
    match = re.search(r"([0-9]{1,9})$", name)
    return int(match[1]) if match else None


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, the last one only where it is whole: a trainer may be writing it. `.zst` is unpacked.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        compression = "zstd" if path.suffix == ".zst" else None
        with pa.input_stream(str(path), compression=compression) as raw:
            for line in io.BufferedReader(raw, 1 << 20):
                if line.endswith(b"\n") or _is_whole(line):
                    yield line
    except (OSError, pa.ArrowException) as error:
        raise unreadable(path, str(error).splitlines()[0] if str(error) else type(error).__name__) from None


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


@dataclass(frozen=True)
class Entry:
    """An object of a record and where it stands, such as `line 3 of 12.jsonl`."""

    where: str
    fields: Mapping[str, Any]

    def number(self, name: str) -> float | None:
        """A number; None where there is none, or NaN.

        Raises:
            InputError: another value, or a number beyond float32.
        """
        value = self.fields.get(name)
        if value is None or (type(value) is float and math.isnan(value)):
            return None
        if type(value) not in (int, float) or not -LIMIT <= value <= LIMIT:
            raise self.wrong(name, NUMBER)
        return float(value)

    def numbers(self, name: str) -> list[float] | None:
        """A list of numbers, NaN where one is missing; None where there is no list.

        Raises:
            InputError: another value.
        """
        values = self.fields.get(name)
        if values is None:
            return None
        if type(values) is not list:
            raise self.wrong(name, "a list of numbers")
        for k, value in enumerate(values):
            if not (value is None or (type(value) in (int, float) and (value != value or -LIMIT <= value <= LIMIT))):
                raise InputError(
                    f"{name}[{k}] of {self.where}", shown(value), "a number that float32 can hold, or none"
                )
        return [math.nan if value is None else float(value) for value in values]

    def counts(self, name: str, limit: int = 2**31 - 1) -> list[int]:
        """A list of whole numbers from 0 to `limit`; empty where there is none.

        Raises:
            InputError: another value.
        """
        values = self.fields.get(name) or []
        if type(values) is not list or not all(type(v) in (int, bool) and 0 <= v <= limit for v in values):
            raise self.wrong(name, f"a list of whole numbers from 0 to {limit}")
        return list(map(int, values))

    def entry(self, name: str) -> Entry:
        """An object in this one; an empty one where there is none.

        Raises:
            InputError: another value.
        """
        value = self.fields.get(name)
        if value is not None and type(value) is not dict:
            raise self.wrong(name, "an object")
        return Entry(f"{name} of {self.where}", value or {})

    def entries(self, name: str) -> list[Entry]:
        """The objects of a list; none where there is no list.

        Raises:
            InputError: another value.
        """
        values = self.fields.get(name) or []
        if type(values) is not list or not all(type(value) is dict for value in values):
            raise self.wrong(name, "a list of objects")
        return [Entry(f"{name}[{k}] of {self.where}", value) for k, value in enumerate(values)]

    def word(self, name: str) -> str | None:
        """A short text or a number, as a text; None where there is neither."""
        value = self.fields.get(name)
        return str(value) if type(value) in (str, int) and value != "" else None

    def require(self, *names: str) -> None:
        """Raises InputError where a field is missing."""
        for name in names:
            if name not in self.fields:
                raise InputError(f"{name} of {self.where}", "nothing", "a value: this field must be there")

    def wrong(self, name: str, expected: str) -> InputError:
        # Names may come from the record as well, and be as hostile as its texts.
        return InputError(one_line(f"{name} of {self.where}", 200), shown(self.fields.get(name)), expected)


def entries(paths: Iterable[Path]) -> Iterator[Entry]:
    """The objects of JSON-lines files; blank lines are none.

    Raises:
        InputError: a line that is no JSON object in UTF-8.
    """
    for path in paths:
        for line, raw in enumerate(whole_lines(path), 1):
            where = f"line {line} of {path.name}"
            try:
                text = raw.decode("utf-8-sig" if line == 1 else "utf-8")
                value = json.loads(text) if text.strip() else None
            except UnicodeDecodeError:
                raise InputError(where, "bytes that are not UTF-8", "UTF-8 text") from None
            except json.JSONDecodeError as error:
                raise InputError(
                    where, f"invalid JSON ({error.msg} at column {error.colno})", "a JSON object"
                ) from None
            except (ValueError, RecursionError) as error:
                raise InputError(where, f"invalid JSON ({error})", "a JSON object") from None
            if not text.strip():
                continue
            if type(value) is not dict:
                raise InputError(where, shown(value), "a JSON object")
            yield Entry(where, value)


def shown(value: object) -> str:
    """A value as a message names it: short, and plain ASCII."""
    if isinstance(value, str):
        return json.dumps(value if len(value) <= 60 else value[:57] + "...")
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int | float):
        text = repr(value)
        return text if len(text) <= 60 else text[:57] + "..."
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return type(value).__name__
