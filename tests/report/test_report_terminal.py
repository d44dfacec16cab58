"""The terminal twin: what is printed on which terminal, and that model text can neither colour nor command one.

Planted faults seen caught: cells printed as markup; the mark's sign swapped; text printed without `visible`; a segment
that does not close the brackets before it; strong marks below half the scale; noise left unmarked; verdicts of another
state; masked tokens in a segment's A; columns cut away on a narrow terminal; bars on an axis of their own; a broken law
shown as kept.
"""

from __future__ import annotations

import io
import re
import time

import pytest
import typer
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from apportion.cli.inspect import inspect
from apportion.report.terminal import coloured, palette_of, print_response, strips
from apportion.report.view import StepView

SGR = re.compile(r"\x1b\[[0-9;]*m")


def shown(run, row: int = 0):
    """The step's view and one of its responses, of the last step."""
    view = StepView(run, run.steps()[-1])
    summary = next(r for r in view.summary["responses"] if r["row"] == row)
    return view.summary, {**summary, **view.detail(row)}


def printed(view, response, system: str | None = None, width: int = 110, height: int = 1000, **options) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        force_terminal=system is not None,
        color_system=system,
        width=width,
        height=height,
        _environ={},
        **options,
    )
    print_response(console, view, response)
    return out.getvalue()


def styles(text: Text) -> list[tuple[str, object]]:
    """Each stretch of the text that has a style of ours, with it."""
    return [(text.plain[s.start : s.end], s.style) for s in text.spans if not isinstance(s.style, str)]


# The 99th percentile of |A| is 2: shares of 1, −1, 0.5, −0.45, 0.08 and 0.05 of the scale, and one token not trained.
VALUES = [2.0, -2.0, 1.0, -0.9, 0.16, 0.1, 9.0]
LETTERS = {
    "token_ids": list(range(7)), "text": "abcdefg", "char_start": list(range(7)), "advantage": VALUES,
    "mask": [True] * 6 + [False],
}  # fmt: skip


def test_gains_are_blue_and_underlined_and_losses_orange_and_italic(handmade):
    view, response = shown(handmade([LETTERS]))
    assert view["scale"]["advantage"] == 2.0
    seen = dict(styles(coloured(response, 2.0, "full")))
    gain, loss = seen["a"], seen["b"]
    assert gain.bgcolor.triplet.hex == "#5eaefb" and gain.underline and not gain.italic
    assert loss.bgcolor.triplet.hex == "#f5963f" and loss.italic and not loss.underline
    assert seen["c"] == gain
    # Weak credit is letters in colour, so that it stands out less than a block, whatever the background.
    assert seen["d"].color.triplet.hex == "#d1600a" and seen["d"].bgcolor is None and not seen["d"].italic
    assert seen["e"].color.triplet.hex == "#1468c7" and seen["e"].bgcolor is None and not seen["e"].underline
    assert "f" not in seen
    assert seen["g"].dim and seen["g"].bgcolor is None and seen["g"].color is None


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2.2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_can_be_read_on_black_and_on_white(handmade):
    _, response = shown(handmade([LETTERS]))
    seen = dict(styles(coloured(response, 2.0, "full")))
    for letter in "de":
        own = luminance(seen[letter].color.triplet.hex)
        assert min(1.05 / (own + 0.05), (own + 0.05) / 0.05) >= 3.7
    for letter in "ab":
        assert (luminance(seen[letter].bgcolor.triplet.hex) + 0.05) / 0.05 >= 7


def test_sixteen_colours_are_the_terminals_own(handmade):
    _, response = shown(handmade([LETTERS]))
    seen = dict(styles(coloured(response, 2.0, "standard")))
    assert {seen[x].bgcolor.name for x in "ace"} == {"cyan"} and {seen[x].bgcolor.name for x in "bd"} == {"yellow"}
    assert all(seen[x].color.name == "black" for x in "abcde")
    assert seen["a"].underline and not seen["e"].underline and seen["b"].italic and not seen["d"].italic


def test_without_colour_brackets_say_it(handmade):
    view, response = shown(handmade([LETTERS]))
    assert coloured(response, 2.0, "none").plain == "{++a++}{--b--}{++c++}{-d-}{+e+}f{/g/}"
    text = printed(view, response)
    assert "{++a++}{--b--}{++c++}{-d-}{+e+}f{/g/}" in text and "\x1b" not in text
    assert "{+ +} made more likely, {- -} less; doubled from |A| = 1.00, {/ /} not trained" in text


