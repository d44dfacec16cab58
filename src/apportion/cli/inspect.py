"""`apportion inspect`: where a run's credit went, in the terminal and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def inspect(
    run: Annotated[Path, typer.Argument(help="A run folder, as `apportion train` writes it.", show_default=False)],
    step: Annotated[
        int | None, typer.Option(help="Only this step. Default: the last ones.", show_default=False)
    ] = None,
    response: Annotated[
        int | None, typer.Option(help="Row of the step. Default: the most instructive.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The page to write. Default: RUN/page.html.", show_default=False),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    max_mb: Annotated[float, typer.Option(min=0.0, help="Budget of the responses in the page, in MB.")] = 20.0,
) -> None:
    """Print one response with its credit and write the page of the run."""
    from rich.console import Console

    from apportion.records import RunFolder
    from apportion.report.escape import visible
    from apportion.report.page import find_steps, start_row, write_page
    from apportion.report.terminal import print_response
    from apportion.report.view import step_view

    folder = RunFolder(run)
    # The spinner goes to stderr: standard output carries results only.
    with Console(stderr=True).status("Writing the page"):
        view = step_view(folder, find_steps(folder, step)[-1])
        row = start_row(view, response)
        page = write_page(run, output or run / "page.html", step=step, response=row, max_bytes=round(max_mb * 1e6))
    for chosen in view["responses"]:
        if chosen["row"] == row:
            print_response(Console(), view, chosen)
    typer.echo(f"\nPage: {visible(str(page))}")
    if open_page:
        typer.launch(page.resolve().as_uri())
