"""Locks a process down and lets a hostile program run in it. `argv[1]` is a JSON configuration.

Two processes: the outer one (trusted) asks the kernel for new namespaces, forks the inner one and kills it when the
parent says so or goes away (`control` closes); the inner one gives up privileges, limits itself, and only then
reads the program. `status` (a pipe the inner one does not have) gets one JSON line on what isolation was reached
and one on how the program ended.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apportion.verify.sandboxed import wire
else:
    # Run as a script beside its neighbours: the package is not on the path here, on purpose.
    import wire

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 1, 8, 38
CAP_DAC_READ_SEARCH = 1 << 2
MS_PRIVATE_REC, MS_PROC = 1 << 18 | 1 << 14, 2 | 4 | 8
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ, EVERYTHING_ABI1 = 1 | 4 | 8, (1 << 13) - 1
_libc = ctypes.CDLL(None, use_errno=True)


def unshare(root: bool) -> list[str]:
    """Enter as many new namespaces as the kernel gives; their names. Root needs no user namespace for them."""
    user = 0 if root else NEWUSER
    for flags, names in (
        (user | NEWNET | NEWPID | NEWNS | NEWIPC | NEWUTS, ["net", "pid", "mount", "ipc"]),
        (user | NEWNET | NEWPID, ["net", "pid"]),
        (user | NEWNET, ["net"]),
    ):
        if _libc.unshare(flags) == 0:
            return [*(["user"] if user else []), *names]
    return []


def landlock(readable: list[str], writable: list[str]) -> bool:
    """Deny every file but these to this process and its children, TCP, and signals to processes outside."""
    abi = _libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        return False
    # Renaming across folders came with version 2 of the interface, truncating with 3, ioctl on devices with 5.
    rights = EVERYTHING_ABI1 | sum(1 << bit for bit, since in ((13, 2), (14, 3), (15, 5)) if abi >= since)
    attributes = (ctypes.c_uint64 * 3)(rights, 3, 3)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _libc.syscall(LANDLOCK_CREATE, ctypes.byref(attributes), ctypes.c_size_t(size), 0)
    if ruleset < 0:
        return False
    for paths, allowed in ((readable, READ), (writable, rights)):
        for path in paths:
            try:
                handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            # Rights on the entries of a folder make no sense on a file, and the kernel refuses them.
            fits = allowed if os.path.isdir(path) else allowed & (1 << 14 | 7)
            rule = fits.to_bytes(8, sys.byteorder) + handle.to_bytes(4, sys.byteorder)
            _libc.syscall(LANDLOCK_ADD, ruleset, 1, rule, 0)
            os.close(handle)
    restricted = _libc.syscall(LANDLOCK_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return bool(restricted)


def drop_capabilities(kept: int) -> None:
    """Give up every capability but those in the bit set `kept`."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)))


def limit(config: dict[str, Any]) -> None:
    for name, value in (
        (resource.RLIMIT_CPU, int(config["wall_s"]) + 1),
        (resource.RLIMIT_AS, config["memory_mb"] << 20),
        (resource.RLIMIT_FSIZE, config["file_mb"] << 20),
        (resource.RLIMIT_NPROC, config["processes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (value, value))


def confine(config: dict[str, Any], namespaces: list[str]) -> bool:
    """Everything the inner process gives up before it reads the program. Returns whether files are fenced off."""
    if "mount" in namespaces:
        _libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_PRIVATE_REC), None)
        # The old /proc shows, and lets one open, every process of this user.
        _libc.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(MS_PROC), None)
    # Root's standard library may lie where only root may read; Landlock keeps this right from reaching further.
    kept = CAP_DAC_READ_SEARCH if config["read_as_root"] else 0
    if config["uid"] is not None:
        _libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setgroups([])
        os.setgid(config["uid"])
        os.setuid(config["uid"])
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    drop_capabilities(kept)
    fenced = landlock(config["readable"], [config["folder"], "/dev/null", "/dev/zero", "/dev/urandom"])
    limit(config)
    return fenced


