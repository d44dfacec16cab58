"""Runs a data set's tests (trusted, but bounded) against a program in another process.

One JSON job on standard input; one JSON line a test on standard output. Each name the tests leave to the program is a
`Remote`: calling it sends plain arguments across and returns a plain value, or a `Remote` for an object, which
refuses every comparison. So `==` only ever runs here, on builtin values.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apportion.verify.sandboxed import wire
else:
    # Run as a script beside its neighbours: the package is not on the path here, on purpose.
    import wire


class ProgramError(Exception):
    """The program raised, hung, died, or handed over an object where a value was needed."""


class TestError(Exception):
    """The test asks for what cannot cross: it passes the program a function or an object of its own."""


class Session:
    """The channel to the program, and what happened on it."""

    def __init__(self, channel: wire.Channel, deadline: float) -> None:
        self.channel, self.deadline = channel, deadline
        self.calls = 0
        self.dead = ""
        self.on_first_call: Any = None

    def ask(self, **request: Any) -> Any:
        """Send a request and return its value. Raises what the program raised, as a builtin exception where there
        is one of that name."""
        self.calls += 1
        if self.on_first_call is not None:
            self.on_first_call()
            self.on_first_call = None
        if self.dead:
            raise ProgramError(self.dead)
        try:
            self.channel.send({"id": self.calls, **request})
            reply = self._reply()
            if "raised" not in reply:
                return wire.decode(reply["value"], lambda message: Remote(self, int(message["handle"]), message))
            name, text = str(reply["raised"]), str(reply["text"])
        except TimeoutError:
            self.dead = "timed out"
        except (wire.WireError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            self.dead = f"the program's process failed: {error}"
        if self.dead:
            raise ProgramError(self.dead)
        kind = getattr(builtins, name, None)
        # StopIteration would end a map() in the test, quietly; exits would end the test.
        quiet = StopIteration | StopAsyncIteration
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, quiet):
            raise _raised(kind, name, text)
        raise ProgramError(f"{name}: {text}")

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
    """A name or an object of the program. It can be called, passed back, read, set and iterated, not compared."""

    __slots__ = ("_attributes", "_kind", "_session", "_target")

    def __init__(
        self, session: Session, target: str | int, message: Any = None, attributes: tuple[str, ...] = ()
    ) -> None:
        object.__setattr__(self, "_session", session)
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_kind", message.get("type") if isinstance(message, dict) else None)
        object.__setattr__(self, "_attributes", attributes)

    def _ask(self, do: str, **more: Any) -> Any:
        return self._session.ask(do=do, target=self._target, attributes=self._attributes, **more)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask(
            "call",
            args=[wire.encode(item, _outgoing) for item in args],
            kwargs={name: wire.encode(item, _outgoing) for name, item in kwargs.items()},
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._session.ask(do="get", target=self._target, attributes=[*self._attributes, name])
        # A method stays a path, so that calling it is one request.
        if isinstance(value, Remote):
            return Remote(self._session, self._target, None, (*self._attributes, name))
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name=name, value=wire.encode(value, _outgoing))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("iterate"))

    def __len__(self) -> int:
        return int(self._ask("length"))

    def __repr__(self) -> str:
        return f"<{self._kind or 'object'} of the program>"

    def _refuse(self, *_: Any) -> Any:
        raise ProgramError(f"returned an object of type {self._kind}, which is not a plain value")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = __contains__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __abs__ = __getitem__ = __round__ = _refuse


def _outgoing(value: Any) -> Any:
    if type(value) is Remote:
        return {"handle": value._target, "attributes": value._attributes}
    raise TestError(f"the test passes the program a {type(value).__name__}, which cannot cross into the sandbox")


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
        before = session.calls
        tree = ast.parse(step)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        depends = bool(names & tainted)
        session.on_first_call = lambda number=number: say(called=number)
        if depends:
            say(called=number)
        blame = error = ""
        try:
            exec(compile(tree, "tests", "exec"), namespace)
        except BaseException as failure:
            # What goes wrong without the program being asked, or a value of it used, is the test's own doing.
            depends = depends or session.calls > before
            blame = "program" if depends and not isinstance(failure, TestError) else "test"
            error = f"{type(failure).__name__}: {str(failure)[:200]}"
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
    signal.setitimer(signal.ITIMER_REAL, job["wall_s"] + 5)

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    run(job, say)
