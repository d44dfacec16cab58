"""Formulas through math-verify's parser, compared by value. Imported only where computer algebra is allowed.

math-verify's parser reads the LaTeX as a whole (its own front end searches text for formulas, and takes x and X for
one unknown); the comparison is ours, because its own rounds to six decimals and chops small numbers to zero, and
`simplify` on unequal formulas takes seconds.
Two formulas are equal when they agree, to 20 digits, at fixed points wherever both are real; constants must besides
have a difference that is zero to 300 digits. A formula that disagrees anywhere is refuted in milliseconds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from sympy.core.function import AppliedUndef

from apportion.verify.extract import matching
from apportion.verify.numerals import FUNCTIONS

# Timeouts are ours (the parent kills); math-verify warns about that at every start.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_PRIME = "'"
DIGITS = 30
MAX_NESTING = 24
EXACT_TOL = 1e-20
EXACT_DIGITS = 300

_STRAY = re.compile(r"\\(?![A-Za-z{}|&])")
_SIGN_RUN = re.compile(r"(?:[-+] ?){9}")
# Its unit stripping takes `t` off `3t`; its "nits" are covered by `numerals`.
_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
)
_CONVERSION = ConversionConfig(lowercase_symbols=False)
# Calls in the spelling of programs whose argument LaTeX puts between other marks than round brackets.
_CALL = re.compile(r"(?:(?P<sqrt>\\?sqrt)|abs) ?(?=\()")
_PREPARE = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<![A-Za-z])(?:np|math|sympy)\.", ""),
        (r"(?<![\\A-Za-z])a(?=(?:sin|cos|tan)(?![A-Za-z]))", "arc"),
        (rf"(?<![\\A-Za-z])(?<!\\text\{{)({FUNCTIONS})(?=[A-Za-z]?(?![A-Za-z]))", r"\\\1 "),
        (r"\\sqrt +(\d+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"\\(sin|cos|tan|ln|log|exp|arcsin|arccos|arctan) ?\{ ?([^{}]*) ?\}", r"\\\1(\2)"),
        # A degree sign inside a formula is a factor; the parser would drop it.
        (r"(\d+(?:\.\d+)?) ?\^ ?\\circ", r"(\\frac{\1\\pi}{180})"),
        # The parser takes \gamma for Euler's constant or a function; in answers it is an unknown.
        (r"\\gamma(?![A-Za-z])(?! ?_)", r"\\mu_{9993}"),
        # The parser takes 2(3) for a mixed number, and drops primes.
        (r"(\d) ?\(", r"\1\\cdot("),
        *(
            (rf"([A-Za-z])(?:_ ?\{{(\w+)\}})? ?{_PRIME * primes}", rf"\1_{{\g<2>{9990 + primes}}}")
            for primes in (3, 2, 1)
        ),
        (r"(?<=\d),(?=\d{3}(?!\d))", ""),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\(begin|end)\{(?:[bB]|small)?matrix\}", r"\\\1{pmatrix}"),
    )
)


class Unreadable(ValueError):
    """The parser does not read this formula as a whole."""


@lru_cache(maxsize=4096)
def parse_scalar(latex: str) -> Any:
    """The sympy object of a normalised formula. Raises `Unreadable`; never returns a part of the formula."""
    if _STRAY.search(latex.replace(r"\\", "") if r"\begin" in latex else latex):
        raise Unreadable("a stray backslash")
    if _too_deep(latex):
        raise Unreadable("nested too deeply")
    if re.search(r"\d \d", latex):
        raise Unreadable("two numbers side by side")
    if latex.count("{") != latex.count("}") or latex.count("(") != latex.count(")"):
        raise Unreadable("brackets do not balance")
    prepared = _bracketed_calls(latex)
    for pattern, replacement in _PREPARE:
        prepared = pattern.sub(replacement, prepared)
    if "'" in prepared:
        raise Unreadable("a prime on no letter")
    try:
        found = latex2sympy(
            prepared,
            is_real=not should_treat_as_complex(prepared),
            normalization_config=_NORMALIZATION,
            conversion_config=_CONVERSION,
        )
    except MemoryError:
        raise
    except Exception as error:  # The parser raises bare `Exception`, and sympy anything.
        raise Unreadable("math-verify does not parse it") from error
    if not isinstance(found, sympy.Basic | sympy.MatrixBase):
        raise Unreadable("math-verify reads no formula in it")
    tidied = _explicit(found) if r"\begin" in latex else _tidy(found)
    by_zero = any(power.base == 0 and power.exp.is_negative for power in tidied.atoms(sympy.Pow))
    if by_zero or tidied.has(sympy.zoo, sympy.nan):
        raise Unreadable("a division by zero")
    return tidied


def _bracketed_calls(text: str) -> str:
    """sqrt(...) and abs(...) as \\sqrt{...} and |...|."""
    while call := _CALL.search(text):
        opening, closing = ("\\sqrt{", "}") if call["sqrt"] else ("|", "|")
        end = matching(text, "()").get(call.end())
        if end is None:
            raise Unreadable("brackets do not balance")
        text = text[: call.start()] + opening + text[call.end() + 1 : end] + closing + text[end + 1 :]
    return text


def _too_deep(latex: str) -> bool:
    """Whether brackets nest so deeply, or signs follow each other so often, that the parser would take seconds."""
    depth = 0
    for character in latex:
        depth += (character in "({[") - (character in ")}]")
        if depth > MAX_NESTING:
            return True
    return latex.count("|") > MAX_NESTING or _SIGN_RUN.search(latex) is not None


def _explicit(matrix: Any) -> Any:
    """A matrix expression as one matrix of formulas."""
    try:
        if (
            isinstance(matrix, sympy.Pow)
            and isinstance(matrix.base, sympy.MatrixBase)
            and abs(matrix.exp) <= MAX_NESTING
        ):
            return (matrix.base**matrix.exp).applyfunc(_tidy)
        if not isinstance(matrix, sympy.MatrixBase | sympy.MatrixExpr):
            if any(isinstance(part, sympy.MatrixBase) for part in sympy.preorder_traversal(matrix)):
                raise Unreadable("a matrix where a number should be")
            return _tidy(matrix)
        worked_out = matrix.doit()
        worked_out = worked_out.as_explicit() if isinstance(worked_out, sympy.MatrixExpr) else worked_out
        return worked_out.applyfunc(_tidy)
    except (ValueError, TypeError, AttributeError, sympy.ShapeError) as error:
        raise Unreadable("matrices that do not fit") from error


def _tidy(expression: Any) -> Any:
    """f(x) as one unknown, the letter i as the imaginary unit and e as Euler's number; integrals worked out."""
    if not isinstance(expression, sympy.Expr):
        return expression
    calls = {call: sympy.Symbol(f"call_{call}", real=True) for call in expression.atoms(AppliedUndef)}
    letters = {s: {"i": sympy.I, "e": sympy.E}[s.name] for s in expression.free_symbols if s.name in ("i", "e")}
    if calls or letters:
        expression = expression.subs({**calls, **letters})
    # The real cube root of −8, not the principal one.
    expression = expression.replace(_is_odd_root_of_negative, _real_root)
    expression = expression.replace(lambda part: isinstance(part, sympy.Sum | sympy.Product), _series)
    if expression.has(sympy.Integral, sympy.Derivative, sympy.Limit, sympy.UnevaluatedExpr):
        expression = expression.doit()
    return expression


