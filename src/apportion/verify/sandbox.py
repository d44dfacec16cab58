"""Run hostile programs against tests: the protocol, and the sandbox on this machine.

What the local sandbox is, by tier (`LocalSandbox().tier()` says which one this machine reaches):

* "process": another process, empty environment, private folder, limits on time, memory, files and processes, killed
  as a group. It does **not** stop a program from reading and writing this user's files, from filling the disk with
  many files, from killing or tracing this user's processes (the grader among them), nor from using the network.
  Where the kernel has Landlock or takes the filter, they are on all the same. For trusted models only.
* "namespaces": besides, new user (root drops to `nobody` instead), network, PID, mount and IPC namespaces, no
  capabilities: no network, no sight of other processes, nothing written but to a bounded folder in memory, and
  nothing outlives the kill. Without the filter the program can clear the signal that ends it should its guard be
  killed first. It does not stop a program from *reading* files that its user may read, from talking to
  services over sockets in the file system, nor from attacking the kernel.
* "fenced": besides, Landlock and the filter: no file's contents but the standard library's and the private folder's, no
  sockets, no further namespaces, keyrings or interfaces to much of the kernel. It does not stop a program from seeing
  which files there are, how large and how old (`stat`), from an attack on what is left of the kernel, nor
  timing channels. For programs of unknown origin at scale use a virtual machine behind `Sandbox`.

Standard output and memory are bounded for each process; a private folder in memory and its files come on top.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

NOBODY = 65534
GRACE_S = 2.0
START_S = 20.0
FOLDER_FILES, FOLDER_ENTRIES, THREADS = 4, 4096, 256
Tier = Literal["process", "namespaces", "fenced"]
_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sandboxed")
_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); import {script}; {script}.main()"


class SandboxError(RuntimeError):
    """The sandbox itself failed (no start, upload or download failed, lost machine): nothing about the program."""


@dataclass(frozen=True)
class Limits:
    """wall_s: seconds for all tests of a program together; memory_mb, file_mb, output_kb: MiB, MiB, KiB.

    file_mb: of one file; of all together FOLDER_FILES times that. processes: 1 leaves threads only.

    readable: further folders and files that the program may read where Landlock fences it, on this machine.
    """

    wall_s: float = 10.0
    memory_mb: int = 512
    file_mb: int = 16
    output_kb: int = 1024
    processes: int = 1
    packages: bool = False
    readable: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallJob:
    """Python tests that call a program. `steps` run in order, those in `tests` (indices) are counted; `names` are
    the tests' free names → the library module they come from, or None for the program's."""

    program: str
    steps: tuple[str, ...]
    tests: tuple[int, ...]
    names: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class StdinJob:
    """A program run once for each input text."""

    program: str
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class StepResult:
    """One step of a `CallJob`. `blame`: "" (it passed), "program" or "test"."""

    blame: str
    error: str = ""


@dataclass(frozen=True)
class StdinResult:
    """What a program wrote to standard output. `error`: "" or "timed out", "too much output"."""

    output: str
    error: str = ""


@dataclass(frozen=True)
class CallReport:
    """Results of the steps, in order, one for every step; `calls`: how often the tests asked the program."""

    results: tuple[StepResult, ...]
    calls: int
    tier: str = ""


@dataclass(frozen=True)
class StdinReport:
    results: tuple[StdinResult, ...]
    tier: str = ""


class Sandbox(Protocol):
    """Who runs hostile programs. A remote client implements these two and raises `SandboxError` for whatever goes
    wrong on its own side: that becomes "abstain", never "wrong". Jobs and reports hold JSON values only."""

    def call(self, job: CallJob, limits: Limits) -> CallReport:
        """Run Python tests against a program."""
        ...

    def stdin(self, job: StdinJob, limits: Limits) -> StdinReport:
        """Run a program once for each input."""
        ...


def _stdlib_paths() -> list[str]:
    return [path for path in sys.path if path and "site-packages" not in path and path.startswith(sys.base_prefix)]


@functools.cache
def _readable() -> list[str]:
    stdlib = os.path.dirname(os.__file__)
    fixed = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime")
    return [stdlib, os.path.join(sys.base_prefix, "lib"), *fixed]


@functools.cache
def _stdlib_is_private() -> bool:
    """Whether the standard library lies below a folder that only its owner may enter (root's own, say)."""
    path = os.path.realpath(os.path.dirname(os.__file__))
    while path != "/":
        if os.stat(path).st_mode & 0o005 != 0o005:
            return True
        path = os.path.dirname(path)
    return False


class _Jail:
    """One run of a program: the process, its private folder, and the pipes that control it."""

    def __init__(self, program: str, limits: Limits, channel: socket.socket | None, stdin: str | None = None) -> None:
        self._control = self._status = -1
        self.process: subprocess.Popen[bytes] | None = None
        self.folder = tempfile.mkdtemp(prefix="apportion-")
        try:
            self._start(program, limits, channel, stdin)
        except BaseException:
            self.close()
            raise

    def _start(self, program: str, limits: Limits, channel: socket.socket | None, stdin: str | None) -> None:
        with open(os.path.join(self.folder, "program.py"), "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(program)
        with open(os.path.join(self.folder, "input"), "wb") as file_in:
            file_in.write((stdin or "").encode("utf-8", "replace"))
        if root := os.geteuid() == 0:
            os.chown(self.folder, NOBODY, NOBODY)
        packages = [path for path in sys.path if path and path not in _stdlib_paths()] if limits.packages else []
        config = {
            "folder": self.folder,
            "channel": channel.fileno() if channel else None,
            "uid": NOBODY if root else None,
            "read_as_root": root and _stdlib_is_private(),
            "path": [*_stdlib_paths(), *packages],
            "readable": [*_readable(), *packages, *limits.readable],
            "wall_s": limits.wall_s,
            "memory_mb": limits.memory_mb,
            "file_mb": limits.file_mb,
            "folder_mb": FOLDER_FILES * limits.file_mb,
            "folder_entries": FOLDER_ENTRIES,
            "processes": limits.processes,
            "threads": THREADS,
        }
        theirs: list[int] = []
        try:
            control, self._control = os.pipe()
            theirs.append(control)
            self._status, status = os.pipe()
            theirs.append(status)
            inherited = [*theirs, *([channel.fileno()] if channel else [])]
            with open(os.path.join(self.folder, "input"), "rb") as standard_input:
                self.process = subprocess.Popen(
                    _command("jail", json.dumps({**config, "control": control, "status": status})),
                    stdin=standard_input,
                    stdout=subprocess.DEVNULL if channel else subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    pass_fds=inherited,
                    env={},
                    start_new_session=True,
                    bufsize=0,
                )
        finally:
            for end in theirs:
                os.close(end)

    def entered(self) -> Tier:
        """Wait until the program is locked in; the tier reached. Raises `SandboxError` if it never is."""
        line = b""
        deadline = time.monotonic() + START_S
        while b"\n" not in line:
            piece = _read(self._status, deadline)
            if not piece:
                raise SandboxError("the sandbox process did not start")
            line += piece
        state = json.loads(line.partition(b"\n")[0])
        if "failed" in state:
            raise SandboxError(f"the sandbox process could not lock itself down: {state['failed']}")
        if not {"pid", "net", "ipc"} <= set(state["namespaces"]) or not state["enclosed"]:
            return "process"
        return "fenced" if state["fenced"] and state["filtered"] else "namespaces"

    def close(self) -> None:
        """Kill the program and everything it started, and remove its folder."""
        for end in (self._control, self._status):
            if end >= 0:
                os.close(end)
        self._control = self._status = -1
        if self.process is not None:
            # Its control pipe has closed: it kills the program and ends. The group kill is for where it cannot.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=GRACE_S)
            _kill_group(self.process)
            if self.process.stdout:
                self.process.stdout.close()
        _remove(self.folder)


def _remove(folder: str) -> None:
    """Remove a folder of a program's: it may be deeper than Python recurses, and closed to its owner."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            with contextlib.suppress(OSError):
                subprocess.run(
                    [*command, "--", folder], stderr=subprocess.DEVNULL, env={"PATH": os.defpath}, check=False
                )


def _command(script: str, *arguments: str) -> list[str]:
    # -I: no environment, no user site; -S: no site-packages, and a start in 15 ms.
    return [sys.executable, "-I", "-S", "-c", _BOOT.format(script=script), _FOLDER, *arguments]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(descriptor: int, deadline: float) -> bytes:
    """Some bytes, or b"" at the end of the stream or the deadline."""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        left = deadline - time.monotonic()
        return os.read(descriptor, 1 << 16) if left > 0 and selector.select(left) else b""


@contextlib.contextmanager
def _jailed(
    program: str, limits: Limits, channel: socket.socket | None = None, stdin: str | None = None
) -> Iterator[_Jail]:
    try:
        jail = _Jail(program, limits, channel, stdin)
    except OSError as error:
        raise SandboxError(f"no sandbox process: {error}") from error
    try:
        yield jail
    finally:
        jail.close()


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair()
    except OSError as error:
        raise SandboxError(f"no channel: {error}") from error


@dataclass(frozen=True)
class LocalSandbox:
    """The sandbox on this machine. `require`: the least tier accepted; less raises `SandboxError`."""

    require: Tier = "process"

    def tier(self) -> Tier:
        """What this machine reaches, tried out."""
        with _jailed("", Limits(), stdin="") as jail:
            return jail.entered()

    def _entered(self, jail: _Jail) -> Tier:
        tier, order = jail.entered(), get_args(Tier)
        if order.index(tier) < order.index(self.require):
            raise SandboxError(f"this machine reaches the tier {tier!r}, {self.require!r} was required")
        return tier

    def call(self, job: CallJob, limits: Limits) -> CallReport:
        """Run Python tests: the program in one process, the tests in another, plain values between them."""
        ours, theirs = _socket_pair()
        with ours, theirs, _jailed(job.program, limits, theirs) as jail:
            theirs.close()
            tier = self._entered(jail)
            messages = _harness(job, limits, ours)
        return _call_report(job, messages, tier)

    def stdin(self, job: StdinJob, limits: Limits) -> StdinReport:
        """Run the program afresh for each input; nothing but its standard output is looked at."""
        results, tier = [], ""
        left = limits.wall_s
        for text in job.inputs:
            with _jailed(job.program, limits, stdin=text) as jail:
                tier = self._entered(jail)
                assert jail.process and jail.process.stdout
                # What it takes to start a sandbox is no time of the program's.
                started = time.monotonic()
                results.append(_output(jail.process.stdout.fileno(), started + left, limits.output_kb << 10))
                left -= time.monotonic() - started
        return StdinReport(tuple(results), tier)


def _output(descriptor: int, deadline: float, cap: int) -> StdinResult:
    pieces: list[bytes] = []
    size = 0
    while piece := _read(descriptor, deadline):
        pieces.append(piece)
        size += len(piece)
        if size > cap:
            return StdinResult("", "too much output")
    if time.monotonic() >= deadline:
        return StdinResult("", "timed out")
    return StdinResult(b"".join(pieces).decode("utf-8", "replace"))


def _harness(job: CallJob, limits: Limits, channel: socket.socket) -> list[dict[str, Any]]:
    """Run the tests; what they reported until they ended or their time was over."""
    request = {
        "channel": channel.fileno(),
        "wall_s": limits.wall_s,
        "grace_s": GRACE_S,
        "memory_mb": 2 * limits.memory_mb,
        "path": _stdlib_paths() if not limits.packages else [path for path in sys.path if path],
        "names": job.names,
        "steps": job.steps,
    }
    try:
        with tempfile.TemporaryFile() as standard_input:
            standard_input.write(json.dumps(request).encode())
            standard_input.seek(0)
            process = subprocess.Popen(
                _command("harness"),
                stdin=standard_input,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[channel.fileno()],
                env={},
                start_new_session=True,
                bufsize=0,
            )
    except OSError as error:
        raise SandboxError(f"no test process: {error}") from error
    assert process.stdout
    try:
        # It ends itself when its time, counted from its start, is over.
        deadline = time.monotonic() + START_S + limits.wall_s + GRACE_S
        written = b""
        while piece := _read(process.stdout.fileno(), deadline):
            written += piece
    finally:
        _kill_group(process)
        process.stdout.close()
    return [json.loads(line) for line in written.split(b"\n")[:-1]]


def _call_report(job: CallJob, messages: list[dict[str, Any]], tier: str) -> CallReport:
    results = {m["step"]: StepResult(m["blame"], m["error"]) for m in messages if "step" in m}
    called = {m["called"] for m in messages if "called" in m}
    calls = next((m["done"] for m in messages if "done" in m), len(called))
    for number in range(len(job.steps)):
        # The first step without a result is where the test process was stuck or died. If the program had been
        # asked something by then, what it answered is what the test choked on.
        stuck = StepResult("program" if number in called else "test", "the test did not finish")
        if number not in results:
            return CallReport((*(results[n] for n in range(number)), *[stuck] * (len(job.steps) - number)), calls, tier)
    return CallReport(tuple(results[number] for number in range(len(job.steps))), calls, tier)
