"""What a gold may be: one accepted answer, or a list of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from numbers import Real
from typing import Any


def _items(gold: object) -> Sequence[object]:
    return gold if isinstance(gold, Sequence) and not isinstance(gold, str | bytes) else [gold]


def accepted(gold: object) -> list[str]:
    """Accepted answers of a gold (one, or a list of which any will do) as text; empty ones are left out."""
    return [str(item) for item in _items(gold) if item is not None and str(item).strip()]


def _readable(number: Any) -> bool:
    try:
        # Python writes whole numbers out up to 4,300 digits; a signalling NaN refuses to be compared.
        return abs(number) < math.inf and bool(str(number))
    except (ArithmeticError, ValueError):
        return False


def unusable(gold: object) -> str | None:
    """Why a gold holds no answer to compare with (another type, nothing in it); None if it does."""
    for item in _items(gold):
        if isinstance(item, Real | Decimal) and not isinstance(item, bool) and _readable(item):
            continue
        if item is not None and not isinstance(item, str):
            got = str(item) if isinstance(item, bool | float) else type(item).__name__
            return f"the gold is {got}; accepted are a string, a finite number, or a list of these"
    return None if accepted(gold) else "the gold is empty"
