"""Find the final answer inside a model's response.

Rules, first match wins [ours]:

1. Only text after the last `</think>` counts. A `<think>` that never closes is an unfinished response.
2. The last `\\boxed{...}` or `\\fbox{...}` whose braces balance; a box cut off by truncation is skipped.
3. The last `<answer>...</answer>`.
4. `\\boxed` followed by one bare token (`\\boxed 5`, `\\boxed5`).
5. What follows the last `####` (GSM8K).
6. What follows the last "answer is", "answer:" or "answer =" up to the end of that sentence or line.
7. The whole text, if it is short enough to be nothing but an answer.

All scans are linear in the length of the response: model text is hostile, and a quadratic scan is an attack.
"""

from __future__ import annotations

import re

MAX_BARE_CHARS = 400

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_BARE_TOKEN = re.compile(r"[^\s{}$]{1,200}")
# Repeats are bounded: `\s*` beside `\s*` would be quadratic in a run of spaces.
_CUE = re.compile(
    r"\banswers?(?:\s{1,3}to\s{1,3}(?:the|this)\s{1,3}(?:question|problem))?[\s*]{0,4}"
    r"(?:(?:is|are)(?!n['’]t)|=|:)[\s*:]{0,6}",
    re.IGNORECASE,
)
# The last dot of an ellipsis ends no sentence.
_SENTENCE_END = re.compile(r"(?<!\.)[.!?](?=\s|$)|\n|,?\s(?:which|because|since|so|where|when)\b|$")


def after_thinking(text: str) -> str | None:
    """The part of a response that may hold its answer; None if its thinking block never closes."""
    _, closed, tail = text.rpartition("</think>")
    if closed:
        return tail
    return None if "<think>" in text else text


def matching(text: str, brackets: str = "{}") -> dict[int, int]:
    """Position of every opening bracket that is closed → position of its closing one. `\\{`, `\\}` do not count."""
    pairs: dict[int, int] = {}
    stack: list[int] = []
    for match in re.finditer(rf"\\.|[{brackets}]", text, re.DOTALL):
        if match.group() == brackets[0]:
            stack.append(match.start())
        elif match.group() == brackets[1] and stack:
            pairs[stack.pop()] = match.start()
    return pairs


def boxes(text: str) -> list[str]:
    """Contents of every balanced outermost box, in order of appearance."""
    found: list[str] = []
    position = 0
    pairs: dict[int, int] | None = None
    while match := _BOX.search(text, position):
        position = match.end()
        if pairs is None:
            pairs = matching(text)
        # A box that truncation left open is passed over; a box inside it may still balance.
        if (end := pairs.get(position)) is not None:
            found.append(text[position + 1 : end])
            position = end + 1
    return found


def _last_box(text: str) -> str | None:
    found = boxes(text)
    if not found:
        return None
    # A box around nothing but a box adds nothing: `\\boxed{\\boxed{5}}` answers 5.
    inner = boxes(found[-1])
    return inner[-1] if inner else found[-1]


def _tagged(text: str) -> str | None:
    start = text.rfind("<answer>")
    if start < 0:
        return None
    end = text.find("</answer>", start)
    return text[start + len("<answer>") : end] if end >= 0 else None


def _bare_box(text: str) -> str | None:
    last = max(_BOX.finditer(text), key=re.Match.start, default=None)
    if last is None:
        return None
    token = _BARE_TOKEN.match(text, last.end())
    return re.sub(r"(?<![.,])[.,;:]$", "", token.group()) if token else ""


def _after_hashes(text: str) -> str | None:
    _, found, tail = text.rpartition("####")
    return tail.strip().split("\n", 1)[0] if found else None


def _after_cue(text: str) -> str | None:
    last = max(_CUE.finditer(text), key=re.Match.start, default=None)
    if last is None:
        return None
    end = _SENTENCE_END.search(text, last.end())
    return text[last.end() : end.start() if end else None].lstrip("} ").rstrip("*")


def final_answer(text: str) -> str | None:
    """The answer string of a response under the rules at the top of this file, or None if it has none."""
    tail = after_thinking(text)
    if tail is None:
        return None
    for rule in (_last_box, _tagged, _bare_box, _after_hashes, _after_cue):
        answer = rule(tail)
        if answer is not None:
            return answer.strip() or None
    bare = tail.strip()
    return bare if 0 < len(bare) <= MAX_BARE_CHARS else None
