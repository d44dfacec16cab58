"""The page's twin for a terminal: what decided a response, its segments as a table, its text in colour.

Model text goes in as `Text`, never as markup, and the view has made its control characters visible. Where there is no
colour to see (a pipe, NO_COLOR), brackets in the text say what colour would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from apportion.report.escape import visible
from apportion.report.reading import fixed, signed

Palette = Literal["none", "standard", "full"]
Response = Mapping[str, Any]

_FAINT, _STRONG = 0.08, 0.5  # shares of the scale: below, nothing is marked; above, it is marked strongly
_KEPT = 1e-4  # a law's error that rounding explains, as on the page
_HEAD = 12  # lines beside those of the text and the segments
_SHOWN, _WORDS = 12, 16  # verdicts that are shown one by one; columns that a table leaves to a segment's words
_MARK = {"correct": "✓", "wrong": "✗", "abstain": "?", "partial": "◐"}
_BARS = "▁▂▃▄▅▆▇█"
# Blue and orange, as on the page. As letters both stand out from black and from white; under black letters, the bright
# ones do. The sixteen colours of a terminal have no orange, and no blue that can be read on black.
_LETTERS = {1: "#1468c7", -1: "#d1600a"}
_GROUND = {"full": {1: "#5eaefb", -1: "#f5963f"}, "standard": {1: "cyan", -1: "yellow"}}

# Of a token: the sign of its credit, or 0; whether that is strong; whether the token is trained.
_Kind = tuple[int, bool, bool]
_PLAIN: _Kind = (0, False, True)
_BRACKETS = {
    (1, False, True): ("{+", "+}"), (1, True, True): ("{++", "++}"), (-1, False, True): ("{-", "-}"),
    (-1, True, True): ("{--", "--}"), (0, False, False): ("{/", "/}"), _PLAIN: ("", ""),
}  # fmt: skip


def print_response(console: Console, view: Mapping[str, Any], response: Response) -> None:
    """Prints one response of a step (`view`, see view.py): what decided it, its segments and laws, then its text."""
    r, group, palette = response, view["groups"][response["group"]], palette_of(console)
    scale = view["scale"]["advantage"]
    console.print(_title(view, group, r))
    console.print(Text(f"prompt: {' '.join(group['prompt'].split())}", "dim"), no_wrap=True, overflow="ellipsis")
    console.print(Text(r["reading"]))
    if group["collapsed"] and (r["spread"] or r["reward"] is None):
        console.print(Text("σ = 0: all rewards of the group are equal", "bold"))
    if r["why"] and not group["collapsed"]:
        console.print(Text(f"No pivot: {visible(r['why'])}"))
    if r["segments"]:
        console.print()
        for line in strips(r, min(console.width, 100)):
            console.print(line, no_wrap=True)
        _print_segments(console, r, palette)
    for check in r["checks"]:
        console.print(Text(_law(check)))
    console.print()
    # A pipe gets the lines of the text as they are.
    console.print(coloured(r, scale, palette), soft_wrap=not console.is_terminal)
    console.print()
    console.print(Text(_legend(r, scale, palette), "dim"))
    if console.is_terminal and _height(r, console.width) > console.height:
        console.print(Text("FORCE_COLOR=1 apportion inspect … | less -R starts at what decided it", "bold"))


def palette_of(console: Console) -> Palette:
    """The colours that a console shows: none, the sixteen of the terminal, or more."""
    if console.color_system is None or console.no_color:
        return "none"
    return "standard" if console.color_system in ("standard", "windows") else "full"


def coloured(response: Response, scale: float, palette: Palette) -> Text:
    """The response's text, each token marked by its advantage as a share of `scale`, and each segment opened by its
    number, with ~ where its increment may be noise."""
    out = Text()
    opens = {s["start"]: f"[{k}{'~' * s['noise']}]" for k, s in enumerate(response["segments"], 1)}
    for start, end, kind in _runs(response, scale, opens):
        if start in opens:
            out.append(opens[start], "dim")
        text = "".join(map(_printed, response["tokens"]["text"][start:end]))
        if palette == "none":
            before, after = _BRACKETS[kind]
            out.append(f"{before}{text}{after}" if text else "", _style(kind, palette))
        else:
            out.append(text, _style(kind, palette))
    return out


def _printed(token: str) -> str:
    # A bare line break has no width to colour.
    return token if token.strip() else token.replace("\n", "↵\n")


def _runs(response: Response, scale: float, opens: Mapping[int, str]) -> Iterator[tuple[int, int, _Kind]]:
    """Stretches of one kind; a segment begins a new one."""
    advantage, masked = response["tokens"]["advantage"], set(response["tokens"]["masked"])
    start, kind = 0, _PLAIN
    for t, value in enumerate(advantage):
        here = (0, False, False) if t in masked else _kind((value or 0.0) / scale)
        if t and (here != kind or t in opens):
            yield start, t, kind
            start = t
        kind = here
    if advantage:
        yield start, len(advantage), kind


def _kind(share: float) -> _Kind:
    if abs(share) < _FAINT:
        return _PLAIN
    return (1 if share > 0 else -1), abs(share) >= _STRONG, True


def _style(kind: _Kind, palette: Palette) -> Style:
    """Strong credit is a block of colour, so that it is what stands out, whatever the background."""
    sign, strong, trained = kind
    if not sign:
        return Style(dim=not trained or None)
    line = Style(underline=strong and sign > 0, italic=strong and sign < 0)
    if palette == "none":
        return line
    if palette == "full" and not strong:
        return Style(color=_LETTERS[sign])
    return line + Style(color="#000000" if palette == "full" else "black", bgcolor=_GROUND[palette][sign])


def strips(response: Response, width: int) -> list[Text]:
    """V̂ along the response, and the entropy of its tokens where it is known, as rows of bars over a common axis."""
    pieces, length = response["segments"], response["length"]
    known = [s for s in pieces if s["before"] is not None]
    if len(known) < 2:
        return []
    room = min(max(10, width - 24), length)
    edges = [round(k * length / room) for k in range(room + 1)]
    # The last value is where the response ended.
    ends = [known[0]["before"], known[-1]["after"] if known[-1]["after"] is not None else known[-1]["before"]]
    values: list[float | None] = []
    for start in edges[:-1]:
        values.append(next((s["before"] for s in reversed(known) if s["start"] <= start), None))
    values[-1] = ends[1]
    every = [v for v in [*values, *(s["before"] for s in known)] if v is not None]
    lines = [_strip("V̂", values, min(0.0, *every), max(1.0, *every), f"{fixed(ends[0])} → {fixed(ends[1])}")]
    if (entropy := response["tokens"]["entropy"]) is not None:
        highest = [max(_known(entropy[a : max(b, a + 1)]), default=None) for a, b in pairwise(edges)]
        top = max(_known(highest), default=0.0)
        lines.append(_strip("entropy", highest, 0.0, top or 1.0, f"to {fixed(top)} nats"))
    return lines


def _strip(name: str, values: Sequence[float | None], low: float, high: float, note: str) -> Text:
    bars = "".join(" " if v is None else _BARS[round((v - low) / (high - low) * (len(_BARS) - 1))] for v in values)
    return Text.assemble((name + " " * (8 - cell_len(name)), "bold"), bars, (f" {note}", "dim"))


def _known(values: Sequence[float | None]) -> list[float]:
    return [v for v in values if v is not None]


def _print_segments(console: Console, response: Response, palette: Palette) -> None:
    pieces = response["segments"]
    masked = set(response["tokens"]["masked"])
    trained = [None if t in masked else a for t, a in enumerate(response["tokens"]["advantage"])]
    rows = [_cells(k, s, response, trained, palette) for k, s in enumerate(pieces, 1)]
    table = segment_table(rows, console.width)
    if table is not None:
        console.print(table)
    for number, place, words, value, change, verdicts, advantage in rows if table is None else ():
        console.print(Text.assemble(number, "  ", place, "  “", words, "”"), no_wrap=True, overflow="ellipsis")
        parts = [Text.assemble("V̂ ", value), change, verdicts, Text.assemble("A ", advantage)]
        console.print(Padding(Text(" · ").join(parts), (0, 0, 0, 3), expand=False))
    if any(s["noise"] for s in pieces):
        console.print(Text("~ within one standard error: may be noise", "dim"))
    if any(_elsewhere(s, response) for s in pieces):
        console.print(Text("(row): probed there, where the tokens before it are the same", "dim"))


_HEADS = ("#", "tokens", "text", "V̂", "increment ± SE", "probes", "A")


def segment_table(rows: Sequence[Sequence[Text]], width: int) -> Table | None:
    """Rows of `_cells` side by side, the words of a segment cut to what is left; None where too little is left."""
    columns = zip(_HEADS, zip(*rows, strict=True), strict=True)
    wide = [max(cell_len(name), *(cell.cell_len for cell in cells)) for name, cells in columns]
    left = width - (sum(wide) - wide[2]) - 2 * (len(wide) - 1)
    if left < min(wide[2], _WORDS):
        return None
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in _HEADS:
        table.add_column(name, justify="left" if name in ("tokens", "text", "probes") else "right", no_wrap=True)
    for row in rows:
        row[2].truncate(left, overflow="ellipsis")
        table.add_row(*row)
    return table


def _cells(
    k: int, s: Mapping[str, Any], response: Response, trained: Sequence[float | None], palette: Palette
) -> list[Text]:
    colour = _LETTERS[-1 if s["increment"] < 0 else 1] if palette == "full" else ""
    change = f"{'~' * s['noise']}{signed(s['increment'])} ± {fixed(s['increment_stderr'])}"
    value = "–" if s["before"] is None and s["after"] is None else f"{fixed(s['before'])} → {fixed(s['after'])}"
    return [
        Text(str(k)), Text(f"{s['start']}–{s['end'] - 1}"), Text(s["snippet"]), Text(value),
        Text(change, "dim" if s["noise"] else colour), Text(_verdicts(s, response)),
        Text(_range(trained[s["start"] : s["end"]])),
    ]  # fmt: skip


def _verdicts(s: Mapping[str, Any], response: Response) -> str:
    """What the continuations from a segment's start came to: ✓✓✗✓, or counts where they are many."""
    found = response["continuations"].get(str(s["start"]))
    if found is None:
        return str(s["samples"] or "–")
    marks = [_MARK.get(item["verdict"], "?") for item in found["items"]]
    shown = "".join(marks)
    if len(marks) > _SHOWN:
        shown = " ".join(f"{marks.count(mark)}{mark}" for mark in dict.fromkeys(_MARK.values()) if mark in marks)
    return shown + (f" ({found['row']})" if _elsewhere(s, response) else "")


