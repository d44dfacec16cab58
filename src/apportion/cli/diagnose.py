"""`apportion diagnose`: what a run's records, and its model, say about its credit."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from apportion.diagnose.lines import Line
    from apportion.diagnose.model import Bench
    from apportion.diagnose.report import Report
    from apportion.train.settings import RunConfig


def diagnose(
    run: Annotated[Path, typer.Argument(help="A run folder, as `apportion train` writes it.", show_default=False)],
    steps: Annotated[
        str | None, typer.Option(help="1,5-9 or 'last 5'. Default: all recorded steps.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="embedded, smollm2, or a folder. Default: RUN/model, with --forks.", show_default=False),
    ] = None,
    forks: Annotated[
        int | None,
        typer.Option(help="Forks a state; 0: do not sample. Default: 4 with --model, else 0.", show_default=False),
    ] = None,
    samples: Annotated[int, typer.Option(help="Continuations of a fork, and of a perturbed response.")] = 4,
    fork_tokens: Annotated[int, typer.Option(help="The most tokens of a fork.")] = 8,
    budget: Annotated[int, typer.Option(min=1, help="The most tokens to generate.")] = 100_000,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print a run's diagnostics with 95 % intervals over prompts, or why one cannot be had.

    Four of them sample from the model and run only with --model or --forks.
    """
    from apportion.diagnose.forks import ForkSettings
    from apportion.diagnose.report import diagnose as diagnosed

    wanted = forks if forks is not None else 4 if model is not None else 0
    settings = ForkSettings(wanted or 2, samples, fork_tokens)
    with _progress(budget) as (doing, tick):
        report = diagnosed(run, steps, _opener(run, model, wanted, seed, tick), settings, budget, doing)
    if as_json:
        typer.echo(json.dumps({"run": str(run), **report.as_json()}, indent=1, allow_nan=False))
    else:
        _print(report)


def _opener(
    run: Path, model: str | None, forks: int, seed: int, tick: Callable[[int], None]
) -> Callable[[RunConfig], Bench] | str:
    """What opens the model; or why none is sampled from."""
    if not forks:
        return "--forks 0" if model is not None else "give --model, or --forks for the run's own"
    if model is None and not (run / "model" / "config.json").is_file():
        return "the run folder holds no whole model: give --model"
    from apportion.diagnose.model import open_bench

    name = model if model is not None else str(run / "model")
    return lambda config: open_bench(config, name, seed, tick)


@contextmanager
def _progress(budget: int) -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    """Takes what is being done, and the tokens generated so far, and shows both on stderr."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}{task.fields[spent]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", spent="")
        yield (
            lambda doing: bar.update(task, description=doing),
            lambda tokens: bar.update(task, spent=f", {tokens:,} of at most {budget:,} tokens"),
        )


def _print(report: Report) -> None:
    """Two lines a diagnostic, so that the sentence has room at 80 columns: the numbers, and what they say."""
    names = max(len(line.name) for line in report.lines)
    typer.echo(f"{'diagnostic':<{names}}  {'value':>8}  {'95 % interval':<18}  n")
    for line in report.lines:
        e = line.estimate
        interval = "–" if e.interval is None else " … ".join(map(_number, e.interval))
        counted = "–" if e.value is None else f"{e.n:,} {line.about.of}"
        typer.echo(f"{line.name:<{names}}  {_number(e.value):>8}  {interval:<18}  {counted}")
        # A method's name is not broken at its hyphen.
        wrapped = textwrap.wrap(_sentence(line), 76, break_on_hyphens=False)
        typer.echo(textwrap.indent("\n".join(wrapped), "    "))
    first, last, count = report.steps[0], report.steps[-1], len(report.steps)
    typer.echo(f"steps: {count}, from {first} to {last}" if count > 1 else f"step: {first}")
    if spent := report.spent:
        typer.echo(
            f"spent: {spent['generated_tokens']:,} generated tokens of at most {spent['budget']:,}, in "
            f"{spent['continuations']:,} continuations; {spent['tokens_read_to_redraw']:,} tokens read to redraw some"
        )
        typer.echo(f"model: {spent['model']}")


def _sentence(line: Line) -> str:
    e, about = line.estimate, line.about
    beside = [f"{name} {_number(value)}" for name, value in line.beside.items() if value is not None]
    return f"{'; '.join([about.says, *beside, *filter(None, [e.missing])])} {about.mark}"


def _number(value: float | None) -> str:
    """Three significant digits, whole numbers from 1,000 on; – where there is none."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"
