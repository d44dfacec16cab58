"""The data of a page that was written, read back."""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from apportion.errors import InputError
from apportion.report.view import SCHEMA


def read_page(path: Path) -> dict[str, Any]:
    """Every text of JSON in a page by its key: `index`, and the chunks `step-N`, `step-N-row-R`, `compare-N`, ….

    Raises:
        InputError: it is no page of ours, is damaged, or is of another schema.
    """
    parser = _Data()
    try:
        parser.feed(path.read_text(encoding="utf-8"))
        found = {key: _json(kind, text) for key, (kind, text) in parser.found.items()}
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise InputError("page", f"{path}: {error}", "a page as `apportion inspect` wrote it") from None
    schema = found.get("index", {}).get("schema")
    if schema != SCHEMA:
        raise InputError("page", f"{path}, with schema {schema}", f"a page of schema {SCHEMA}", "write it again")
    for key in (f"step-{step}" for step in found["index"]["steps"]):
        wanted = [key, *(f"{key}-row-{r['row']}" for r in found.get(key, {}).get("responses", ()))]
        if missing := [each for each in wanted if each not in found]:
            raise InputError("page", f"{path}, without {missing[0]}", "a page as it was written, to its end")
    return found


def unpacked(chunk: bytes | str) -> dict[str, Any]:
    """The JSON of a chunk: base64 of gzip."""
    return json.loads(gzip.decompress(base64.b64decode(chunk)))


def _json(kind: str, text: str) -> dict[str, Any]:
    return unpacked(text) if kind == "application/gzip" else json.loads(text)


class _Data(HTMLParser):
    """The text of the script elements that have a key."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[str, str]] = {}
        self._open: tuple[str, str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "script" and given.get("id"):
            self._open = str(given["id"]), str(given.get("type"))
            self.found[self._open[0]] = (self._open[1], "")

    def handle_data(self, data: str) -> None:
        if self._open and self.cdata_elem == "script":
            key, kind = self._open
            self.found[key] = (kind, self.found[key][1] + data)

    def handle_endtag(self, tag: str) -> None:
        self._open = None
