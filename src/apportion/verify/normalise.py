"""Bring an answer string to one spelling, so that equal spellings compare equal before any parsing.

Nothing here changes what an answer means: units, percent signs, ± and ellipses survive, and a space stays
wherever taking it out would join two words or two numbers ("1 1/4" is not "11/4").
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from apportion.verify.extract import matching

_GREEK_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega phi epsilon mu"
)
_GREEK = dict(zip("αβγδεζηθικλμνξρστυφχψωΓΔΘΛΞΣΦΨΩϕϵµ", _GREEK_NAMES.split(), strict=True))
_VULGAR = "12 14 34 13 23 15 25 35 45 16 56 18 38 58 78"
# Scripts are runs: x¹⁰ is x^{10}.
_SCRIPTS = tuple(
    (re.compile(f"[{run}]+"), mark, str.maketrans(run, plain))
    for mark, run, plain in (
        ("^", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni"),
        ("_", "₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙᵢ", "0123456789+-()ni"),
    )
)
_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "－": "-",
        "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "•": r"\cdot ", "÷": r"\div ",
        "∕": "/", "⁄": "/",
        "±": r"\pm ", "∓": r"\mp ", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "°": r"^\circ ", "º": r"^\circ ",
        "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ",
        "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}",
        "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "∖": r"\setminus ", "∨": r"\lor ", "∧": r"\land ", "→": r"\to ",
        "≡": r"\equiv ", "∠": r"\angle ", "∣": "|", "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ", "℃": r"^\circ C",
        "℉": r"^\circ F", "¢": r"\text{ cents}", "…": r"\ldots ",
        "⋯": r"\ldots ", "“": '"', "”": '"',
        "’": "'", "′": "'", "″": "''", "‘": "'", "（": "(", "）": ")", "，": ",", "：": ":", "；": ";", "％": "%",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200b": "", "\ufeff": "", "⟨": r"\langle ", "⟩": r"\rangle ",
        **{
            sign: rf"\frac{{{pair[0]}}}{{{pair[1]}}}"
            for sign, pair in zip("½¼¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", _VULGAR.split(), strict=True)
        },
        **{letter: rf"\{name} " for letter, name in _GREEK.items()},
    }
)  # fmt: skip

# Order matters: each rule sees the output of the ones before it.
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|hfill|boldsymbol|rm|bf|it)(?![A-Za-z])", ""),
        (r"\\left\s*\.|\\right\s*\.", ""),
        (r"\\(?:left|right|bigl|bigr|Bigl|Bigr|biggl|biggr|big|Big|bigg|Bigg|middle)(?![A-Za-z])\s*", ""),
        (r"(?<!\\)\\!\s*", ""),
        (r"(?<!\\)\\[,;:> ]|\\(?:quad|qquad|thinspace|enspace|medspace|space)(?![A-Za-z])|(?<!\\)~", " "),
        (r"\\(?:[dtc]frac|nicefrac|sfrac|flatfrac)(?![A-Za-z])", r"\\frac"),
        (r"\\(?:textcolor|color|hspace|vspace|phantom|label|tag)\*?\s*\{[^{}]*\}", ""),
        (r"\\phantom\s*[^\s{]", ""),
        (r"\\(?:ensuremath|mathord|mathop|mathbin|mathrel|underline|uline|smash)(?![A-Za-z])", ""),
        (r"\\lg(?![A-Za-z])", r"\\log_{10} "),
        (r"\\var(phi|epsilon|theta|rho|sigma)(?![A-Za-z])", r"\\\1"),
        (r"\\text\s*\{\s*(thousand|million|billion|trillion)(?![A-Za-z])", r" \1\\text{"),
        (r"(?<=[\d}])[ -]*thousand(?![A-Za-z])", r"\\times 10^{3}"),
        (r"(?<=[\d}])[ -]*million(?![A-Za-z])", r"\\times 10^{6}"),
        (r"(?<=[\d}])[ -]*billion(?![A-Za-z])", r"\\times 10^{9}"),
        (r"(?<=[\d}])[ -]*trillion(?![A-Za-z])", r"\\times 10^{12}"),
        (r"\\(?:dbinom|tbinom)(?![A-Za-z])", r"\\binom"),
        (r"\\(?:mathbf|mathit|bm|vec)\s*\{\s*([A-Za-z])\s*\}", r"\1 "),
        (r"\\(?:mathrm|text|textrm|textit|operatorname)\s*\{\s*([eid])\s*\}", r"\1 "),
        (r"\\(?:textrm|textbf|textit|textnormal|textsf|texttt|mbox|mathrm|mathbf|mathit|mathsf|mathnormal|"
         r"operatorname\*?|emph|bm)\s*(?=\{)", r"\\text"),
        (r"\\text\s+\{", r"\\text{"),
        (r"\\text\{\s*(\\[A-Za-z]+)\s*\}", r"\1 "),
        (r"\\text\{\s*([-+]?[\d.,/:]+)\s*\}", r"\1"),
        (r"\\frac\{\s*\\text\{([^{}]*)\}\s*\}\{\s*\\text\{([^{}]*)\}\s*\}", r"\\text{\1/\2}"),
        # A product of unknowns set upright, beside an operator: x = \mathrm{gb}. Elsewhere it is a word or a unit.
        (r"(?:(?<=[=({+*,])|^)\s*\\text\{\s*(?!(?:or|of|no|is|in|at|if|on|to|by|and)\s*\})([A-Za-z]{1,2})\s*\}"
         r"(?=\s*[=+/^_]|\s*[)}]|(?<=.{9})$)", r"\1 "),
        # After a number these are seconds and minutes.
        (r"(?<=[\d}/])\s*\\text\{\s*(min|sec)\s*\}", r"\\text{ \1.}"),
        (r"\\text\{\s*(sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|exp|min|max|gcd|lcm|det)"
         r"\s*\}", r"\\\1 "),
        (r"\\text\{\s*\}", ""),
        (r"\\(?:leqslant|leq|leqq)(?![A-Za-z])", r"\\le "),
        (r"\\(?:geqslant|geq|geqq)(?![A-Za-z])", r"\\ge "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"!=(?!=)|\\neq(?![A-Za-z])|\\not\s*=", r"\\ne "),
        (r"\\lt(?![A-Za-z])|&lt;", "<"),
        (r"\\gt(?![A-Za-z])|&gt;", ">"),
        (r"\\(?:varnothing|oslash)(?![A-Za-z])", r"\\emptyset "),
        (r"\\(?:dots|cdots|dotsc|dotsb|hdots)(?![A-Za-z])|\.{2,3}", r"\\ldots "),
        # "3..." at the end of a list goes on as "3, ..." does, and 0.333... is not 0.333.
        (r"(?<=[\w)}\]]) ?\\ldots\s*(?=[.,;]?$|\\?[)\]}])", r", \\ldots "),
        (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
        (r"\\(?:mid|vert|lvert|rvert)(?![A-Za-z])", "|"),
        (r"\\(?:colon)(?![A-Za-z])", ":"),
        (r"\{([^{}\\]*)\\choose(?![A-Za-z])([^{}\\]*)\}", r"\\binom{\1}{\2}"),
        (r"^([^{}\\]*)\\choose(?![A-Za-z])([^{}\\]*)$", r"\\binom{\1}{\2}"),
        (r"[(\[] ?\\begin\{array\} ?\{[^{}]*\}", r"\\begin{pmatrix}"),
        (r"\\end\{array\} ?[)\]]", r"\\end{pmatrix}"),
        (r"\| ?\\begin\{array\} ?\{[^{}]*\}", r"\\begin{vmatrix}"),
        (r"\\end\{array\} ?\|", r"\\end{vmatrix}"),
        (r"\\%", "%"),
        (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\degree(?![A-Za-z])", r"^\\circ "),
        (r"\*\*", "^"),
        (r"\*", r"\\cdot "),
        (r"\{,\}", ","),
        (r"\^\s*\{\s*\\prime\s*\\prime\s*\\prime\s*\}", "'''"),
        (r"\^\s*\{\s*\\prime\s*\\prime\s*\}", "''"),
        (r"\^\s*\{\s*\\prime\s*\}|\^\s*\\prime(?![A-Za-z])", "'"),
        (r"\+\s*\\infty", r"\\infty"),
        (r"\\log\s*_\s*(\d)\s*(?=\d)", r"\\log_{\1} "),
        # TeX would raise one digit of 10^23 only; whoever writes it means both.
        (r"([_^])\s*(-?\d+|[A-Za-z])", r"\1{\2}"),
        (r"\s+", " "),
    )
)  # fmt: skip

# Most answers: nothing below would change them.
_PLAIN = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:/\d+)?|[A-Za-z]")
# Markdown's emphasis or code around the whole answer.
_EMPHASIS = re.compile(r"(?P<mark>\*{1,3}|_{1,2}|`{1,3})(?P<inside>.+)(?P=mark)[.,]?")
# Between maths marks letters in a row are a product; elsewhere they are a word.
_MATHS = re.compile(r"(?<!\\)(?:\$\$?(?P<dollars>[^$]*)\$\$?|\\\((?P<brackets>[^()]*)\\\))")
# (Dollars may be cut in two: "x = 1$ or $x = 2" was taken from between them.)
_PRODUCT = re.compile(r"\s*(?!(?:pi|and|or|if|is|of|to|in|at|for)\b)([A-Za-z]{2,3})\s*")
_TIGHT = re.compile(r" (?![A-Za-z0-9.])|(?<![A-Za-z0-9.]) ")
_ALIGNED = re.compile(
    r"\\begin\{(?P<env>aligned|align\*?|alignat|gathered|gather\*?|split|equation\*?)\}(?P<body>.*)\\end\{(?P=env)\}",
    re.DOTALL,
)
_SYSTEM = re.compile(
    r"(?:\\begin\{cases\}(?P<cases>[^&]*)\\end\{cases\}"
    r"|\\left\s*\\\{\s*\\begin\{array\}\s*\{[lcr]\}(?P<array>[^&]*)\\end\{array\}\s*\\right\s*\.)",
    re.DOTALL,
)
_FOR_ALL = re.compile(
    r",? ?(?:\\text\{ ?)?,? ?(?:for|where|with)(?: all| any| every| each| some)?(?: ?\})? ?"
    r"(?:(?:\\text\{ ?)?(?P<kind>real number|real|integer)s?(?: ?\})? ?(?P<name>[A-Za-z])"
    r"|(?P<first>[A-Za-z])(?:\\text\{)? (?:is )?an? (?P<class>real number|integer)(?: ?\})?) ?$"
)
# Inside \text{m/s^{2}} braces would only be in the way.
_TEXT_POWER = re.compile(r"(\\text\{[^{}]*\^)\{(-?\d)\}")
_TEXT_GROUP = re.compile(r"\\text\{([^{}]*)\}")
_TAKES_ARGUMENTS = re.compile(r"\\(frac|binom|sqrt)(?![A-Za-z])\s*(\[[^\[\]]*\])?\s*")
_TOKEN = re.compile(r"[0-9A-Za-z]|\\[A-Za-z]+")


def _brace_arguments(text: str) -> str:
    """`\\frac12`, `\\frac{\\sqrt3}2`, `\\sqrt2` with the braces TeX would supply."""
    pairs = matching(text)
    insertions: list[tuple[int, str]] = []
    for match in _TAKES_ARGUMENTS.finditer(text):
        position = match.end()
        for _ in range(1 if match.group(1) == "sqrt" else 2):
            while text[position : position + 1] == " ":
                position += 1
            if position in pairs:
                position = pairs[position] + 1
            elif token := _TOKEN.match(text, position):
                insertions += [(position, "{"), (token.end(), "}")]
                position = token.end()
            else:
                break
    # A closing brace goes in before an opening one at the same place: `\frac12` is `\frac{1}{2}`.
    pieces, last = [], 0
    for position, brace in sorted(insertions, key=lambda insertion: (insertion[0], insertion[1] == "{")):
        pieces += [text[last:position], brace]
        last = position
    return "".join([*pieces, text[last:]])


def _lines(text: str) -> str:
    """Displayed lines as one: a line that begins with a relation goes on with the one before; a system is a list."""
    if aligned := _ALIGNED.fullmatch(text):
        lines = [
            line.strip()
            for line in re.split(r"\\\\(?:\[[^\[\]]*\])?", aligned["body"].replace("&", " "))
            if line.strip()
        ]
        return "".join(
            (", " if at and not re.match(r"=|\\approx|\\equiv", line) else "") + line for at, line in enumerate(lines)
        )
    if system := _SYSTEM.fullmatch(text):
        return ", ".join(row.strip(" ,") for row in (system["cases"] or system["array"]).split(r"\\") if row.strip())
    return text


def _product(maths: re.Match[str]) -> str:
    letters = _PRODUCT.fullmatch(maths["dollars"] or maths["brackets"] or "")
    return spelled(letters[1]) if letters else maths[0]


def _scripts(text: str) -> str:
    for run, mark, table in _SCRIPTS:
        text = run.sub(lambda found, mark=mark, table=table: f"{mark}{{{found.group().translate(table)}}}", text)  # type: ignore[misc]
    return text


def spelled(letters: str) -> str:
    """A product as TeX reads it, one unknown after the other: "a b"."""
    return " ".join(letters)


@lru_cache(maxsize=4096)
def normalise(text: str) -> str:
    """One spelling of an answer: no math delimiters, sizing, spacing commands or final full stop. [ours]"""
    text = text.strip()
    if _PLAIN.fullmatch(text):
        return text if text.isascii() else unicodedata.normalize("NFKC", text)
    text = _MATHS.sub(_product, text)
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and text.endswith(closing) and text.count(opening) == 1:
            text = text[2:-2]
    text = _lines(text)
    text = re.sub(r"√\s*(\d+(?:\.\d+)?|\()", r"\\sqrt{\1}", text).replace(r"\sqrt{(}", "sqrt(")
    text = re.sub(r"([∛∜])\s*(\d+)", lambda root: rf"\sqrt[{'34'['∛∜'.index(root[1])]}]{{{root[2]}}}", text)
    text = re.sub(r"(?<!\\)\$", " ", text).strip()
    while (match := _EMPHASIS.fullmatch(text)) and match["mark"] not in match["inside"]:
        text = match["inside"].strip()
    if not text.isascii():
        text = unicodedata.normalize("NFKC", _scripts(text).translate(_UNICODE))
        text = "".join(character for character in text if unicodedata.category(character) != "Cf")
    text = text.replace("\\$", r"\text{USD}")
    # Undo JSON's escaping where it was done twice. In a matrix a double backslash ends a row.
    twice, once = (r"\\\\\\\\", r"\\\\") if r"\begin" in text else (r"\\\\(?=[A-Za-z]{2})", r"\\")
    text = re.sub(twice, once, text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = text.rstrip(" .,;:\\")
    if text.startswith(r"\text{") and "\\" in (inside := text[6:-1]) and matching(text).get(5) == len(text) - 1:
        text = inside
    if stated := _FOR_ALL.search(text):
        family = "Z" if (stated["kind"] or stated["class"]) == "integer" else "R"
        text = text[: stated.start()] + rf", {stated['name'] or stated['first']}\in \mathbb{{{family}}}"
    text = _TEXT_POWER.sub(r"\1\2", text)
    return _brace_arguments(text).strip().rstrip(" .,;:\\")


@lru_cache(maxsize=4096)
def canonical(text: str) -> str:
    """`normalise` with every space taken out that does not part two words or numbers; the exact-match key."""
    return _TIGHT.sub("", _TEXT_GROUP.sub(lambda group: group.group(1).strip(), normalise(text)))
