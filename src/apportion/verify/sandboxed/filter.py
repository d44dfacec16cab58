"""A filter on system calls, where the machine is one whose numbers are known here (x86-64, AArch64).

Refused, as if the kernel did not have them: sockets but for connected pairs (Landlock and network namespaces leave
the sockets of the file system open), further namespaces and mounts, other processes (ptrace, signals, their memory),
keyrings and System V objects (they outlive a process), files by handle, and interfaces that much of the kernel lies
behind. Programs may start threads; new processes only where they are allowed.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from typing import Any

PR_SET_PDEATHSIG, PR_SET_SECCOMP = 1, 22
CLONE_THREAD, CLONE_NEW = 0x00010000, 0x7E020000
# Error 38 is ENOSYS: glibc then starts threads with clone, whose flags a filter can read, not with clone3.
_REFUSED, _ALLOWED = 0x00050000 | 38, 0x7FFF0000
_X32 = 0x40000000
# (AUDIT_ARCH, column of the table below).
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# From the kernel's tables of system calls; those from 424 on have one number on every machine.
_CALLS = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "unshare": (272, 97), "setns": (308, 268), "clone3": (435, 435), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "shmget": (29, 194),
    "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "syslog": (103, 116),
}  # fmt: skip
_CLONE, _PRCTL, _PRLIMIT, _SOCKETPAIR = (56, 220), (157, 167), (302, 261), (53, 199)
_FORK, _VFORK = (57, None), (58, None)


def _instructions(machine: str, processes: bool) -> list[tuple[int, int, int, int]]:
    """The classic BPF program: (code, jump if true, jump if false, operand)."""
    arch, column = _MACHINES[machine]
    load, equal, at_least, any_bit, mask, ret = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    refuse = (ret, 0, 0, _REFUSED)

    def first_argument(call: tuple[int, int], word: int, *rest: tuple[int, int, int, int]) -> Any:
        # After `rest` the program has returned or goes on with the next call's number.
        body = [(load, 0, 0, word), *rest, (load, 0, 0, 0)]
        return [(equal, 0, len(body), call[column]), *body]

    forbidden = [number[column] for number in _CALLS.values()]
    if not processes:
        forbidden += [number for number in (_FORK[column], _VFORK[column]) if number is not None]
    clone = [(any_bit, 0, 1, CLONE_NEW), refuse]
    if not processes:
        clone += [(any_bit, 1, 0, CLONE_THREAD), refuse]
    return [
        (load, 0, 0, 4), (equal, 1, 0, arch), refuse, (load, 0, 0, 0), (at_least, 0, 1, _X32), refuse,
        *(row for number in forbidden for row in ((equal, 0, 1, number), refuse)),
        *first_argument(_CLONE, 16, *clone),
        *first_argument(_PRCTL, 16, (equal, 0, 1, PR_SET_PDEATHSIG), refuse),
        # One's own limits only: those of the grader are the grader's.
        *first_argument(_PRLIMIT, 16, (equal, 1, 0, 0), refuse),
        # A pair of streams stays a pair; one of datagrams could be sent elsewhere.
        *first_argument(_SOCKETPAIR, 24, (mask, 0, 0, 0xF), (equal, 1, 0, 1), refuse),
        (ret, 0, 0, _ALLOWED),
    ]  # fmt: skip


def install(libc: ctypes.CDLL, processes: bool) -> bool:
    """Put the filter on this process, for good; it needs "no new privileges". Returns whether it is there.

    processes: allow new processes, not threads only.
    """
    machine = platform.machine()
    if machine not in _MACHINES or struct.calcsize("P") != 8:
        return False
    rows = [struct.pack("=HBBI", *row) for row in _instructions(machine, processes)]
    code = ctypes.create_string_buffer(b"".join(rows))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(rows), ctypes.addressof(code)))
    return bool(libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0) == 0)
