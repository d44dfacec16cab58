"""`apportion train` and `apportion demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from apportion.cli.shared import read_settings
from apportion.errors import InputError

_Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="section.key=value, over the file; may be repeated.", show_default=False),
]


def train(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; the defaults where left out.")] = None,
    model: Annotated[str | None, typer.Option(help="embedded, smollm2, or a folder: model.name.")] = None,
    data: Annotated[str | None, typer.Option(help="A file of problems: data.path.")] = None,
    method: Annotated[str | None, typer.Option(help="A credit method: method.name.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps: run.steps.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="The run folder: run.folder.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run folder, from its last checkpoint.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")] = False,
    settings: _Set = None,
) -> None:
    """Train a policy with a credit method. Ctrl-C leaves a run that --resume continues."""
    short = {
        "model.name": model, "data.path": data, "method.name": method, "run.steps": steps, "run.folder": output
    }  # fmt: skip
    overrides = {key: value for key, value in short.items() if value is not None} | read_settings(settings or [])
    if resume is not None and (config is not None or overrides):
        raise InputError(
            "--resume", "other settings beside it", "the run folder alone: a run goes on as it was started"
        )
    from apportion.train.settings import load_config, resume_config, to_toml

    chosen = resume_config(resume) if resume else load_config(config, overrides)
    if not resume and not dry_run:
        _check_fresh(Path(chosen.run.folder))
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("Loading and checking everything the run needs"):
        from apportion.train.prepare import prepare, resolve

        if dry_run:
            typer.echo(to_toml(resolve(chosen)))
            return
        run = prepare(chosen)
        from apportion.train.run import train as train_run
    folder = Path(chosen.run.folder)
    try:
        with _progress(console, chosen.run.steps) as show:
            result = train_run(run, resume=resume is not None, progress=show)
    except KeyboardInterrupt:
        console.print(f"Stopped. Go on with: apportion train --resume {folder}")
        raise typer.Exit(130) from None
    for name, value in result.items():
        typer.echo(f"{name}: {value:,.4g}" if value < 1 else f"{name}: {value:,.0f}")
    typer.echo(f"records: {folder}   page: apportion inspect {folder}")


def demo(
    folder: Annotated[Path, typer.Option("--output", "-o", help="Where the runs and pages go.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each method; one takes minutes.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Generated tokens of each run, probes included.")] = 1_200_000,
) -> None:
    """The main job: GRPO and ProbePO train the embedded policy at equal generated tokens."""
    from apportion.train.demo import run_demo

    run_demo(folder, seeds, tokens)


def _check_fresh(folder: Path) -> None:
    if (folder / "metrics.jsonl").exists():
        raise InputError(
            "run.folder", str(folder), "a folder that holds no run yet",
            f"--resume {folder} goes on with it; -o names another",
        )  # fmt: skip


def _progress(console: Any, steps: int) -> Any:
    """A context whose value takes each step's metrics and shows them in one line."""
    from contextlib import contextmanager

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    @contextmanager
    def shown() -> Any:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("training", total=steps)

            def show(metrics: dict[str, float]) -> None:
                words = f"reward {metrics['reward']:.3f}  tokens {metrics['tokens']:,.0f}"
                bar.update(task, completed=metrics["step"], description=words)

            yield show

    return shown()
