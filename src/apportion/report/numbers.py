"""Numbers as the page's JSON has them."""

from __future__ import annotations

import math


def number(value: float | None) -> float | None:
    """Five significant digits; None where there is no number, as JSON has no NaN."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None
