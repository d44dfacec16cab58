"""Answers in words: what some of them name (numbers, infinity, the real line), dates, and when two phrases are one."""

from __future__ import annotations

import re
from fractions import Fraction

from apportion.verify.nodes import Interval, Node, Scalar, Text
from apportion.verify.numerals import WORDS, Numeral

_MONTH = (
    "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|"
    "nov(?:ember)?|dec(?:ember)?"
)
_DATE = re.compile(
    rf"(?:(?P<month>{_MONTH})\.? (?P<day>\d{{1,2}})(?:st|nd|rd|th)?|(?P<day_first>\d{{1,2}})(?:st|nd|rd|th)? (?:of )?"
    rf"(?P<month_last>{_MONTH})\.?)(?:,? (?P<year>\d{{4}}))?",
    re.IGNORECASE,
)
_NO_LIMIT = re.compile(r"dne|(?:it|(?:the )?limit) does not exist")
_ALL_REALS = frozenset(
    {"all real numbers", "all reals", "set of all real numbers", "real numbers", "any real number", "every real number"}
)


def words(text: str) -> str:
    """Words with case, spacing and punctuation taken out."""
    plain = re.sub(r"[^A-Za-z0-9]+", " ", text).strip().lower()
    return re.sub(r"^(?:an?|the) (?=\w{3})", "", "does not exist" if _NO_LIMIT.fullmatch(plain) else plain)


def read_words(text: str, formula: str = "") -> Node:
    """Words, or what some of them name: numbers, infinity, the real line."""
    plain = words(text)
    if plain in WORDS:
        return Scalar(str(WORDS[plain]), Numeral(Fraction(WORDS[plain])))
    if infinity := re.fullmatch(r"(positive |negative |minus )?infinity", plain):
        return Scalar(r"-\infty" if infinity[1] in ("negative ", "minus ") else r"\infty")
    if plain in _ALL_REALS:
        return Interval(Scalar(r"-\infty"), Scalar(r"\infty"), True, True)
    return Text(plain, formula)


def read_date(text: str) -> Node | None:
    """June 5, 5 June 2003."""
    date = _DATE.fullmatch(text)
    if date is None:
        return None
    month = (date["month"] or date["month_last"]).lower()[:3]
    return Text(f"{month} {int(date['day'] or date['day_first'])} {date['year'] or ''}".strip())
