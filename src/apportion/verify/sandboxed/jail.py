"""Locks a process down and lets a hostile program run in it. `argv[1]` is a JSON configuration.

Two processes: the outer one (trusted) asks the kernel for new namespaces, forks the inner one and kills it when the
parent says so or goes away (`control` closes); the inner one gives up privileges, limits itself, and only then
runs the program. `status` (a pipe the inner one does not have while the program runs) gets one JSON line: the isolation
that was reached, or why there is none.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apportion.verify.sandboxed import filter as calls
    from apportion.verify.sandboxed import wire
else:
    # Run as a script beside its neighbours: the package is not on the path here, on purpose.
    import filter as calls
    import wire

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 8, 36, 38
CAP_DAC_READ_SEARCH = 1 << 2
MS_PRIVATE_REC, MS_BARE = 1 << 18 | 1 << 14, 2 | 4 | 8
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ, EVERYTHING_ABI1 = 1 | 4 | 8, (1 << 13) - 1
# Instances of their subclasses cross with a plain value beside them (named tuples, enumerations of integers). Not those
# of lists and the like: the object here may change, and the value would not.
_BASES = (str, int, float, complex, bytes, tuple, frozenset)
_END = object()
_libc = ctypes.CDLL(None, use_errno=True)


def unshare(root: bool) -> list[str]:
    """Enter as many new namespaces as the kernel gives; their names. Root needs no user namespace for them."""
    user, uid, gid = 0 if root else NEWUSER, os.geteuid(), os.getegid()
    for flags, names in (
        (user | NEWNET | NEWPID | NEWNS | NEWIPC | NEWUTS, ["net", "pid", "mount", "ipc"]),
        (user | NEWNET | NEWPID, ["net", "pid"]),
        (user | NEWNET, ["net"]),
    ):
        if _libc.unshare(flags) == 0:
            if user:
                # Files in a new file system need an owner that has a name in here.
                for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                    with open(f"/proc/self/{file}", "w", encoding="ascii") as handle:
                        handle.write(text)
            return [*(["user"] if user else []), *names]
    return []


def enclose(config: dict[str, Any]) -> bool:
    """This process's own view of files: its own /proc, all of it read-only (Landlock lets chmod and the like through),
    and over the folder a file system in memory, which is bounded and goes away with the process. Whether it worked."""
    owner = config["uid"] if config["uid"] is not None else os.geteuid()
    group = config["uid"] if config["uid"] is not None else os.getegid()
    size = f"size={config['folder_mb']}m,nr_inodes={config['folder_entries']},mode=700,uid={owner},gid={group}"
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
    return (
        _libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_PRIVATE_REC), None) == 0
        # The old /proc shows, and lets one open, every process of this user.
        and _libc.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(MS_BARE), None) == 0
        and _libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, ctypes.c_size_t(32)) == 0
        and _libc.mount(b"tmpfs", os.fsencode(config["folder"]), b"tmpfs", ctypes.c_ulong(2 | 4), size.encode()) == 0
    )


def landlock(readable: list[str], writable: list[str]) -> bool:
    """Deny every file but these to this process and its children, TCP, and signals to processes outside.

    Readable ones may be missing. Raises OSError where a writable one cannot be opened."""
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
                if paths is writable:
                    raise
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


def limit(config: dict[str, Any], processes: int) -> None:
    for name, value in (
        (resource.RLIMIT_CPU, int(config["wall_s"]) + 1),
        (resource.RLIMIT_AS, config["memory_mb"] << 20),
        (resource.RLIMIT_FSIZE, config["file_mb"] << 20),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        most = resource.getrlimit(name)[1]
        kept = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(name, (kept, kept))


def confine(config: dict[str, Any], namespaces: list[str]) -> dict[str, bool]:
    """Everything the inner process gives up before it runs the program; it ends in the private folder. Returns which
    of `enclosed`, `fenced`, `filtered` were reached."""
    enclosed = "mount" in namespaces and enclose(config)
    os.chdir(config["folder"])
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
    # The folder by its short name: what lies above it may be closed to this user.
    fenced = landlock([*config["readable"], "/proc/self/fd/0"], [".", "/dev/null", "/dev/zero", "/dev/urandom"])
    if kept and not fenced:
        raise OSError("Python lies where only root may read, and without Landlock that right would open every file")
    filtered = calls.install(_libc, config["processes"] > 1)
    # The filter refuses processes, and so leaves room for threads.
    limit(config, max(config["processes"], config["threads"]) if filtered else config["processes"])
    return {"enclosed": enclosed, "fenced": fenced, "filtered": filtered}


def inner(config: dict[str, Any], namespaces: list[str], ready: int) -> None:
    """The hostile side. Only the channel and the standard streams stay open when the program runs."""
    with open(os.path.join(config["folder"], "program.py"), "rb") as file:
        source = file.read().decode("utf-8", "surrogatepass")
    try:
        reached: dict[str, Any] = confine(config, namespaces)
    except (OSError, ValueError) as error:
        reached = {"failed": str(error)}
    os.write(ready, json.dumps(reached).encode())
    if "failed" in reached:
        return
    if reached["enclosed"]:
        with open("program.py", "w", encoding="utf-8", errors="surrogatepass") as copy:
            copy.write(source)
    keep = config["channel"] if config["channel"] is not None else 2
    os.closerange(3, keep) if keep > 3 else None
    os.closerange(max(keep, 2) + 1, 4096)
    sys.path[:] = config["path"]
    sys.argv[:] = ["program.py"]
    if config["channel"] is None:
        _script(source)
    else:
        serve(source, wire.Channel(socket.socket(fileno=keep)))


def _script(source: str) -> None:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    exec(compile(source, "program.py", "exec", dont_inherit=True), module.__dict__)


class _Absent(Exception):
    """The program does not load, or has no such name: nothing that a test may take for the program's answer."""


