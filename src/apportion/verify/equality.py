"""Is the prediction's tree the same answer as the gold's? One rule for each pair of node kinds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from apportion.verify import scalars
from apportion.verify.nodes import Assign, Clock, Group, Interval, Matrix, Node, Raw, Relation, Scalar, Text, Union
from apportion.verify.numerals import Numeral, same_numeral
from apportion.verify.phrases import words
from apportion.verify.structure import as_list, is_symbol, read
from apportion.verify.units import same_unit

if TYPE_CHECKING:
    from apportion.verify.math import MathSettings

NO_SOLUTION = frozenset(
    {
        "none",
        "empty set",
        "no such values",
        *(
            f"{there}no {real}{noun}"
            for there in ("", "there is ", "there are ")
            for real in ("", "real ")
            for noun in ("solution", "solutions")
        ),
    }
)
# Names of the constant of an antiderivative.
_CONSTANTS = ("c", "K", "k", "C_1", "c_1")
_FUNCTION_VALUE = re.compile(r"[a-z]\([a-z]\)")
_HUNDRED = Fraction(1, 100)


def unreadable(node: Node) -> str | None:
    """Why a tree cannot be compared except word for word; None when every part of it was read."""
    if isinstance(node, Raw):
        return node.reason
    if isinstance(node, Scalar):
        return None if node.numeral else _unreadable_latex(node.latex)
    if isinstance(node, Relation) and node.region is None:
        return _unreadable_latex(node.left) or _unreadable_latex(node.right)
    return next((reason for child in _children(node) if (reason := unreadable(child))), None)


def _unreadable_latex(latex: str) -> str | None:
    if latex == r"\ldots":
        return None
    try:
        scalars.parse_scalar(latex)
    except scalars.Unreadable as error:
        return f"{error}: {latex[:80]!r}"
    return None


def _children(node: Node) -> Iterator[Node]:
    match node:
        case Group(items=items) | Union(parts=items):
            yield from items
        case Interval(low=low, high=high):
            yield from (low, high)
        case Assign(value=value):
            yield value
        case Relation(region=region) if region is not None:
            yield region
        case Matrix(rows=rows):
            for row in rows:
                yield from row


class Comparison:
    """Compares trees under one `MathSettings`. Not symmetric: a gold may be given back in another form (a line's
    equation rearranged), a prediction may not restate the problem (gold x = 5, prediction 2x = 10)."""

    def __init__(self, settings: MathSettings) -> None:
        self.settings = settings

    def same(self, gold: Node, prediction: Node) -> bool:
        """Whether `prediction` is the answer `gold`. Raises nothing; what cannot be read is not the same."""
        try:
            return self._same(gold, prediction)
        except scalars.Unreadable:
            return False

    def _same(self, gold: Node, pred: Node) -> bool:
        gold, pred = self._worked_out(gold), self._worked_out(pred)
        if isinstance(gold, Raw) or isinstance(pred, Raw):
            return False
        if isinstance(gold, Text) or isinstance(pred, Text):
            return self._same_text(gold, pred)
        if isinstance(gold, Scalar) and isinstance(pred, Scalar):
            return self._same_scalar(gold, pred)
        if isinstance(gold, Assign | Relation) or isinstance(pred, Assign | Relation):
            return self._same_statement(gold, pred)
        if isinstance(gold, Interval) and isinstance(pred, Interval):
            return self._same_interval(gold, pred)
        if isinstance(gold, Matrix) or isinstance(pred, Matrix):
            return self._same_matrix(gold, pred)
        if isinstance(gold, Clock) or isinstance(pred, Clock):
            return self._same_clock(gold, pred)
        if isinstance(gold, Union) or isinstance(pred, Union):
            return self._same_union(gold, pred)
        return self._same_group(gold, pred)

    def _same_text(self, gold: Node, pred: Node) -> bool:
        if {_words(gold), _words(pred)} & NO_SOLUTION:
            return all(node == Group("set", ()) or _words(node) in NO_SOLUTION for node in (gold, pred))
        if _words(gold) is not None and _words(gold) == _words(pred):
            return True
        # Beside a formula bare letters are one too: ab is ba where the other side is a product.
        if isinstance(gold, Text) and isinstance(pred, Text):
            return False
        gold, pred = _as_formula(gold), _as_formula(pred)
        return not isinstance(gold, Text) and not isinstance(pred, Text) and self._same(gold, pred)

    # --- numbers and formulas ---------------------------------------------------------------------------------

    def _same_scalar(self, gold: Scalar, pred: Scalar) -> bool:
        rule = self.settings.units
        marks = [node.unit or ("%" if node.percent else "") for node in (gold, pred)]
        if rule == "required" and not same_unit(gold.unit or "", pred.unit or ""):
            return False
        if rule == "optional" and marks[0] and marks[1] and not same_unit(marks[0], marks[1]):
            return False
        degrees = [node.unit == "deg" for node in (gold, pred)]
        if self._same_amount(gold, pred):
            return True
        # 180° and π are one angle.
        return degrees[0] != degrees[1] and self._same_formula(
            _times(gold, scalars.DEGREE if degrees[0] else 1), _times(pred, scalars.DEGREE if degrees[1] else 1)
        )

    def _same_amount(self, gold: Scalar, pred: Scalar) -> bool:
        rule = self.settings.percent
        if gold.percent == pred.percent:
            return self._same_scaled(gold, pred, 1, 1)
        factors = (_HUNDRED if gold.percent else 1, _HUNDRED if pred.percent else 1)
        return (rule in ("either", "fraction") and self._same_scaled(gold, pred, *factors)) or (
            rule in ("either", "sign") and self._same_scaled(gold, pred, 1, 1)
        )

    def _same_scaled(self, gold: Scalar, pred: Scalar, by_gold: Fraction | int, by_pred: Fraction | int) -> bool:
        if gold.numeral and pred.numeral:
            return same_numeral(_scaled(gold.numeral, by_gold), _scaled(pred.numeral, by_pred), self.settings.rel_tol)
        if gold.latex == pred.latex and by_gold == by_pred:
            return True
        a, b = _times(gold, by_gold), _times(pred, by_pred)
        return self._same_formula(a, b) or self._same_up_to_constant(a, b)

    def _same_formula(self, gold: Any, pred: Any) -> bool:
        return scalars.same_value(gold, pred, self.settings.rel_tol)

    def _same_up_to_constant(self, gold: Any, pred: Any) -> bool:
        """x² + C and x² + c: the constant of integration may have another name, where no other capital stands."""
        names = [{symbol.name for symbol in getattr(value, "free_symbols", ())} for value in (gold, pred)]
        if "C" in names[1]:
            gold, pred, names = pred, gold, names[::-1]
        other = [name for name in _CONSTANTS if name in names[1] - names[0]]
        if "C" not in names[0] or "C" in names[1] or len(other) != 1 or any(n[0].isupper() for n in names[0] - {"C"}):
            return False
        return len(names[0]) > 1 and self._same_formula(gold, scalars.renamed(pred, {other[0]: "C"}))

    # --- equations and inequalities ---------------------------------------------------------------------------

    def _worked_out(self, node: Node) -> Node:
        """2 + 3 = 5 answers 5: a true equation of constants says what its last side says."""
        if isinstance(node, Group) and node.kind == "twice":
            return node.items[0] if self._same(*node.items) else node
        if not isinstance(node, Relation) or not node.chain:
            return node
        first, *others = (read(side) for side in node.chain)
        constant = all(
            isinstance(side, Matrix) or (isinstance(side, Scalar) and not _has_unknowns(side))
            for side in (first, *others)
        )
        return others[-1] if constant and all(self.same(first, side) for side in others) else node

    def _same_statement(self, gold: Node, pred: Node) -> bool:
        if isinstance(gold, Assign) and isinstance(pred, Assign):
            if _same_name(gold.name, pred.name):
                return self._same(gold.value, pred.value)
            if (argument := _other_argument(gold.name, pred.name)) and isinstance(gold.value, Scalar):
                # f(x) = x² and f(t) = t²: the argument's name is the function's own.
                value = isinstance(pred.value, Scalar) and scalars.renamed(_times(pred.value, 1), argument)
                return value is not None and value is not False and self._same_formula(_times(gold.value, 1), value)
            return self._same_equation(gold, pred)
        if isinstance(gold, Relation) and isinstance(pred, Relation) and not (gold.region and pred.region):
            return self._same_relation(gold, pred)
        if _is_equation(gold) and _is_equation(pred):
            return self._same_equation(gold, pred)
        (gold_name, gold_value), (pred_name, pred_value) = _content(gold), _content(pred)
        if gold_value is None or pred_value is None or (gold_name and pred_name and gold_name != pred_name):
            return False
        inequality = isinstance(gold, Relation) or isinstance(pred, Relation)
        if inequality and not (isinstance(gold, Relation) and isinstance(pred, Relation)):
            if self.settings.intervals == "strict":
                return False
        elif self.settings.names == "required" and gold_name != pred_name:
            return False
        return self._same(gold_value, pred_value)

    def _same_relation(self, gold: Relation, pred: Relation) -> bool:
        if gold.op != pred.op:
            return False
        sides = [scalars.parse_scalar(side) for side in (gold.left, gold.right, pred.left, pred.right)]
        return scalars.same_relation(sides, self.settings.rel_tol, sign=gold.op in ("<", "le"))

    def _same_equation(self, gold: Node, pred: Node) -> bool:
        equations = [_equation(node) for node in (gold, pred)]
        if equations[0] is None or equations[1] is None:
            return False
        if isinstance(gold, Assign) and is_symbol(gold.name) and not _has_unknowns(gold.value):
            # x = 5 is a solution; an equation that has it as its solution is not one.
            return False
        sides = [scalars.parse_scalar(side) for equation in equations if equation for side in equation]
        return scalars.same_relation(sides, self.settings.rel_tol, sign=False)

    # --- sets, lists, intervals -------------------------------------------------------------------------------

    def _same_interval(self, gold: Interval, pred: Interval) -> bool:
        return (gold.open_low, gold.open_high) == (pred.open_low, pred.open_high) and (
            self._same(gold.low, pred.low) and self._same(gold.high, pred.high)
        )

    def _same_matrix(self, gold: Node, pred: Node) -> bool:
        gold, pred = _as_matrix(gold), _as_matrix(pred)
        if not isinstance(gold, Matrix) or not isinstance(pred, Matrix):
            formulas = [_matrix_formula(node) for node in (gold, pred)]
            return None not in formulas and self._same_formula(*formulas)
        return [len(row) for row in gold.rows] == [len(row) for row in pred.rows] and all(
            self._same(a, b) for rows in zip(gold.rows, pred.rows, strict=True) for a, b in zip(*rows, strict=True)
        )

    def _same_clock(self, gold: Node, pred: Node) -> bool:
        if not isinstance(gold, Clock) or not isinstance(pred, Clock):
            return False
        if self.settings.units == "required" and gold.half != pred.half:
            return False
        if (gold.half is None) == (pred.half is None):
            return _on_24h(gold) == _on_24h(pred)
        return (gold.minutes, gold.seconds) == (pred.minutes, pred.seconds) or _on_24h(gold) == _on_24h(pred)

    def _same_union(self, gold: Node, pred: Node) -> bool:
        parts = [_parts(node) for node in (gold, pred)]
        merged = [self._merged(side) for side in parts]
        if merged[0] is not None and merged[1] is not None:
            return self._matched(merged[0], merged[1])
        return self._matched(*parts)

    def _merged(self, parts: Sequence[Node]) -> list[Node] | None:
        """Intervals and single numbers, sorted, those that touch made one; None where an end is no number."""
        spans: list[tuple[Any, Any, Interval]] = []
        for part in parts:
            singles = part.items if isinstance(part, Group) and part.kind == "set" else None
            for span in [part] if singles is None else [Interval(one, one, False, False) for one in singles]:
                if not isinstance(span, Interval) or not (
                    isinstance(span.low, Scalar) and isinstance(span.high, Scalar)
                ):
                    return None
                ends = [scalars.bound(_times(end, 1)) for end in (span.low, span.high)]
                if None in ends or ends[0] > ends[1]:
                    return None
                spans.append((*ends, span))
        merged: list[tuple[Any, Any, Interval]] = []
        for low, high, span in sorted(spans, key=lambda entry: (entry[0], entry[2].open_low)):
            if merged and (
                low < merged[-1][1] or (low == merged[-1][1] and not (span.open_low and merged[-1][2].open_high))
            ):
                before_low, before_high, before = merged[-1]
                if high > before_high or (high == before_high and before.open_high):
                    joined = replace(before, high=span.high, open_high=span.open_high, pair=False)
                    merged[-1] = (before_low, high, joined)
            else:
                merged.append((low, high, span))
        return [span for _, _, span in merged]

    def _same_group(self, gold: Node, pred: Node) -> bool:
        if isinstance(gold, Group) and not isinstance(pred, Group):
            pred = as_list(pred)
        elif isinstance(pred, Group) and not isinstance(gold, Group):
            gold = as_list(gold)
        a, b = _items(gold), _items(pred)
        if a is None or b is None:
            return False
        (kind_a, items_a), (kind_b, items_b) = a, b
        kinds = {kind_a, kind_b}
        if "ratio" in kinds:
            return self._same_ratio(gold, pred)
        if kinds & {"mod", "chain", "twice"}:
            return len(kinds) == 1 and self._in_order(items_a, items_b)
        if any(isinstance(node, Interval) and not node.open_low for node in (gold, pred)) and "list" in kinds:
            return False
        if "tuple" in kinds:
            # A bare list may leave out the brackets of a tuple, never its order.
            return "set" not in kinds and "one" not in kinds and self._in_order(items_a, items_b)
        if kind_a == "set" or kind_b == "set":
            return self._matched(self._distinct(items_a), self._distinct(items_b))
        items_a, items_b = self._families(items_a, items_b)
        if self.settings.order == "given" or any(_is_ellipsis(item) for item in (*items_a, *items_b)):
            return self._in_order(items_a, items_b)
        return self._matched(items_a, items_b)

    def _families(self, a: list[Node], b: list[Node]) -> tuple[list[Node], list[Node]]:
        """Solutions with a whole number in them: its name does not matter, and that it is whole may be left out."""
        kept_a, name_a = _family(a)
        kept_b, name_b = _family(b)
        if name_a and name_b and name_a != name_b:
            renamed = [_renamed(item, {name_b: name_a}) for item in kept_b]
            return (a, b) if None in renamed else (kept_a, [item for item in renamed if item is not None])
        return kept_a, kept_b

    def _same_ratio(self, gold: Node, pred: Node) -> bool:
        """3:6 and 1:2 are one ratio, and so is the fraction 1/2; with an ellipsis the terms must be the same."""
        a, b = (list(n.items) if isinstance(n, Group) and n.kind == "ratio" else [n] for n in (gold, pred))
        if any(_is_ellipsis(item) for item in (*a, *b)):
            return self._in_order(a, b)
        if len(a) == 1 and len(b) == 2:
            a = [*a, Scalar("1", Numeral(Fraction(1)))]
        elif len(b) == 1 and len(a) == 2:
            b = [*b, Scalar("1", Numeral(Fraction(1)))]
        if len(a) != len(b) or not all(isinstance(item, Scalar) for item in (*a, *b)):
            # "center: (1,2)" is no ratio.
            return self._in_order(a, b)
        values_a, values_b = ([_times(item, 1) for item in side if isinstance(item, Scalar)] for side in (a, b))
        pairs = zip(values_a, values_b, strict=True)
        return all(self._same_formula(x * values_b[0], y * values_a[0]) for x, y in pairs)

    def _in_order(self, a: Sequence[Node], b: Sequence[Node]) -> bool:
        return len(a) == len(b) and all(self._same(x, y) for x, y in zip(a, b, strict=True))

    def _matched(self, a: Sequence[Node], b: Sequence[Node]) -> bool:
        """Every item of `a` has a partner of its own in `b`. Equality is close to transitive, so the first
        partner found will do."""
        left = list(b)
        if len(a) != len(left):
            return False
        for item in a:
            partner = next((k for k, other in enumerate(left) if self.same(item, other)), None)
            if partner is None:
                return False
            left.pop(partner)
        return True

    def _distinct(self, items: Sequence[Node]) -> list[Node]:
        kept: list[Node] = []
        for item in items:
            if not any(self.same(item, other) for other in kept):
                kept.append(item)
        return kept


def _other_argument(gold: str, pred: str) -> dict[str, str] | None:
    """{"t": "x"} for f(x) and f(t)."""
    calls = [re.fullmatch(r"(.+)\(([a-z])\)", name) for name in (gold, pred)]
    if calls[0] is None or calls[1] is None or calls[0][1] != calls[1][1]:
        return None
    return {calls[1][2]: calls[0][2]}


def _family(items: list[Node]) -> tuple[list[Node], str]:
    """Items without "k ∈ Z", and k; the items themselves where there is none."""
    whole = [item for item in items if isinstance(item, Assign) and item.value == Scalar(r"\mathbb{Z}")]
    if len(whole) != 1 or len(items) == 1 or not is_symbol(whole[0].name):
        return items, ""
    return [item for item in items if item is not whole[0]], whole[0].name


def _renamed(node: Node, names: dict[str, str]) -> Node | None:
    """`node` read again with its single letters called otherwise; None where a new name is taken."""
    latex = (
        node.sides[1] if isinstance(node, Assign) and node.sides else getattr(node, "latex", getattr(node, "text", ""))
    )
    letters = re.findall(r"\\[A-Za-z]+|[A-Za-z]", latex)
    if not latex or any(new in letters for new in names.values()):
        return None
    text = re.sub(r"\\[A-Za-z]+|[A-Za-z]", lambda letter: names.get(letter[0], letter[0]), latex)
    value = read(text)
    return replace(node, value=value) if isinstance(node, Assign) else value


def _as_matrix(node: Node) -> Node:
    """(1, 2, 3) as a column, [[1, 2], [3, 4]] as rows."""
    items = _items(node)
    if items is None or items[0] != "tuple":
        return node
    rows = [_items(item) for item in items[1]]
    if all(row is not None and row[0] == "tuple" for row in rows):
        return Matrix(tuple(tuple(row[1]) for row in rows if row))
    return Matrix(tuple((item,) for item in items[1]))


def _matrix_formula(node: Node) -> Any:
    """A matrix, or a formula whose value is one; None for anything else."""
    if isinstance(node, Matrix) and all(isinstance(cell, Scalar) for row in node.rows for cell in row):
        return scalars.matrix([[_times(cell, 1) for cell in row if isinstance(cell, Scalar)] for row in node.rows])
    return _times(node, 1) if isinstance(node, Scalar) else None


def _times(node: Scalar, factor: Any) -> Any:
    expression = scalars.parse_scalar(node.latex)
    return expression if factor == 1 else expression * factor


def _scaled(numeral: Numeral, factor: Fraction | int) -> Numeral:
    return numeral if factor == 1 else Numeral(numeral.value * factor, numeral.approximate)


def _words(node: Node) -> str | None:
    if isinstance(node, Text):
        return node.words
    letters = node.latex.replace(" ", "") if isinstance(node, Scalar) else ""
    return words(letters) if letters.isalnum() else None


def _as_formula(node: Node) -> Node:
    return Scalar(node.formula) if isinstance(node, Text) and node.formula else node


def _is_ellipsis(node: Node) -> bool:
    return isinstance(node, Scalar) and node.latex == r"\ldots"


def _is_equation(node: Node) -> bool:
    return isinstance(node, Assign) or (isinstance(node, Relation) and node.op == "=")


def _same_name(gold: str, pred: str) -> bool:
    """y = ... and f(x) = ... introduce the same function."""
    return gold == pred or any(a == "y" and _FUNCTION_VALUE.fullmatch(b) for a, b in ((gold, pred), (pred, gold)))


def _equation(node: Node) -> tuple[str, str] | None:
    if isinstance(node, Assign):
        return node.sides
    return (node.left, node.right) if isinstance(node, Relation) and node.op == "=" else None


def _has_unknowns(value: Node) -> bool:
    return isinstance(value, Scalar) and bool(getattr(scalars.parse_scalar(value.latex), "free_symbols", ()))


def _content(node: Node) -> tuple[str, Node | None]:
    """What a statement says about its one variable; a bare answer says it about no name."""
    match node:
        case Assign(name=name, value=value):
            return name, value
        case Relation(name=name, region=region):
            return name, region
    return "", node


def _parts(node: Node) -> list[Node]:
    """Parts of a union of sets. "x < 1 or x > 3" is a list of regions."""
    if isinstance(node, Union):
        return list(node.parts)
    if isinstance(node, Group) and node.kind == "list":
        regions = [region for item in node.items if (region := _content(item)[1]) is not None]
        return regions if len(regions) == len(node.items) else []
    return [node]


def _items(node: Node) -> tuple[str, list[Node]] | None:
    match node:
        case Group(kind=kind, items=items):
            return kind, list(items)
        case Interval(low=low, high=high, pair=True):
            return "tuple", [low, high]
        case Scalar() | Text():
            return "one", [node]
    return None


def _on_24h(clock: Clock) -> tuple[int, int]:
    minutes = clock.minutes
    if clock.half is not None:
        minutes = minutes % 720 + (720 if clock.half == "p" else 0)
    return minutes, clock.seconds
