"""`apportion watch`: the pages of a run in the browser while it is trained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from apportion.cli.shared import say
from apportion.errors import InputError

_FOLDER = "the folder of a run, or its name where it will be"


def watch(
    run: Annotated[
        Path,
        typer.Argument(help="A run folder, as `apportion train` writes it; it may be yet to come.", show_default=False),
    ],
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Default: 8765 or the next that is free; 0: any.", show_default=False),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Serve the page of a run on this machine alone, and update it as steps are recorded. Ctrl-C ends it.

    Nothing is written. Whoever is logged in on this machine can read the page while it is served.
    """
    try:
        _watch(run, port, open_page)
    except KeyboardInterrupt:
        # Ctrl-C is how this command ends.
        return


def _watch(run: Path, port: int | None, open_page: bool) -> None:
    from apportion.report.escape import visible
    from apportion.report.page import render_live
    from apportion.report.serve import Guarded, OwnFiles, listen
    from apportion.report.site import Site

    _check(run)
    folder = OwnFiles(run)
    folder.metrics()  # raises where the folder cannot be served
    site = Site(folder, live=True)
    told: set[str] = set()

    def once(line: str) -> None:
        if line not in told:
            told.add(line)
            say("error", line)

    with listen(Guarded(site, folder), render_live(site), port, once) as server:
        if links := folder.links_out():
            more = f" and {len(links) - 1} more" if len(links) > 1 else ""
            say(
                "note",
                f"{visible(links[0], 200)}{more} in {visible(str(run))} leads out of the folder and is not shown",
            )
        if not folder.steps():
            say("note", f"waiting for the first recorded step in {visible(str(run))}")
        typer.echo(f"Page: {server.url}   Ctrl-C ends it")
        if open_page:
            typer.launch(server.url)
        server.run()


def _check(run: Path) -> None:
    """That the run is there, or can come: a run that starts now makes its folder, but not the one around it."""
    try:
        there, folder, around = run.exists() or run.is_symlink(), run.is_dir(), run.resolve().parent
        runs = sorted(path.parent.name for path in run.glob("*/config.toml")) if folder else []
        readable = not folder or os.access(run, os.R_OK | os.X_OK)
        possible = folder or (not there and around.is_dir())
    except OSError as error:
        raise InputError("RUN", f"{run}: {error.strerror}", _FOLDER) from None
    if not possible:
        raise InputError("RUN", f"{run}: no folder" if there else f"{run}, and there is no folder {around}", _FOLDER)
    if not readable:
        raise InputError("RUN", f"{run}: no right to read it", _FOLDER)
    if runs and not any((run / name).exists() for name in ("config.toml", "metrics.jsonl", "credit")):
        raise InputError("RUN", f"{run}, a folder of runs", _FOLDER, f"name one: {', '.join(runs[:8])}")