def serve(source: str, channel: wire.Channel) -> None:
    """Load the program, then answer requests on its names and objects until the other side hangs up."""
    module = types.ModuleType("program")
    sys.modules["program"] = module
    objects: list[Any] = []

    def as_handle(value: Any) -> Any:
        objects.append(value)
        handle = {"handle": len(objects) - 1, "type": type(value).__name__[:80]}
        plain = next((kind for kind in _BASES if isinstance(value, kind)), None)
        return handle if plain is None else {**handle, "plain": wire.encode(plain(value), as_handle)}

    def from_handle(message: Any) -> Any:
        return follow(message["handle"], message["attributes"])

    def follow(target: Any, attributes: list[str]) -> Any:
        if isinstance(target, str) and target not in module.__dict__:
            raise _Absent(f"the program defines no {target}")
        value = module.__dict__[target] if isinstance(target, str) else objects[target]
        for attribute in attributes:
            value = getattr(value, attribute)
        return value

    def answer(request: dict[str, Any]) -> Any:
        value = follow(request["target"], request["attributes"])
        if request["do"] == "set":
            return setattr(value, request["name"], wire.decode(request["value"], from_handle))
        if request["do"] == "call":
            args = [wire.decode(item, from_handle) for item in request["args"]]
            kwargs = {name: wire.decode(item, from_handle) for name, item in request["kwargs"].items()}
            return value(*args, **kwargs)
        if request["do"] == "iterate":
            # An iterator stays here, for "next": it may have no end.
            return value if isinstance(value, Iterator) else list(value)
        if request["do"] == "next":
            return [item] if (item := next(value, _END)) is not _END else []
        return {"length": len, "truth": bool, "get": lambda it: it}[request["do"]](value)

    failure = ""
    try:
        exec(compile(source, "program.py", "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:  # SystemExit too: a program that exits while loading defines nothing
        failure = f"the program does not load: {type(error).__name__}: {_text(error)}"
    while True:
        request = channel.receive()
        try:
            if failure:
                raise _Absent(failure)
            reply = {"value": wire.encode(answer(request), as_handle)}
        except _Absent as error:
            reply = {"absent": str(error)}
        except BaseException as error:
            reply = {"raised": type(error).__name__[:80], "text": _text(error)}
        channel.send({"id": request["id"], **reply})


def _text(error: BaseException) -> str:
    try:
        return str(error)[:300]
    except BaseException:
        return ""


def _end_descendants() -> None:
    """Kill what has moved itself out of the process group: it is this process's child once its parent has ended."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        while children := file.read().split():
            for pid in map(int, children):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            file.seek(0)


def outer(config: dict[str, Any]) -> None:
    status = config["status"]
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    namespaces = unshare(os.geteuid() == 0)
    ready, ready_inner = os.pipe()
    child = os.fork()
    if child == 0:
        # It ends as Python does: threads are waited for, and what was left for the end is done.
        os.close(ready)
        inner(config, namespaces, ready_inner)
        return
    os.close(ready_inner)
    if config["channel"] is not None:
        os.close(config["channel"])
    reached = json.loads(os.read(ready, 4096) or b'{"failed": "it ended"}')
    os.write(status, json.dumps({"namespaces": namespaces, **reached}).encode() + b"\n")
    ended = os.pidfd_open(child)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(config["control"], select.POLLIN | select.POLLHUP)
    poll.poll()
    # The first process of a PID namespace takes every other one in it along, whatever session it moved to.
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    _end_descendants()


def main() -> None:
    outer(json.loads(sys.argv[1]))
