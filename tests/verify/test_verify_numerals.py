"""Plain numerals: read exactly, and compared by relative tolerance.

Planted fault seen caught here: absolute instead of relative tolerance in `close`.
"""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from apportion.verify.normalise import normalise
from apportion.verify.numerals import Numeral, close, read_numeral, same_numeral


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_numerals_read_exactly(p, q):
    assert read_numeral(f"{p}/{q}").value == Fraction(p, q)
    assert read_numeral(normalise(rf"\frac{{{p}}}{{{q}}}")).value == Fraction(p, q)
    assert read_numeral(f"{p:,}").value == p


@given(st.decimals(-(10**9), 10**9, allow_nan=False, places=6), st.integers(-30, 30))
def test_scientific_notation(mantissa, exponent):
    expected = Fraction(str(mantissa)) * Fraction(10) ** exponent
    assert read_numeral(f"{mantissa:f}e{exponent}").value == expected
    assert read_numeral(rf"{mantissa:f} \times 10^{{{exponent}}}").value == expected


@given(st.fractions(), st.integers(-300, 300))
def test_tolerance_is_relative(value, exponent):
    # |a − b| ≤ tol·max(|a|, |b|) is unchanged when both are scaled; a chop at some absolute size would not be.
    scale = Fraction(10) ** exponent
    other = value * (1 + Fraction(3, 10**6))
    assert close(value, other, 1e-5) and close(value * scale, other * scale, 1e-5)
    assert close(value * scale, other * scale, 1e-6) == (value == 0)


def test_tolerance_boundary():
    # |1/3 − 0.333333| = (1/3)·10⁻⁶, just within the default 1e-6; one digit less is not.
    third = Numeral(Fraction(1, 3))
    assert same_numeral(third, read_numeral("0.333333"), 1e-6)
    assert not same_numeral(third, read_numeral("0.33333"), 1e-6)
    assert not same_numeral(Numeral(Fraction(10**9)), Numeral(Fraction(10**9 + 1)), 1e-6)


def test_huge_exponents_are_not_expanded():
    assert read_numeral("1e999999999") is None
    assert read_numeral("10^{999999}") is None
    assert read_numeral("9" * 5000) is None
