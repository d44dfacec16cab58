"""Read a normalised answer string as a small tree: lists, sets, tuples, intervals, relations, matrices, scalars.

Only the leaves (`Scalar`) go to the computer algebra. Everything that decides *how* answers are compared (is the
order part of the answer? is this an interval? is there a unit?) is read here, from the answer's own punctuation.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from fractions import Fraction

from apportion.verify.nodes import Assign, Clock, Group, Interval, Matrix, Node, Raw, Relation, Scalar, Union
from apportion.verify.normalise import canonical, normalise, spelled
from apportion.verify.numerals import FUNCTIONS, Numeral, looks_like_list, read_numeral
from apportion.verify.phrases import read_date, read_words, words
from apportion.verify.units import Quantity, split_unit

_OPEN, _CLOSE = "([{", ")]}"
_NOT_PROSE = re.compile(rf"(?:{FUNCTIONS}|max|min|gcd|lcm|mod|det|pi|inf|arg)+[A-Za-z]?")
_CALL = re.compile(rf"(?<![A-Za-z])(?:{FUNCTIONS})(?: ?\(| \w)")
_CONSTANT = re.compile(r"\(?(?:pi|inf)\)?")
_WORD_RUN = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_SHORT_WORD = re.compile(
    r"the|and|for|are|all|any|not|yes|odd|if|is|of|to|in|at|on|or|no|none|per|one|two|six|ten", re.IGNORECASE
)
_ONLY_WORDS = re.compile(r"(?=.*[A-Za-z]{2})\(?[A-Za-z](?:[A-Za-z '.,!?()]|(?<=[a-z])-(?=[a-z]{2}))*")
_LETTERS = re.compile(r"(?!pi)[A-Za-z]{2,3}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_RELATIONS = re.compile(r"\\(?:le|ge|ne|in|approx|equiv|subseteq|to|mapsto)(?![A-Za-z])|:=|[=<>]")
_NAME = re.compile(
    r"(?:\\(?:angle|triangle|overline|vec|hat|bar|mathcal) ?)?(?:\\?[A-Za-z]+|\{[A-Za-z]+\})(?:_(?:\{[^{}]*\}|\w))?'*"
    r"(?: ?\( ?[^()]*\))?(?:\^\{-1\} ?(?:\([^()]*\))?)?"
)
_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))? ?(?:\\text\{)? ?([ap])?\.? ?(?:m\.?)? ?\}?", re.IGNORECASE)
_HOUR = re.compile(r"(\d{1,2}) ?(?:\\text\{)? ?([ap])\.? ?m\.? ?\}?", re.IGNORECASE)
_MATRIX = re.compile(
    r"[(\[]? ?\\begin\{(?P<env>[pbB]?matrix|smallmatrix|array)\} ?(?:\{[^{}]*\})?"
    r"(?P<body>(?:(?!\\begin).)*)\\end\{(?P=env)\} ?[)\]]?",
    re.DOTALL,
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-zA-Z]*matrix\}")
_OUTWARD = re.compile(r"\](?P<low>[^\[\],;]+)[,;](?P<high>[^\[\],;]+)(?P<close>[\[\]])")
_RATIO_TO = re.compile(r"(\d[\d.]*) ?(?:\\text\{)? ?to ?\}? ?(\d[\d.]*)")
_ARC = re.compile(r"(-?)(\d+) ?\^\\circ ?(\d{1,2})(?: ?'|\^\{\\prime\})(?: ?(\d{1,2}(?:\.\d+)?) ?'')?")
_MODULO = re.compile(
    r"(?P<residue>.+?) ?(?:\(\s*(?:\\?mod|\\text\{ ?mod ?\}) ?(?P<a>[^()]+)\)|\\pmod ?\{?(?P<b>[^{}]+)\}?)"
)
_REALS = (r"\mathbb{R}", r"\mathbb R", r"\R", r"\Re")
MAX_SIGNS = 4
MAX_DEPTH = 12


def split_top(text: str, separators: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Pieces of `text` between separators outside every bracket, and the separators."""
    pieces, found, depth, start, position = [], [], 0, 0, 0
    while position < len(text):
        character = text[position]
        if text.startswith(("\\begin{", "\\end{"), position):
            depth += 1 if text.startswith("\\begin{", position) else -1
            position = text.find("}", position) + 1 or len(text)
            continue
        if character in _OPEN or text.startswith(("\\{", "\\langle"), position):
            depth += 1
            position += 2 if character == "\\" else 1
            continue
        if character in _CLOSE or text.startswith(("\\}", "\\rangle"), position):
            depth -= 1
            position += 2 if character == "\\" else 1
            continue
        if depth == 0 and (match := separators.match(text, position)):
            pieces.append(text[start:position])
            found.append(match.group())
            start = position = match.end()
            continue
        command = _COMMAND.match(text, position)
        position = command.end() if command else position + 1
    return [piece.strip() for piece in [*pieces, text[start:]]], found


