"""The one sentence that answers where a response was won or lost, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any


def fixed(value: float | None, digits: int = 2) -> str:
    """A number as the page prints it: halves away from 0, as toFixed does; – where there is none."""
    if value is None:
        return "–"
    if abs(value) >= 1e15:
        return f"{value:.{digits}e}".replace("-", "−")
    return str(Decimal(value).quantize(Decimal(10) ** -digits, ROUND_HALF_UP)).replace("-", "−")


def signed(value: float | None, digits: int = 2) -> str:
    """`fixed` with its sign: +0.13, −0.59."""
    return ("+" if value is not None and value >= 0 else "") + fixed(value, digits)


def reading(response: Mapping[str, Any], segments: Sequence[Mapping[str, Any]], collapsed: bool) -> str:
    """Says of one response (views, see view.py and detail.py) what decided it. `collapsed`: its group has σ = 0."""
    reward, mean, base = response["reward"], response["mean"], response["base"]
    if reward is None:
        return "No reward: the verifier abstained, so this response is left out of its group."
    opening = f"Reward {reward:g} where the group averages {fixed(mean)}."
    if collapsed and not response["spread"]:
        return f"{opening} σ = 0: all rewards of its group are equal, so every token gets {signed(base)}."
    pieces = [s for s in segments if None not in (s["before"], s["after"], s["increment"])]
    if not response["spread"]:
        why = "No pivot fell into it: every" if segments else "Every"
        return f"{opening} {why} token gets the base advantage {signed(base)}."
    if len(pieces) < 2 or mean is None:
        low, high = signed(response["low"]), signed(response["high"])
        return f"{opening} Advantages run from {low} to {high} around the base {signed(base)}."
    lost = reward < mean
    extreme = min if lost else max
    piece = extreme(pieces, key=lambda s: s["increment"])
    number = segments.index(piece) + 1
    change, spread = piece["increment"], piece["increment_stderr"]
    where = f"segment {number}, “{piece['snippet']}”"
    return (
        f"{opening} Most was {'lost' if lost else 'won'} in {where}: "
        f"V̂ went {fixed(piece['before'])} → {fixed(piece['after'])}{_counts(segments[number - 1 : number + 1])}, "
        f"{signed(change)} ± {fixed(spread)}, {_sureness(change, spread)}."
    )


def _counts(ends: Sequence[Mapping[str, Any]]) -> str:
    """How many continuations were right where a segment opens and where the next does, for rewards of 0 and 1."""
    said = []
    for s, where in zip(ends, ("before", "after"), strict=False):
        right = (s["raw"] or 0.0) * s["samples"]
        if s["samples"] and 0 <= right <= s["samples"] and abs(right - round(right)) < 1e-3 * s["samples"]:
            said.append(f"{round(right)} of {s['samples']} continuations right {where} it")
    return f" ({', '.join(said)})" if said else ""


def _sureness(change: float, spread: float | None) -> str:
    if not spread:
        return "with no spread seen" if spread == 0 else "with nothing measured at its ends"
    ratio = abs(change) / spread
    if ratio <= 1:
        return "within one standard error, so it may be noise"
    return f"{ratio:.1f} standard errors" + (", likely real" if ratio >= 2 else ", weak evidence")
