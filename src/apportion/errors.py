"""The one error for bad input: it names the field, what came, what was expected and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Raised before any long work starts when something a person gave cannot be used.

    Args:
        field: the name the person wrote: a setting, a column, a tensor of the batch, a line of a file.
        got: what came.
        expected: what would have been accepted.
        fix: what to do about it; left out where `expected` says it all.
    """

    def __init__(self, field: str, got: object, expected: str, fix: str = "") -> None:
        self.field, self.got, self.expected, self.fix = field, got, expected, fix
        super().__init__(f"{field}: got {got}; expected {expected}" + (f". Fix: {fix}" if fix else ""))


def nearest(word: str, known: Iterable[str]) -> str:
    """`, did you mean 'x'?` for a misspelt name, or an empty string when nothing is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
