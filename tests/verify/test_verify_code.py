"""Programs against tests: what passes, what fails, what cannot be judged, and programs that cheat.

Planted faults seen caught here: objects that may be compared; StopIteration let through; the prompt's helper taken
from the program; hidden values shown; a test's own failure graded "wrong"; a missing result counted as passed; tests
that assert nothing passed; tests in classes passed over; imports from the future behind the helpers; the last block
taken whatever it defines.
"""

import json
import os
import time

import pytest
from typer.testing import CliRunner

from apportion.cli import app
from apportion.verify import check_gold, grade, sandbox
from apportion.verify.code import CodeSettings, program_of, read_tests
from apportion.verify.sandbox import CallReport, LocalSandbox, SandboxError, StdinReport, StepResult


def judge(gold, prediction, **settings):
    return grade("code", gold, prediction, allow_local_code=True, **{"wall_s": 20, **settings})


TRIPLE = "def triple(n):\n    return 3 * n\n"
ASSERTS = "assert triple(2) == 6\nassert triple('a') == 'aaa'"


@pytest.mark.parametrize(
    "gold",
    [
        ASSERTS,
        ASSERTS.split("\n"),
        {"tests": ASSERTS, "setup": "import math"},
        "def check(candidate):\n    for n in range(4):\n        assert candidate(n) == 3 * n\ncheck(triple)",
        {"test": "def check(f):\n    assert f(1) == 3", "entry_point": "triple"},
        "def test_small():\n    assert triple(1) == 3\ndef test_big():\n    assert triple(10**30) == 3 * 10**30",
        "values = [triple(k) for k in range(3)]\nassert values == [0, 3, 6]",
        "assert abs(triple(0.1) - 0.3) < 1e-9\nassert isclose(triple(1.5), 4.5)",
        "assert not triple(0)\nassert triple(1) is not None",
        "try:\n    triple(None)\n    assert False\nexcept TypeError:\n    pass",
    ],
)
def test_all_shapes_of_tests(gold):
    assert judge(gold, TRIPLE).outcome == "correct"
    assert judge(gold, TRIPLE.replace("3 *", "4 *").replace("n\n", "(n or 1)\n")).outcome == "wrong"


VALUE = """{(1, 2): [b'x', 1.5, float('inf'), -0.0, 2**70, 3j, {4, 5}, frozenset({6}), None, True,
range(3), 'é\\ud800', int]}"""


def test_values_keep_their_types_both_ways():
    program = "def same(x): return x\ndef kind(x): return type(x).__name__"
    gold = f"assert same({VALUE}) == {VALUE}\nassert kind((1,)) == 'tuple'\nassert kind(same) == 'function'"
    assert judge(gold, program).outcome == "correct"
    counting = "from collections import Counter\n"
    gold, program = counting + "assert count('aab') == Counter('aab')", counting + "def count(s): return Counter(s)"
    assert judge(gold, program).outcome == "correct"


TREE = """
class Node:
    def __init__(self, v):
        self.v, self.left = v, None
    def up(self):
        return self.v + 1
def total(n):
    return n.v + (total(n.left) if n.left else 0)
"""


def test_classes_of_the_program_are_used_through_handles():
    gold = """
root = Node(1)
root.left = Node(2)
root.left.left = Node(3)
assert total(root) == 6
assert root.up() == 2
assert root.left.v == 2
"""
    assert judge(gold, TREE).outcome == "correct"
    assert judge(gold, TREE.replace("self.v + 1", "self.v")).outcome == "wrong"


CLAIMS_EQUAL = """
class Y:
    def __eq__(self, o): return True
    def __ne__(self, o): return False
    def __bool__(self): return True
    def __sub__(self, o): return self
    def __abs__(self): return 0.0
    def __lt__(self, o): return True
    __hash__ = object.__hash__
"""
WRITES_EVERYWHERE = """
import os
for d in range(64):
    try: os.write(d, b'{"step": 0, "ok": true, "blame": "", "error": ""}\\n{"done": 1}\\n')
    except OSError: pass
def triple(n): return 0
"""


