"""Plain numerals, read exactly: integers, decimals, fractions, mixed numbers, scientific notation.

Most answers are one of these. Reading them as exact fractions needs no computer algebra, cannot hang, and keeps
every digit, so 1/3 and 0.333333 meet at the documented tolerance and nowhere else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

# Larger exponents would build integers of thousands of digits from a dozen characters.
MAX_EXPONENT = 4000
MAX_DIGITS = 4000

# Functions that may be written without a backslash.
FUNCTIONS = "arcsin|arccos|arctan|arccot|asin|acos|atan|sinh|cosh|tanh|coth|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|abs"

_INT = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
_DEC = rf"(?:{_INT}(?:\.\d*)?|\.\d+)"
_SIGN = r"(?P<sign>[-+]?) ?"
_SHAPES = tuple(
    (name, re.compile(_SIGN + body))
    for name, body in (
        ("decimal", rf"(?P<a>{_DEC})"),
        ("fraction", rf"\\frac\{{ ?(?P<a>-? ?{_DEC}) ?\}} ?\{{ ?(?P<b>-? ?{_DEC}) ?\}}"),
        ("fraction", rf"\(?(?P<a>-?{_DEC})\)? ?/ ?(?P<b>-?{_DEC})"),
        ("fraction", rf"(?P<a>{_DEC}) ?\\div (?P<b>{_DEC})"),
        ("mixed", r"(?P<whole>\d+) ?\\frac\{ ?(?P<a>\d+) ?\} ?\{ ?(?P<b>\d+) ?\}"),
        ("mixed", r"(?P<whole>\d+) (?:and )?(?P<a>\d+) ?/ ?(?P<b>\d+)"),
        ("scientific", rf"(?P<a>{_DEC})[eE](?P<b>[-+]?\d+)"),
        (
            "scientific",
            rf"(?P<a>{_DEC}) ?(?:\\times|\\cdot|x) ?10 ?\^ ?\{{? ?(?P<b>[-+]? ?\d+) ?\}}?",
        ),
        ("power", r"(?P<a>10) ?\^ ?\{? ?(?P<b>[-+]? ?\d+) ?\}?"),
        ("repeating", r"(?P<a>\d*\.\d*)\\(?:overline|bar|dot)\{(?P<b>\d+)\}"),
        ("repeating", r"(?P<a>\d+\.\d*)\((?P<b>\d+)\)"),
    )
)
_SMALL = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
# Numbers below 100 in words.
WORDS = {word: value for value, word in enumerate(_SMALL)} | {
    tens + (f" {_SMALL[ones]}" if ones else ""): 20 + 10 * at + ones
    for at, tens in enumerate(_TENS)
    for ones in range(10)
}
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+")


@dataclass(frozen=True)
class Numeral:
    """An exact value. `approximate` marks a decimal point or an exponent in its spelling; `places` counts the
    decimals written (the finest place it vouches for)."""

    value: Fraction
    approximate: bool = False
    places: int = 0


def looks_like_list(text: str) -> bool:
    """Whether `text` is also readable as a list of integers: 100,200 against 100200."""
    return _THOUSANDS.fullmatch(text) is not None


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").replace(" ", "").rstrip("."))


def read_numeral(text: str) -> Numeral | None:
    """The numeral that `text` (normalised) is as a whole, else None. An improper "4 10/3" is no mixed number."""
    if len(text) > MAX_DIGITS:
        return None
    for name, shape in _SHAPES:
        match = shape.fullmatch(text)
        if match is None:
            continue
        part = match.groupdict()
        a = part["a"]
        if name == "decimal":
            value = _fraction(a)
        elif name == "fraction":
            if not (denominator := _fraction(part["b"])):
                return None
            value = _fraction(a) / denominator
        elif name == "mixed":
            if not 0 < int(a) < int(part["b"]):
                return None
            value = int(part["whole"]) + Fraction(int(a), int(part["b"]))
        elif name == "repeating":
            head, _, tail = a.partition(".")
            scale = 10 ** len(tail)
            value = Fraction(int((head + tail) or 0), scale)
            value += Fraction(int(part["b"]), scale * (10 ** len(part["b"]) - 1))
        else:
            if len(part["b"]) > 6 or abs(exponent := int(part["b"].replace(" ", ""))) > MAX_EXPONENT:
                return None
            value = (1 if name == "power" else _fraction(a)) * Fraction(10) ** exponent
        spelled = a + (part.get("b") or "") if name == "fraction" else a
        approximate = name not in ("power", "repeating", "mixed") and ("." in spelled or "e" in text.lower())
        places = len(a.partition(".")[2]) if name == "decimal" else 0
        return Numeral(-value if part["sign"] == "-" else value, approximate, places)
    return None


def close(a: Fraction, b: Fraction, rel_tol: float) -> bool:
    """|a − b| ≤ rel_tol · max(|a|, |b|), in exact arithmetic: zero is close to nothing but zero."""
    return abs(a - b) <= Fraction(rel_tol).limit_denominator(10**15) * max(abs(a), abs(b))


def same_numeral(a: Numeral, b: Numeral, rel_tol: float) -> bool:
    """Exact equality, or `close` when a decimal is in play. Two decimals written to the same number of places
    are compared exactly: 123456.7 and 123456.8 are different answers."""
    if a.value == b.value:
        return True
    if not (a.approximate or b.approximate):
        return False
    if a.places and a.places == b.places:
        return False
    return close(a.value, b.value, rel_tol)
