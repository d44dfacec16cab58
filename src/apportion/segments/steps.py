"""Reasoning steps by delimiter: the candidates of ProbePO, Stage 2."""

import re
from collections.abc import Iterable, Sequence

# [ours] Regular expressions that mark a step where a line starts (after its indent). A number needs white
# space behind its dot or bracket, so that `3.14` and `(2)(3)` are no markers.
DEFAULT_MARKERS: tuple[str, ...] = (
    r"(?:\*\*)?(?i:step)[ \t]+[0-9]+\b",
    r"[0-9]{1,3}[.)](?=\s|\Z)",
    r"\([0-9]{1,3}\)(?=\s|\Z)",
    r"[-*•](?=[ \t])",
)

_INDENT = r"[^\S\n]*"
_PARAGRAPH_BREAK = re.compile(rf"\n(?:{_INDENT}\n)+")


def step_starts(text: str, patterns: Sequence[str] = DEFAULT_MARKERS) -> list[int]:
    """Character offsets at which a new reasoning step starts, in order. [paper: ProbePO Stage 2]

    A step starts with the first line after a paragraph break (blank lines, which may hold spaces; `\\r\\n`
    too) and with a line that begins with a marker (the patterns are [ours]). The offset is that of the line's
    first character, indent included, because a token usually carries the space before its word. Breaks count
    everywhere, inside LaTeX and fenced code too [ours]. The first step is not listed, nor anything that only
    white space precedes or follows (the terminal break).

    Raises ValueError for a pattern that is no regular expression.
    """
    found = {match.end() for match in _PARAGRAPH_BREAK.finditer(text)}
    for pattern in patterns:
        try:
            marker = re.compile(rf"^{_INDENT}(?:{pattern})", re.MULTILINE)
        except re.error as error:
            raise ValueError(
                f"patterns: {pattern!r} is no regular expression ({error}); give each marker as it looks "
                "at the start of a line, special characters escaped"
            ) from error
        found |= {match.start() for match in marker.finditer(text)}
    first_line = text.rfind("\n", 0, len(text) - len(text.lstrip())) + 1
    return sorted(offset for offset in found if first_line < offset < len(text.rstrip()))


def merge_close(positions: Iterable[int], min_gap: int = 16) -> list[int]:
    """Positions in order, without those fewer than min_gap tokens behind the last one kept. [ours]

    The earlier one stays. The response's start is no candidate, so the first position always stays.
    """
    kept: list[int] = []
    for position in sorted(positions):
        if not kept or position - kept[-1] >= max(min_gap, 1):
            kept.append(position)
    return kept


def keep_tail(positions: Iterable[int], length: int, tail: int = 8) -> list[int]:
    """Positions p with at least `tail` tokens from p to the end of the response: length − p ≥ tail. [ours]"""
    return [position for position in positions if length - position >= max(tail, 1)]
