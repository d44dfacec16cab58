"""`apportion inspect`: where a run's credit went, in the terminal and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from apportion.report.site import Site


def inspect(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run folder, or records of TRL, verl, prime-rl or `apportion assign`.",
            show_default=False,
        ),
    ],
    step: Annotated[
        int | None, typer.Option(help="Only this step. Default: the last ones.", show_default=False)
    ] = None,
    response: Annotated[
        int | None, typer.Option(help="Row of the step. Default: the most instructive.", show_default=False)
    ] = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option(
            "--beside", help="Another run, whose learning curves are drawn too; several times.", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The page to write. Default: RUN/page.html, or FILE.html.",
            show_default=False,
        ),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    max_mb: Annotated[float, typer.Option(min=0.0, help="Budget of the responses in the page, in MB.")] = 100.0,
) -> None:
    """Print one response with its credit and write the page of the run.

    Runs with the same configuration but for their seed are one curve with an interval.
    """
    from rich.console import Console

    from apportion.report.escape import visible
    from apportion.report.page import find_steps
    from apportion.report.site import Site, start_row
    from apportion.report.source import open_source
    from apportion.report.terminal import print_response

    site = Site(open_source(run), [open_source(other) for other in beside or []])
    view = site.step(find_steps(site.source, step)[-1])
    row = start_row(view.summary, response)
    if row is not None:
        print_response(Console(), view.summary, view.response(row))
    out = output or (run / "page.html" if run.is_dir() else run.with_suffix(".html"))
    page = _written(site, out, step, row, round(max_mb * 1e6))
    typer.echo(f"\nPage: {visible(str(page))}")
    if open_page:
        typer.launch(page.resolve().as_uri())


def _written(site: Site, out: Path, step: int | None, row: int | None, max_bytes: int) -> Path:
    """Writes the page. Progress goes to stderr: standard output carries results only."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from apportion.report.page import write_page

    console = Console(stderr=True)
    columns = (TextColumn("Writing the page"), BarColumn(), TextColumn("{task.fields[words]}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", words="")
        return write_page(
            site, out, step=step, response=row, max_bytes=max_bytes,
            progress=lambda words, done, of: bar.update(task, completed=done, total=of, words=words),
        )  # fmt: skip