def _series(series: Any) -> Any:
    """An infinite series in some unknown, as its general term: evaluating one may never end, and two are the same
    answer when their terms and their first indices are."""
    index, first, last = series.limits[0]
    if last != sympy.oo or len(series.limits) > 1 or not series.free_symbols:
        return series.doit()
    term = series.function.subs(index, sympy.Symbol("index_of_series", real=True))
    return sympy.Symbol(f"{type(series).__name__}_from_{first}", real=True) * term


def _is_odd_root_of_negative(node: Any) -> bool:
    return bool(
        node.is_Pow and node.exp.is_Rational and node.exp.q > 1 and node.exp.q % 2 and node.base.is_number
        and node.base.is_negative
    )  # fmt: skip


def _real_root(power: Any) -> Any:
    return (-1) ** power.exp.p * (-power.base) ** power.exp


# Values of the free symbols: mixed signs, and whole numbers for formulas that hold over the integers only.
_POINTS: tuple[tuple[str, ...], ...] = (
    ("1.3719", "0.7243", "2.1187", "1.6331", "0.4519", "3.2381", "2.7113"),
    ("0.6173", "1.8929", "0.3371", "2.3957", "1.1423", "0.8117", "1.4717"),
    ("-1.2347", "-0.5813", "-2.0219", "-0.8741", "-1.7431", "-0.2963", "-1.3973"),
    ("2.5171", "-1.1317", "0.9187", "-1.5519", "1.2713", "-0.6547", "0.3779"),
    ("5", "3", "7", "2", "11", "4", "6"),
    ("4", "2", "3", "5", "6", "8", "9"),
    ("11.731", "17.293", "8.517", "23.119", "6.871", "13.337", "9.173"),
)


def _number(value: Any) -> complex | None:
    """A finite complex number, exact zero for what evaluation cannot tell from zero; None for the rest."""
    if not getattr(value, "is_number", False) or value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
        return None
    # What stayed unevaluated (3 mod 5) has no value to compare.
    return value if all(part.is_Number for part in value.as_real_imag()) else None