def _elsewhere(s: Mapping[str, Any], response: Response) -> bool:
    found = response["continuations"].get(str(s["start"]))
    return found is not None and found["row"] != response["row"]


def _range(values: Sequence[float | None]) -> str:
    """A number that all of them share, or the lowest and the highest."""
    known = [v for v in values if v is not None]
    low, high = signed(min(known, default=None)), signed(max(known, default=None))
    return low if low == high else f"{low}…{high}"


def _title(view: Mapping[str, Any], group: Mapping[str, Any], r: Response) -> Text:
    told = [
        visible(r["verdict"] or "no verdict", 20),
        f"group {group['name']}",
        f"{r['pivots']} pivots",
        f"base {signed(r['base'])}",
    ]
    if group["gold"]:
        told.insert(2, f"gold {' '.join(group['gold'].split())}")
    if r["finish"] == "length":
        told.insert(1, "cut at the length limit")
    name = f"step {view['step']} · {view['method']} · response {r['row']} "
    return Text.assemble((name, "bold"), _MARK.get(r["verdict"], ""), (" " + " · ".join(told), "dim"))


def _law(check: Mapping[str, Any]) -> str:
    error = check["error"]
    kept = error is not None and error <= _KEPT
    shown = "unknown" if error is None else f"{error:.0e}"
    sides = f"{fixed(check['got'], 4)} = {fixed(check['expected'], 4)}"
    return f"{'✓' if kept else '✗'} {check['name']}: {sides}, error {shown}"


def _legend(response: Response, scale: float, palette: Palette) -> str:
    """How to read the marks that can be seen."""
    strong, masked = f"from |A| = {fixed(_STRONG * scale)}", bool(response["tokens"]["masked"])
    if palette == "none":
        words = f"{{+ +}} made more likely, {{- -}} less; doubled {strong}"
        return words + (", {/ /} not trained" if masked else "")
    gain, loss = ("blue", "orange") if palette == "full" else ("cyan", "yellow")
    words = f"{gain}: made more likely, {loss}: less; {strong} underlined, italic"
    return words + (", dim: not trained" if masked else "")


def _height(response: Response, width: int) -> int:
    """Lines of all that is printed, near enough."""
    text = "".join(response["tokens"]["text"])
    return sum(1 + len(line) // width for line in text.split("\n")) + len(response["segments"]) + _HEAD
