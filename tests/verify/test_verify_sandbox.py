"""Programs that attack the sandbox or the verdict, tiers on kernels that give less, and what must cross all the same.

Planted faults seen caught here: no filter on system calls; files left writable or their modes changeable; a folder
without bounds; a program that outlives its guard; a tier named for mounts that failed; root's right to read kept where
nothing fences it; a dead program taken for an expected exception; names of the sandbox's own in `__main__`.
"""

import os
import shutil
import signal
import socket
import time

import pytest

from apportion.verify import grade, sandbox
from apportion.verify.sandbox import NOBODY, Limits, LocalSandbox, SandboxError, StdinJob

TIER = LocalSandbox().tier()
needs_fence = pytest.mark.skipif(TIER != "fenced", reason=f"this machine's kernel reaches the tier {TIER!r} only")
needs_namespaces = pytest.mark.skipif(TIER == "process", reason="this machine's kernel gives no namespaces")
CALLS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    return "done" if libc.syscall(*arguments) >= 0 else os.strerror(ctypes.get_errno())
"""


def outcome(program, gold="assert f(1) == 1", **settings):
    return grade("code", gold, program, allow_local_code=True, **{"wall_s": 20, **settings}).outcome


def printed(program, **limits):
    """What a program printed in the sandbox."""
    result = LocalSandbox().stdin(StdinJob(CALLS + program, ("",)), Limits(**limits)).results[0]
    return result.error or result.output.strip()


def attempt(statement):
    return printed(f"try:\n    {statement}\n    print('done')\nexcept Exception as error: print(type(error).__name__)")


@needs_fence
def test_sockets_of_the_file_system_are_out_of_reach(tmp_path):
    path = tmp_path / "s"
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as server:
            server.bind(str(path))
            os.chmod(path, 0o777)
            for folder in (path.parent, path.parent.parent):
                folder.chmod(0o777)
            assert (
                attempt(f"import socket; socket.socket(socket.AF_UNIX, {int(kind)}).connect({str(path)!r})") != "done"
            )
            pair = f"import socket; socket.socketpair(type={int(kind)})[0]"
            assert attempt(f"{pair}.sendto(b'x', {str(path)!r})") != "done"
        path.unlink()
    # Event loops start with a pair of streams.
    assert attempt("import asyncio; asyncio.run(asyncio.sleep(0))") == "done"


@needs_fence
@pytest.mark.parametrize(
    "arguments",
    [
        "248, b'user', b'key', b'v', 1, -4",  # add_key, to the user's keyring
        "272, 0x10000000",  # unshare, a user namespace
        "425, 4, ctypes.create_string_buffer(120)",  # io_uring_setup
        "319, b'x', 0",  # memfd_create
        "101, 0, 0, 0, 0",  # ptrace
        "29, 1, 4096, 0o1666",  # shmget
        "302, 1, 7, 0, 0",  # prlimit64 of another process
        "56, 0x10000011, 0, 0, 0, 0",  # clone, with a user namespace
    ],
)
def test_system_calls_that_are_refused(arguments):
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers here are those of x86-64")
    assert printed(f"print(call({arguments}))") == "Function not implemented"


@needs_namespaces
def test_files_outside_keep_their_modes(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    for path in (tmp_path.parent, tmp_path, file):
        path.chmod(0o777)
    if os.geteuid() == 0:
        os.chown(file, NOBODY, NOBODY)
    for change in ("os.chmod({!r}, 0)", "os.utime({!r}, (0, 0))", "os.truncate({!r}, 0)", "os.unlink({!r})"):
        assert attempt(change.format(str(file))) != "done"
    assert file.stat().st_mode & 0o777 == 0o777 and file.read_text() == "x" and file.stat().st_mtime > 0


@needs_namespaces
def test_the_private_folder_is_bounded_and_leaves_nothing():
    before = set(os.listdir("/tmp"))
    fill = "n = 0\ntry:\n    while n < 200: open(str(n), 'wb').write(bytes(1 << 20)); n += 1\nexcept OSError: print(n)"
    assert 60 <= int(printed(fill)) <= 64
    many = "n = 0\ntry:\n    while n < 9000: open(str(n), 'wb').close(); n += 1\nexcept OSError: print(n)"
    assert 4000 <= int(printed(many)) <= 4096
    assert printed("for _ in range(2000): os.mkdir('d'); os.chdir('d')\nprint('ok')") == "ok"
    assert printed("os.makedirs('a/b'); os.chmod('a', 0); os.chmod('.', 0); print('ok')") == "ok"
    left = {name for name in set(os.listdir("/tmp")) - before if name.startswith("apportion-")}
    deadline = time.monotonic() + 30
    while left and time.monotonic() < deadline:
        time.sleep(0.2)
        left &= set(os.listdir("/tmp"))
    assert not left


@needs_fence
def test_nothing_outlives_its_guard():
    program = f"{CALLS}libc.prctl(1, 0, 0, 0, 0)\nos.setsid()\nprint('free', flush=True)\nimport time\ntime.sleep(600)"
    with sandbox._jailed(program, Limits(), stdin="") as jail:
        jail.entered()
        assert os.read(jail.process.stdout.fileno(), 16) == b"free\n"
        os.kill(jail.process.pid, signal.SIGKILL)
        # The end of the stream: nobody is left to write.
        assert sandbox._read(jail.process.stdout.fileno(), time.monotonic() + 10) == b""
        os.set_blocking(jail.process.stdout.fileno(), False)
        assert os.read(jail.process.stdout.fileno(), 1) == b""


@needs_fence
def test_threads_run_and_processes_do_not():
    run = "import threading\nthread = threading.Thread(target=print, args=('ran',)); thread.start(); thread.join()"
    assert printed(run) == "ran"
    for statement in ("os.fork()", "os.posix_spawn('/bin/true', ['true'], {})"):
        assert attempt(statement) != "done"
    assert printed("if os.fork() == 0: print('child', flush=True); os._exit(0)\nos.wait()", processes=8) == "child"


def test_what_the_program_finds_is_its_own():
    assert printed("print(sorted(n for n in globals() if n[0] != '_'))") == "['call', 'ctypes', 'libc', 'os', 'sys']"
    assert printed("def f(x: int): pass\nprint(f.__annotations__['x'] is int, __name__)") == "True __main__"
    assert outcome("def g(x: int): pass\ndef f(n): return int(g.__annotations__['x'] is int)") == "correct"


def test_a_script_ends_and_reads_as_elsewhere():
    assert printed("import atexit\natexit.register(print, 'late')") == "late"
    late = "import threading, time\ndef run(): time.sleep(0.1); print('late')\nthreading.Thread(target=run).start()"
    assert TIER != "fenced" or printed(late) == "late"
    program = "import inspect\ndef f(): pass\nprint(open('/dev/stdin').read(), open(0).read(), inspect.getsource(f))"
    given = LocalSandbox().stdin(StdinJob(program, ("in",)), Limits()).results[0].output
    assert given.startswith("in ") and "def f(): pass" in given


EXPECTED = "failed = False\ntry:\n    f('x')\nexcept {}:\n    failed = True\nassert failed"


@pytest.mark.parametrize("caught", ["Exception", "BaseException"])
@pytest.mark.parametrize(
    "program",
    [
        "import os\ndef f(n): os._exit(0)",
        "def f(n):\n    while True: pass",
        "import sys\nsys.exit(0)",
        "def f(n: return 1",
        "def g(n): return 1",
        "import os\ndef f(n): os.closerange(0, 64)",
    ],
)
def test_a_program_that_fails_raised_nothing(program, caught):
    assert outcome(program, EXPECTED.format(caught), wall_s=2) == "wrong"
    assert outcome("def f(n): raise ValueError(n)", EXPECTED.format(caught)) == "correct"


def test_exits_and_refused_comparisons_are_no_exceptions():
    gold = "failed = False\ntry:\n    f(1) == 3\nexcept Exception:\n    failed = True\nassert failed"
    assert outcome("class C: pass\ndef f(n): return C()", gold) == "wrong"
    assert outcome("def f(n): raise SystemExit", gold) == "wrong"
    assert outcome("class E(Exception): pass\ndef f(n): raise E", gold) == "correct"


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("it = f(2)\nassert next(it) == 0\nassert next(it) == 1\nassert next(it, None) is None",
         "def f(n): yield from range(n)", "def f(n): yield 0"),
        ("from itertools import islice\nassert list(islice(f(0), 3)) == [0, 1, 2]",
         "def f(n):\n    while True:\n        yield n\n        n += 1", "def f(n):\n    while True: yield n"),
        ("assert f(1) == (1, 2)\nassert f(1).y == 2",
         "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(n): return P(n, 2)", "f = divmod"),
        ("assert f(1) == 1\nassert 1 + f(1) == 2\nassert f(1) in {1}",
         "from enum import IntEnum\nclass C(IntEnum):\n    A = 1\nf = C", "def f(n): return 2"),
        ("s, node = [], f([1, 2])\nwhile node:\n    s.append(node.v)\n    node = node.next\nassert s == [1, 2]",
         "class N: pass\ndef f(vs):\n    n = None\n    for v in vs[::-1]:\n        m = N(); m.v, m.next = v, n; n = m\n"
         "    return n", "def f(vs): return None"),
        ("assert f(1) != None", "class N: pass\ndef f(n): return N()", "def f(n): return None"),
    ],
)  # fmt: skip
def test_objects_that_tests_use(gold, right, wrong):
    assert outcome(right, gold, wall_s=5) == "correct"
    assert outcome(wrong, gold, wall_s=5) == "wrong"


@pytest.mark.parametrize("kind", ["int", "tuple", "list"])
def test_a_subclass_that_equals_everything(kind):
    program = f"class I({kind}):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n"
    program += "    __hash__ = object.__hash__\n    __sub__ = __abs__ = lambda s, *o: 0\ndef f(n): return I()"
    for gold in ("assert f(1) == 5", "assert [f(1)] == [5]", "assert f(1) in (5, 6)", "assert not f(1) != 5"):
        assert outcome(program, gold) == "wrong"


@pytest.mark.parametrize(
    "gold",
    ["assert isinstance(f(1), C)", "assert f('x' * (5 << 20)) == 1", "try:\n    f(lambda: 1)\nexcept: pass\nassert f"],
)
def test_what_cannot_cross_abstains(gold):
    assert outcome("class C: pass\ndef f(n): return C()", gold) == "abstain"


# --- kernels that give less, by a copy of the scripts that asks for less -----------------------------------------


@pytest.fixture
def less(monkeypatch, tmp_path):
    """`less(script, line, replaced)`: from here on the sandbox runs a changed copy of its scripts."""

    def change(script, old, new):
        folder = tmp_path / "sandboxed"
        shutil.copytree(sandbox._FOLDER, folder)
        for path in (tmp_path.parent, tmp_path, folder):
            path.chmod(0o755)
        text = (folder / script).read_text()
        assert text.count(old) == 1
        (folder / script).write_text(text.replace(old, new))
        monkeypatch.setattr(sandbox, "_FOLDER", str(folder))

    return change


@needs_fence
def test_without_landlock(less, monkeypatch):
    less("jail.py", "abi = _libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)", "abi = 0")
    monkeypatch.setattr(sandbox, "_stdlib_is_private", lambda: os.geteuid() == 0)
    if os.geteuid() == 0:
        # Root's right to read would open every file here.
        with pytest.raises(SandboxError, match="only root may read"):
            LocalSandbox().tier()
        assert outcome("def f(n): return 1") == "abstain"
    else:
        assert LocalSandbox().tier() == "namespaces"


@needs_fence
def test_without_the_filter(less):
    less("filter.py", '"x86_64": ', '"no_machine": ')
    if os.uname().machine == "x86_64":
        assert LocalSandbox().tier() == "namespaces"
        # What it would have refused: threads count as processes, and there are none.
        assert attempt("import threading; threading.Thread(target=print).start()") == "RuntimeError"
        assert outcome("def f(n): return 1") == "correct"


@needs_fence
@pytest.mark.parametrize("call", ['_libc.mount(b"proc"', '_libc.mount(b"tmpfs"', "_libc.syscall(MOUNT_SETATTR"])
def test_a_mount_that_fails_is_no_namespace(less, call):
    less("jail.py", f"and {call}", f"and -1 + 0 * {call}")
    assert LocalSandbox().tier() == "process"
    assert outcome("def f(n): return 1") == "correct"
    assert outcome("def f(n): return 1", require="namespaces") == "abstain"
