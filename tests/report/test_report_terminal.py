"""The terminal twin: what is printed, and that model text can neither colour nor command a terminal.

Planted faults seen caught: cells printed as markup; the tint's sign swapped; text printed without `visible`.
"""

from __future__ import annotations

import io
import re

import typer
from rich.console import Console
from typer.testing import CliRunner

from apportion.cli.inspect import inspect
from apportion.report.terminal import coloured, print_response
from apportion.report.view import step_view

SGR = re.compile(r"\x1b\[[0-9;]*m")


def printed(view, row: int, colour: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=colour, color_system="truecolor" if colour else None, width=110)
    print_response(console, view, view["responses"][row])
    return out.getvalue()


def test_gains_are_blue_and_underlined_and_losses_orange_and_italic(handmade):
    run = handmade([{"token_ids": [1, 2, 3, 4], "advantage": [2.0, -2.0, 0.1, 9.0], "mask": [True, True, True, False]}])
    view = step_view(run, 1)
    spans = coloured(view["responses"][0], view["scale"]["advantage"]).spans
    gain, loss, masked = (span.style for span in spans if not isinstance(span.style, str))
    assert gain.bgcolor.triplet.hex == "#5eaefb" and gain.underline and not gain.italic
    assert loss.bgcolor.triplet.hex == "#f5963f" and loss.italic and not loss.underline
    assert masked.dim and masked.bgcolor is None


def test_a_response_with_its_segments(run):
    view = step_view(run, run.steps()[-1])
    row = max(range(24), key=lambda i: view["responses"][i]["spread"])
    r, text = view["responses"][row], printed(view, row, colour=False)
    assert r["reading"].split(".")[0] in text and f"response {row}" in text
    for k, s in enumerate(r["segments"], 1):
        assert f"[{k}]" in text and f"{s['start']}–{s['end'] - 1}" in text
    assert "token mean of A = base" in text and "\x1b" not in text


def test_model_text_cannot_reach_the_terminal(handmade, segment):
    hostile = "\x1b[31m[bold]x[/bold]\u202e\x07[link=file:///]\x9b0m"
    run = handmade(
        [{"token_ids": [1, 2], "text": hostile + "x", "char_start": [0, len(hostile)], "group": hostile,
          "advantage": [1.0, -1.0],
          "segments": [segment(0, 1, 0.5, 0.5, 0, 0.5, 0), segment(1, 2, 1.0, 1.0, 0, 0.0, 2)]}]
    )  # fmt: skip
    text = SGR.sub("", printed(step_view(run, 1), 0, colour=True))
    assert not set(text) & {"\x1b", "\x07", "\u202e", "\x9b"}
    # Four times: as the group's name, in the sentence, in the response and in the table of segments.
    assert text.replace("\n", "").count("␛[31m[bold]x[/bold]") == 4


def test_the_command_prints_and_writes(run, tmp_path):
    app = typer.Typer()
    app.command()(inspect)
    result = CliRunner().invoke(app, [str(run.path), "--response", "9", "-o", str(tmp_path / "p.html")])
    assert result.exit_code == 0, result.output
    assert "response 9" in result.output and (tmp_path / "p.html").stat().st_size > 10_000
