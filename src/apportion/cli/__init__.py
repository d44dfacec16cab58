"""The command line. Commands import what they need when they run, so that `--help` answers at once."""

from __future__ import annotations

from typing import Annotated

import typer

from apportion.cli import info, interchange, training
from apportion.cli.cluster import cluster, cluster_data
from apportion.cli.compare_credit import compare_credit
from apportion.cli.cost import cost
from apportion.cli.diagnose import diagnose
from apportion.cli.evaluate import compare_evaluations, evaluate
from apportion.cli.inspect import inspect
from apportion.cli.shared import Commands
from apportion.cli.watch import watch

app = typer.Typer(
    name="apportion",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for command in (
    training.demo, training.train, cluster, cluster_data, cost, inspect, watch, compare_credit, diagnose, evaluate,
    compare_evaluations,
    interchange.plan, interchange.assign, interchange.grade, interchange.export,
    info.methods, info.doctor,
):  # fmt: skip
    app.command()(command)


def _version(asked: bool) -> None:
    if asked:
        from apportion import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Fine-grained credit assignment for critic-free LLM reinforcement learning."""
