"""One line of the interchange file: an object, checked field by field against what the contract promises."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from apportion.errors import InputError

Row = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """What the values of a field are: in words, and as a test of a whole list, since files are large."""

    words: str
    hold: Callable[[list[Any]], bool]


def _only(values: list[Any], *types: type) -> bool:
    # The very type and not isinstance: true and false are no numbers.
    return set(map(type, values)) <= {*types}


def _numbers(values: list[Any]) -> bool:
    limit = sys.float_info.max
    return _only(values, int, float) and (not values or -limit <= min(values) <= max(values) <= limit)


def _counts(values: list[Any]) -> bool:
    return _only(values, int) and (not values or 0 <= min(values) <= max(values) < 2**63)


NUMBER = Kind("a finite number", _numbers)
MAYBE = Kind("a finite number, or null", lambda vs: _numbers([v for v in vs if v is not None]))
COUNT = Kind("a whole number from 0", _counts)
FLAG = Kind("0 or 1", lambda vs: all(v in (0, 1) for v in vs))
NODE = Kind("a string or a whole number", lambda vs: _only(vs, str, int))
TEXT = Kind("a string", lambda vs: _only(vs, str))
FINISH = Kind('"stop" or "length"', lambda vs: all(v in ("stop", "length") for v in vs))
TRUTH = Kind("true or false", lambda vs: _only(vs, bool))
ENTRY = Kind("an object", lambda vs: _only(vs, dict))

# Evidence that comes as one object a state: where it was read, and what was.
STATES: dict[str, dict[str, Kind]] = {
    "belief": {"position": COUNT, "logprob": NUMBER},
    "confidence": {"position": COUNT, "conf": NUMBER, "acc": NUMBER},
    "steps": {"start": COUNT, "ok": TRUTH},
}

PER_TOKEN = {
    "mask": FLAG,
    "offsets": COUNT,
    # Measured; a host may have nothing to say about a token that is not trained on.
    "old_logprob": MAYBE,
    "ref_logprob": MAYBE,
    "entropy": MAYBE,
}


def objects(lines: Iterable[bytes]) -> Iterator[tuple[int, Row]]:
    """(line number, object) for every line that is not blank. UTF-8, with or without a byte order mark.

    Raises:
        InputError: a line that is no JSON object, with its number. NaN and Infinity are not JSON.
    """
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            row = json.loads(text, parse_constant=_Constant) if text.strip() else None
        except json.JSONDecodeError as error:
            raise _no_object(number, f"invalid JSON ({error.msg} at column {error.colno})") from None
        except UnicodeDecodeError:
            raise InputError(f"line {number}", "bytes that are not UTF-8", "UTF-8 text") from None
        except (ValueError, RecursionError) as error:
            raise _no_object(number, f"invalid JSON ({error})") from None
        if not text.strip():
            continue
        if not isinstance(row, dict):
            raise _no_object(number, _short(row))
        if any(word in text for word in ("NaN", "Infinity")) and (found := _constant(row)):
            raise InputError(f"{found[0].lstrip('.')} of line {number}", found[1], "a number that JSON has, or null")
        yield number, row


def check(row: Row, number: int) -> None:
    """Checks the fields of a response that are ours.

    Raises:
        InputError: the first field that is missing or not what the contract promises, with the line number.
    """
    text_field(row, "group", number)
    if "reward" not in row:
        raise InputError(f"reward of line {number}", "nothing", MAYBE.words, "null where the verifier abstained")
    _value(row["reward"], "reward", MAYBE, number)
    length = len(_list(_required(row, "token_ids", number), "token_ids", COUNT, number))
    for field, kind in PER_TOKEN.items():
        if row.get(field) is None:
            continue
        values = _list(row[field], field, kind, number)
        if len(values) != length:
            raise InputError(f"{field} of line {number}", f"{len(values)} values", f"{length}, one a token")
        if kind is MAYBE and None in values:
            _check_nulls_masked(values, row.get("mask"), field, number)
    for field, kind in (("text", TEXT), ("finish", FINISH)):
        if row.get(field) is not None:
            _value(row[field], field, kind, number)
    if row.get("path") is not None:
        _list(row["path"], "path", NODE, number)
    if row.get("offsets") is not None:
        _check_offsets(row["offsets"], row.get("text"), number)
    if row.get("boundaries") is not None:
        positions = _list(row["boundaries"], "boundaries", COUNT, number)
        for before, after in pairwise(positions):
            if after <= before:
                got = f"{after} after {before}"
                raise InputError(f"boundaries of line {number}", got, "rising positions, each once")
        if positions and positions[-1] >= length:
            expected = f"positions from 0 to {length - 1}" if length else "none, there are no tokens"
            raise InputError(f"boundaries of line {number}", positions[-1], expected)


@dataclass(frozen=True)
class Measured:
    """The `evidence` object of a row; a field is None where the row does not have it.

    Attributes:
        continuations: (position, rewards) entries.
        states: kind → (position, value …) tuples, for the kinds of `STATES`.
        importance: one value a token.
        answer_start: position; −1 where the row says `null`: it has no answer; None where it says nothing.
    """

    continuations: list[tuple[int, list[float | None]]] | None
    states: dict[str, list[tuple[float, ...]]]
    importance: list[float] | None
    answer_start: int | None


def measured(row: Row, number: int) -> Measured:
    """What was measured on a row; kinds that are not ours are not read.

    Raises:
        InputError: a wrong type or length, with the field and line.
    """
    evidence = row.get("evidence")
    if evidence is None:
        evidence = {}
    if not isinstance(evidence, dict):
        raise InputError(f"evidence of line {number}", _short(evidence), "an object")
    length = len(row["token_ids"])
    importance = evidence.get("importance")
    if importance is not None:
        field = "evidence.importance"
        importance = [0.0 if v is None else v for v in _list(importance, field, MAYBE, number)]
        if len(importance) != length:
            raise InputError(f"{field} of line {number}", f"{len(importance)} values", f"{length}, one a token")
        _check_nulls_masked(evidence["importance"], row.get("mask"), field, number)
    answer = evidence.get("answer_start")
    if answer is None:
        answer = -1 if "answer_start" in evidence else None
    else:
        _value(answer, "evidence.answer_start", COUNT, number)
        if answer > length:
            expected = f"a position up to the response's {length} tokens, or null where it has no answer"
            raise InputError(f"evidence.answer_start of line {number}", answer, expected)
    states = {}
    for kind, fields in STATES.items():
        entries = _entries(evidence, kind, fields, number)
        if entries is not None:
            states[kind] = entries
    continuations = _entries(evidence, "continuations", {"position": COUNT, "rewards": ENTRY}, number)
    return Measured(continuations, states, importance, answer)


def _entries(evidence: Row, kind: str, fields: Mapping[str, Kind], number: int) -> list[tuple[Any, ...]] | None:
    """The values of each entry's fields in the order of `fields`; None where the row does not have the list."""
    if evidence.get(kind) is None:
        return None
    out = []
    for k, entry in enumerate(_list(evidence[kind], f"evidence.{kind}", ENTRY, number)):
        at = f"evidence.{kind}[{k}]."
        values = [_required(entry, name, number, at) for name in fields]
        out.append(
            tuple(
                _list(value, f"{at}{name}", MAYBE, number)
                if name == "rewards"
                else _value(value, f"{at}{name}", of, number)
                for (name, of), value in zip(fields.items(), values, strict=True)
            )
        )
    return out


