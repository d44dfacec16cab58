"""Model text is hostile: what a reader sees of it, and how a page holds it without reading it as markup."""

from __future__ import annotations

import json
import unicodedata
from typing import Any


class _Visible(dict[int, str]):
    """Fills itself, so that a translation costs one look-up a character."""

    def __missing__(self, code: int) -> str:
        if code in (0x09, 0x0A):
            shown = chr(code)
        elif code < 0x20:
            shown = chr(0x2400 + code)
        elif code == 0x7F:
            shown = "\u2421"
        # Cc: other controls; Cf: bidi and zero-width; Cs: lone surrogates; Co, Cn: no glyph; Zl, Zp: line
        # ends that neither a terminal nor a text box treats alike.
        elif unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
            shown = f"⟨U+{code:04X}⟩"
        else:
            shown = chr(code)
        self[code] = shown
        return shown


_VISIBLE = _Visible()


def visible(text: str, limit: int | None = None) -> str:
    """`text` with everything that acts instead of showing turned into visible characters; \\n and \\t stay.

    Control characters become their pictures (ESC is ␛), bidi controls, other invisible characters and lone
    surrogates ⟨U+202E⟩. Past `limit` characters the rest is counted and not shown.
    """
    cut = "" if limit is None or len(text) <= limit else f"… ({len(text) - limit:,} more characters)"
    if not cut and text.isprintable():  # most text: it holds none of the characters above
        return text
    return text[:limit].translate(_VISIBLE) + cut


def one_line(text: str, limit: int) -> str:
    """`text` on a single line, for tables and sentences: white space is folded, long text ends in …"""
    words = " ".join(text[: 4 * limit].split())
    short = words if len(words) <= limit else words[: limit - 1].rstrip() + "…"
    return visible(short)


def embeddable_json(value: Any) -> str:
    """JSON that can stand inside a <script> element: pure ASCII, no <, > or &. ValueError on a NaN."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
