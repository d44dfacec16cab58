"""`apportion train` and `apportion demo`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apportion.cli.shared import read_settings, say
from apportion.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from apportion.train.settings import RunConfig

_Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="section.key=value, over all else; may be repeated.", show_default=False),
]


def train(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; the defaults where left out.")] = None,
    model: Annotated[str | None, typer.Option(help="embedded, smollm2, or a folder: model.name.")] = None,
    data: Annotated[str | None, typer.Option(help="A file of problems: data.path.")] = None,
    method: Annotated[str | None, typer.Option(help="A credit method: method.name.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps: run.steps.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="The run folder: run.folder.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run folder, from its last checkpoint.")] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check all but the weights, print the configuration, stop."),
    ] = False,
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
    from apportion.train.settings import CONFIG_FILE, load_config, resume_config, save_config, to_toml

    chosen = resume_config(resume) if resume else load_config(config, overrides)
    folder = Path(chosen.run.folder)
    if dry_run:
        from apportion.train.prepare import check

        typer.echo(to_toml(check(chosen).config))
        return
    if resume is not None and (done := folder / "result.json").exists():
        say("complete", f"{folder} has nothing left to do")
        _print_result(folder, json.loads(done.read_text()))
        return
    if resume is None:
        _check_fresh(folder)
    try:
        result = _train(chosen, resume is not None)
    except KeyboardInterrupt:
        # While everything loads there is no run folder yet, and its configuration is all that a fresh start needs.
        if not (folder / CONFIG_FILE).exists():
            save_config(chosen)
        say("stopped", f"go on with: apportion train --resume {folder}")
        raise typer.Exit(130) from None
    _print_result(folder, result)


def demo(
    folder: Annotated[Path, typer.Option("--output", "-o", help="Where the runs and pages go.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each method; one takes minutes.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Generated tokens of each run, probes included.")] = 700_000,
    settings: _Set = None,
) -> None:
    """The main job: GRPO and ProbePO train the embedded policy at equal generated tokens."""
    from apportion.train.demo import ChildFailed, run_demo

    try:
        run_demo(folder, seeds, tokens, read_settings(settings or []))
    except ChildFailed as error:
        say("error", str(error))
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        say("stopped", "the same command goes on with the demo")
        raise typer.Exit(130) from None


def _check_fresh(folder: Path) -> None:
    if (folder / "metrics.jsonl").exists():
        raise InputError(
            "run.folder", str(folder), "a folder that holds no run yet",
            f"--resume {folder} goes on with it; -o names another",
        )  # fmt: skip


def _train(config: RunConfig, resume: bool) -> dict[str, Any]:
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("Loading and checking everything the run needs"):
        from apportion.train.prepare import prepare

        run = prepare(config)
        from apportion.train import run as running
    if resume:
        checkpoint = running.last_checkpoint(Path(config.run.folder))
        say("resuming", f"from {checkpoint.name}" if checkpoint else "no checkpoint yet, so from the start")
    with _progress(console, config) as show:
        return running.train(run, resume=resume, progress=show)


@contextmanager
def _progress(console: Console, config: RunConfig) -> Iterator[Callable[[dict[str, float]], None]]:
    """Takes each step's metrics and shows them in one line, against the token budget where there is one."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=config.run.tokens or config.run.steps)

        def show(metrics: dict[str, float]) -> None:
            # TRL has no mean reward for a step in which every response abstained.
            reward = "none" if (mean := metrics.get("reward")) is None else f"{mean:.3f}"
            words = f"step {metrics['step']:.0f}  reward {reward}  tokens {metrics['tokens']:,.0f}"
            bar.update(task, completed=metrics["tokens" if config.run.tokens else "step"], description=words)

        yield show


def _print_result(folder: Path, result: Mapping[str, Any]) -> None:
    from apportion.report.beside import lines

    for name, value in result.items():
        if name == "beside":
            continue
        typer.echo(f"{name}: {value:.3f}" if name in ("start", "end") else f"{name}: {value:,.0f}")
    if "beside" in result:
        typer.echo("\n".join(["", *lines(result["beside"]), ""]))
    typer.echo(f"records: {folder}   page: apportion inspect {folder}")
