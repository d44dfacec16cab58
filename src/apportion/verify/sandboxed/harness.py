"""Runs a data set's tests (trusted, but bounded) against a program in another process.

One JSON job on standard input; one JSON line a test on standard output. Each name the tests leave to the program is a
`Remote`: calling it sends plain arguments across and returns a plain value, or a `Remote` for an object, which
refuses comparisons, or makes them on the plain value that came with it. So `==` only ever runs here, on builtin values.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import operator
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apportion.verify.sandboxed import wire
else:
    # Run as a script beside its neighbours: the package is not on the path here, on purpose.
    import wire


class ProgramError(Exception):
    """The program raised an exception of its own."""


class Unusable(BaseException):
    """The program hung, died, does not load, exits, or handed over an object where a value was needed. No Exception:
    a test that expects one from the program must not take this for it."""


class TestError(BaseException):
    """The test asks for what cannot cross: it passes the program a function or an object of its own, say."""


class Session:
    """The channel to the program, and what happened on it."""

    def __init__(self, channel: wire.Channel, deadline: float) -> None:
        self.channel, self.deadline = channel, deadline
        self.calls = 0
        self.dead = self.blocked = ""
        self.on_first_call: Any = None

    def ask(self, **request: Any) -> Any:
        """Send a request and return its value. Raises what the program raised, as a builtin exception where there
        is one of that name."""
        self.calls += 1
        if self.on_first_call is not None:
            self.on_first_call()
            self.on_first_call = None
        if self.dead:
            raise Unusable(self.dead)
        try:
            self.channel.send({"id": self.calls, **request})
        except wire.WireError as error:
            raise self.block(str(error)) from None
        except OSError as error:
            self.dead = f"the program's process failed: {error}"
            raise Unusable(self.dead) from None
        try:
            reply = self._reply()
            if "absent" in reply:
                self.dead = str(reply["absent"])
            elif "raised" not in reply:
                return wire.decode(reply["value"], self._remote)
            else:
                name, text = str(reply["raised"]), str(reply["text"])
        except TimeoutError:
            self.dead = "timed out"
        except (wire.WireError, OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            self.dead = f"the program's process failed: {error}"
        if self.dead:
            raise Unusable(self.dead)
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            # StopIteration would end a map() in the test, quietly; exits would end the test.
            if issubclass(kind, StopIteration | StopAsyncIteration) or not issubclass(kind, Exception):
                raise Unusable(f"{name}: {text}")
            raise _raised(kind, name, text)
        raise ProgramError(f"{name}: {text}")

    def block(self, message: str) -> TestError:
        """What to raise where a test asks for something that cannot cross; it is remembered if the test goes on."""
        self.blocked = self.blocked or message
        return TestError(message)

    def plain(self, value: Any) -> Any:
        """The message for a value of the test's."""
        try:
            return wire.encode(value, self._outgoing)
        except wire.WireError as error:
            raise self.block(str(error)) from None

    def _outgoing(self, value: Any) -> Any:
        if type(value) is Remote:
            return {"handle": value._target, "attributes": value._attributes}
        raise self.block(f"the test passes the program a {type(value).__name__}, which cannot cross into the sandbox")

    def _remote(self, message: Any) -> Remote:
        handle = Remote(self, int(message["handle"]), str(message.get("type"))[:80])
        if "plain" in message:
            object.__setattr__(handle, "_plain", wire.decode(message["plain"], self._remote))
        return handle

    def _reply(self) -> dict[str, Any]:
        while True:
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            reply = self.channel.receive(left)
            # Stale answers are those of a program that writes to the channel itself: values all the same.
            if type(reply) is dict and reply.get("id") == self.calls:
                return reply


def _raised(kind: type[Exception], name: str, text: str) -> Exception:
    try:
        return kind(text)
    except TypeError:
        return ProgramError(f"{name}: {text}")


