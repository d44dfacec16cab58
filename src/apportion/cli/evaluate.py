"""`apportion evaluate` and `apportion compare-evaluations`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from apportion.cli.shared import say
from apportion.errors import InputError

LOG_EVERY = 30.0
"""Seconds between two lines of progress where standard error is no terminal."""

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def evaluate(
    model: Annotated[str, typer.Option(help="embedded, smollm2, or a folder.", show_default=False)],
    bench: Annotated[
        str,
        typer.Option(
            help="Names with commas between them: math500, olympiadbench, collegemath, amc, minerva, aime24, gsm8k, "
            "chain, or files of your own.",
            show_default=False,
        ),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder with NAME.jsonl (.json, .parquet, .gz), a file, or hf:ORG/NAME/CONFIG@SPLIT, which "
            "uses the network; NAME=SOURCE for one set. May be repeated.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of records.")] = Path("runs/evaluation"),
    n: Annotated[int | None, typer.Option(help="Samples a problem. Default: 16, and 32 on aime24.")] = None,
    k: Annotated[str | None, typer.Option(help="Of pass@k and maj@k: 1,8. Default: 8, or n if less.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first problems of each set.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Of a response. Default: 1024.")] = None,
    temperature: Annotated[float, typer.Option(help="Of the sampling.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="1 keeps all.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all, 1 is greedy.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the sampling and of the bootstrap.")] = 0,
    grader: Annotated[str | None, typer.Option(help="math, exact or choice. Default: math.")] = None,
    second_grader: Annotated[str | None, typer.Option(help="Grades too; where the two differ is listed.")] = None,
    unreadable: Annotated[
        str, typer.Option(help="Problems whose gold a grader cannot read: error, drop, or judge by spelling.")
    ] = "error",
    prompt: Annotated[str | None, typer.Option(help="qwen, r1, chat, plain. Default: by the model's family.")] = None,
    batch: Annotated[int, typer.Option(help="Samples decoded together, and written as one file.")] = 64,
    dtype: Annotated[str, typer.Option(help="Of the weights: float32 or bfloat16.")] = "float32",
    problem_column: Annotated[
        list[str] | None, typer.Option(help="Of the problem's text; NAME=COLUMN for one set. Default: problem.")
    ] = None,
    answer_column: Annotated[
        list[str] | None, typer.Option(help="Of the gold answer; NAME=COLUMN for one set. Default: answer.")
    ] = None,
    id_column: Annotated[
        list[str] | None,
        typer.Option(help="Of the id; NAME=COLUMN for one set. Default: id; rows are numbered where there is none."),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Sample a model on problem sets and print avg@n, pass@k and maj@k with 95 % intervals over problems.

    What is in the output folder already is not sampled again: after Ctrl-C the same command goes on.
    """
    from rich.console import Console

    with Console(stderr=True).status("Loading and checking everything the evaluation needs"):
        from transformers.utils import logging

        from apportion import evaluate as evaluation
        from apportion.evaluate.table import table

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        settings = evaluation.Settings(
            n, _numbers(k), max_tokens, temperature, top_p, top_k, seed, grader, second_grader, unreadable,
            prompt, batch,
        )  # fmt: skip
        names = [name.strip() for name in bench.split(",") if name.strip()]
        columns = evaluation.columns_by_set(names, problem_column or (), answer_column or (), id_column or ())
        sets = evaluation.load_sets(names, data or [], columns, limit)
        policy = evaluation.open_policy(model, dtype)
    try:
        with _progress(batch) as show:
            found = evaluation.evaluate(policy, sets, settings, output, show)
    except KeyboardInterrupt:
        say("stopped", f"finished batches are in {output}; the same command goes on")
        raise typer.Exit(130) from None
    typer.echo(json.dumps(found, indent=1, allow_nan=False) if as_json else f"{model}\n\n{table(found)}")
    say("records", str(output))


def compare_evaluations(
    outputs: Annotated[
        list[Path],
        typer.Argument(metavar="OUT_A OUT_B ...", help="Folders of finished evaluations.", show_default=False),
    ],
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap.")] = 0,
    as_json: _Json = False,
) -> None:
    """Print evaluations side by side, and the first against each of the others: paired bootstrap and sign test."""
    from apportion.evaluate.compare import compare
    from apportion.evaluate.records import Store
    from apportion.evaluate.table import comparison, leaderboard

    if len(outputs) < 2:
        raise InputError("OUT", "one folder", "two or more, to compare the first with the others")
    if twice := next((folder for folder in outputs if outputs.count(folder) > 1), None):
        raise InputError("OUT", f"{twice} twice", "each folder once")
    evaluations = {str(folder): Store(folder).evaluation() for folder in outputs}
    pairs = [compare(outputs[0], other, seed) for other in outputs[1:]]
    if as_json:
        typer.echo(json.dumps({"evaluations": evaluations, "pairs": pairs}, indent=1, allow_nan=False))
    else:
        typer.echo(f"{leaderboard(evaluations)}\n{comparison(pairs)}", nl=False)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise InputError("--k", repr(text), "whole numbers with commas between them, such as 1,8") from None


@contextmanager
def _progress(batch: int) -> Iterator[Callable[[str, int, int], None]]:
    """Takes what is being done, how much of it is done and how much there is, and shows it with the time left.

    In a log, where standard error is no terminal, that is a line every `LOG_EVERY` seconds.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    left = _Left(batch)
    if not console.is_terminal:
        yield _log(left)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.fields[left]}"))  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting", total=None, left="")
        yield lambda doing, done, total: bar.update(
            task, description=doing, completed=done, total=total, left=left(done, total)
        )


def _log(left: _Left) -> Callable[[str, int, int], None]:
    said = left.clock()

    def show(doing: str, done: int, total: int) -> None:
        nonlocal said
        until = left(done, total)
        if left.clock() - said >= LOG_EVERY:
            said = left.clock()
            say("progress", ", ".join([doing, f"{done} of {total}", *([until] if until else [])]))

    return show


class _Left:
    """The time left, once a batch is done: all of a batch's samples end late in it, so the first few tell nothing."""

    def __init__(self, batch: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.batch, self.clock = batch, clock
        self.began, self.total = clock(), 0

    def __call__(self, done: int, total: int) -> str:
        now = self.clock()
        # Another total is other work, with a speed of its own.
        if total != self.total:
            self.began, self.total = now, total
        if done < self.batch:
            return ""
        minutes, seconds = divmod(round((now - self.began) / done * (total - done)), 60)
        return f"about {minutes // 60}:{minutes % 60:02d}:{seconds:02d} left"
