"""Find the final answer inside a model's response.

Rules, first match wins [ours]:

1. Only text after the last `</think>` counts. A `<think>` that never closes is an unfinished response.
2. The last `\\boxed{...}` or `\\fbox{...}` whose braces balance; a box cut off by truncation is skipped.
3. The last `<answer>...</answer>`.
4. `\\boxed` followed by one bare token (`\\boxed 5`, `\\boxed5`).
5. What follows the last `####` (GSM8K).
6. What follows the last "answer is", "answer:", "answer =" or a heading "Answer" up to the end of that sentence, line
   or displayed formula.
7. The whole text, if it is short enough to be nothing but an answer; of one that ends in a statement ("Hence x = 5.",
   "The area is $12$.") what is stated.

"The answer is" before an answer in a box or a tag is left out.

All scans are linear in the length of the response: model text is hostile, and a quadratic scan is an attack.
"""

from __future__ import annotations

import re

MAX_BARE_CHARS = 400

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_JOINT = re.compile(r"[\s$]{0,8}(?:,|and|or|,\s{0,3}(?:and|or))[\s$]{0,8}")
_BARE_TOKEN = re.compile(r"[^\s{}$]{1,200}")
# Repeats are bounded: `\s*` beside `\s*` would be quadratic in a run of spaces.
_CUE = re.compile(
    r"\banswers?(?:\s{1,3}to\s{1,3}(?:the|this)\s{1,3}(?:question|problem))?[\s*_]{0,4}"
    r"(?:(?:(?:is|are)(?!n['’]t)|equals|(?:would|will|should|must)\s{1,3}be)\b|=|:)[\s*_:]{0,6}"
    r"(?:(?:therefore|thus|hence|then|simply|just|equal\s{1,3}to|given\s{1,3}by)\b[\s*_:,]{0,4}){0,2}"
    r"|^[#*_ ]{0,8}(?:(?:the|my|our|final|correct)\s){0,3}answers?[*_ :]{0,6}\n\s{0,6}",
    re.IGNORECASE | re.MULTILINE,
)
_LEAD = re.compile(
    r"(?P<wrapper>\\text(?:bf|it|rm)?\{)?[\s*]{0,4}"
    r"(?:(?:so|thus|hence|therefore|the|my|our|final|correct)[\s,]{1,3}){0,4}",
    re.IGNORECASE,
)
_DISPLAY = re.compile(r"\\\[.*?\\\]|\$\$.*?\$\$", re.DOTALL)
_SENTENCE_START = re.compile(r"\n\s{0,20}|(?<=[.!?])\s{1,20}(?=[A-Z$\\])")
_STATED = re.compile(
    r"(?P<lead>(?:therefore|thus|hence|so|then|finally|and|we (?:get|have|find|obtain|conclude that)|(?:this|which) "
    r"gives)\b[,: ]{0,3}){0,3}"
    r"(?:(?P<subject>[A-Za-z](?:[A-Za-z ,'’-]|\$[A-Za-z_\\{}() ]{1,20}\$){0,200}?) "
    r"(?:is|are|equals|is equal to) (?=\$|\\|[-+]?[\d(.]|[A-Za-z] ?=))?"
    r"(?P<stated>.+)",
    re.IGNORECASE | re.DOTALL,
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


def _spans(text: str) -> list[tuple[int, str, int]]:
    """(start, contents, end) of every balanced outermost box, in order of appearance."""
    found: list[tuple[int, str, int]] = []
    position = 0
    pairs: dict[int, int] | None = None
    while match := _BOX.search(text, position):
        position = match.end()
        if pairs is None:
            pairs = matching(text)
        # A box that truncation left open is passed over; a box inside it may still balance.
        if (end := pairs.get(position)) is not None:
            found.append((match.start(), text[position + 1 : end], end + 1))
            position = end + 1
    return found


def boxes(text: str) -> list[str]:
    """Contents of every balanced outermost box, in order of appearance."""
    return [inside for _, inside, _ in _spans(text)]


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
    shown = _DISPLAY.match(text, last.end())
    end = _SENTENCE_END.search(text, shown.end() if shown else last.end())
    return text[last.end() : end.start() if end else None].lstrip("} ").rstrip("*")


def _without_lead(answer: str) -> str:
    """ "5" of "\\text{The answer is } 5"."""
    lead = _LEAD.match(answer)
    cue = _CUE.match(answer, lead.end()) if lead else None
    if lead is None or cue is None:
        return answer
    if not lead["wrapper"]:
        return answer[cue.end() :]
    closing = matching(answer).get(lead.end("wrapper") - 1)
    return answer[cue.end() :] if closing is None else answer[cue.end() : closing] + answer[closing + 1 :]


def _bare(text: str) -> str | None:
    """A short text, or what its last sentence states."""
    if not 0 < len(text) <= MAX_BARE_CHARS:
        return None
    starts = [match.end() for match in _SENTENCE_START.finditer(text)]
    stated = _STATED.fullmatch(text, starts[-1] if starts else 0)
    return stated["stated"] if stated and (stated["lead"] or stated["subject"]) else text


def side_by_side(text: str) -> list[str]:
    """Contents of the last boxes of a response that only "and", "or" or a comma part: \\boxed{1} and \\boxed{2}."""
    tail = after_thinking(text) or ""
    run: list[str] = []
    last_end = None
    for start, inside, end in _spans(tail):
        joined = last_end is not None and _JOINT.fullmatch(tail, last_end, start)
        if not joined:
            run = []
        run.append(inside)
        last_end = end
    return run


def _marked(text: str) -> str | None:
    """What rules 2 to 5 find."""
    for rule in (_last_box, _tagged, _bare_box, _after_hashes):
        if (answer := rule(text)) is not None:
            return answer
    return None


def gold_forms(text: str) -> list[str]:
    """What a gold accepts: its marked answer; else itself, and what it states where it is a single sentence.

    The last sentence of several is a part of the answer only.
    """
    text = text.strip()
    marked = _marked(text)
    if marked is not None:
        return [marked.strip() or text]
    stated = None if _SENTENCE_START.search(text) else final_answer(text)
    return list(dict.fromkeys([text, stated or text]))


def final_answer(text: str) -> str | None:
    """The answer string of a response under the rules at the top of this file, or None if it has none."""
    tail = after_thinking(text)
    if tail is None:
        return None
    for rule in (_marked, _after_cue):
        answer = rule(tail)
        if answer is not None:
            return _without_lead(answer.strip()).strip() or None
    return _bare(tail.strip())
