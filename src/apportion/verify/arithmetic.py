"""Exact checks of the arithmetic inside a response, step by step. No model text is evaluated as a program. [ours]"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from fractions import Fraction
from typing import Any

from apportion.verify.steps import Steps, StepVerifier

# GSM8K's calculator marks: <<48/2=24>>.
_MARK = re.compile(r"<<([^<>=]{1,200})=([^<>=]{1,60})>>")
_NUMBER = r"\d{1,30}(?:,\d{3})*(?:\.\d{1,30})?|\.\d{1,30}"
# In running text: what may stand left of an equals sign, found backwards from it, and a whole number to its right.
_LEFT = re.compile(r"[\d.,()+*/x×·÷−–^%$\s-]{1,200}\Z")
# What goes on behind that number: a larger number, another operand, 5 and 2/3, a remainder.
_GOES_ON = (
    r"\w|[.,]\d|\s*[(^*/+×÷·=]|\s*[-−–]\s*[$(.]*\d|\s*x\s*\d|\s+\d|\s+and\s+[$(]?\d+\s*/"
    r"|(?:\s+\w+){0,4}?\s+a\s+remainder"
)
_RIGHT = re.compile(rf"\s*((?>-?\s?\$?(?:{_NUMBER})(?:\s?%)?))(?!{_GOES_ON})")
# What an expression hangs on to its left: "40 books - 20 = 20", "1 and 1/4 = 15".
_HANGS = re.compile(r"[\w)]\s*\0\s*[-−–]|\d\s+and\s*\0\s*\(?\d+\s*/")
_CENTS = re.compile(r"\s*(?:cents?\b|¢)")
_MIDDLE = re.compile(r"(?>[\d.,()+*/x×·÷−–^%$\s-]{1,200}=){1,9}")
_OPERATION = re.compile(r"[\d)%]\s*[+*/x×·÷−–^-]")
_TOKEN = re.compile(rf"\s*(?:(?P<number>{_NUMBER})|(?P<other>\*\*|[-+*/()%]))")
_SPELLING = str.maketrans({"×": "*", "·": "*", "x": "*", "÷": "/", "−": "-", "–": "-", "$": None, "^": None})
_DEEPEST, _MOST_DIGITS = 40, 400


class _Unreadable(ValueError):
    pass


def arithmetic_verifier(marks: bool = True, equations: bool = True) -> StepVerifier:
    """A step verifier that recomputes every equation of a response in rational numbers.

    A step is a line that holds one; it is right where all of its equations are. A result that is written with
    fewer digits than it has is right where it is the exact one rounded, half up or towards 0, to the digits shown.
    Lines without an equation are no steps; what cannot be read (variables, functions) is no equation. That each step
    is the one the problem asks for is not checked.

    Args:
        marks: read GSM8K's `<<48/2=24>>`. equations: read `48 / 2 = 24` in running text, outside of marks.
    """

    def verify(
        prompts: Sequence[str], responses: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> list[Steps | None]:
        return [check_lines(text, marks, equations) for text in responses]

    return verify


def check_lines(text: str, marks: bool = True, equations: bool = True) -> Steps:
    """(character where the line starts, whether its equations hold) for every line of a response with an equation."""
    steps, start = [], 0
    for line in text.splitlines(keepends=True):
        found = [holds(*match.groups()) for match in _MARK.finditer(line)] if marks else []
        if equations:
            found += [holds(left, right) for left, right in _equations(_MARK.sub(" ", line))]
        judged = [ok for ok in found if ok is not None]
        if judged:
            steps.append((start, all(judged)))
        start += len(line)
    return steps


def _equations(line: str) -> Iterator[tuple[str, str]]:
    """(left, right) of what looks like an equation with an operation on its left and a number on its right."""
    for sign in re.finditer("=", line):
        left = _LEFT.search(line[max(0, sign.start() - 200) : sign.start()])
        # In a = b + c = d, what a is claimed to be is d.
        behind = _MIDDLE.match(line, sign.end())
        right = _RIGHT.match(line, behind.end() if behind else sign.end())
        if not left or not right or not _OPERATION.search(left[0]):
            continue
        # A sentence may end or a list go on right before the equation.
        expression = re.split(r"[.,]\s", left[0])[-1]
        start = sign.start() - len(expression)
        if not _HANGS.search(f"{line[max(0, start - 20) : start]}\0{expression[:40]}"):
            # A cent is to a dollar what a percentage is to its number.
            cents = "$" in expression and "%" not in right[1] and _CENTS.match(line, right.end())
            yield expression, right[1] + "%" * bool(cents)


def holds(left: str, right: str) -> bool | None:
    """Whether left = right exactly, or rounded to the digits that `right` shows; None where either cannot be read.

    A percentage may stand for the hundredth or for the number itself: 18/450 · 100 = 4%.

    Numbers: "10/3", "3.33" True; "2/3", "0.66" True (cut off), "0.67" True, "0.6" True, "0.65" False; "1/0", "1" False.
    """
    try:
        shown = right.translate(_SPELLING).replace(",", "").replace(" ", "")
        wanted = Reader(shown.rstrip("%")).whole()
        exact = Reader(left.translate(_SPELLING)).whole()
    except _Unreadable:
        return None
    except ZeroDivisionError:
        return False
    values = (exact, exact * 100) if shown.endswith("%") else (exact,)
    return any(_shows(value, wanted, shown.rstrip("%")) for value in values)


def _shows(exact: Fraction, wanted: Fraction, shown: str) -> bool:
    """Whether `shown`, which is the number `wanted`, is `exact` or that rounded to as many digits."""
    if exact == wanted:
        return True
    digits = len(shown.partition(".")[2])
    if not digits or (10**digits * exact).denominator == 1:
        return False
    place = Decimal(1).scaleb(-digits)
    number = Decimal(exact.numerator) / Decimal(exact.denominator)
    return Decimal(shown) in {number.quantize(place, mode) for mode in (ROUND_HALF_UP, ROUND_DOWN)}


class Reader:
    """Reads an arithmetic expression of +, −, *, /, % (a hundredth) and parentheses into a fraction.

    Raises:
        ValueError: it is no such expression, or one too deep or with too many digits to be worth reading.
    """

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        at = 0
        while at < len(text.rstrip()):
            match = _TOKEN.match(text, at)
            if match is None:
                raise _Unreadable(text)
            self.tokens.append(match[0].strip().replace(",", ""))
            at = match.end()
        self.at = self.depth = 0

    def whole(self) -> Fraction:
        value = self._sum()
        if self.at < len(self.tokens):
            raise _Unreadable(self.tokens[self.at])
        return value

    def _sum(self) -> Fraction:
        # A sign stands in front of a sum only: in "7x+12" the x is no multiplication.
        sign = -1 if self._next("-") else 1
        value = sign * self._product()
        while self._next("+", "-"):
            value = value + self._product() if self.tokens[self.at - 1] == "+" else value - self._product()
        return value

    def _product(self) -> Fraction:
        value = self._share()
        while self._next("*", "/"):
            value = value * self._share() if self.tokens[self.at - 1] == "*" else value / self._share()
            if value.numerator.bit_length() + value.denominator.bit_length() > 4 * _MOST_DIGITS:
                raise _Unreadable("too many digits")
        return value

    def _share(self) -> Fraction:
        value = self._atom()
        while self._next("%"):
            value /= 100
        return value

    def _atom(self) -> Fraction:
        if self._next("("):
            self.depth += 1
            if self.depth > _DEEPEST:
                raise _Unreadable("too deep")
            value = self._sum()
            if not self._next(")"):
                raise _Unreadable("a parenthesis that does not close")
            self.depth -= 1
            return value
        if self.at == len(self.tokens) or self.tokens[self.at][0] not in "0123456789.":
            raise _Unreadable("no number")
        self.at += 1
        return Fraction(self.tokens[self.at - 1])

    def _next(self, *wanted: str) -> bool:
        """Takes the next token where it is one of these."""
        found = self.at < len(self.tokens) and self.tokens[self.at] in wanted
        self.at += found
        return found
