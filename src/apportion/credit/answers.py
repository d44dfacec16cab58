"""Where a response states its own final answer, as tokens. Found in text, counted in the ids that were sampled.

Shapes: _R responses.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import AfterValidator, Field
from torch import Tensor

from apportion.errors import InputError
from apportion.rollouts import Rollouts

# [ours] A boxed answer with up to two levels of braces inside. Possessive, so that it never goes back over its text.
BOXED = r"\\boxed\{((?:[^{}]++|\{(?:[^{}]++|\{[^{}]*+\})*+\})++)\}"

# [ours] Asks for the answer in the form in which `BOXED` finds it.
CUE = "\n\nThe final answer is \\boxed{"


def _with_group(pattern: str) -> str:
    expected = "a regular expression whose first group is the answer itself"
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise InputError("answer_pattern", f"{pattern!r} ({error})", expected) from None
    if groups < 1:
        raise InputError("answer_pattern", repr(pattern), expected)
    return pattern


AnswerPattern = Annotated[
    str,
    AfterValidator(_with_group),
    Field(description="finds the stated answer: the last match is its cue and it, group 1 the answer itself"),
]


@dataclass(frozen=True)
class Stated:
    """A stated answer: `cue` is the first token of the whole match, `start` and `end` those of the answer itself.

    A token that holds any part of the match belongs to it.
    """

    cue: int
    start: int
    end: int


def stated_answers(rollouts: Rollouts, pattern: str, method: str, wanted: Tensor | None = None) -> list[Stated | None]:
    """[R] the last answer that each of the `wanted` [R] responses states; None for others, and where it
    states none. All are wanted where that is left out.

    The last token of a response that is not truncated is EOS, and that is no part of an answer. Where to look is
    [ours]: the papers speak of the response's own final answer.

    Raises:
        InputError: a wanted response has no text with `char_start` to look in.
    """
    text, starts = rollouts.text or (None,) * len(rollouts), rollouts.char_start
    use = [True] * len(rollouts) if wanted is None else wanted.tolist()
    lacking = next((i for i, own in enumerate(text) if use[i] and (own is None or starts is None)), None)
    if lacking is not None:
        raise InputError(
            f"{method}: text of row {lacking}", "none with offsets",
            "`text` with `offsets`, to find the stated answer in", "give both for every row",
        )  # fmt: skip
    found: list[Stated | None] = [None] * len(rollouts)
    spans, stops = list(pairwise(rollouts.offsets.tolist())), (~rollouts.truncated).tolist()
    for i, own in enumerate(text):
        if use[i] and own is not None and starts is not None:
            a, b = spans[i]
            found[i] = _last(re.finditer(pattern, own), starts[a:b].tolist(), b - a - stops[i])
    return found


def reasoning_ends(rollouts: Rollouts, pattern: str, method: str, wanted: Tensor | None = None) -> list[int]:
    """[R] the position where the stated answer's cue begins; without an answer the response's end, before its EOS.

    Raises:
        InputError: a wanted response has no text with `char_start` to look in.
    """
    without = (rollouts.length - (~rollouts.truncated).long()).clamp(min=0).tolist()
    found = stated_answers(rollouts, pattern, method, wanted)
    return [end if stated is None else stated.cue for stated, end in zip(found, without, strict=True)]


def _last(matches: Iterable[re.Match[str]], starts: list[int], end: int) -> Stated | None:
    """The last match whose group 1 has a token before `end`."""
    found = None

    def first_token(character: int) -> int:
        """Of the tokens that hold the character, the first; several hold parts of one character."""
        return bisect_left(starts, starts[max(bisect_right(starts, character) - 1, 0)])

    for match in matches if starts else ():
        if match.group(1):
            first, last = first_token(match.start(1)), min(bisect_left(starts, match.end(1)), end)
            if first < last:
                found = Stated(first_token(match.start()), first, last)
    return found