@pytest.mark.parametrize(
    "program",
    [
        CLAIMS_EQUAL + "def triple(n): return Y()",
        CLAIMS_EQUAL + "def triple(n): return [Y()]",
        CLAIMS_EQUAL + "triple = Y",
        "class I(int):\n    def __eq__(self, o): return True\ndef triple(n): return I(0)",
        "import os\ndef triple(n): os._exit(0)",
        "import sys\nsys.exit(0)",
        "def triple(n): raise SystemExit(0)",
        "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.all = lambda x: True\ndef triple(n): return 0",
        WRITES_EVERYWHERE,
        "print('PASSED'); print('{\"done\": 9}')\ndef triple(n): return 0",
        "def triple(n): raise StopIteration",
        "def triple(n): raise AssertionError",
        "def triple(n): return 0 if n else",
        "",
    ],
)
@pytest.mark.parametrize(
    "gold", ["assert triple(2) == 6", "assert abs(triple(2) - 6) <= 1e-6 and all(map(triple, [1]))"]
)
def test_programs_that_cheat_or_crash_are_wrong(program, gold):
    assert judge(gold, program).outcome == "wrong"


def test_map_does_not_swallow_a_stop():
    assert judge("assert all(map(triple, [1, 2]))", "def triple(n): raise StopIteration").outcome == "wrong"


def test_hidden_tests_count_and_stay_hidden():
    gold = {"tests": "assert square(3) == 9", "hidden": "assert square(-12345) == 152399025"}
    verdict = judge(gold, "def square(x): return 9")
    assert verdict.outcome == "wrong" and "hidden test 1" in verdict.reason and "12345" not in verdict.reason
    assert judge(gold, "def square(x): return x * x").outcome == "correct"


def test_helpers_of_the_prompt_are_the_tests_own():
    prompt = "def encode(s):\n    return s[::-1]\n\ndef decode(s):\n    '''Undo encode.'''\n"
    gold = {"prompt": prompt, "entry_point": "decode", "test": "def check(f):\n    assert f(encode('abc')) == 'abc'"}
    assert judge(gold, "    return s[::-1]\n").outcome == "correct"
    cheat = "def encode(s): return s\ndef decode(s): return s"
    assert judge(gold, cheat).outcome == "wrong"


def test_library_names_are_not_taken_from_the_program():
    cheat = "def isclose(a, b): return True\ndef triple(n): return 0"
    assert judge("assert isclose(triple(2), 6)", cheat).outcome == "wrong"


@pytest.mark.parametrize(
    ("gold", "reason"),
    [
        ("", "no tests"),
        ("x = 1", "no tests"),
        ("assert True", "no test called"),
        ("assert triple(", "not Python"),
        ("def check(f):\n    assert f(1) == 3", "entry_point"),
        ("assert 1 == 2\nassert triple(2) == 6", "fails by itself"),
        ("assert triple(lambda: 1) == 3", "cannot cross"),
        ("assert triple(2) == 6\nimport no_such_library", "no_such_library"),
        ("assert triple(2) == 6\nwrong = 2\nassert wrong == 3", "fails by itself"),
        ({"tests": 5}, "neither Python source"),
        ({"stdin": [{"input": "1"}]}, "input and an output"),
        ({"stdin": [{"input": ["1", "2"], "output": "3"}]}, "input and an output"),
        ({"stdin": [{"input": "1", "output": None}]}, "input and an output"),
        ({"stdin": [{"input": "1", "output": "\n"}]}, "no test expects"),
        ({"stdin": [{"input": "1", "output": "1"}], "hidden": ASSERTS}, "give one"),
        # Tests that would pass whatever the program does, or be passed over.
        ("triple(1)\ntriple(2)", "assert nothing"),
        ("assert triple(1) == 3\nclass TestTriple:\n    def test_two(self):\n        assert triple(2) == 7", "classes"),
        ("assert triple(1) == 3\ndef test_two(tmp_path):\n    assert triple(2) == 7", "takes arguments"),
        ("assert triple(1) == 3\nasync def test_two():\n    assert await triple(2) == 7", "asynchronous"),
        ("import asyncio\nassert asyncio.run(triple(2)) == 6", "asynchronous"),
        ("try:\n    triple(1)\n    assert False\nexcept Triple:\n    pass", "catch Triple"),
        # What the parser takes and nothing else does.
        ("nonlocal x\nassert triple(1) == 3", "not Python"),
        ("assert triple(" + "-" * 3000 + "1) == 3", "not Python"),
    ],
)
def test_gold_that_cannot_judge_abstains(gold, reason):
    verdict = judge(gold, TRIPLE)
    assert verdict.outcome == "abstain" and reason in verdict.reason