_LIST = re.compile(r"[,;]|\\text\{ ?,? ?(?:and|or) ?\}|(?<=[ \d)}$]),? ?(?:and|or)(?![A-Za-z])(?=[ \\(-])")
_LOOSE_LIST = re.compile(r", |[;]|\\text\{ ?,? ?(?:and|or) ?\}|(?<=[ \d)}$]),? ?(?:and|or)(?![A-Za-z])(?=[ \\(-])")
_CUP = re.compile(r"\\cup(?![A-Za-z])|(?<=[)\]] )U(?= [(\[])|(?<=[)\]])U(?=[(\[])")
_REALS_WITHOUT = re.compile(
    r"(?:\\(?:mathbb ?\{?R\}?|R)|(?P<interval>[(\[][^()\[\]{}]*[)\]])) ?"
    r"(?:\\setminus|\\backslash|-) ?\\\{(?P<points>[^{}]*(?:\{[^{}]*\}[^{}]*)*)\\\}"
)
_BRACKETS = (("\\{", ("\\}",)), ("{", ("}",)), ("\\langle", ("\\rangle",)), ("(", (")", "]")), ("[", ("]", ")", "[")))
_AND = re.compile(r"\\text\{ ?and ?\}|(?<![A-Za-z\\])and(?![A-Za-z])|\\(?:land|wedge)(?![A-Za-z])")
_COMMA = re.compile(r"[,;]")
_BAR = re.compile(r"\||:(?!=)")
_COLON = re.compile(r":(?!=)")
_CONGRUENT = re.compile(r"\\equiv(?![A-Za-z])|=")
_ROW = re.compile(r"\\\\(?: ?\[[^\[\]]*\])?")
_CELL = re.compile(r"&")
_TIGHT_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,]|\.\d*,)")


def _split_list(text: str) -> list[str]:
    """Items of a bare list. A comma inside 1,234 is part of the number where other commas carry a space."""
    if not _TIGHT_THOUSANDS.search(text):
        return split_top(text, _LIST)[0]
    loose = split_top(text, _LOOSE_LIST)[0]
    if len(loose) > 1 or _TIGHT_THOUSANDS.fullmatch(text.lstrip("+-").strip()):
        return loose
    bare = _TIGHT_THOUSANDS.sub("0", text)
    # 1,234\pi holds one number; 1,200,x is a list whatever it is.
    return [text] if len(split_top(bare, _LIST)[0]) == 1 else split_top(text, _LIST)[0]


def _signs(text: str) -> list[str]:
    """A ± stands for two answers. All of them move together where a ∓ ties them, else each is free. [ours]"""
    pieces = re.split(r"\\(pm|mp)(?![A-Za-z])", text)
    marks = pieces[1::2]
    if not marks or len(marks) > MAX_SIGNS:
        return [text]
    if "mp" in marks:
        choices = [tuple(mark == flip for mark in marks) for flip in ("pm", "mp")]
    else:
        choices = list(itertools.product((True, False), repeat=len(marks)))
    return [
        pieces[0] + "".join(("+" if plus else "-") + rest for plus, rest in zip(signs, pieces[2::2], strict=True))
        for signs in choices
    ]


