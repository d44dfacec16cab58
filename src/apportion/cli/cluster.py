"""`apportion cluster` and `apportion cluster-data`: a recipe under verl, checked and predicted before it starts."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apportion.cli.shared import read_settings, say
from apportion.errors import InputError

if TYPE_CHECKING:
    from apportion.integrations.verl.predicted import ClusterPrediction
    from apportion.integrations.verl.recipe import Recipe

_SETS = "math500,olympiadbench,collegemath,amc,minerva,aime24"


def cluster(
    recipe: Annotated[Path, typer.Argument(help="A YAML file over verl's configuration.", show_default=False)],
    method: Annotated[
        str | None, typer.Option(help="probepo, grpo, vineppo, or another registered method. Default: the recipe's.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Of all nodes. Default: the recipe's.")] = None,
    hardware: Annotated[str, typer.Option(help="What the GPUs are, for the prediction: h100, h200, a100-80, ...")] = (
        "h100"
    ),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe against the installed verl, predict, print, stop.")
    ] = False,
    show_config: Annotated[bool, typer.Option("--show-config", help="Print verl's whole configuration too.")] = False,
    response_length: Annotated[float | None, typer.Option(help="Mean tokens of a response.")] = None,
    longest: Annotated[int | None, typer.Option(help="Tokens of a batch's longest.")] = None,
    prompt_length: Annotated[int | None, typer.Option(help="Tokens of a prompt.")] = None,
    step_tokens: Annotated[int | None, typer.Option(help="Tokens of a reasoning step.")] = None,
    pass_rate: Annotated[float | None, typer.Option(help="Share of right responses.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value of verl's or apportion.key=value, over all else; may be repeated."),
    ] = None,
) -> None:
    """Run a recipe under verl, or with --dry-run say what it would run and what that takes."""
    from apportion.cost import Assumed, find_hardware

    assumed = Assumed(response_length, longest, prompt_length, step_tokens, pass_rate)
    machine = find_hardware(hardware)
    if machine.devices > 1:
        raise InputError("--hardware", hardware, "one device's name: --gpus says how many", f"--gpus {machine.devices}")
    with _quiet():
        from apportion.integrations.verl.recipe import check, check_files, compose

        found = compose(recipe, method, read_settings(settings or []), gpus)
        check(found)
    if not dry_run:
        check_files(found)
        say("running", shlex.join(found.command))
        sys.stdout.flush()
        os.execv(found.command[0], found.command)
    from apportion.integrations.verl.predicted import predict_cluster
    from apportion.integrations.verl.recipe import plain

    prediction = predict_cluster(
        plain(found.config), found.credit, find_hardware(f"{hardware}x{found.devices}"), assumed
    )
    if show_config:
        from omegaconf import OmegaConf

        typer.echo(OmegaConf.to_yaml(found.config))
    typer.echo("\n".join([*_lines(prediction), "", *_commands(found)]))
    try:
        check_files(found)
    except InputError as error:
        say("note", str(error))


def cluster_data(
    data: Annotated[Path, typer.Option(help="A file of problems: .jsonl, .json, .parquet.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of train.parquet and test.parquet.")],
    prompt: Annotated[
        str, typer.Option(help="qwen: the instruction as system message; chat: after the problem; bare: none.")
    ] = "chat",
    held_out: Annotated[
        int | None, typer.Option(help="Last rows that go to test.parquet. Default: a tenth, at most 128.")
    ] = None,
    drop_unreadable: Annotated[
        bool, typer.Option("--drop-unreadable", help="Leave out rows whose answer the verifier cannot read.")
    ] = False,
    problem_column: Annotated[str, typer.Option(help="Of the problem's text.")] = "problem",
    answer_column: Annotated[str, typer.Option(help="Of the gold answer.")] = "answer",
) -> None:
    """Write problems as the Parquet files that verl trains on, each answer checked."""
    from apportion.integrations.verl.dataset import write_data

    counts = write_data(
        data, output, style=prompt, held_out=held_out, drop_unreadable=drop_unreadable,
        problem_column=problem_column, answer_column=answer_column,
    )  # fmt: skip
    typer.echo(
        f"{output / 'train.parquet'}: {counts['train']} problems\n{output / 'test.parquet'}: {counts['test']} problems"
        f"\ndropped: {counts['dropped']}"
    )


def _lines(found: ClusterPrediction) -> list[str]:
    update, cap, work = found.update, found.update.cap or found.update, found.update.work
    machine, most = update.hardware, found.updates
    hours = found.seconds / 3600
    generated = found.tokens["tokens/actor"] + found.tokens["probe/tokens"]
    run = "as many steps as the data and trainer.total_epochs give"
    if found.steps:
        run = (
            f"{found.steps:,} steps: {found.steps * generated / 1e6:,.1f} million generated tokens, "
            f"{found.steps * hours:,.1f} hours, {found.steps * hours * machine.devices:,.0f} GPU hours"
        )
    return [
        f"One step of {update.method} on {machine.name} ({machine.source}), predicted", "",
        f"{'tokens of all GPUs':<40}{'expected':>16}{'at most':>16}",
        *(f"  {name:<38}{value:>16,.0f}{most * cap.tokens[name]:>16,.0f}" for name, value in found.tokens.items()), "",
        f"{'seconds':<40}{'expected':>16}{'at most':>16}",
        *(f"  {name:<38}{value:>16.1f}{most * cap.parts[name]:>16.1f}" for name, value in found.parts.items()),
        f"  {'all':<38}{found.seconds:>16.1f}{most * cap.total:>16.1f}", "",
        f"One step: {generated:,.0f} generated tokens, {hours:.4f} hours, {hours * machine.devices:.3f} GPU hours.",
        f"The run: {run}.", "",
        f"{'memory of a GPU':<40}{'GB':>16}",
        *(f"  {name:<38}{size / 1e9:>16.1f}" for name, size in update.memory.items()),
        f"  {'of the GPU':<38}{machine.memory / 1e9:>16.1f}  {'fits' if update.fits else 'DOES NOT FIT'}", "",
        f"Assumed: {work.rows * machine.devices} responses of {work.response:.0f} tokens, the longest {work.longest}, "
        f"prompts of {work.prompt:.0f}; a step of {work.step} tokens; {work.pass_rate:.0%} right; shares of the GPU's "
        f"peaks as docs/cost.md has them. The model's shape is from {found.source}.",
        *update.notes, *found.notes,
    ]  # fmt: skip


def _commands(found: Recipe) -> list[str]:
    """What runs the recipe, and what fills the paper's row from its last checkpoint."""
    config = found.config
    last = config.trainer.total_training_steps or "STEP"
    folder, merged = f"{config.trainer.default_local_dir}/global_step_{last}", f"runs/{config.trainer.experiment_name}"
    evaluation = (config.get("recipe") or {}).get("evaluation") or {}
    options: list[Any] = [
        "--model", f"{merged}/model", "--bench", _SETS, "--data", "sets", "--unreadable", "spelling",
        "--max-tokens", evaluation.get("max_tokens", config.data.max_response_length), "--dtype", "bfloat16",
        "-o", f"{merged}/evaluation",
    ]  # fmt: skip
    merge = [
        "python", "-m", "verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", f"{folder}/actor",
        "--target_dir", f"{merged}/model",
    ]  # fmt: skip
    return [
        "To run it:", f"  {shlex.join(found.command)}", "", "For the paper's row (sets/ has a file for each set):",
        f"  {shlex.join(merge)}", f"  {shlex.join(['apportion', 'evaluate', *map(str, options)])}",
    ]  # fmt: skip


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What verl says about engines and accelerators that are not here."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