def _evaluate(expression: Any, symbols: Sequence[Any], point: Sequence[str]) -> Any:
    at = {symbol: sympy.Rational(point[k % len(point)]) + k // len(point) for k, symbol in enumerate(symbols)}
    try:
        value = expression.subs(at).evalf(DIGITS)
    except (TypeError, ValueError, ZeroDivisionError, AttributeError, NotImplementedError):
        return None
    return _number(value)


def _real(value: Any) -> bool:
    imaginary = sympy.im(value)
    return imaginary == 0 or abs(imaginary) < EXACT_TOL * abs(value)


def _zero(value: Any) -> bool:
    # evalf marks a result that it could not tell from zero with a precision of one bit.
    return all(part == 0 or getattr(part, "_prec", 0) == 1 for part in value.as_real_imag())


def _agree(a: Any, b: Any, tolerance: float) -> bool:
    if _zero(a) or _zero(b):
        return _zero(a) and _zero(b)
    return bool(abs(a - b) <= tolerance * sympy.Max(abs(a), abs(b)))


def _tolerance(rel_tol: float, *expressions: Any) -> float:
    return rel_tol if any(expression.has(sympy.Float) for expression in expressions) else EXACT_TOL


def _samples(a: Any, b: Any) -> list[tuple[Any, Any]]:
    """Values of both at every point where both are defined: where both are real, if there are such points."""
    symbols = sorted(a.free_symbols | b.free_symbols, key=lambda symbol: symbol.name)
    points = _POINTS if symbols else _POINTS[:1]
    values = [(_evaluate(a, symbols, point), _evaluate(b, symbols, point)) for point in points]
    defined = [(x, y) for x, y in values if x is not None and y is not None]
    return [(x, y) for x, y in defined if _real(x) and _real(y)] or defined


def same_value(a: Any, b: Any, rel_tol: float) -> bool:
    """Whether two parsed formulas are equal everywhere; a decimal in either is held to `rel_tol` only."""
    if a == b:
        return True
    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr):
        return _same_object(a, b, rel_tol)
    if a.has(sympy.oo, -sympy.oo) or b.has(sympy.oo, -sympy.oo):
        return bool(a.doit() == b.doit())
    tolerance = _tolerance(rel_tol, a, b)
    samples = _samples(a, b)
    if not samples or not all(_agree(x, y, tolerance) for x, y in samples):
        return False
    if tolerance > EXACT_TOL or a.free_symbols or b.free_symbols:
        return True
    return _zero_constant(a - b)


def _zero_constant(difference: Any) -> bool:
    """1/2^{200} + 1 is not 1: exact arithmetic for rationals, else zero to `EXACT_DIGITS` digits."""
    exact = difference.doit()
    if exact.is_Rational:
        return bool(exact == 0)
    return _zero(exact.evalf(5, maxn=EXACT_DIGITS))


def _same_object(a: Any, b: Any, rel_tol: float) -> bool:
    """Matrices entry by entry; sets and whatever else the parser makes are left to math-verify."""
    if isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase):
        return a.shape == b.shape and all(same_value(x, y, rel_tol) for x, y in zip(a, b, strict=True))
    if isinstance(a, sympy.Expr) or isinstance(b, sympy.Expr):
        return False
    return bool(verify(a, b, timeout_seconds=0, allow_set_relation_comp=True))


def same_relation(sides: Sequence[Any], rel_tol: float, sign: bool) -> bool:
    """Whether two equations (or, with `sign`, inequalities) say the same: their differences are in a constant ratio
    (positive for inequalities), after denominators are cleared in equations. `sides`: left and right of the one,
    then of the other."""
    try:
        if same_value(sides[0], sides[2], rel_tol) and same_value(sides[1], sides[3], rel_tol):
            return True
        a, b = sides[0] - sides[1], sides[2] - sides[3]
        if a.free_symbols != b.free_symbols or not a.free_symbols:
            return False
        if not sign:
            a, b = (sympy.fraction(sympy.together(side))[0] for side in (a, b))
    except (TypeError, AttributeError):
        return False
    ratios = [x / y for x, y in _samples(a, b) if not _zero(x) and not _zero(y)]
    if len(ratios) < 2 or (sign and not all(_real(ratio) and sympy.re(ratio) > 0 for ratio in ratios)):
        return False
    tolerance = _tolerance(rel_tol, a, b)
    return all(_agree(ratio, ratios[0], tolerance) for ratio in ratios[1:])


def bound(value: Any) -> Any:
    """A number or an infinity to sort interval ends by; None where an unknown stands in it."""
    if value in (sympy.oo, -sympy.oo):
        return value
    number = value.evalf(DIGITS) if isinstance(value, sympy.Expr) and not value.free_symbols else None
    return number if number is not None and number.is_real else None


def matrix(rows: Sequence[Sequence[Any]]) -> Any:
    """Formulas in rows as one matrix."""
    return sympy.ImmutableMatrix(rows)


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """`value` with unknowns called otherwise; None where the new name is taken."""
    symbols = {symbol.name: symbol for symbol in getattr(value, "free_symbols", ())}
    if any(new in symbols for new in names.values()):
        return None
    known = {old: new for old, new in names.items() if old in symbols}
    return value.subs({symbols[old]: sympy.Symbol(new, real=symbols[old].is_real) for old, new in known.items()})


DEGREE = sympy.pi / 180