def test_tests_of_other_shapes_count():
    guarded = "def run():\n    assert triple(2) == 6\nif __name__ == '__main__':\n    run()"
    looped = "def same(a, b):\n    assert a == b\nfor n in (1, 2):\n    same(triple(n), 3 * n)"
    raised = "if triple(2) != 6:\n    raise AssertionError('no')"
    for gold in (guarded, looped, raised):
        assert judge(gold, TRIPLE).outcome == "correct"
        assert judge(gold, "def triple(n): return n").outcome == "wrong"


def test_a_hidden_test_that_fails_by_itself_stays_hidden():
    report = CallReport((StepResult(""), StepResult("test", "KeyError: 'secret'")), 1)
    gold = {"tests": "assert triple(1) == 3", "hidden": "assert triple(2) == {}['secret']"}
    verdict = grade("code", gold, TRIPLE, sandbox=Remote(report))
    assert verdict.outcome == "abstain" and "secret" not in verdict.reason


def test_reasons_are_text_that_files_take():
    verdict = judge(ASSERTS, "def triple(n): raise ValueError('\\ud800')")
    assert verdict.outcome == "wrong" and verdict.reason.encode()


def test_check_gold():
    assert check_gold("code", ASSERTS) is None
    assert "no test" in check_gold("code", "assert 1 == 1")
    assert "no tests" in check_gold("code", [])


def test_local_execution_needs_the_flag(monkeypatch):
    monkeypatch.delenv("APPORTION_ALLOW_LOCAL_CODE", raising=False)
    verdict = grade("code", ASSERTS, TRIPLE)
    assert verdict.outcome == "abstain"
    for way in ("--allow-local-code", "allow_local_code=True", "APPORTION_ALLOW_LOCAL_CODE=1"):
        assert way in verdict.reason


def test_grade_hints_once_at_the_flag(monkeypatch, tmp_path):
    monkeypatch.delenv("APPORTION_ALLOW_LOCAL_CODE", raising=False)
    path = tmp_path / "rows.jsonl"
    row = {"kind": "code", "gold": ASSERTS, "prediction": TRIPLE}
    path.write_text("".join(json.dumps(one) + "\n" for one in (row, row, {**row, "kind": "exact"})))
    off, on = (CliRunner().invoke(app, ["grade", str(path), *flag]) for flag in ([], ["--allow-local-code"]))
    assert off.exit_code == on.exit_code == 0
    assert off.stderr.startswith("hint: 2 rows of kind code abstained") and off.stderr.count("\n") == 1
    assert "--allow-local-code" in off.stderr and on.stderr == ""
    monkeypatch.setenv("APPORTION_ALLOW_LOCAL_CODE", "1")
    assert grade("code", ASSERTS, TRIPLE, wall_s=20).outcome == "correct"


class Remote:
    """A sandbox elsewhere."""

    def __init__(self, report):
        self.report = report

    def call(self, job, limits):
        if isinstance(self.report, Exception):
            raise self.report
        return self.report

    def stdin(self, job, limits):
        return self.report


def test_remote_sandboxes():
    passed, failed = StepResult(""), StepResult("program", "AssertionError")

    def judge_there(report):
        return grade("code", ASSERTS, TRIPLE, sandbox=Remote(report)).outcome

    assert judge_there(CallReport((passed, passed), 2)) == "correct"
    assert judge_there(CallReport((passed, failed), 2)) == "wrong"
    assert judge_there(SandboxError("upload failed")) == "abstain"
    # Fewer results than steps: somebody lost one. It is not a pass.
    assert judge_there(CallReport((passed,), 2)) == "abstain"
    assert judge_there(CallReport((passed, passed), 0)) == "abstain"
    gold = {"stdin": [{"input": "", "output": "1"}]}
    assert grade("code", gold, "print(1)", sandbox=Remote(StdinReport(()))).outcome == "abstain"


def test_a_tier_out_of_reach_abstains(monkeypatch):
    monkeypatch.setattr("apportion.verify.sandbox._Jail.entered", lambda jail: "process")
    verdict = judge(ASSERTS, TRIPLE, require="namespaces")
    assert verdict.outcome == "abstain" and "'namespaces' was required" in verdict.reason


