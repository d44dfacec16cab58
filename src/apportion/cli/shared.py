"""What the commands share: one-line errors, whole files, settings, progress."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO, TypeVar

import typer
from typer.core import TyperGroup

from apportion.errors import InputError

T = TypeVar("T")

PATIENCE = 2.0
"""Seconds after which a command shows its progress."""


class Commands(TyperGroup):
    """The command group: bad input ends in one line on stderr and exit code 2, whichever command met it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except InputError as error:
            say("error", str(error))
            raise typer.Exit(2) from None
        except ModuleNotFoundError as error:
            # A part of its own, since verl cannot be run beside it.
            if error.name != "trl":
                raise
            fix = "pip install 'apportion[trl]'"
            say("error", str(InputError("trl", "not installed", "TRL, which trains on one machine", fix)))
            raise typer.Exit(2) from None


def say(kind: str, message: str) -> None:
    """One line on stderr; standard output carries results only."""
    typer.echo(f"{kind}: " + message.replace("\n", " "), err=True)


def read_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """`key=value` pairs as a mapping; the last of a repeated key holds.

    Values are read as JSON where they are JSON (0, 0.5, true, [1, 2]), as plain strings where they are not.

    Raises:
        InputError: a pair without a key, or a value in quotation marks that is no JSON.
    """
    out: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise InputError("--set", repr(pair), "key=value, such as alpha=0.5")
        try:
            out[key.strip()] = json.loads(value)
        except ValueError as error:
            if value.strip().startswith('"'):
                raise InputError(
                    "--set", repr(pair), f"JSON, as its value starts with a quotation mark: {error}",
                    "leave the quotation marks out, or double each backslash inside them",
                ) from None  # fmt: skip
            out[key.strip()] = value.strip()
    return out


def read_lines(path: str) -> Iterator[bytes]:
    """The lines of a file, or of standard input for `-`."""
    if path == "-":
        yield from sys.stdin.buffer
        return
    try:
        with open(path, "rb") as file:
            yield from file
    except OSError as error:
        raise InputError(path, error.strerror, "a file that can be read, or - for standard input") from None


@contextmanager
def whole_file(path: str) -> Iterator[TextIO]:
    """A file to write that appears whole when the block ends, or not at all; standard output for `-`."""
    if path == "-":
        yield sys.stdout
        return
    # A pipe or a device cannot be replaced, only written to; what a link points to is replaced, not the link.
    special = os.path.exists(path) and not os.path.isfile(path)
    target = Path(path) if special else Path(path).resolve()
    part = target if special else target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        file = part.open("w", encoding="utf-8", newline="\n")
    except OSError as error:
        raise InputError(path, error.strerror, "a place where a file can be written") from None
    try:
        with file:
            yield file
    except BaseException:
        if not special:
            part.unlink()
        raise
    if not special:
        os.replace(part, target)


def tracked(items: Iterable[T], label: str) -> Iterator[T]:
    """The same items; once they have taken longer than `PATIENCE`, a count of them runs on stderr."""
    began = time.monotonic()
    with ExitStack() as stack:
        bar = None
        for done, item in enumerate(items):
            if bar is None and time.monotonic() - began > PATIENCE:
                from rich.console import Console
                from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

                words = TextColumn("{task.description} {task.completed}")
                console = Console(stderr=True)
                bar = stack.enter_context(
                    Progress(SpinnerColumn(), words, TimeElapsedColumn(), console=console, transient=True)
                )
                bar.add_task(label)
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done)
            yield item
