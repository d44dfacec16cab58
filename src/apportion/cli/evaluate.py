"""`apportion evaluate` and `apportion compare-evaluations`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from apportion.cli.shared import say
from apportion.errors import InputError

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
            help="A folder with NAME.jsonl (.gz, .parquet), a file, or hf:ORG/NAME/CONFIG@SPLIT, which "
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
    problem_column: Annotated[str, typer.Option(help="Column of the problem's text.")] = "problem",
    answer_column: Annotated[str, typer.Option(help="Column of the gold answer.")] = "answer",
    id_column: Annotated[str, typer.Option(help="Column of the id; rows are numbered where there is none.")] = "id",
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
        columns = evaluation.Columns(problem_column, answer_column, id_column)
        sets = evaluation.load_sets(names, data or [], columns, limit)
        policy = evaluation.open_policy(model, dtype)
    try:
        with _progress() as show:
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
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Takes what is being done, how much of it is done and how much there is, and shows it with the time left."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("left"), TimeRemainingColumn())  # fmt: skip
    # Samples differ in length: a speed over the last seconds would let the time left jump about.
    with Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=600) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda doing, done, total: bar.update(task, description=doing, completed=done, total=total)
