"""The tree of an answer, as `structure` reads it and `equality` compares it."""

from __future__ import annotations

from dataclasses import dataclass, field

from apportion.verify.numerals import Numeral


@dataclass(frozen=True)
class Text:
    """Words. `formula` holds bare letters as they were written: beside a formula they are a product or a function."""

    words: str
    formula: str = field(default="", compare=False)


@dataclass(frozen=True)
class Scalar:
    """One formula or number with what was written around it."""

    latex: str
    numeral: Numeral | None = None
    unit: str | None = None
    percent: bool = False


@dataclass(frozen=True)
class Group:
    """`list` (bare commas), `set` (braces), `tuple` (round, square or angle brackets), `ratio` (colons)."""

    kind: str
    items: tuple[Node, ...]
    text: str = ""


@dataclass(frozen=True)
class Interval:
    low: Node
    high: Node
    open_low: bool
    open_high: bool
    # (1,2) and [1,2] are as well a point: then the items in order are compared.
    pair: bool = False


@dataclass(frozen=True)
class Union:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Assign:
    """`name = value` or `name ∈ value`; `sides` keeps the equation for a comparison as an equation."""

    name: str
    value: Node
    sides: tuple[str, str] | None = None


@dataclass(frozen=True)
class Relation:
    """`left op right` with op one of = < ≤ ≠; > and ≥ are turned round."""

    op: str
    left: str
    right: str
    # What the relation says about one variable, as a set of reals, when it says that.
    name: str = ""
    region: Node | None = None
    # All sides of an equation, those between the first and the last too.
    chain: tuple[str, ...] = ()


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True)
class Clock:
    minutes: int
    seconds: int
    half: str | None = None


@dataclass(frozen=True)
class Raw:
    """Prose mixed with mathematics: comparable only word for word. `reason` says why it was not read further."""

    text: str
    reason: str = field(default="", compare=False)


Node = Text | Scalar | Group | Interval | Union | Assign | Relation | Matrix | Clock | Raw
