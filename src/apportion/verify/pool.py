"""Child processes that may hang, run out of memory or die without taking this process with them.

A job is a JSON line, the answer is JSON lines: nothing is pickled. Each job has a wall-clock limit that starts when
a child takes it up (waiting for a free child does not count) and a memory limit; a stuck child is killed and
another one started when next needed. Usable from any thread; after `os.fork` the new process starts children of
its own. Children live in their own session, so Ctrl-C reaches this process only.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any, Literal

START_S = 60.0
MAX_LINE = 1 << 20
_MAIN = "import sys, json; sys.path[:] = json.loads(sys.argv.pop(2)); import {module}; {module}.main()"


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `value` is the result of "done"; `stage` is the last part the child reported; `reason` says
    what happened otherwise: "timeout", "starved" (killed at the deadline, but the machine had given it less than a
    fifth of that time), "crash", "memory", "error", "start" (no child, or none that came up), "closed" (the pool was,
    meanwhile). Of a child that something else killed no stage is told: the job is not why it died."""

    state: Literal["done", "failed"]
    value: Any = None
    stage: str = ""
    reason: str = ""
    detail: str = ""


class _Failure(Exception):
    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


class _Child:
    """One child process and the pipes to it. Used by one thread at a time."""

    def __init__(self, memory_mb: int, module: str) -> None:
        command = [sys.executable, "-c", _MAIN.format(module=module), str(memory_mb), json.dumps(sys.path)]
        # One hash seed: the order of sets in sympy is then the same in every child and every run.
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
                bufsize=0,
            )
        except OSError as error:
            raise _Failure("start", str(error)) from error
        assert self.process.stdin and self.process.stdout
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        # A stopped child reads nothing: a job larger than the pipe would block for ever.
        os.set_blocking(self._stdin.fileno(), False)
        self._buffer = b""
        self._ready = False

    def _line(self, deadline: float) -> dict[str, Any]:
        with selectors.PollSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise _Failure("timeout")
                piece = os.read(self._stdout.fileno(), 1 << 16)
                if not piece:
                    raise self._ended()
                self._buffer += piece
                if len(self._buffer) > MAX_LINE:
                    raise _Failure("crash", "a result longer than a MiB")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise _Failure("crash", "not a message")
        return message

    def _write(self, data: bytes, deadline: float) -> None:
        rest = memoryview(data)
        with selectors.PollSelector() as selector:
            selector.register(self._stdin, selectors.EVENT_WRITE)
            while rest:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise _Failure("timeout")
                try:
                    rest = rest[os.write(self._stdin.fileno(), rest) :]
                except BlockingIOError:
                    continue
                except BrokenPipeError:
                    raise self._ended() from None

    def _spoke(self) -> bool:
        """Whether something is there to read."""
        with selectors.PollSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            return bool(self._buffer or selector.select(0))

    def _ended(self) -> _Failure:
        """What to raise where the child has closed its pipe."""
        try:
            status = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return _Failure("crash", "closed its pipe")
        return _Failure("killed" if -status in (signal.SIGKILL, signal.SIGTERM) else "crash", f"exit status {status}")

    def wait_ready(self) -> None:
        if self._ready:
            return
        try:
            self._line(time.monotonic() + START_S)
        except _Failure as failure:
            raise _Failure("start", failure.detail or failure.reason) from failure
        self._ready = True

    def run(self, job: dict[str, Any], wall_s: float) -> Outcome:
        stage, cpu = "", self._cpu_s()
        request = json.dumps({**job, "wall_s": wall_s}).encode() + b"\n"
        deadline = time.monotonic() + wall_s
        try:
            if self._spoke():
                # What it said after its last job would be taken for the answer to this one.
                raise _Failure("crash", "it spoke, or died, out of turn")
            self._write(request, deadline)
            while True:
                message = self._line(deadline)
                if "stage" in message:
                    stage = str(message["stage"])
                elif "error" in message:
                    reason = "memory" if message["error"] == "out of memory" else "error"
                    return Outcome("failed", stage=stage, reason=reason, detail=str(message["error"]))
                else:
                    return Outcome("done", message["result"], stage)
        except _Failure as failure:
            reason = failure.reason
            if reason == "killed":
                return Outcome("failed", reason="crash", detail=failure.detail)
            # A child that got no processor is no evidence against the answer it was reading.
            if reason == "timeout" and cpu is not None and (now := self._cpu_s()) is not None:
                reason = "timeout" if now - cpu >= 0.2 * wall_s else "starved"
            return Outcome("failed", stage=stage, reason=reason, detail=failure.detail)
        except KeyError:
            return Outcome("failed", stage=stage, reason="crash", detail="a message without a result")
        except (OSError, ValueError) as error:
            # Of our own pipes: not the job's doing.
            return Outcome("failed", reason="crash", detail=str(error))

    def _cpu_s(self) -> float | None:
        """Processor seconds used so far; None where /proc does not tell."""
        try:
            with open(f"/proc/{self.process.pid}/stat", encoding="ascii", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Kill the process and wait for it. The pipes stay open for the thread that may be reading them."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def drop(self) -> None:
        """Close our ends of the pipes without touching the process."""
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()


class Pool:
    """Up to `workers` children, started when first needed.

    Args:
        workers: children at most; the number of processors by default.
        memory_mb: address space of a child, MiB.
        module: the module whose `main()` a child runs.
    """

    def __init__(
        self, workers: int | None = None, memory_mb: int = 1024, module: str = "apportion.verify.worker"
    ) -> None:
        self.workers = workers or len(os.sched_getaffinity(0))
        self.memory_mb, self.module = memory_mb, module
        self._reset()
        _POOLS.add(self)

    def _reset(self) -> None:
        self._slots = threading.Semaphore(self.workers)
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()
        self._closed = False

    def run(self, job: dict[str, Any], wall_s: float) -> Outcome:
        """Give `job` (JSON values) to a child and wait. Never raises for what happens to the child.

        Raises:
            RuntimeError: the pool is closed.
        """
        if self._closed:
            raise RuntimeError("this pool is closed")
        with self._slots:
            outcome = self._attempt(job, wall_s)
            if outcome.reason == "crash" and not outcome.stage:
                # It died before it took the job up, or was killed from outside: not the job's doing.
                outcome = self._attempt(job, wall_s)
            return outcome

    def _attempt(self, job: dict[str, Any], wall_s: float) -> Outcome:
        try:
            child = self._take()
        except _Failure as failure:
            return Outcome("failed", reason=failure.reason, detail=failure.detail)
        keep = False
        try:
            child.wait_ready()
            outcome = child.run(job, wall_s)
            keep = outcome.state == "done" or outcome.reason == "error"
            return outcome
        except _Failure as failure:
            return Outcome("failed", reason=failure.reason, detail=failure.detail)
        finally:
            # Also on KeyboardInterrupt: a child in the middle of a job is of no use to the next one.
            self._give_back(child, keep)

    def _take(self) -> _Child:
        with self._lock:
            if self._closed:
                raise _Failure("closed")
            child = self._idle.pop() if self._idle else None
            if child is None or child.process.poll() is not None:
                if child is not None:
                    child.drop()
                child = _Child(self.memory_mb, self.module)
            self._busy.add(child)
            return child

    def _give_back(self, child: _Child, keep: bool) -> None:
        with self._lock:
            self._busy.discard(child)
            if keep and not self._closed:
                self._idle.append(child)
                return
        child.end()
        child.drop()

    def close(self) -> None:
        """Kill every child and wait for it. Jobs under way end as failed."""
        with self._lock:
            self._closed = True
            idle, busy = [*self._idle], [*self._busy]
            self._idle.clear()
        for child in (*idle, *busy):
            child.end()
        for child in idle:
            child.drop()

    def _after_fork(self) -> None:
        # The children are our parent's. Locks may have been held by threads that do not exist here.
        for child in [*self._idle, *self._busy]:
            child.drop()
            # Popen would else complain, when collected, of a child that was never ours to wait for.
            child.process.returncode = 0
        self._reset()


_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()
_shared: dict[int, Pool] = {}
_shared_lock = threading.Lock()


def shared_pool(memory_mb: int = 1024) -> Pool:
    """The process-wide pool with this memory limit."""
    with _shared_lock:
        if memory_mb not in _shared:
            _shared[memory_mb] = Pool(memory_mb=memory_mb)
        return _shared[memory_mb]


def _after_fork() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()
    for pool in list(_POOLS):
        pool._after_fork()


def _close_all() -> None:
    for pool in list(_POOLS):
        pool.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_close_all)
