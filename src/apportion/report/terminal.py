"""The page's twin for a terminal: one response in colour and its segments as a table.

Model text goes in as `Text`, never as markup, and the view has made its control characters visible.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from apportion.report.reading import fixed, signed

# Black on a tint reads on dark and on light terminals alike. Blue and orange, as on the page.
_GAIN, _LOSS = (0x5E, 0xAE, 0xFB), (0xF5, 0x96, 0x3F)
_FAINT, _STRONG = 0.08, 0.5  # shares of the scale: below, no tint; above, the second channel speaks too
_MARK = {"correct": "✓", "wrong": "✗", "abstain": "?", "partial": "◐"}


def print_response(console: Console, view: Mapping[str, Any], response: Mapping[str, Any]) -> None:
    """Prints one response of a step (views of view.py): what decided it, its text, its segments, its laws."""
    group, r = view["groups"][response["group"]], response
    title = Text.assemble(
        (f"step {view['step']} · {view['method']} · response {r['row']} ", "bold"),
        _MARK.get(r["verdict"], ""), " ",
        (f"{group['name']} · {r['pivots']} pivots · base {signed(r['base'])}", "dim"),
    )  # fmt: skip
    console.print(title)
    if group["collapsed"]:
        console.print(Text("σ = 0: all rewards of the group are equal", "bold"))
    console.print(Text(r["reading"]))
    console.print()
    console.print(coloured(r, view["scale"]["advantage"]))
    console.print()
    console.print(Text("blue, underlined: made more likely; orange, italic: less", "dim"))
    if r["segments"]:
        console.print(segment_table(r))
    for check in r["checks"]:
        sides = f"{fixed(check['got'], 4)} = {fixed(check['expected'], 4)}"
        console.print(Text(f"{check['name']}: {sides}, error {check['error']:.0e}"))


def coloured(response: Mapping[str, Any], scale: float) -> Text:
    """The response's text, each token tinted by its advantage and each segment opened by its number."""
    tokens, out = response["tokens"], Text()
    masked, opens = set(tokens["masked"]), {s["start"]: k for k, s in enumerate(response["segments"], 1)}
    for t, (text, advantage) in enumerate(zip(tokens["text"], tokens["advantage"], strict=True)):
        if t in opens:
            out.append(f"[{opens[t]}]", "dim")
        style = Style(dim=True) if t in masked else _tint(advantage / scale)
        # A bare line break has no width to colour.
        out.append(text.replace("\n", "↵\n") if text.strip() == "" else text, style)
    return out


def _tint(credit: float) -> Style:
    a = min(1.0, abs(credit))
    if a < _FAINT:
        return Style()
    red, green, blue = (round(255 + (c - 255) * a) for c in (_LOSS if credit < 0 else _GAIN))
    strong = a >= _STRONG
    return Style(
        color="black", bgcolor=f"#{red:02x}{green:02x}{blue:02x}",
        underline=strong and credit > 0, italic=strong and credit < 0,
    )  # fmt: skip


def segment_table(response: Mapping[str, Any]) -> Table:
    """Segments with their values, increments, errors and evidence; ~ marks what may be noise."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("#", "tokens", "text"):
        table.add_column(name, overflow="ellipsis", no_wrap=True)
    for name in ("V̂", "increment", "± SE", "probes", "A"):
        table.add_column(name, justify="right", no_wrap=True)
    for k, s in enumerate(response["segments"], 1):
        colour = "#d1600a" if s["increment"] < 0 else "#1468c7"
        table.add_row(
            str(k), f"{s['start']}–{s['end'] - 1}", Text(s["snippet"]),
            f"{fixed(s['before'])} → {fixed(s['after'])}",
            Text(("~" if s["noise"] else "") + signed(s["increment"]), "dim" if s["noise"] else colour),
            fixed(s["increment_stderr"]), str(s["samples"] or "–"),
            signed(response["tokens"]["advantage"][s["start"]]),
        )  # fmt: skip
    table.caption = (
        "~ within one standard error: may be noise" if any(s["noise"] for s in response["segments"]) else None
    )
    table.caption_justify = "left"
    return table
