"""`apportion compare-credit`: the same recorded responses under several credit methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apportion.cli.shared import read_settings, say
from apportion.errors import InputError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from apportion.compare.run import Progress
    from apportion.report.compared import Compared

_FIRST = 8  # disagreements that are printed


def compare_credit(
    run: Annotated[Path, typer.Argument(help="A run folder, as `apportion train` writes it.", show_default=False)],
    methods: Annotated[str, typer.Option(help="Two or more, such as probepo,vineppo; pipelines with +.")],
    step: Annotated[
        int | None, typer.Option(help="A recorded step. Default: the last one.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="What measures: embedded, smollm2, or a folder. Default: RUN/model, or the newest checkpoint.",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="METHOD.KEY=VALUE; may be given several times.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The page to write. Default: RUN/page.html.", show_default=False),
    ] = None,
) -> None:
    """Credit the same recorded responses by several methods, and show where they disagree.

    What a method measures is taken from the record where it is there, else measured.

    Results are kept under RUN/compare, so a comparison that was stopped goes on.
    """
    from rich.console import Console

    from apportion.compare.run import compare
    from apportion.report.compared import Compared
    from apportion.report.escape import visible
    from apportion.report.page import write_page

    names = [name.strip() for name in methods.split(",") if name.strip()]
    chosen = _by_method(names, read_settings(settings or []))
    try:
        with _progress() as progress:
            number = compare(run, names, step, model, chosen, progress)
    except KeyboardInterrupt:
        say("stopped", "what is done is kept under RUN/compare; the same command goes on from there")
        raise typer.Exit(130) from None
    found = Compared.open(run, number)
    assert found is not None
    console = Console(soft_wrap=not Console().is_terminal)
    _print(console, found)
    for name, told in found.told.items():
        if told.get("reproduced") is False:
            say(
                "warning", f"{name}: the record gives another credit today than the one that was trained with, so the "
                "other methods may see another base or evidence than the run did",
            )  # fmt: skip
    with Console(stderr=True).status("Writing the page"):
        page = write_page(run, output or run / "page.html", step=step, view="methods")
    typer.echo(f"Page: {visible(str(page))}")


def _by_method(names: Sequence[str], pairs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """METHOD.KEY=VALUE pairs as a table for each method. A pipeline's key is its stage's: a+b.a.KEY."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in pairs.items():
        owner = max((name for name in names if key.startswith(f"{name}.")), key=len, default=None)
        if owner is None:
            raise InputError(
                "--set", repr(key), f"METHOD.KEY=VALUE, of {', '.join(names)}{nearest(key.partition('.')[0], names)}"
            )  # fmt: skip
        found.setdefault(owner, {})[key.removeprefix(f"{owner}.")] = value
    return found


@contextmanager
def _progress() -> Iterator[Progress]:
    """Which method is at work and what it has done, on stderr: a line that changes, or where there is no terminal
    one line for each thing that is begun.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}{task.fields[count]}"), TimeElapsedColumn())
    begun, total = ("", ""), 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading the record", count="")

        def progress(method: str, doing: str, done: int) -> None:
            nonlocal begun, total
            if doing and (method, doing) != begun:
                begun, total = (method, doing), 0
                bar.update(task, description=f"{method}: {doing}", count="")
                if not console.is_terminal:
                    typer.echo(f"{method}: {doing}", err=True)
            total += done
            if total:
                bar.update(task, count=f", {total:,} answered")

        yield progress


def _print(console: Console, found: Compared) -> None:
    """What each method took, how far each two agree, and where they agree least."""
    from rich.table import Table
    from rich.text import Text

    from apportion.report.reading import fixed

    chunk = found.summary()
    took = Table("method", "credit", "generated", "forward", "backward", "seconds", title=f"Step {found.step}")
    for each in chunk["methods"]:
        cost = each["cost"] or {}
        spent = [f"{cost[name]:,}" if cost.get(name) else "–" for name in ("generated", "forward", "backward")]
        took.add_row(each["name"], provenance(each), *spent, f"{cost['seconds']:.1f}" if cost else "–")
    console.print(took)
    names = [each["name"] for each in chunk["methods"]]
    matrix = Table("rank correlation", *names)
    for row, name in enumerate(names):
        cells = ["1" if row == column else "" for column in range(len(names))]
        for pair in chunk["pairs"]:
            if pair["second"] == name:
                low_high = pair["rho"]["interval"]
                interval = f"\n{fixed(low_high[0])} … {fixed(low_high[1])}" if low_high else ""
                cells[names.index(pair["first"])] = fixed(pair["rho"]["value"]) + interval
        matrix.add_row(name, *cells)
    console.print(matrix)
    console.print(
        "Spearman's, of the tokens' advantages inside each response, mean over the responses in which both vary, with "
        "95 % over prompts.",
        style="dim",
    )
    if chunk["disagreements"]:
        furthest = Table(
            "row", "token", "text", "apart", "ranked highest by", "lowest by", title="Where ranks differ most"
        )
        for each in chunk["disagreements"][:_FIRST]:
            ends = [f"{name} {each['advantage'][name]:+.3g}".replace("-", "−") for name in (each["high"], each["low"])]
            furthest.add_row(str(each["row"]), str(each["token"]), Text(each["snippet"]), fixed(each["gap"]), *ends)
        console.print(furthest)


def provenance(each: Mapping[str, Any]) -> str:
    """Where a method's credit comes from, in words."""
    if each["provenance"] == "recorded":
        return "as trained with"
    states = each["states"] or {}
    if each["provenance"] == "assigned":
        return "from the record" + (f", {states['reused']:,} reused" if states.get("reused") else "")
    parts = ["judged by the run's step verifier" if each["model"] is None else f"measured with {each['model']}"]
    if states.get("reused"):
        parts.append(f"{states['reused']:,} of {states['reused'] + states['measured']:,} from the record")
    gap = each["gap"]
    if each["model"] is None:
        return parts[0]
    parts.append("gap unknown: no old_logprob" if gap is None else f"gap {gap['mean']:.3g} nats")
    return "; ".join(parts)