class Remote:
    """A name or an object of the program. It can be called, passed back, read, set and iterated; it is compared and
    computed with by the plain value that came with it, if one did."""

    __slots__ = ("_attributes", "_kind", "_plain", "_session", "_target")

    def __init__(
        self, session: Session, target: str | int, kind: str = "object", attributes: tuple[str, ...] = ()
    ) -> None:
        for name, value in (
            ("_session", session), ("_target", target), ("_kind", kind), ("_plain", self), ("_attributes", attributes),
        ):  # fmt: skip
            object.__setattr__(self, name, value)

    def _ask(self, do: str, **more: Any) -> Any:
        return self._session.ask(do=do, target=self._target, attributes=self._attributes, **more)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = self._session.plain
        return self._ask(
            "call", args=[plain(item) for item in args], kwargs={name: plain(item) for name, item in kwargs.items()}
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._session.ask(do="get", target=self._target, attributes=[*self._attributes, name])
        # A method stays a path, so that calling it is one request.
        if isinstance(value, Remote):
            return Remote(self._session, self._target, "object", (*self._attributes, name))
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name=name, value=self._session.plain(value))

    def __iter__(self) -> Iterator[Any]:
        items = self._ask("iterate")
        if type(items) not in (list, Remote):
            raise Unusable("the program's object gave no items")
        return _one_by_one(items) if type(items) is Remote else iter(items)

    def __next__(self) -> Any:
        found = self._ask("next")
        if type(found) is not list or len(found) > 1:
            raise Unusable("the program's iterator gave no item")
        if not found:
            raise StopIteration
        return found[0]

    def __len__(self) -> int:
        return int(self._ask("length"))

    def __bool__(self) -> bool:
        return self._ask("truth") is True if self._plain is self else bool(self._plain)

    def __instancecheck__(self, value: Any) -> bool:
        raise self._session.block("the test asks for a class of the program's, which cannot cross")

    __subclasscheck__ = __instancecheck__

    def __repr__(self) -> str:
        return f"<{self._kind} of the program>"


def _one_by_one(items: Remote) -> Iterator[Any]:
    while (item := next(items, _END)) is not _END:
        yield item


def _by_value(function: Callable[..., Any], reflected: bool = False) -> Any:
    def operation(self: Remote, *operands: Any) -> Any:
        # No object is None, whatever it says.
        if operands == (None,) and function in (operator.eq, operator.ne):
            return function is operator.ne
        if self._plain is self:
            raise Unusable(f"returned an object of type {self._kind}, which is not a plain value")
        return function(*operands, self._plain) if reflected else function(self._plain, *operands)

    return operation


for _function in (hash, round, abs, int, float, operator.index, operator.neg, operator.contains, operator.getitem):
    setattr(Remote, f"__{_function.__name__}__", _by_value(_function))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _by_value(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Remote, f"__{_name}__", _by_value(getattr(operator, _name)))
    setattr(Remote, f"__r{_name}__", _by_value(getattr(operator, _name), reflected=True))
_END = object()


def _bind(names: dict[str, str | None], session: Session) -> dict[str, Any]:
    """What each free name of the tests stands for: a library's own object, or the program's."""
    bound: dict[str, Any] = {}
    for name, module in names.items():
        if module is None:
            bound[name] = Remote(session, name)
        else:
            library = importlib.import_module(module)
            bound[name] = library if module == name else getattr(library, name)
    return bound


def run(job: dict[str, Any], say: Any) -> None:
    """Run the steps in order. A test is a step that is counted; the rest (imports, assignments) prepares."""
    channel = wire.Channel(socket.socket(fileno=job["channel"]))
    session = Session(channel, time.monotonic() + job["wall_s"])
    namespace: dict[str, Any] = {"__name__": "tests", **_bind(job["names"], session)}
    tainted: set[str] = set()
    for number, step in enumerate(job["steps"]):
        before, session.blocked = session.calls, ""
        tree = ast.parse(step)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        depends = bool(names & tainted)
        session.on_first_call = lambda number=number: say(called=number)
        if depends:
            say(called=number)
        blame = error = ""
        try:
            exec(compile(tree, "tests", "exec", dont_inherit=True), namespace)
        except BaseException as failure:
            # What goes wrong without the program being asked, or a value of it used, is the test's own doing.
            depends = depends or session.calls > before
            blame = "program" if depends else "test"
            error = f"{type(failure).__name__}: {str(failure)[:200]}"
        # Neither ends in a bare `except`.
        if session.dead and session.calls > before:
            blame, error = "program", session.dead
        elif session.blocked:
            blame, error = "test", session.blocked
        if depends or session.calls > before:
            tainted |= names - job["names"].keys()
        say(step=number, ok=not blame, blame=blame, error=error)
    say(done=session.calls)


def main() -> None:
    """Read the job, bound this process, run it."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    job = json.loads(sys.stdin.buffer.read())
    os.dup2(null, 0)
    sys.path[:] = job["path"]
    limit = job["memory_mb"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_REAL, job["wall_s"] + job["grace_s"])

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    run(job, say)
