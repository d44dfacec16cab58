"""Multiple choice: one letter from A to J."""

from __future__ import annotations

import re
from dataclasses import dataclass

from apportion.errors import InputError
from apportion.verify.extract import after_thinking, final_answer
from apportion.verify.normalise import normalise
from apportion.verify.verdict import Verdict

_WRAPPED = re.compile(r"\(?\[? ?([A-Za-z]) ?\]?\)?(?:[.:)\]]|$)(?:\s.*)?", re.DOTALL)
_OPTION = re.compile(r"(?:option|choice|answer) ?\(?([A-Za-z])\)?(?![A-Za-z])(?:[.:].*)?", re.IGNORECASE | re.DOTALL)
_STANDING = re.compile(r"(?<![A-Za-z\\])\(?([A-J])\)(?![A-Za-z])|(?<![A-Za-z'\\])([A-J])(?=[.:]?\s*$)")


@dataclass(frozen=True)
class ChoiceSettings:
    """`letters`: the options that exist, in order. `any_case`: "b" is B. [ours]"""

    letters: str = "ABCDEFGHIJ"
    any_case: bool = True

    def __post_init__(self) -> None:
        if not self.letters.isalpha() or self.letters != self.letters.upper():
            raise InputError("letters", repr(self.letters), "capital letters such as 'ABCD'")


def read_letter(text: str, settings: ChoiceSettings) -> str | None:
    """The letter that an answer string names: "B", "(B)", "B.", "B) because", "option B", "\\text{B}"."""
    plain = re.sub(r"\\text\{ ?([^{}]*?) ?\}", r"\1", normalise(text)).replace("**", "").strip()
    match = _WRAPPED.fullmatch(plain) or _OPTION.fullmatch(plain)
    if match is None:
        return None
    letter = match.group(1).upper() if settings.any_case else match.group(1)
    return letter if letter in settings.letters else None


def choose(response: str, settings: ChoiceSettings) -> str | None:
    """The letter a response settles on: that of its final answer, else the last "(B)" or a letter that ends it."""
    answer = final_answer(response)
    if answer is not None and (letter := read_letter(answer, settings)):
        return letter
    tail = after_thinking(response)
    if tail is None or "\\boxed" in tail:
        return None
    standing = [a or b for a, b in _STANDING.findall(tail)]
    return next((letter for letter in reversed(standing) if letter in settings.letters), None)


def unreadable_gold(gold: object, settings: ChoiceSettings) -> str | None:
    """Why `gold` names none of the options; None if it does."""
    if read_letter(str(gold), settings) is None:
        return f"the gold {str(gold)[:80]!r} names none of the options {settings.letters}"
    return None


def grade(gold: object, prediction: str, settings: ChoiceSettings) -> Verdict:
    """Correct when both name the same letter."""
    if reason := unreadable_gold(gold, settings):
        return Verdict("abstain", reason, str(gold), None)
    wanted, chosen = read_letter(str(gold), settings), choose(prediction, settings)
    if chosen is None:
        return Verdict("wrong", "no option named", wanted, None)
    if wanted == chosen:
        return Verdict("correct", "same option", wanted, chosen)
    return Verdict("wrong", "another option", wanted, chosen)