SUM = {"stdin": [{"input": "3 4\n", "output": "7\n"}, {"input": "1 1\n", "output": "2\n"}]}


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("```python\na, b = map(int, input().split())\nprint(a + b)\n```", "correct"),
        ("import sys\nif __name__ == '__main__':\n    print(sum(map(int, sys.stdin)))", "wrong"),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(3)", "correct"),
        ("print(7)", "wrong"),
        ("a, b = map(int, input().split())\nprint(a + b)\nraise ValueError", "correct"),
        ("raise ValueError", "wrong"),
    ],
)
def test_stdin(program, outcome):
    # Neither the exit status nor standard error says anything; standard output does.
    assert judge(SUM, program).outcome == outcome


def test_stdin_output_rules():
    gold = {"stdin": [{"input": "", "output": "1 2\n3\n"}]}
    assert judge(gold, "print('1 2 \\n3\\n\\n')").outcome == "correct"
    assert judge(gold, "print('1 2 3')").outcome == "wrong"
    assert judge(gold, "print('1 2 3')", output="tokens").outcome == "correct"
    assert judge(gold, "print('1 2 \\n3')", output="exact").outcome == "wrong"
    # Lines end in a line feed, with a carriage return or not; a form feed ends none.
    assert judge(gold, "print('1 2\\r\\n3', end='')").outcome == "correct"
    assert judge(gold, "print('1 2\\x0c3')").outcome == "wrong"


def test_program_of():
    tests = read_tests({"tests": "assert f(1) == 1", "entry_point": "f"})
    text = "<think>```python\nx\n```</think>\n```py\ndef f(x): return x\n```\n```\nf(1)\n```"
    assert program_of(text, tests).strip() == "def f(x): return x"
    assert program_of("<think>def f", tests) == ""


FUNCTION = "def f(x):\n    return x\n"


@pytest.mark.parametrize("gold", ["assert f(1) == 1", {"tests": "assert f(1) == 1", "entry_point": "f"}])
@pytest.mark.parametrize(
    "text",
    [
        f"So:\n```python\n{FUNCTION}```\nIt prints\n```\n1\n```\n",
        f"So:\n```python\n{FUNCTION}```\nUse:\n```python\nprint(f(1))\n```\n",
        f"```\n{FUNCTION}```\n```python\nprint(f(1))\n```",
        f"Cut off:\n```python\n{FUNCTION}",
        "1. So:\n   ```python\n   def f(x):\n       return x\n   ```\n",
        f"~~~py\n{FUNCTION}~~~",
        f"````python\n{FUNCTION}TEXT = '''\n```\nx\n```\n'''\n````\n",
        f"```text\ndef f\n```\n```python\r\n{FUNCTION}```",
    ],
)
def test_the_block_that_defines_what_is_tested_counts(text, gold):
    assert program_of(text, read_tests(gold)).replace("\r", "").strip().startswith(FUNCTION.strip())


def test_helpers_go_behind_imports_from_the_future():
    gold = {
        "prompt": "import math\ndef f(x):\n    ''",
        "entry_point": "f",
        "test": "def check(f):\n    assert f(1) == 1",
    }
    for head in (
        "from __future__ import annotations\n",
        "'''Doc.'''\n# one\nfrom __future__ import (\n annotations)\n",
    ):
        compile(program_of(head + FUNCTION, read_tests(gold)), "program", "exec")
    # A line like one in the middle of a text moves nothing.
    late = FUNCTION + "T = '''\nfrom __future__ import annotations\n'''\n"
    assert program_of(late, read_tests(gold)) == "import math\n" + late


def test_settings_are_checked():
    from apportion.errors import InputError

    with pytest.raises(InputError, match="output"):
        CodeSettings(output="fuzzy")


# --- what a program can reach -----------------------------------------------------------------------------------

TIER = LocalSandbox().tier()
needs_fence = pytest.mark.skipif(TIER != "fenced", reason=f"this machine's kernel reaches the tier {TIER!r} only")
needs_namespaces = pytest.mark.skipif(TIER == "process", reason="this machine's kernel gives no namespaces")


def reaches(attempt):
    """Whether `attempt` (statements) runs through inside the sandbox."""
    lines = "".join(f"        {line}\n" for line in attempt.split("\n"))
    program = f"import os, sys\ndef reach():\n    try:\n{lines}    except Exception as error: return repr(error)\n"
    program += "    return 'reached'\n"
    verdict = judge("assert reach() == 'reached'", program)
    assert verdict.outcome in ("correct", "wrong"), verdict.reason
    return verdict.outcome == "correct"