def text_field(row: Row, field: str, number: int) -> str:
    """The string in a field that must be there."""
    return _value(_required(row, field, number), field, TEXT, number)


def _check_nulls_masked(values: Sequence[float | None], mask: Sequence[int] | None, field: str, number: int) -> None:
    for k, value in enumerate(values):
        if value is None and (mask is None or mask[k]):
            expected = f"{NUMBER.words}; null only where `mask` is 0"
            raise InputError(f"{field}[{k}] of line {number}", "null", expected)


def _check_offsets(starts: Sequence[int], text: str | None, number: int) -> None:
    for before, after in pairwise(starts):
        if after < before:
            raise InputError(f"offsets of line {number}", f"{after} after {before}", "starts that never fall")
    if text is None:
        raise InputError(f"text of line {number}", "nothing", "the text that `offsets` counts in")
    if starts and starts[-1] > len(text):
        expected = f"at most {len(text)}, the characters of `text`"
        raise InputError(f"offsets of line {number}", starts[-1], expected)


def _required(row: Row, field: str, number: int, prefix: str = "") -> Any:
    if row.get(field) is None:
        got = "null" if field in row else "nothing"
        raise InputError(f"{prefix}{field} of line {number}", got, "a value: this field must be there")
    return row[field]


def _value(value: Any, field: str, kind: Kind, number: int) -> Any:
    if not kind.hold([value]):
        raise InputError(f"{field} of line {number}", _short(value), kind.words)
    return value


def _list(values: Any, field: str, kind: Kind, number: int) -> list[Any]:
    if not isinstance(values, list):
        raise InputError(f"{field} of line {number}", _short(values), f"a list, each item {kind.words}")
    if not kind.hold(values):
        k, value = next((k, value) for k, value in enumerate(values) if not kind.hold([value]))
        raise InputError(f"{field}[{k}] of line {number}", _short(value), kind.words)
    return values


def _no_object(number: int, got: str) -> InputError:
    return InputError(f"line {number}", got, "one JSON object")


class _Constant(str):
    """NaN, Infinity or -Infinity where a value should be: Python's parser takes them, JSON does not have them."""


def _constant(value: Any, path: str = "") -> tuple[str, str] | None:
    """Where the first such constant stands, and which it is."""
    if isinstance(value, _Constant):
        return path, str(value)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if found := _constant(item, f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}"):
            return found
    return None


def _short(value: Any) -> str:
    """A value as JSON, cut to what fits into a message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
