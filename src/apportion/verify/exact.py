"""Exact string match of the final answer."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from apportion.verify.extract import final_answer
from apportion.verify.gold import accepted, unusable
from apportion.verify.verdict import Verdict


@dataclass(frozen=True)
class ExactSettings:
    """What is levelled before strings are compared. [ours]

    Attributes:
        whitespace: runs of whitespace count as one space, and ends are trimmed.
        case: case matters.
        extract: compare the response's final answer (box, <answer>, "answer is", ...); off, the whole response.
    """

    whitespace: bool = True
    case: bool = True
    extract: bool = True


def _level(text: str, settings: ExactSettings) -> str:
    text = unicodedata.normalize("NFC", text)
    if settings.whitespace:
        text = re.sub(r"\s+", " ", text).strip()
    return text if settings.case else text.casefold()


def unreadable_gold(gold: object, settings: ExactSettings) -> str | None:
    """A gold must hold at least one character."""
    return unusable(gold)


def grade(gold: object, prediction: str, settings: ExactSettings) -> Verdict:
    """Correct when the strings are equal; a list of golds accepts any of them."""
    if reason := unusable(gold):
        return Verdict("abstain", reason)
    golds = accepted(gold)
    answer = final_answer(prediction) if settings.extract else prediction
    shown = " | ".join(golds)
    if answer is None:
        return Verdict("wrong", "no answer found", shown, None)
    key = _level(answer, settings)
    for one in golds:
        if _level(one, settings) == key:
            return Verdict("correct", "same string", one, answer)
    return Verdict("wrong", "another string", shown, answer)