@pytest.mark.parametrize(
    ("system", "no_color", "palette"),
    [(None, None, "none"), ("truecolor", True, "none"), ("truecolor", None, "full"), ("256", None, "full"),
     ("standard", None, "standard")],
)  # fmt: skip
def test_what_a_console_shows(handmade, system, no_color, palette):
    console = Console(file=io.StringIO(), force_terminal=system is not None, color_system=system, no_color=no_color,
                      _environ={})  # fmt: skip
    assert palette_of(console) == palette
    text = printed(*shown(handmade([LETTERS])), system=system, no_color=no_color)
    assert ("{++a++}" in text) == (palette == "none") and ("blue: made" in text) == (palette == "full")
    # NO_COLOR leaves underlines and italics, and no colour of ours.
    assert not no_color or not re.search(r"\x1b\[[0-9;]*[34]8;", text)


@pytest.fixture
def measured(handmade, segment):
    """Four segments of a wrong response: μ = 0.5, V̂ = 0.75, 0.6 and 0.7, r = 0. By hand, with n₀ = 4 and M = 4 an
    error is half the raw one: 0, 0.1, 0.15 and 0.05."""

    def probe(row: int, position: int, m: int, verdict: str) -> dict:
        return {
            "key": f"{row}/{position}/{m}", "kind": "continuations", "group": "g", "row": row, "position": position,
            "m": m, "token_ids": [1], "text": "t", "reward": float(verdict == "correct"), "verdict": verdict,
            "finish": "stop", "rescued": False,
        }  # fmt: skip

    words = ["ab", "cd", "ef", "gh"]
    responses = [
        {
            "token_ids": list(range(8)), "text": "".join(words), "char_start": list(range(8)), "reward": 0.0,
            "verdict": "wrong", "advantage": [1.0, 1.0, -1.0, 0.5, -2.0, -2.0, -2.0, 9.0], "base": -0.8125,
            "mask": [True] * 7 + [False], "entropy": [0.0, 0.0, 0.0, 0.8, 0.0, 0.0, 0.0, 1.6],
            "segments": [
                segment(0, 2, 0.5, 0.5, 0.0, 0.25, 0), segment(2, 4, 0.75, 0.75, 0.2, -0.15, 4),
                segment(4, 6, 0.6, 0.6, 0.3, 0.1, 4), segment(6, 8, 0.7, 0.7, 0.1, -0.7, 4),
            ],
        },
        {"token_ids": [0, 1, 2, 3, 9], "reward": 1.0},
    ]  # fmt: skip
    evidence = [probe(0, 2, m, v) for m, v in enumerate(["correct", "correct", "wrong", "correct"])]
    evidence += [probe(1, 4, m, "abstain" if m == 3 else "wrong") for m in range(4)]
    return handmade(responses, evidence)


def test_segments_with_values_errors_verdicts_and_advantages(measured):
    text = printed(*shown(measured))
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines() if re.match(r"\d  ", line)]
    assert rows == [
        ["1", "0–1", "ab", "0.50 → 0.75", "+0.25 ± 0.10", "–", "+1.00"],
        # √(0.1² + 0.15²) = 0.18, more than 0.15.
        ["2", "2–3", "cd", "0.75 → 0.60", "~−0.15 ± 0.18", "✓✓✗✓", "−1.00…+0.50"],
        # Its state is row 1's as well, and was continued there.
        ["3", "4–5", "ef", "0.60 → 0.70", "~+0.10 ± 0.16", "✗✗✗? (1)", "−2.00"],
        # No continuations are recorded of the last, only their number; its last token is not trained.
        ["4", "6–7", "gh", "0.70 → 0.00", "−0.70 ± 0.05", "4", "−2.00"],
    ]
    assert "~ within one standard error: may be noise" in text and "(row): probed there" in text
    # Noise is marked in the text too, and a segment closes the brackets of the one before it.
    assert "[1]{++ab++}[2~]{--c--}{+d+}[3~]{--ef--}[4]{--g--}{/h/}" in text
    lines = text.splitlines()
    table, body = (
        next(i for i, x in enumerate(lines) if x.startswith("#  tokens")),
        lines.index("[1]{++ab++}[2~]{--c--}{+d+}[3~]{--ef--}[4]{--g--}{/h/}"),
    )
    assert table < body and body < 24


@pytest.mark.parametrize("width", [40, 60, 72, 80, 100, 200])
def test_every_width_shows_every_number(measured, run, width):
    row = max(range(24), key=lambda i: StepView(run, run.steps()[-1]).summary["responses"][i]["spread"])
    for view, response in (shown(measured), shown(run, row)):
        text = printed(view, response, width=width)
        whole = " ".join(text.split())
        for s in response["segments"]:
            assert f"{s['start']}–{s['end'] - 1}" in whole
            assert re.search(rf"{abs(s['increment']):.2f} ± ", whole)
        head = text[: text.index("[1]")].splitlines()
        assert all(cell_len(line.rstrip()) <= width for line in head)
        assert re.search(r"base −?\+?\d\.\d\d", whole)


