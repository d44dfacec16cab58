"""Plain values as JSON, and back. What is not exactly a plain type crosses as a numbered handle, never as itself.

Plain: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, and from the
standard library deque, Counter, OrderedDict, defaultdict (as a dict), Decimal, Fraction; and the builtin types
themselves. A subclass is not plain: its `__eq__` is the other side's code.
"""

from __future__ import annotations

import json
import socket
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, object)
}
MAX_MESSAGE = 4 << 20
MAX_DEPTH = 100


class WireError(Exception):
    """A message that is too long, cut off, or no message."""


def encode(value: Any, handle: Callable[[Any], Any], depth: int = 0) -> Any:
    """JSON for `value`; `handle(object)` gives the JSON of what is not plain (or raises)."""
    if depth > MAX_DEPTH:
        raise WireError("a value nested too deeply")
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -(1 << 53) < value < 1 << 53 else {"int": hex(value)}
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind in (bytes, bytearray):
        return {kind.__name__: value.hex()}
    if kind in (list, tuple, set, frozenset, deque):
        return {kind.__name__: [encode(item, handle, depth + 1) for item in value]}
    if kind in (dict, defaultdict, OrderedDict, Counter):
        name = "dict" if kind is defaultdict else kind.__name__
        return {name: [[encode(item, handle, depth + 1) for item in pair] for pair in value.items()]}
    if kind is range:
        return {"range": [encode(part, handle) for part in (value.start, value.stop, value.step)]}
    for name, builtin in TYPES.items():
        if value is builtin:
            return {"type": name}
    if (kind.__module__, kind.__name__) in (("decimal", "Decimal"), ("fractions", "Fraction")):
        return {kind.__name__: str(value)}
    return handle(value)


def _decimal(text: str) -> Any:
    from decimal import Decimal

    return Decimal(text)


def _fraction(text: str) -> Any:
    from fractions import Fraction

    return Fraction(text)


_BUILD: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": lambda parts: complex(float.fromhex(parts[0]), float.fromhex(parts[1])),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "range": lambda parts: range(*parts),
    "Decimal": _decimal,
    "Fraction": _fraction,
    "type": TYPES.__getitem__,
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
}
_NESTED = frozenset(("list", "tuple", "set", "frozenset", "deque", "range"))
_PAIRS = frozenset(("dict", "OrderedDict", "Counter"))


def decode(message: Any, handle: Callable[[Any], Any]) -> Any:
    """The value of a message; `handle(json)` gives what stands for the other side's object. Builds nothing but
    plain values whatever the message says; raises `WireError` on what is no message."""
    if message is None or type(message) in (bool, int, str):
        return message
    if type(message) is not dict or not message:
        raise WireError("not a value")
    if "handle" in message:
        return handle(message)
    ((name, body),) = message.items()
    try:
        if name in _NESTED:
            return _BUILD[name]([decode(item, handle) for item in body])
        if name in _PAIRS:
            return _BUILD[name]([(decode(key, handle), decode(item, handle)) for key, item in body])
        return _BUILD[name](body)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise WireError(f"not a value: {name!r}") from error


class Channel:
    """JSON lines over a socket, with a cap on what one line may hold."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""

    def send(self, message: Any) -> None:
        line = json.dumps(message).encode() + b"\n"
        if len(line) > MAX_MESSAGE:
            raise WireError("a value too large to pass on")
        self._socket.sendall(line)

    def receive(self, timeout: float | None = None) -> Any:
        """The next message. Raises `WireError` on the end of the stream, `TimeoutError` after `timeout` seconds
        of silence."""
        self._socket.settimeout(timeout)
        pieces = [self._buffer]
        size = len(self._buffer)
        while b"\n" not in pieces[-1]:
            if size > MAX_MESSAGE:
                raise WireError("a value too large to pass on")
            piece = self._socket.recv(1 << 16)
            if not piece:
                raise WireError("the process ended")
            pieces.append(piece)
            size += len(piece)
        line, _, self._buffer = b"".join(pieces).partition(b"\n")
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WireError("not a message") from error
