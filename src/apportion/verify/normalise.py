"""Bring an answer string to one spelling, so that equal spellings compare equal before any parsing.

Nothing here changes what an answer means: units, percent signs, ± and ellipses survive, and a space stays
wherever taking it out would join two words or two numbers ("1 1/4" is not "11/4").
"""

from __future__ import annotations

import re
from functools import lru_cache

from apportion.verify.extract import matching

_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "－": "-",
        "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": r"\div ", "∕": "/", "⁄": "/",
        "±": r"\pm ", "∓": r"\mp ", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "°": r"^\circ ", "º": r"^\circ ",
        "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ",
        "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "…": r"\ldots ",
        "⋯": r"\ldots ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "“": '"', "”": '"',
        "’": "'", "′": "'", "″": "''", "‘": "'", "（": "(", "）": ")", "，": ",", "：": ":", "；": ";", "％": "%",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200b": "", "\ufeff": "", "⟨": r"\langle ", "⟩": r"\rangle ",
        "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
        **{sup: f"^{digit}" for digit, sup in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
        **{sub: f"_{digit}" for digit, sub in enumerate("₀₁₂₃₄₅₆₇₈₉")},
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
        (r"\\(?:d|t|c)frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:dbinom|tbinom)(?![A-Za-z])", r"\\binom"),
        (r"\\(?:mathbf|mathit|bm|vec)\s*\{\s*([A-Za-z])\s*\}", r"\1 "),
        (r"\\(?:mathrm|text|textrm|textit|operatorname)\s*\{\s*([eid])\s*\}", r"\1 "),
        (r"\\(?:textrm|textbf|textit|textnormal|textsf|texttt|mbox|mathrm|mathbf|mathit|mathsf|mathnormal|"
         r"operatorname\*?|emph|bm)\s*(?=\{)", r"\\text"),
        (r"\\text\s+\{", r"\\text{"),
        (r"\\text\{\s*(\\[A-Za-z]+)\s*\}", r"\1 "),
        (r"\\text\{\s*([-+]?[\d.,/:]+)\s*\}", r"\1"),
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
        (r"\\%", "%"),
        (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\degree(?![A-Za-z])", r"^\\circ "),
        (r"\*\*", "^"),
        (r"\*", r"\\cdot "),
        (r"\{,\}", ","),
        (r"\^\s*\{\s*(?:\\prime\s*)+\}|\^\s*\\prime", "'"),
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
_PRODUCT = re.compile(r"(?<!\\)(?:\$\$?|\\\()\s*(?!pi\b)([A-Za-z]{2,3})\s*(?:\$\$?|\\\))")
_TIGHT = re.compile(r" (?![A-Za-z0-9.])|(?<![A-Za-z0-9.]) ")
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


def spelled(letters: str) -> str:
    """A product as TeX reads it, one unknown after the other: "a b"."""
    return " ".join(letters)


@lru_cache(maxsize=4096)
def normalise(text: str) -> str:
    """One spelling of an answer: no math delimiters, sizing, spacing commands or final full stop. [ours]"""
    text = text.strip()
    if _PLAIN.fullmatch(text):
        return text
    text = _PRODUCT.sub(lambda letters: spelled(letters[1]), text)
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and text.endswith(closing) and text.count(opening) == 1:
            text = text[2:-2]
    text = re.sub(r"√\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<!\\)\$", " ", text).strip()
    while (match := _EMPHASIS.fullmatch(text)) and match["mark"] not in match["inside"]:
        text = match["inside"].strip()
    text = text.translate(_UNICODE).replace("\\$", r"\text{USD}")
    # Undo JSON's escaping where it was done twice. In a matrix a double backslash ends a row.
    twice, once = (r"\\\\\\\\", r"\\\\") if r"\begin" in text else (r"\\\\(?=[A-Za-z]{2})", r"\\")
    text = re.sub(twice, once, text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _TEXT_POWER.sub(r"\1\2", text)
    return _brace_arguments(text).strip().rstrip(" .,;:\\")


@lru_cache(maxsize=4096)
def canonical(text: str) -> str:
    """`normalise` with every space taken out that does not part two words or numbers; the exact-match key."""
    return _TIGHT.sub("", _TEXT_GROUP.sub(lambda group: group.group(1).strip(), normalise(text)))