def test_many_continuations_are_counted(handmade, segment):
    evidence = [
        {"key": str(m), "kind": "continuations", "group": "g", "row": 0, "position": 1, "m": m, "token_ids": [1],
         "text": "t", "reward": 0.0, "verdict": "correct" if m < 9 else "wrong", "finish": "stop", "rescued": False}
        for m in range(13)
    ]  # fmt: skip
    segments = [segment(0, 1, 0.5, 0.5, 0, 0.2, 0), segment(1, 2, 0.7, 0.7, 0.1, 0.3, 13)]
    run = handmade([{"token_ids": [1, 2], "advantage": [1.0, 1.0], "segments": segments}], evidence)
    assert "  9✓ 4✗  " in printed(*shown(run))


def test_bars_share_one_axis(measured):
    _, response = shown(measured)
    value, entropy = (line.plain for line in strips(response, 100))
    # A bar a token: V̂ = 0.5, 0.75, 0.6, 0.7 over two tokens each, and the reward 0 at the end, in sevenths; entropy in
    # shares of its largest, 1.6.
    assert value == "V̂       ▅▅▆▆▅▅▆▁ 0.50 → 0.00"
    assert entropy == "entropy ▁▁▁▅▁▁▁█ to 1.60 nats"


def test_laws_are_marked_by_their_error(handmade, segment):
    broken = {"token_ids": [1, 2], "advantage": [1.0, 0.0], "base": 0.25,
              "segments": [segment(0, 1, 0.5, 0.5, 0, 0.25, 0), segment(1, 2, 0.75, 0.75, 0, 0.25, 4)]}  # fmt: skip
    text = printed(*shown(handmade([broken])))
    assert "✗ token mean of A = base: 0.5000 = 0.2500, error 2e-01" in text
    assert "✓ Σ increments = r − μ: 0.5000 = 0.5000, error 0e+00" in text


def test_a_group_without_variance_says_so_once(handmade):
    view, response = shown(handmade([{"token_ids": [1, 2]}, {"token_ids": [3]}]))
    text = printed(view, response)
    assert text.count("σ = 0") == 1 and "No pivot" not in text


def test_model_text_cannot_reach_the_terminal(handmade, segment):
    hostile = "\x1b[31m[bold]x[/bold]\u202e\x07[link=file:///]\x9b0m\x1b]8;;http://x\x1b\\y\x1b]8;;\x1b\\\u2067\r"
    run = handmade(
        [{"token_ids": [1, 2], "text": hostile + "x", "char_start": [0, len(hostile)], "group": hostile,
          "prompt": hostile, "gold": hostile, "verdict": "\x1b[2J", "finish": "\x1b[2J", "advantage": [1.0, -1.0],
          "segments": [segment(0, 1, 0.5, 0.5, 0, 0.5, 0), segment(1, 2, 1.0, 1.0, 0, 0.0, 2)]}],
        method="\x1b[5mm",
    )  # fmt: skip
    view, response = shown(run)
    for width in (40, 400):
        text = SGR.sub("", printed(view, response, "truecolor", width))
        assert not set(text) & {"\x1b", "\x07", "\u202e", "\u2067", "\x9b", "\r"}
    # As the group's name, its gold answer and its prompt, in the sentence, in the table and in the response.
    assert text.replace("\n", "").count("␛[31m[bold]x[/bold]") == 6


def test_a_pipe_gets_the_lines_of_the_text_and_a_terminal_a_hint_where_they_do_not_fit(handmade):
    line = "word " * 60
    given = {"token_ids": [1, 2], "text": line + "\nend", "char_start": [0, len(line)], "advantage": [1.0, 1.0]}
    view, response = shown(handmade([given]))
    assert "{++" + line + "\nend++}" in printed(view, response, width=40)
    assert "less -R" not in printed(view, response, width=40, height=10)
    assert "less -R" in printed(view, response, "truecolor", width=400, height=10)
    assert "less -R" not in printed(view, response, "truecolor", width=400, height=50)


def test_a_long_response_is_quick(handmade):
    n = 32_000
    given = {"token_ids": [7] * n, "text": "xq " * n, "char_start": list(range(0, 3 * n, 3)),
             "advantage": [1.0 if t % 300 < 150 else -0.3 for t in range(n)], "entropy": [0.5] * n}  # fmt: skip
    view, response = shown(handmade([given]))
    start = time.perf_counter()
    text = printed(view, response, "truecolor", width=100, height=24)
    assert time.perf_counter() - start < 10 and SGR.sub("", text).count("xq") == n


def test_the_command_prints_the_row_of_the_last_step_and_writes(run, tmp_path):
    app = typer.Typer()
    app.command()(inspect)
    result = CliRunner().invoke(app, [str(run.path), "--response", "9", "-o", str(tmp_path / "p.html")])
    assert result.exit_code == 0, result.output
    assert f"step {run.steps()[-1]} · probepo · response 9" in result.output
    assert (tmp_path / "p.html").stat().st_size > 10_000
