"""`apportion cost`: what a step of a run will take, before it starts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apportion.cli.shared import read_settings, say

if TYPE_CHECKING:
    from apportion.cost import Prediction


def cost(
    config: Annotated[Path, typer.Option(help="A TOML file, as `apportion train` takes it.", show_default=False)],
    hardware: Annotated[
        str,
        typer.Option(help="h100, h200, a100-80, a100-40, rtx4090, l40s; h100x8 for eight; here measures this machine."),
    ] = "here",
    response_length: Annotated[
        float | None, typer.Option(help="Mean tokens of a response. Default: half its limit; a task's own solutions.")
    ] = None,
    longest: Annotated[int | None, typer.Option(help="Tokens of a batch's longest. Default: the limit.")] = None,
    prompt_length: Annotated[
        int | None, typer.Option(help="Tokens of a prompt; then neither data nor tokenizer is read.")
    ] = None,
    step_tokens: Annotated[int | None, typer.Option(help="Tokens of a reasoning step. Default: 40.")] = None,
    pass_rate: Annotated[float | None, typer.Option(help="Share of right responses. Default: 0.5.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value, over all else; may be repeated.")
    ] = None,
) -> None:
    """Predict tokens, seconds by phase and memory of one step of a run. Nothing is trained and no weights are read."""
    from apportion.cost import HERE, Assumed, find_hardware, predict_run
    from apportion.train.settings import load_config

    assumed = Assumed(response_length, longest, prompt_length, step_tokens, pass_rate)
    machine = None if hardware.strip().lower() == HERE else find_hardware(hardware)
    chosen = load_config(config, read_settings(settings or []))
    if machine is None:
        from rich.console import Console

        from apportion.cost.kept import measured_machine

        with Console(stderr=True).status("Measuring this machine"):
            machine, kept = measured_machine(chosen)
        if not kept:
            say("note", "the figures could not be kept for `apportion train`: no cache folder can be written to")
    found = predict_run(chosen, machine, assumed)
    if as_json:
        typer.echo(json.dumps(_data(found) | {"at_most": _data(found.cap or found)}, indent=2))
    else:
        typer.echo("\n".join(_lines(found, chosen.run.steps)))


def _data(found: Prediction) -> dict[str, Any]:
    return {
        "method": found.method, "hardware": found.hardware.name, "source": found.hardware.source,
        "tokens": dict(found.tokens), "seconds": dict(found.seconds), "parts": dict(found.parts),
        "total_seconds": found.total, "memory": dict(found.memory), "fits": found.fits, "assumed": asdict(found.work),
        "notes": list(found.notes),
    }  # fmt: skip


def _lines(found: Prediction, steps: int) -> list[str]:
    work, machine, cap = found.work, found.hardware, found.cap or found
    return [
        f"One step of {found.method} on {machine.name} ({machine.source})", "",
        f"{'tokens':<40}{'expected':>14}{'at most':>14}",
        *(f"  {name:<38}{value:>14,.0f}{cap.tokens[name]:>14,.0f}" for name, value in found.tokens.items()), "",
        f"{'seconds':<40}{'expected':>14}{'at most':>14}",
        *(f"  {name:<38}{value:>14.3f}{cap.parts[name]:>14.3f}" for name, value in found.parts.items()),
        f"  {'all':<38}{found.total:>14.3f}{cap.total:>14.3f}", "",
        f"{'memory of a device':<40}{'GB':>14}",
        *(f"  {name:<38}{size / 1e9:>14.3f}" for name, size in found.memory.items()),
        f"  {'of the device':<38}{machine.memory / 1e9:>14.3f}  {'fits' if found.fits else 'DOES NOT FIT'}", "",
        f"{steps:,} steps: {_time(steps * found.total)}, evaluations and checkpoints not counted.",
        f"Assumed: {work.rows} responses a device and batch, of {work.response:.0f} tokens, the longest "
        f"{work.longest}; prompts of {work.prompt:.0f}; a step of {work.step} tokens; {work.pass_rate:.0%} right.",
        *found.notes,
    ]  # fmt: skip


def _time(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