def _enclosed(text: str) -> tuple[str, str, str] | None:
    """(opening, inside, closing) when one pair of brackets holds the whole text."""
    for opening, closings in _BRACKETS:
        if not text.startswith(opening):
            continue
        for closing in closings:
            if not text.endswith(closing) or len(text) < len(opening) + len(closing):
                continue
            inside = text[len(opening) : len(text) - len(closing)]
            depth = 0
            for match in re.finditer(r"\\[{}]|\\langle|\\rangle|[()\[\]{}]", inside):
                depth += 1 if match.group() in ("\\{", "\\langle", "(", "[", "{") else -1
                if depth < 0:
                    break
            else:
                if depth == 0:
                    return opening, inside.strip(), closing
    return None


def _is_words(text: str) -> bool:
    """Whether a bare text is words: "cat", "no solution"; not "sin x", not "pi"."""
    if _ONLY_WORDS.fullmatch(text) is None or _CONSTANT.fullmatch(text):
        return False
    return _CALL.search(text) is None or _has_words(text)


def size(text: str) -> int:
    """How many items the list or set is that a text writes; 1 for anything else."""
    node = read(normalise(text))
    return len(node.items) if isinstance(node, Group) and node.kind in ("list", "set") else 1


def read(text: str, depth: int = 0) -> Node:
    """The tree of a normalised answer. Never raises on any text: what it cannot read is `Raw`."""
    text = text.strip()
    if depth > MAX_DEPTH:
        return Raw(text, "nested too deeply")
    if not text:
        return Raw(text, "empty")
    unwrapped = re.fullmatch(r"\\text\{([^{}]*)\}", text)
    if unwrapped and re.search(r"\d", text) and not isinstance(inside := read(unwrapped.group(1), depth + 1), Raw):
        return inside
    if unwrapped:
        return read_words(unwrapped.group(1)) if words(unwrapped.group(1)) else Raw(text, "empty")
    if text in _REALS:
        return Interval(Scalar(r"-\infty"), Scalar(r"\infty"), True, True)
    if text == r"\emptyset":
        return Group("set", ())
    if matrix := _MATRIX.fullmatch(text):
        return _read_matrix(matrix.group("body"), depth)
    if (date := read_date(text)) is not None:
        return date
    if (both := _read_both(text, depth)) is not None:
        return both
    if (twice := _read_twice(text, depth)) is not None:
        return twice
    items = _split_list(text)
    if len(items) > 1:
        return _group("list", items, depth, text)
    if clock := _CLOCK.fullmatch(text):
        hour, minute, second, half = clock.groups()
        return Clock(int(hour) * 60 + int(minute), int(second or 0), half.lower() if half else None)
    if hour := _HOUR.fullmatch(text):
        return Clock(int(hour[1]) * 60, 0, hour[2].lower())
    if _is_words(text):
        return read_words(text, "" if _has_words(text) else text)
    if holes := _REALS_WITHOUT.fullmatch(text):
        return _punctured(split_top(holes.group("points"), _COMMA)[0], holes["interval"], text)
    if outward := _OUTWARD.fullmatch(text):
        low, high = (read(outward[end], depth + 1) for end in ("low", "high"))
        return Interval(low, high, True, outward["close"] == "[")
    if (modulo := _read_modulo(text, depth)) is not None:
        return modulo
    if ratio := _RATIO_TO.fullmatch(text):
        return _group("ratio", list(ratio.groups()), depth, text)
    parts, unions = split_top(text, _CUP)
    if unions:
        return Union(tuple(read(part, depth + 1) for part in parts))
    sides, operators = split_top(text, _RELATIONS)
    if operators:
        return _read_relation(sides, operators, text, depth)
    if enclosed := _enclosed(text):
        return _read_bracket(*enclosed, text, depth)
    parts, colons = split_top(text, _COLON)
    if colons and all(parts):
        return _group("ratio", parts, depth, text)
    return _read_scalar(text, depth)


