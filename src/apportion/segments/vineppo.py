"""The character step splitter of VinePPO, after its description. [paper]

A line end and a sentence end before a capital start a step. LaTeX environments stay whole. A part of more
than 100 characters is cut at its most central comma, "and" or colon, or inside maths at its "=" or "+". The
paper's code settles more than that sentence does; what we settled ourselves is marked [ours] below.
"""

import re
from bisect import bisect_left
from itertools import pairwise

Span = tuple[int, int]

_LINE_END = re.compile(r"\n\s*\n|\n")
_SENTENCE_END = re.compile(r"""[.!?]["')\]}$]*(?=[^\S\n]+(\S))""")
# A cut leaves the space to the part behind it, since tokens carry the space before their word. [ours]
_CLAUSE = re.compile(r"[,:](?=[^\S\n]+\S)|(?<=\S)(?=[^\S\n]+and\s)")
_ENVIRONMENT_EDGE = re.compile(r"\\(begin|end)\{([^{}]*)\}")
_MATHS_EDGE = re.compile(r"\\.|\$\$?", re.DOTALL)
_CLOSER = {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}


def vineppo_steps(text: str, max_chars: int = 100) -> list[int]:
    """Character starts of every step after the first, in order; the parts make up the text exactly.

    [ours]: a step is never white space alone; maths ($…$, $$…$$, \\(…\\), \\[…\\]) is split by no line or
    sentence end; all cuts of a long part compete, the earlier of two equally central ones wins, and its
    halves are cut again while they are too long; "=" and "+" inside braces are no cuts; an environment is
    kept whole however long.
    """
    environments = _environments(text)
    maths = _maths(text)
    whole = _union(environments + maths)

    ends = [match.end() for match in _LINE_END.finditer(text)]
    ends += [match.end() for match in _SENTENCE_END.finditer(text) if match[1].isupper()]
    first, last = len(text) - len(text.lstrip()), len(text.rstrip())
    breaks = sorted({end for end in ends if first < end < last and not _inside(whole, end)})

    cuts = {match.end() for match in _CLAUSE.finditer(text) if not _inside(whole, match.end())}
    cuts |= {cut for span in maths for cut in _operators(text, span) if not _inside(environments, cut)}
    ordered = sorted(cut for cut in cuts if first < cut < last)

    parts = pairwise([0, *breaks, len(text)])
    return sorted(breaks + [cut for part in parts for cut in _halve(ordered, *part, max_chars)])


def _halve(cuts: list[int], low: int, high: int, max_chars: int) -> list[int]:
    """Cuts of the part [low, high), most central first, until every part is short or has no cut left."""
    near = bisect_left(cuts, (low + high) / 2)
    central = [cut for cut in cuts[max(near - 1, 0) : near + 1] if low < cut < high]
    if high - low <= max_chars or not central:
        return []
    cut = min(central, key=lambda cut: abs(2 * cut - low - high))
    return [cut, *_halve(cuts, low, cut, max_chars), *_halve(cuts, cut, high, max_chars)]


def _environments(text: str) -> list[Span]:
    """\\begin{name} … \\end{name}; one that is never closed protects nothing."""
    spans: list[Span] = []
    opened: dict[str, list[int]] = {}
    for edge in _ENVIRONMENT_EDGE.finditer(text):
        kind, name = edge.groups()
        if kind == "begin":
            opened.setdefault(name, []).append(edge.start())
        elif opened.get(name):
            spans.append((opened[name].pop(), edge.end()))
    return _union(spans)


def _maths(text: str) -> list[Span]:
    """Formulas with their delimiters. "$" closes on its own line and not before a digit ("$5 or $6")."""
    spans: list[Span] = []
    absent: set[str] = set()  # closers that come no more: to seek them for each opener would be quadratic
    position = 0
    while edge := _MATHS_EDGE.search(text, position):
        position = edge.end()
        closer = _CLOSER.get(edge[0])
        if closer is None or closer in absent:
            continue
        at = text.find(closer, position)
        end = at + len(closer)
        if at < 0:
            absent.add(closer)
        elif closer != "$" or not (text[end : end + 1].isdigit() or "\n" in text[position:at]):
            spans.append((edge.start(), end))
            position = end
    return spans


def _operators(text: str, span: Span) -> list[int]:
    """Where a formula can be cut: before an "=" or "+" (and its space) outside braces, with a left side."""
    cuts: list[int] = []
    opener = 2 if text.startswith(("$$", r"\(", r"\["), span[0]) else 1
    depth, left = 0, 0  # left: end of the left side so far; while there is none 0, which is no cut
    for at in range(span[0] + opener, span[1] - opener):
        character = text[at]
        if character in "=+" and depth == 0 and text[at - 1] not in "<>!:=":
            cuts.append(left)
        depth += (character == "{") - (character == "}")
        if not character.isspace():
            left = at + 1
    return cuts


def _union(spans: list[Span]) -> list[Span]:
    """The same ground in sorted spans that do not overlap."""
    union: list[Span] = []
    for low, high in sorted(spans):
        if union and low < union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], high))
        else:
            union.append((low, high))
    return union


def _inside(spans: list[Span], offset: int) -> bool:
    """Whether a cut at this offset would split one of the spans (sorted, apart)."""
    index = bisect_left(spans, (offset,))
    return index > 0 and offset < spans[index - 1][1]