def test_an_attempt_that_is_allowed_is_seen():
    assert reaches("open('note', 'w').write('x')\nassert open('note').read() == 'x'")
    assert reaches("import heapq, sqlite3, decimal, zoneinfo")


@needs_fence
@pytest.mark.parametrize("path", [__file__, "/etc/passwd", "/proc/self/environ", "/root", "/home"])
def test_files_are_out_of_reach(path):
    assert not reaches(f"os.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r}).read(1)")


@needs_fence
def test_nothing_is_written_outside(tmp_path):
    tmp_path.chmod(0o777)
    assert not reaches(f"open({str(tmp_path / 'x')!r}, 'w')")


@needs_namespaces
def test_no_network_and_no_other_process():
    assert not reaches("import socket\nsocket.create_connection(('127.0.0.1', 22), 1)")
    assert not reaches("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))")
    assert not reaches(f"os.kill({os.getpid()}, 0)")


def test_limits_hold():
    assert not reaches("bytearray(1 << 33)")
    assert not reaches("with open('big', 'wb') as file:\n    for _ in range(64): file.write(bytes(1 << 20))")
    assert not reaches("if os.fork() == 0: os._exit(0)")
    assert not reaches("assert set(os.environ) - {'LC_CTYPE'}")
    assert not reaches("import apportion")


@needs_namespaces
def test_nothing_outlives_a_timeout():
    before = set(os.listdir("/tmp"))
    verdict = judge("assert stay() == 1", "import time\ndef stay():\n    time.sleep(600)", wall_s=2)
    assert verdict.outcome == "wrong" and "timed out" in verdict.reason
    # Other processes' sandboxes come and go; a folder that was left behind stays.
    left = {name for name in set(os.listdir("/tmp")) - before if name.startswith("apportion-")}
    deadline = time.monotonic() + 30
    while left and time.monotonic() < deadline:
        time.sleep(0.2)
        left &= set(os.listdir("/tmp"))
    assert not left


@pytest.mark.parametrize(
    ("target", "error"),
    [("tempfile.mkdtemp", 28), ("socket.socketpair", 24), ("tempfile.TemporaryFile", 28), ("subprocess.Popen", 11)],
)
def test_a_machine_that_is_out_of_something_abstains(monkeypatch, target, error):
    def fails(*_, **__):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(target, fails)
    verdict = judge(ASSERTS, TRIPLE)
    assert verdict.outcome == "abstain" and verdict.reason.startswith("sandbox: ")


def test_nothing_stays_open_when_a_start_fails(monkeypatch):
    pipe, asked = os.pipe, []

    def second_fails():
        asked.append(1)
        if len(asked) == 2:
            raise OSError(24, "Too many open files")
        return pipe()

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("os.pipe", second_fails)
    assert judge(ASSERTS, TRIPLE).outcome == "abstain"
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_slow_start_is_no_time_of_the_program(monkeypatch):
    entered = sandbox._Jail.entered
    monkeypatch.setattr("apportion.verify.sandbox._Jail.entered", lambda jail: (time.sleep(1.2), entered(jail))[1])
    assert judge(SUM, "print(sum(map(int, input().split())))", wall_s=1).outcome == "correct"


@pytest.mark.parametrize(
    "mess",
    [
        "for _ in range(1500): os.mkdir('d'); os.chdir('d')",
        "os.makedirs('a/b'); os.chmod('a/b', 0); os.chmod('a', 0)",
    ],
)
def test_folders_too_deep_or_closed_are_removed_too(monkeypatch, tmp_path, mess):
    # Where the private folder is one on disk (the tier "process"), this is all that stands between it and /tmp.
    folder = tmp_path / "apportion-x"
    folder.mkdir()
    where = os.getcwd()
    os.chdir(folder)
    exec(mess, {"os": os})
    os.chdir(where)
    sandbox._remove(str(folder))
    assert not folder.exists()


@pytest.mark.parametrize("body", ["while True: pass", "return 2 ** (10 ** 9)", "return 'x' * (1 << 26)"])
def test_programs_that_do_not_end_are_wrong(body):
    assert judge("assert f() == 1", f"def f():\n    {body}", wall_s=2).outcome == "wrong"
