"""Prompts and responses of a record as text, and text as pieces, for records that hold no tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from apportion.errors import InputError
from apportion.report.foreign.files import Entry, shown

PIECES = "pieces of text: the record holds no tokens"

Message = tuple[str, str]
"""Who speaks, and what; the role of plain text is empty."""
Part = tuple[str, bool]
"""A stretch of a response, and whether the policy wrote it."""

# A word with the white space before it, line breaks of their own. No piece is longer than a line of a page holds,
# and no more than that is ever looked at twice.
_PIECE = re.compile(r"\n{1,40}|[^\S\n]{0,40}\S{1,40}|[^\S\n]{1,40}")
_SURROGATE = re.compile("[\ud800-\udfff]")


def clean(text: str) -> str:
    """`text` with half surrogate pairs, which no file can hold, as the replacement character; as long as before."""
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)


def split(parts: Sequence[Part]) -> tuple[list[str], list[bool]]:
    """A response as pieces that make up its text, and whether the policy wrote each.

    A response without text is one empty piece: the policy ended it at once, and was rewarded for that.
    """
    pieces: list[str] = []
    mask: list[bool] = []
    for part, ours in parts:
        found = _PIECE.findall(part)
        pieces += found
        mask += [ours] * len(found)
    return (pieces, mask) if pieces else ([""], [True])


def is_trained(parts: Sequence[Part]) -> bool:
    """Whether the policy wrote a piece of a response."""
    return any(ours and part for part, ours in parts) or not any(part for part, _ in parts)


def words(parts: Sequence[Part]) -> int:
    """How many words the policy wrote."""
    return sum(len(part.split()) for part, ours in parts if ours)


def messages(entry: Entry, name: str) -> list[Message]:
    """A text or a conversation; nothing where the field is null.

    Raises:
        InputError: neither.
    """
    value = entry.fields.get(name)
    if value is None:
        return []
    if isinstance(value, str):
        return [("", value)]
    if isinstance(value, dict):
        return [message(Entry(f"{name} of {entry.where}", value))]
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise entry.wrong(name, "a text or a list of messages")
    return [message(each) for each in entry.entries(name)]


def message(entry: Entry) -> Message:
    """One message, with its reasoning, its content and the tools it calls.

    Raises:
        InputError: a content that is no text.
    """
    said = [entry.fields.get("reasoning_content"), entry.fields.get("content")]
    found = [text for text in (_content(each, entry) for each in said) if text]
    found += [_call(each) for each in entry.entries("tool_calls")]
    return entry.word("role") or "message", "\n".join(found)


def _content(value: Any, entry: Entry) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise InputError(f"content of {entry.where}", shown(value), "a text or a list of parts")
    return "".join(_content_part(part) for part in value)


def _content_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        if isinstance(part.get("text"), str):
            return str(part["text"])
        if isinstance(part.get("type"), str):
            return f"[{part['type']}]"
    return "[?]"


def _call(entry: Entry) -> str:
    # OpenAI's tool calls hold a function; those of verifiers 1 are one.
    called = entry.entry("function") if entry.fields.get("function") else entry
    arguments = called.fields.get("arguments")
    return f"{called.word('name') or '?'}({arguments if isinstance(arguments, str) else shown(arguments)})"


def conversation(said: Sequence[Message]) -> str:
    """Messages under each other, each after its role."""
    return "\n\n".join(f"{role}: {text}" if role else text for role, text in said)


def parts(said: Sequence[Message]) -> list[Part]:
    """A response: a single message is what the policy wrote; of several, those of the assistant are."""
    if len(said) < 2:
        return [(text, True) for _, text in said]
    found: list[Part] = []
    for k, (role, text) in enumerate(said):
        found += [("\n\n" * (k > 0) + f"{role}: ", False), (text, role == "assistant")]
    return found


def gold(value: Any) -> str | None:
    """A reference answer of any type, as text."""
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return shown(value)