def _read_both(text: str, depth: int) -> Node | None:
    """x > 2 and x < 5: one interval. (With "or", or a comma, it is a list of two regions.)"""
    parts = split_top(text, _AND)[0]
    if len(parts) != 2 or not all(re.search(r"[<>]|\\[lg]e", part) for part in parts):
        return None
    low, high = (read(part, depth + 1) for part in parts)
    if isinstance(high, Relation) and isinstance(high.region, Interval) and high.region.high == Scalar(r"\infty"):
        low, high = high, low
    if not isinstance(low, Relation) or not isinstance(high, Relation) or low.name != high.name:
        return None
    a, b = low.region, high.region
    if not isinstance(a, Interval) or not isinstance(b, Interval):
        return None
    if a.high != Scalar(r"\infty") or b.low != Scalar(r"-\infty"):
        return None
    return Relation("<", low.left, high.right, low.name, Interval(a.low, b.high, a.open_low, b.open_high))


def _read_twice(text: str, depth: int) -> Node | None:
    """x > 2: (2, ∞). Whether both sides say the same is for the comparison to find."""
    parts, colons = split_top(text, _COLON)
    if len(colons) != 1 or not re.search(r"[<>]|\\[lgn]e(?![A-Za-z])", parts[0]) or not re.match(r"[(\[]", parts[1]):
        return None
    return Group("twice", tuple(read(part, depth + 1) for part in parts), text)


def _read_modulo(text: str, depth: int) -> Node | None:
    """x ≡ 3 (mod 5), or 3 (mod 5): a residue and its modulus."""
    match = _MODULO.fullmatch(text)
    if match is None:
        return None
    sides, signs = split_top(match["residue"], _CONGRUENT)
    if len(sides) > 2 or (signs and not _is_name(sides[0])):
        return None
    residue, modulus = _read_scalar(sides[-1], depth), _read_scalar((match["a"] or match["b"]).strip(), depth)
    if isinstance(residue, Scalar) and isinstance(modulus, Scalar) and residue.numeral and modulus.numeral:
        least = residue.numeral.value % abs(modulus.numeral.value) if modulus.numeral.value else residue.numeral.value
        residue = Scalar(str(least), Numeral(least))
    pair = Group("mod", (residue, modulus), text)
    return Assign(canonical(sides[0]), pair) if signs else pair


def _group(kind: str, items: list[str], depth: int, text: str) -> Node:
    if kind == "ratio":
        return Group(kind, tuple(read(item, depth + 1) for item in items), text)
    expanded = [signed for item in items if item for signed in _signs(item)]
    if not expanded:
        return Raw(text, "a list of nothing")
    return Group(kind, tuple(read(item, depth + 1) for item in expanded), text)


def _read_matrix(body: str, depth: int) -> Node:
    rows = [row for row in split_top(body.replace(r"\hline", ""), _ROW)[0] if row]
    cells = [split_top(row, _CELL)[0] for row in rows]
    if not cells or len({len(row) for row in cells}) != 1:
        return Raw(body, "a matrix with ragged rows")
    return Matrix(tuple(tuple(read(cell, depth + 1) for cell in row) for row in cells))


def _punctured(points: list[str], interval: str | None, text: str) -> Node:
    """The reals, or an interval, without some numbers: the intervals between them."""
    whole = read(interval or r"(-\infty,\infty)", 1)
    numerals = [read_numeral(point) for point in points]
    if not all(numerals) or not isinstance(whole, Interval):
        return Raw(text, "a set difference this layer does not read")
    ordered = sorted(zip(numerals, points, strict=True), key=lambda pair: pair[0].value if pair[0] else 0)
    ends = [whole.low, *(Scalar(point, numeral) for numeral, point in ordered), whole.high]
    values = [end.numeral.value for end in ends if isinstance(end, Scalar) and end.numeral]
    if values != sorted(set(values)):
        return Raw(text, "points outside the interval")
    pieces = [Interval(low, high, True, True) for low, high in itertools.pairwise(ends)]
    pieces[0] = replace(pieces[0], open_low=whole.open_low)
    pieces[-1] = replace(pieces[-1], open_high=whole.open_high)
    return Union(tuple(pieces))