def inner(config: dict[str, Any], namespaces: list[str], ready: int) -> None:
    """The hostile side. Only the channel and the standard streams stay open when the program is read."""
    os.chdir(config["folder"])
    fenced = confine(config, namespaces)
    os.write(ready, b"1" if fenced else b"0")
    keep = config["channel"] if config["channel"] is not None else 2
    os.closerange(3, keep) if keep > 3 else None
    os.closerange(max(keep, 2) + 1, 4096)
    sys.path[:] = config["path"]
    sys.argv[:] = ["program.py"]
    with open("program.py", encoding="utf-8") as file:
        source = file.read()
    if config["channel"] is None:
        _script(source)
    else:
        serve(source, wire.Channel(socket.socket(fileno=keep)))


def _script(source: str) -> None:
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    try:
        exec(compile(source, "program.py", "exec"), sys.modules["__main__"].__dict__)
    finally:
        sys.stdout.flush()


def serve(source: str, channel: wire.Channel) -> None:
    """Load the program, then answer requests on its names and objects until the other side hangs up."""
    module = types.ModuleType("program")
    sys.modules["program"] = module
    objects: list[Any] = []

    def as_handle(value: Any) -> Any:
        objects.append(value)
        return {"handle": len(objects) - 1, "type": type(value).__name__[:80]}

    def from_handle(message: Any) -> Any:
        return follow(message["handle"], message["attributes"])

    def follow(target: Any, attributes: list[str]) -> Any:
        value = getattr(module, target) if isinstance(target, str) else objects[target]
        for attribute in attributes:
            value = getattr(value, attribute)
        return value

    def answer(request: dict[str, Any]) -> Any:
        if failure is not None:
            raise failure
        value = follow(request["target"], request["attributes"])
        if request["do"] == "set":
            return setattr(value, request["name"], wire.decode(request["value"], from_handle))
        if request["do"] == "call":
            args = [wire.decode(item, from_handle) for item in request["args"]]
            kwargs = {name: wire.decode(item, from_handle) for name, item in request["kwargs"].items()}
            return value(*args, **kwargs)
        if request["do"] == "iterate":
            return list(value)
        return len(value) if request["do"] == "length" else value

    failure: BaseException | None = None
    try:
        exec(compile(source, "program.py", "exec"), module.__dict__)
    except BaseException as error:  # SystemExit too: a program that exits while loading defines nothing
        failure = error
    while True:
        request = channel.receive()
        try:
            reply = {"value": wire.encode(answer(request), as_handle)}
        except BaseException as error:
            reply = {"raised": type(error).__name__[:80], "text": _text(error)}
        channel.send({"id": request["id"], **reply})


def _text(error: BaseException) -> str:
    try:
        return str(error)[:300]
    except BaseException:
        return ""


def outer(config: dict[str, Any]) -> None:
    status = config["status"]
    namespaces = unshare(os.geteuid() == 0)
    ready, ready_inner = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(ready)
            inner(config, namespaces, ready_inner)
            code = 0
        except SystemExit:
            code = 0
        finally:
            os._exit(code)
    os.close(ready_inner)
    if config["channel"] is not None:
        os.close(config["channel"])
    fenced = os.read(ready, 1)
    reached = {"entered": fenced != b"", "namespaces": namespaces, "files_fenced": fenced == b"1"}
    os.write(status, json.dumps(reached).encode() + b"\n")
    ended = os.pidfd_open(child)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(config["control"], select.POLLIN | select.POLLHUP)
    poll.poll()
    # The first process of a PID namespace takes every other one in it along, whatever session it moved to.
    os.kill(child, signal.SIGKILL)
    _, code = os.waitpid(child, 0)
    os.write(status, json.dumps({"ended": os.waitstatus_to_exitcode(code)}).encode() + b"\n")


def main() -> None:
    outer(json.loads(sys.argv[1]))