def _read_bracket(opening: str, inside: str, closing: str, text: str, depth: int) -> Node:
    if opening == "{" and len(split_top(inside, _COMMA)[0]) == 1:
        # TeX's braces, which group. Around a list they are a set's whose backslashes were forgotten.
        return read(inside, depth + 1)
    if opening in ("\\{", "{"):
        sides, bars = split_top(inside, _BAR)
        if bars and sides[0] and sides[1]:
            # {x | condition}: the condition says it all; {x ∈ R | condition} likewise.
            return read(sides[1], depth + 1)
        return _group("set", split_top(inside, _COMMA)[0], depth, text) if inside else Group("set", ())
    items = split_top(inside, _COMMA)[0]
    if len(items) == 1:
        signed = _signs(inside)
        if len(signed) > 1:
            return Group("list", tuple(read(item, depth + 1) for item in signed), text)
        return read(inside, depth + 1) if closing in ")]" else Raw(text, "brackets do not match")
    if len(items) == 2 and opening in "([":
        signed_items = [_signs(item) for item in items]
        if any(len(signs) > 1 for signs in signed_items):
            pairs = [f"({a},{b})" for a, b in itertools.product(*signed_items)]
            return Group("list", tuple(read(pair, depth + 1) for pair in pairs), text)
        low, high = (read(item, depth + 1) for item in items)
        return Interval(low, high, opening == "(", closing in ")[", pair=(opening, closing) in (("(", ")"), ("[", "]")))
    if (opening, closing) not in (("(", ")"), ("[", "]"), ("\\langle", "\\rangle")):
        return Raw(text, "brackets do not match")
    if len(items) == 2:
        low, high = (read(item, depth + 1) for item in items)
        return Interval(low, high, True, True, pair=True)
    return Group("tuple", tuple(read(item, depth + 1) for item in items), text)


def _read_relation(sides: list[str], operators: list[str], text: str, depth: int) -> Node:
    symbols = [operator.lstrip("\\").replace(":=", "=").replace("approx", "=") for operator in operators]
    if symbols[0] == "=" and not sides[0]:
        # "= 5": the left side is the question's.
        sides, symbols = sides[1:], symbols[1:]
        if not symbols:
            return read(sides[0], depth + 1)
    if not all(sides) or any(symbol not in ("=", "<", ">", "le", "ge", "ne", "in") for symbol in symbols):
        return Raw(text, "a relation this layer does not read")
    if set(symbols) == {"="}:
        name, value = sides[0], sides[-1]
        if len(sides) == 2 and not _is_name(name) and _is_name(value):
            name, value = value, name
        if not _is_name(name):
            if any(_has_words(side) for side in sides):
                return Raw(text, "words inside a formula")
            return Relation("=", sides[0], sides[-1], chain=tuple(sides))
        signed = _signs(value)
        if len(signed) > 1:
            return Group("list", tuple(read(f"{name} = {item}", depth + 1) for item in signed), text)
        # Beside "=" letters are a product: x = ab.
        product = _LETTERS.fullmatch(value) and not _has_words(value)
        return Assign(canonical(name), read(spelled(value) if product else value, depth + 1), (name, value))
    if symbols == ["in"]:
        if not _is_name(sides[0]):
            return Raw(text, "a membership of no unknown")
        return Assign(canonical(sides[0]), read(sides[1], depth + 1))
    if "=" in symbols or "in" in symbols or ("ne" in symbols and len(symbols) > 1):
        return Raw(text, "a chain of unlike relations")
    return _read_inequality(sides, symbols, text)


def _is_name(text: str) -> bool:
    """x, f(x), y', \\angle ABC, or a tuple of such names."""
    inside = text[1:-1].split(",") if text.startswith("(") and text.endswith(")") else [text]
    return all(_NAME.fullmatch(name.strip()) is not None for name in inside)


def is_symbol(name: str) -> bool:
    """A single unknown, not a product of letters or a function's value."""
    return re.fullmatch(r"(?:\\[A-Za-z]+|[A-Za-z])(?:_\{[^{}]*\})?", name) is not None


def _read_inequality(sides: list[str], symbols: list[str], text: str) -> Node:
    if any(symbol in (">", "ge") for symbol in symbols):
        if any(symbol in ("<", "le") for symbol in symbols):
            return Raw(text, "a chain of unlike relations")
        turn = {">": "<", "ge": "le"}
        sides, symbols = sides[::-1], [turn.get(symbol, symbol) for symbol in reversed(symbols)]
    if any(_has_words(side) for side in sides):
        return Raw(text, "words inside a formula")
    infinity, minus = Scalar(r"\infty"), Scalar(r"-\infty")
    strict = [symbol == "<" for symbol in symbols]
    if len(sides) == 3 and _is_name(sides[1]):
        region: Node = Interval(_read_scalar(sides[0], 0), _read_scalar(sides[2], 0), *strict)
        return Relation("<", sides[0], sides[2], canonical(sides[1]), region)
    if len(sides) > 2:
        links = [
            _read_inequality(list(pair), [symbol], text)
            for pair, symbol in zip(itertools.pairwise(sides), symbols, strict=True)
        ]
        return Group("chain", tuple(links), text)
    left, right = sides
    for magnitude, limit in ((left, right), (right, left)):
        inside = re.fullmatch(r"\|([^|]+)\|", magnitude)
        if inside is None or symbols[0] == "ne" or not _positive(limit) or not _is_name(inside[1].strip()):
            continue
        name = inside[1].strip()
        if magnitude is left:
            return _read_inequality([f"-{limit}", name, limit], symbols * 2, text)
        outside = (
            Interval(minus, _read_scalar(f"-{limit}", 0), True, strict[0]),
            Interval(_read_scalar(limit, 0), infinity, strict[0], True),
        )
        return Relation(symbols[0], left, right, canonical(name), Union(outside))
    for name, value, below in ((left, right, True), (right, left, False)):
        if not _is_name(name):
            continue
        bound = read(value, 1)
        if symbols[0] == "ne":
            region = Union((Interval(minus, bound, True, True), Interval(bound, infinity, True, True)))
        elif below:
            region = Interval(minus, bound, True, strict[0])
        else:
            region = Interval(bound, infinity, strict[0], True)
        return Relation(symbols[0], left, right, canonical(name), region)
    return Relation(symbols[0], left, right)


def _positive(text: str) -> bool:
    numeral = read_numeral(text)
    return numeral is not None and numeral.value > 0


def _has_words(text: str) -> bool:
    """Whether there is prose in a formula. Letters in a row are a product up to three of them."""
    text = _ENVIRONMENT.sub("", text)
    return r"\text" in text or any(
        _SHORT_WORD.fullmatch(run) or (len(run) > 3 and not _NOT_PROSE.fullmatch(run))
        for run in _WORD_RUN.findall(text)
    )


def _read_scalar(text: str, depth: int) -> Node:
    if (numeral := read_numeral(text)) is not None:
        return Scalar(text, numeral)
    signed = _signs(text)
    if len(signed) > 1:
        return Group("list", tuple(read(item, depth + 1) for item in signed), text)
    if r"\ldots" in text:
        return Scalar(r"\ldots") if text == r"\ldots" else Raw(text, "an ellipsis inside a formula")
    if arc := _ARC.fullmatch(text):
        value = int(arc[2]) + Fraction(int(arc[3]), 60) + Fraction(arc[4] or 0) / 3600
        value = -value if arc[1] else value
        return Scalar(rf"\frac{{{value.numerator}}}{{{value.denominator}}}", Numeral(value), "deg")
    quantity: Quantity = split_unit(text)
    head = quantity.value
    if head != text:
        inner = read(head, depth + 1)
        if isinstance(inner, Scalar):
            return replace(inner, unit=quantity.unit or inner.unit, percent=quantity.percent or inner.percent)
        return Raw(text, "a unit on what is no number") if not isinstance(inner, Raw) else Raw(text, inner.reason)
    if _has_words(text):
        return Raw(text, "words inside a formula")
    return Scalar(text)


def as_list(node: Node) -> Node:
    """100,200 read the other way, as a list of integers."""
    if isinstance(node, Scalar) and looks_like_list(node.latex):
        return Group("list", tuple(read(item) for item in node.latex.split(",")), node.latex)
    return node
